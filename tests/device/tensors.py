"""Tensors that say they are on a GPU and hold CPU values; mixing devices raises, host synchronisations are counted.

    with tensors.present(), tensors.counted() as waits:
        logits = tensors.put(torch.randn(4, 9)).requires_grad_()
        fused_rl.token_logprobs(logits, tensors.put(targets)).logprobs.sum().backward()
    assert not waits.reads

Every operator arrives in `_run`, which asks what CUDA would have made of it, then computes it on the CPU values.
"""

import collections
import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from tests import graphs

ROOT = Path(__file__).parents[2]
OURS = {
    __file__,
    str(Path(__file__).with_name("process.py")),
    str(Path(__file__).with_name("twins.py")),
}
DEVICE = torch.device("cuda", 0)


@dataclass
class Waits:
    """How often the host waited for the device, by `file:line operation` of the project's code.

    reads: values came from the device, or their count did. uploads: values went there by a copy that blocks; one with
    non_blocking=True is none. launches: operators on tensors of the device, by name.
    """

    reads: collections.Counter = field(default_factory=collections.Counter)
    uploads: collections.Counter = field(default_factory=collections.Counter)
    launches: collections.Counter = field(default_factory=collections.Counter)


_waits = Waits()


@contextlib.contextmanager
def counted():
    """Yields the `Waits` of what happens inside."""
    global _waits
    before, _waits = _waits, Waits()
    try:
        yield _waits
    finally:
        _waits = before


_sync_debug_mode = "default"


def set_sync_debug_mode(mode: str) -> None:
    """With "error", what waits raises, as with torch.cuda's."""
    global _sync_debug_mode
    _sync_debug_mode = mode


def wait(what: str) -> None:
    """One more read."""
    _note(_waits.reads, what)


def _upload(what: str) -> None:
    _note(_waits.uploads, what)


def _note(counter: collections.Counter, what: str) -> None:
    if _sync_debug_mode == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
    counter[f"{place()} {what}"] += 1


class Graph(graphs.Graph):
    """Stands for torch.cuda.CUDAGraph: a replay is one launch."""

    def replay(self):
        with counted():
            super().replay()
        _waits.launches["replay"] += 1


def place() -> str:
    """`file:line` of the innermost frame of the project's code, else of its tests; `<-` a transformers model in it."""
    frame, test, inside = sys._getframe(1), None, ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/transformers/" in name:
            inside = inside or f" <- {Path(name).name}:{frame.f_lineno}"
        elif name not in OURS and name.startswith(str(ROOT)) and "site-packages" not in name:
            where = f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
            if not where.startswith("tests/"):
                return where + inside
            test = test or where + inside
        frame = frame.f_back
    return test or "torch"


