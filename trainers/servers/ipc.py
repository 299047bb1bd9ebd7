"""Weights for vLLM servers on the trainers' GPUs by CUDA IPC: handles of memory go over HTTP, and no weight is copied.

A server reads the weights where a trainer has them. The protocol is vLLM's weight transfer with the backend "ipc", as
in vllm/distributed/weight_transfer/ipc_engine.py of 0.32 and 0.33.
"""

import base64
import pickle
from collections import ChainMap

import torch
from torch.multiprocessing.reductions import reduce_tensor

from ..base import ranks


def is_possible(model) -> bool:
    """Return True if each process has the tensors of the policy's files, by the names of these, on a GPU."""
    # Adapters are merged for the files alone, and under ZeRO 3 a process has parts.
    lm = model.module.base
    in_other_form = (
        model.module.lora or lm._weight_conversions or model.zero_optimization_stage() == 3
    )
    return lm.device.type == "cuda" and not in_other_form


def update_info(lm, exports: dict[int, tuple]) -> dict:
    """Return what `/update_weights` takes: handles of the weights on the GPUs of all processes, which call this.

    `lm` is a transformers model, whose weights must not change until the server has read them. `exports` has the
    storages that were shared before, by their address, and gets new ones.
    """
    state = lm.state_dict()
    names = [name for name in state if name not in lm.all_tied_weights_keys]
    gpu = str(torch.cuda.get_device_properties(lm.device).uuid)
    handles = []
    for name in names:
        # PyTorch never frees what is read more often than it was exported, and an export lasts as long as its storage.
        # So a storage is exported once in a run, and kept. Under ZeRO 1 and 2 one storage has all weights.
        weight = state[name]
        address = weight.untyped_storage().data_ptr()
        if address not in exports:
            exports[address] = weight, reduce_tensor(weight)[1]
        kind, _, _, _, *storage = exports[address][1]
        view = weight.shape, weight.stride(), weight.storage_offset()
        handles.append({gpu: (kind, *view, *storage)})
    torch.cuda.synchronize()
    by_gpu = [dict(ChainMap(*one)) for one in zip(*ranks.gather_processes(handles), strict=True)]
    return {
        "names": names,
        "dtype_names": [str(state[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [list(state[name].shape) for name in names],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(by_gpu)).decode(),
    }
