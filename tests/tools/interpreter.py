"""Triton's interpreter with the numerics of a GPU, at a usable speed, and with counters and checks on memory.

`fix_numerics()` once per process, after TRITON_INTERPRET=1 and before the first launch; then

    with count_traffic() as launches: ...     # one `Launch` per kernel launch: exact bytes read and written, per tensor
    with check_memory(): ...                  # MemoryFault when a program leaves its tensors or races with another one

Triton is imported inside the functions, so that a process without it, or with a GPU, can import this module.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import os
from typing import NamedTuple

import numpy as np


class MemoryFault(AssertionError):
    """A kernel touched memory outside its arguments, or two of its programs touched the same element."""


@dataclasses.dataclass
class Launch:
    """What one kernel launch moved: bytes of the lanes that a mask leaves on, per argument name."""

    kernel: str
    grid: tuple = ()
    read: dict = dataclasses.field(default_factory=dict)
    written: dict = dataclasses.field(default_factory=dict)

    def bytes(self, argument: str | None = None) -> tuple[int, int]:
        """(bytes read, bytes written), of one argument or of all of them; an atomic counts as both."""
        if argument:
            return self.read.get(argument, 0), self.written.get(argument, 0)
        return sum(self.read.values()), sum(self.written.values())


# --------------------------------------------------------------------------- numerics


def _up(a):
    """bf16 as uint16 -> fp32."""
    bits = np.ascontiguousarray(a).view(np.uint16).astype(np.uint32)
    return (bits << 16).view(np.float32).reshape(a.shape)


def _down(a):
    """fp32 -> bf16 as uint16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    rounded = (bits + (0x7FFF + odd)) >> 16
    rounded = rounded.astype(np.uint16).reshape(a.shape)
    return np.where(np.isnan(a), np.uint16(0x7FC0), rounded)