class OnDevice(torch.Tensor):
    """A tensor of a device, the current one if none is given; `inner` holds its values, with the same strides."""

    @staticmethod
    def __new__(cls, inner, device=None):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device or current(),
        )

    def __init__(self, inner, device=None):
        self.inner = inner

    def tolist(self):
        wait("tolist")
        return self.inner.tolist()

    def numpy(self, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def data_ptr(self):
        return self.inner.data_ptr()

    def resize_(self, *shape):  # the shape that torch knows of is fixed
        return OnDevice(self.inner.resize_(*shape), self.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Present(TorchDispatchMode):
    """Sees operators without a tensor of the device: those that make one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_device(kwargs.get("device")) or any(
            isinstance(x, OnDevice) for x in tree_leaves((args, kwargs))
        ):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def present() -> contextlib.AbstractContextManager:
    """Inside, `device="cuda"` makes such tensors."""
    return _Present()


def put(x: torch.Tensor) -> OnDevice:
    """x on the device, uncounted: a leaf that needs a gradient where x does."""
    return OnDevice(x.detach().clone()).requires_grad_(x.requires_grad)


def put_module(module: torch.nn.Module) -> torch.nn.Module:
    """Its parameters and buffers on the device; tied ones stay tied."""
    moved = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in moved:
                values = OnDevice(parameter.detach().clone())
                moved[id(parameter)] = torch.nn.Parameter(
                    values, requires_grad=parameter.requires_grad
                )
            part._parameters[name] = moved.get(id(parameter))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else put(buffer)
    return module


def values(x):
    """The CPU values of a tensor, or of the tensors in a nest of tuples, lists and dicts; uncounted."""
    return tree_map(_inner, x)


def _inner(x):
    return x.inner if isinstance(x, OnDevice) else x


def wrapped(x, device=None):
    return OnDevice(x, device) if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) else x


def _is_device(device) -> bool:
    return device is not None and torch.device(device).type == "cuda"


# what CUDA would have made of an operator

READS = {"_local_scalar_dense", "is_nonzero", "equal"}  # their result is the host's
SIZED = {
    "nonzero",
    "masked_select",
    "unique_consecutive",
    "_unique2",
    "unique_dim",
    "_unique",
    "bincount",
    "masked_scatter_backward",
}
COPIES = {"copy_", "_to_copy"}
INDEXED = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}
NO_SCALARS = {
    "cat",
    "stack",
    "index_select",
    "gather",
    "scatter",
    "scatter_add",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
}


def mixes(operator: str, plain: list[torch.Tensor]) -> None:
    """Raises as CUDA does where an operator meets tensors of two devices."""
    found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in plain)
    raise RuntimeError(
        f"{place()}: {operator}: expected all tensors to be on cuda:0, but found on the CPU: {found}"
    )


def _run(func, args, kwargs):
    """One operator: what is counted or refused, its CPU values, and which device they are on."""
    name = func.name().split("::")[1].split(".")[0]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, OnDevice)]
    plain = [x for x in tensors if not isinstance(x, OnDevice)]
    if func.namespace == "fused_rl":
        return _registered(name, args, kwargs, plain)
    if func.namespace == "c10d":
        return _over_ranks(func, args, kwargs, ours)
    _waits.launches[name] += 1
    if name in ("_pin_memory", "is_pinned"):
        return False if name == "is_pinned" else args[0]
    if ours:
        _check(name, args, kwargs, plain)
        _check_indices(name, ours)
    if name in COPIES:
        _count_copy(name, args, kwargs)

    out = _computed(func, name, args, kwargs)

    if name in READS or name == "_to_copy" and not _stays(args, kwargs):
        return out
    device = _device_of(ours, kwargs)
    out = tree_map(lambda x: wrapped(x, device), out)
    if ours and name != "_to_copy":
        return return_and_correct_aliasing(func, args, kwargs, out)
    return out


def _registered(name, args, kwargs, plain):
    """One of the library's operators: what it is made of, each with its devices."""
    if any(x.dim() for x in plain):
        mixes(name, plain)
    with _Present(), torch._C._AutoDispatchBelowAutograd():
        return OPDEFS[f"fused_rl::{name}"]._init_fn(*args, **kwargs)


def _over_ranks(func, args, kwargs, ours):
    """A collective over gloo, of tensors that NCCL would take: those of the device that this rank joined with."""
    for x in ours:
        if x.device.index != int(os.environ["LOCAL_RANK"]):
            raise RuntimeError(
                f"{place()}: {func.name()} of {x.device} by local rank {os.environ['LOCAL_RANK']}"
            )
    *_, work = func(*values(args), **values(kwargs))
    return args[0], work


def _device_of(ours, kwargs) -> torch.device:
    """Where an operator's result is: where it is asked for, else where its operands are."""
    given = kwargs.get("device")
    if given is None:
        return ours[0].device if ours else current()
    return current() if torch.device(given).index is None else torch.device(given)


def _check_indices(name, ours):
    """Refuse operands of two GPUs; a copy may be between them."""
    if name not in COPIES and len({x.device for x in ours}) > 1:
        raise RuntimeError(
            f"{place()}: {name}: found tensors on {' and '.join(sorted({str(x.device) for x in ours}))}"
        )


def _check(name, args, kwargs, plain):
    """Counts what waits, and refuses what mixes devices."""
    if name in READS or name in SIZED:
        wait(name)
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        wait("repeat_interleave without output_size")
    elif name in INDEXED:
        _check_index(name, args, plain)
        return
    elif name in COPIES:
        return
    refused = [x for x in plain if x.dim() or name in NO_SCALARS]
    if refused:
        mixes(name, refused)


def _check_index(name, args, plain):
    indices = [i for i in args[1] if i is not None]
    if not isinstance(args[0], OnDevice):
        mixes(f"{name} of a CPU tensor by one of the device", plain)
    if (
        name.endswith(("put", "put_", "impl_"))
        and not isinstance(args[2], OnDevice)
        and args[2].dim()
    ):
        mixes(f"{name} of values", [args[2]])
    masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
    # By masked_fill.
    fills = "put" in name and not isinstance(args[2], OnDevice) and len(indices) == len(masks)
    if any(isinstance(i, OnDevice) for i in masks) and not fills:
        wait("index by a mask")
    if any(not isinstance(i, OnDevice) and i.dim() for i in indices):
        _upload("index by a CPU tensor")


def _count_copy(name, args, kwargs):
    """A copy between host and device: to the host it waits, from there unless it is told not to."""
    if name == "copy_":
        to_device, source = isinstance(args[0], OnDevice), args[1]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        to_device, source = _stays(args, kwargs), args[0]
        blocks = not kwargs.get("non_blocking", False)
    if not source.numel():
        return
    if (
        to_device
        and not isinstance(source, OnDevice)
        and blocks
        and (source.dim() or name != "copy_")
    ):
        _upload(name)
    elif not to_device and isinstance(source, OnDevice):
        wait(name)


def _stays(args, kwargs) -> bool:
    """Whether a `_to_copy` ends on the device."""
    device = kwargs.get("device")
    return isinstance(args[0], OnDevice) if device is None else _is_device(device)


def _computed(func, name, args, kwargs):
    """The operator on the CPU values."""
    kwargs = {
        key: value for key, value in kwargs.items() if key not in ("non_blocking", "pin_memory")
    }
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    args, kwargs = values(args), values(kwargs)
    if name in ("mm", "addmm", "bmm", "baddbmm") and "dtype" in func._overloadname:
        return _product(name, args, kwargs)
    out = func(*args, **kwargs)
    return out.clone() if name == "_to_copy" and out is args[0] else out


def _product(name, args, kwargs):
    """A product of 16-bit operands whose sums leave it in fp32, which the CPU has not."""
    added = args[:1] if name in ("addmm", "baddbmm") else ()
    left, right = (x.float() for x in args[len(added) :][:2])
    total = left @ right * kwargs.get("alpha", 1)
    if added and kwargs.get("beta", 1):
        total += added[0] * kwargs.get("beta", 1)
    return kwargs["out"].copy_(total) if "out" in kwargs else total
