"""vLLM's weight transfer with the backend "ipc", on a CPU: shared memory takes the place of CUDA's.

`Transfer` holds to vLLM 0.32.0 and 0.33.0: entrypoints/rl/online/api_router.py (paths, bodies), v1/worker/gpu_worker.py
(the order), distributed/weight_transfer/ipc_engine.py (fields, handles by the GPU's UUID), all alike in both.
"""

import base64
import inspect
import os
import pickle

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

FIELDS = {"names", "dtype_names", "shapes", "ipc_handles_pickled"}


def reduce_tensor(tensor: torch.Tensor) -> tuple:
    """Return what PyTorch's `reduce_tensor` does of a tensor on a GPU, with a handle of shared memory."""
    storage = tensor.untyped_storage()
    descriptor, size = storage._share_fd_cpu_()
    name = f"/proc/{os.getpid()}/fd/{descriptor}"
    view = type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset()
    memory = type(storage), tensor.dtype, 0, name, size, 0
    return rebuild_cuda_tensor, (*view, *memory, tensor.requires_grad, b"", 0, b"", True)


def rebuilt(handle: tuple) -> torch.Tensor:
    """Return the tensor of a handle, whose parts are where PyTorch's `rebuild_cuda_tensor` has them."""
    parts = inspect.signature(rebuild_cuda_tensor).bind(*handle).arguments
    name, size = parts["storage_handle"], parts["storage_size_bytes"]
    storage = torch.UntypedStorage.from_file(name, True, size)
    view = parts["tensor_offset"], parts["tensor_size"], parts["tensor_stride"]
    return torch.empty(0, dtype=parts["dtype"]).set_(storage, *view)


class Transfer:
    """What a worker does, which has tensors by name at the end."""

    def __init__(self, gpu: str, *, insecure: bool = True):
        self.gpu, self.insecure = gpu, insecure
        self.ready = self.active = False
        self.weights: dict[str, torch.Tensor] = {}

    def answer(self, path: str, body: dict | None) -> dict:
        """Do what is asked for; an AssertionError has the words of vLLM."""
        if path == "/init_weight_transfer_engine":
            assert body == {"init_info": {"packed": False}}
            self.ready = True
        elif path == "/start_weight_update":
            assert not self.active, "start_weight_update called while a weight update is already"
            self.active = self.ready
        elif path == "/update_weights":
            assert self.active, "start_weight_update must be called before update_weights"
            self.active = False  # if it fails
            self.update(**body)
            self.active = True
        else:
            assert path == "/finish_weight_update" and body is None and self.active
            self.active = False
        return {"message": path}

    def update(self, update_info: dict) -> None:
        """Read the weights."""
        assert update_info.keys() == FIELDS
        assert self.insecure, "Refusing to deserialize `ipc_handles_pickled` without VLLM_ALLOW"
        handles = pickle.loads(base64.b64decode(update_info["ipc_handles_pickled"]))
        about = (update_info[field] for field in ("names", "dtype_names", "shapes"))
        for name, dtype, shape, by_gpu in zip(*about, handles, strict=True):
            assert self.gpu in by_gpu, f"IPC handle not found for GPU UUID {self.gpu}. Available"
            weight = rebuilt(by_gpu[self.gpu])
            assert weight.dtype == getattr(torch, dtype) and list(weight.shape) == shape
            self.weights[name] = weight.clone()