def fix_numerics():
    """Make the interpreter compute what a GPU computes, without its needless copies of CPU tensors.

    The stock one truncates fp32 to bf16 and loses bf16 denormals; keeps a Python float as fp64; rounds an fma twice;
    lets NaN through a minimum or maximum that drops it on the device; gives a comparison the type of what it compares,
    which spoils a scalar one in a mask; and warns about inf and NaN.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter.InterpreterBuilder, "_fixed", False):
        return
    _fix_casts(interpreter, tl)
    _fix_arithmetic(interpreter, tl)
    _fix_launches(interpreter)
    _patch_language_once_per_launch(interpreter, tl)
    interpreter.InterpreterBuilder._fixed = True


def _fix_casts(interpreter, tl):
    """bf16 rounds to the nearest and keeps denormals; a Python float is an fp32."""
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    convert = interpreter._implicit_cvt

    def fixed(stock):
        def cast(self, src, dst_type, *rounding):
            pair = (src.dtype.scalar, dst_type.scalar)
            if pair == (tl.bfloat16, tl.float32):
                return handle(_up(src.data), tl.float32)
            if pair == (tl.float32, tl.bfloat16):
                return handle(_down(src.data), tl.bfloat16)
            return stock(self, src, dst_type, *rounding)

        return cast

    def implicit_convert(arg):
        if type(arg) is not float:
            return convert(arg)
        data = np.array([arg], np.float32)
        return tl.tensor(handle(data, tl.float32), tl.float32)

    def get_bf16(self, value):
        data = np.array([value], np.float32)
        return handle(_down(data), tl.bfloat16)

    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, fixed(getattr(builder, name)))
    interpreter._implicit_cvt = implicit_convert
    if not hasattr(builder, "get_bf16"):  # triton before 3.8
        builder.get_bf16 = get_bf16


def _fix_arithmetic(interpreter, tl):
    """An fma rounds once, minimum and maximum drop NaN, a comparison is a truth value."""
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def fma(self, x, y, z):  # the product of two fp32 is exact in fp64
        exact = x.data.astype(np.float64) * y.data + z.data
        return handle(exact.astype(z.data.dtype), z.dtype.scalar)

    def comparison(stock):
        def compare(self, a, b):
            return handle(stock(self, a, b).data, tl.int1)

        return compare

    builder.create_fma = fma
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, comparison(getattr(builder, name)))


def _fix_launches(interpreter):
    """No warnings about inf and NaN, and no copies back of tensors that were on the CPU all along."""
    executor = interpreter.GridExecutor
    launch = executor.__call__
    restore = executor._restore_args_dev

    def quiet_launch(self, *args, **kwargs):
        with np.errstate(all="ignore"):
            return launch(self, *args, **kwargs)

    def restore_unless_cpu(self, dev, host, kwargs, host_kwargs):
        moved = [i for i, arg in enumerate(dev) if not _on_cpu(arg)]
        names = [name for name, arg in kwargs.items() if not _on_cpu(arg)]
        of_device = {name: kwargs[name] for name in names}
        of_host = {name: host_kwargs[name] for name in names}
        return restore(
            self,
            [dev[i] for i in moved],
            [host[i] for i in moved],
            of_device,
            of_host,
        )

    executor.__call__ = quiet_launch
    executor._restore_args_dev = restore_unless_cpu


def _on_cpu(arg):
    return hasattr(arg, "data_ptr") and arg.device.type == "cpu"


def _patch_language_once_per_launch(interpreter, tl):
    """Every call of a nested jit function patches triton.language anew, which takes longer than its arithmetic."""
    patch = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    done, known = set(), {}

    def modules(fn):
        if fn not in known:
            found = filter(inspect.ismodule, fn.__globals__.values())
            known[fn] = {id(module) for module in found if module in (tl, tl.core)}
        return known[fn]

    # A launch undoes what this returns; the interpreter ignores it for nested calls.
    def patch_once(
        fn,
    ):
        if done and modules(fn) <= done:
            return None
        done.update(modules(fn))
        return patch(fn)

    def clean_launch(self, *args, **kwargs):
        done.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            done.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = clean_launch


# --------------------------------------------------------------------------- what a launch does to memory


class Access(NamedTuple):
    """How a method of the interpreter's builder reaches memory."""

    pointers: int  # position among its arguments
    mask: int | None
    reads: bool
    writes: bool


ACCESSES = {
    "create_masked_load": Access(0, 1, True, False),
    "create_masked_store": Access(0, 2, False, True),
    "create_atomic_rmw": Access(1, 3, True, True),
    "create_atomic_cas": Access(0, None, True, True),
}


def _watched(stock, access: Access, on_access):
    """The builder's method `stock`, which tells `on_access` first."""

    def method(self, *args, **kwargs):
        pointers = args[access.pointers]
        addresses = np.atleast_1d(pointers.data)
        if access.mask is not None:
            mask = args[access.mask] if len(args) > access.mask else kwargs["mask"]
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
        if addresses.size:
            bits = pointers.get_element_ty().primitive_bitwidth
            on_access(self, addresses, max(1, bits // 8), access.reads, access.writes)
        return stock(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def _watch(on_launch, on_access):
    """Call `on_launch(executor, tensors)` before each launch, with its tensors by argument name, and
    `on_access(builder, addresses, size, reads, writes)` at each load, store and atomic: the unmasked lanes' addresses.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    executor = interpreter.GridExecutor
    saved = {name: getattr(builder, name) for name in ACCESSES}
    launch = executor.__call__

    def call(self, *args, **kwargs):
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        tensors = {name: arg for name, arg in given.items() if hasattr(arg, "untyped_storage")}
        on_launch(self, {name: tensor for name, tensor in tensors.items() if tensor.numel()})
        try:
            return launch(self, *args, **kwargs)
        except interpreter.InterpreterError as error:  # it wraps whatever a program raised
            raise error.__cause__ if isinstance(error.__cause__, MemoryFault) else error from None

    for name, access in ACCESSES.items():
        setattr(builder, name, _watched(saved[name], access, on_access))
    executor.__call__ = call
    try:
        yield
    finally:
        for name, method in saved.items():
            setattr(builder, name, method)
        executor.__call__ = launch


def _span(tensor):
    """The bytes [first, last) that a view can reach, which for a slice is less than its storage."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.element_size()


def _spans(tensors) -> dict:
    return {name: _span(tensor) for name, tensor in tensors.items()}


def _holding(spans, low, high) -> str | None:
    """The argument that holds the bytes [low, high)."""
    for name, (first, last) in spans.items():
        if first <= low and high <= last:
            return name
    return None


@contextlib.contextmanager
def count_traffic():
    """Yield a list that gains one `Launch` per kernel launch."""
    launches, spans = [], {}

    def on_launch(executor, tensors):
        launches.append(Launch(executor.fn.__name__))
        spans.clear()
        spans.update(_spans(tensors))

    def on_access(builder, addresses, size, reads, writes):
        launch = launches[-1]
        first = int(addresses[0])
        launch.grid = tuple(builder.grid_dim)
        name = _holding(spans, first, first + 1) or "?"
        for counter in [launch.read] * reads + [launch.written] * writes:
            counter[name] = counter.get(name, 0) + addresses.size * size

    with _watch(on_launch, on_access):
        yield launches


@contextlib.contextmanager
def check_memory():
    """Raise MemoryFault when an access leaves the launch's tensors, when two programs touch one element that either
    writes (the interpreter runs them one after another and hides the race), or when the grid is too large for CUDA.
    """
    state = {"kernel": "", "spans": {}, "touched": {}}

    def on_launch(executor, tensors):
        state.update(kernel=executor.fn.__name__, spans=_spans(tensors), touched={})

    def on_access(builder, addresses, size, reads, writes):
        # The grid, then where the access lies, then who else was there.
        where = f"{state['kernel']}, program {tuple(builder.grid_idx)}"
        spans = state["spans"]
        if max(builder.grid_dim[1:]) > 65535:
            raise MemoryFault(
                f"{where}: grid {tuple(builder.grid_dim)} has more than 65535 programs on y or z"
            )
        low = int(addresses.min())
        high = int(addresses.max()) + size
        name = _holding(spans, low, high)
        if name is None:
            near = {}
            for other, (first, last) in spans.items():
                if low < last and first < high:
                    near[other] = (low - first, high - first, last - first)
            raise MemoryFault(
                f"{where}: bytes outside every argument; (from, to, its size) of the nearest: {near}"
            )
        if _races(state["touched"], spans[name], builder, addresses, size, reads, writes):
            raise MemoryFault(
                f"{where}: touches elements of {name} that another program touches, one of them writing"
            )

    with _watch(on_launch, on_access):
        yield


def _races(touched, span, builder, addresses, size, reads, writes) -> bool:
    """Whether another program touched one of these elements, and one of both wrote; notes this access."""
    unit = min(size, 2)  # bytes; one kernel may load pairs of what it stores singly
    if (
        span[0],
        unit,
    ) not in touched:  # who read and who wrote each unit: 0 nobody, -1 several programs
        units = (span[1] - span[0]) // unit + 1
        touched[span[0], unit] = np.zeros((2, units), np.int32)
    readers, writers = touched[span[0], unit]

    # The units of this access, and a number for this program.
    first = (addresses - np.uint64(span[0])) // np.uint64(unit)
    at = first.astype(np.int64)[..., None] + np.arange(size // unit)
    at = at.ravel()
    x, y, z = builder.grid_idx
    me = 1 + np.ravel_multi_index((x, y, z), builder.grid_dim)

    others = [writers[at]] + [readers[at]] * writes
    for programs in others:
        if np.any((programs != 0) & (programs != me)):
            return True
    if writes:
        writers[at] = me
    if reads:
        before = readers[at]
        alone = (before == 0) | (before == me)
        readers[at] = np.where(alone, me, -1)
    return False
