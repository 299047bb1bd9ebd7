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
        names = [argument] if argument else {*self.read, *self.written}
        return sum(self.read.get(n, 0) for n in names), sum(self.written.get(n, 0) for n in names)


# --------------------------------------------------------------------------- numerics


def _up(a):
    return (np.ascontiguousarray(a).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(a.shape)


def _down(a):
    bits = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16).reshape(a.shape)
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

    builder, executor, handle = interpreter.InterpreterBuilder, interpreter.GridExecutor, interpreter.TensorHandle
    if getattr(builder, "_fixed", False):
        return
    casts = {name: getattr(builder, name) for name in ("cast_impl", "create_fp_to_fp")}
    convert, launch, restore = interpreter._implicit_cvt, executor.__call__, executor._restore_args_dev

    def cast(name):
        def wrapped(self, src, dst_type, *rounding):
            pair = (src.dtype.scalar, dst_type.scalar)
            if pair == (tl.bfloat16, tl.float32):
                return handle(_up(src.data), tl.float32)
            if pair == (tl.float32, tl.bfloat16):
                return handle(_down(src.data), tl.bfloat16)
            return casts[name](self, src, dst_type, *rounding)

        return wrapped

    def fma(self, x, y, z):  # the product of two fp32 is exact in fp64
        exact = x.data.astype(np.float64) * y.data + z.data
        return handle(exact.astype(z.data.dtype), z.dtype.scalar)

    def implicit_convert(arg):
        if type(arg) is float:
            return tl.tensor(handle(np.array([arg], np.float32), tl.float32), tl.float32)
        return convert(arg)

    def quiet_launch(self, *args, **kwargs):
        with np.errstate(all="ignore"):
            return launch(self, *args, **kwargs)

    def restore_unless_cpu(self, dev, host, kwargs, host_kwargs):
        moved = [i for i, a in enumerate(dev) if not _on_cpu(a)]
        names = [k for k, a in kwargs.items() if not _on_cpu(a)]
        pick = [{k: d[k] for k in names} for d in (kwargs, host_kwargs)]
        return restore(self, [dev[i] for i in moved], [host[i] for i in moved], *pick)

    def comparison(compare):
        return lambda self, a, b: handle(compare(self, a, b).data, tl.int1)

    for name in casts:
        setattr(builder, name, cast(name))
    for name in [n for n in dir(builder) if n.startswith(("create_icmp", "create_fcmp"))]:
        setattr(builder, name, comparison(getattr(builder, name)))
    builder.create_fma = fma
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    if not hasattr(builder, "get_bf16"):  # triton before 3.8
        builder.get_bf16 = lambda self, v: handle(_down(np.array([v], np.float32)), tl.bfloat16)
    interpreter._implicit_cvt = implicit_convert
    executor.__call__, executor._restore_args_dev = quiet_launch, restore_unless_cpu
    _patch_language_once_per_launch(interpreter, tl)
    builder._fixed = True


def _on_cpu(arg):
    return hasattr(arg, "data_ptr") and arg.device.type == "cpu"


def _patch_language_once_per_launch(interpreter, tl):
    """Every call of a nested jit function patches triton.language anew, which takes longer than its arithmetic."""
    patch, launch, done, known = interpreter._patch_lang, interpreter.GridExecutor.__call__, set(), {}

    def modules(fn):
        if fn not in known:
            known[fn] = {id(v) for v in fn.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core)}
        return known[fn]

    def patch_once(fn):  # a launch undoes what this returns; the interpreter ignores it for nested calls
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

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, clean_launch


# --------------------------------------------------------------------------- what a launch does to memory


@contextlib.contextmanager
def _watch(on_launch, on_access):
    """Call `on_launch(executor, tensors)` before each launch, with its tensors by argument name, and
    `on_access(builder, addresses, size, reads, writes)` at each load, store and atomic: the unmasked lanes' addresses.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    # method -> (position of the mask among its arguments, reads, writes)
    methods = {
        "create_masked_load": (1, True, False),
        "create_masked_store": (2, False, True),
        "create_atomic_rmw": (3, True, True),
        "create_atomic_cas": (None, True, True),
    }
    saved, launch = {name: getattr(builder, name) for name in methods}, executor.__call__

    def wrap(name):
        at, reads, writes = methods[name]

        def wrapped(self, *args, **kwargs):
            pointers = args[1 if name == "create_atomic_rmw" else 0]
            addresses = np.atleast_1d(pointers.data)
            if at is not None:
                mask = args[at] if len(args) > at else kwargs["mask"]
                addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
            if addresses.size:
                on_access(self, addresses, max(1, pointers.get_element_ty().primitive_bitwidth // 8), reads, writes)
            return saved[name](self, *args, **kwargs)

        return wrapped

    def call(self, *args, **kwargs):
        tensors = {n: t for n, t in [*zip(self.arg_names, args), *kwargs.items()] if hasattr(t, "untyped_storage")}  # noqa: B905
        on_launch(self, {n: t for n, t in tensors.items() if t.numel()})
        try:
            return launch(self, *args, **kwargs)
        except interpreter.InterpreterError as error:  # it wraps whatever a program raised
            raise error.__cause__ if isinstance(error.__cause__, MemoryFault) else error from None

    for name in methods:
        setattr(builder, name, wrap(name))
    executor.__call__ = call
    try:
        yield
    finally:
        for name, method in saved.items():
            setattr(builder, name, method)
        executor.__call__ = launch


def _span(tensor):
    """The bytes [first, last) that a view can reach, which for a slice is less than its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextlib.contextmanager
def count_traffic():
    """Yield a list that gains one `Launch` per kernel launch."""
    launches, spans = [], {}

    def on_launch(executor, tensors):
        launches.append(Launch(executor.fn.__name__))
        spans.clear()
        spans.update({name: _span(t) for name, t in tensors.items()})

    def on_access(builder, addresses, size, reads, writes):
        launch, first = launches[-1], int(addresses[0])
        launch.grid = tuple(builder.grid_dim)
        name = next((n for n, (low, high) in spans.items() if low <= first < high), "?")
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
        state.update(kernel=executor.fn.__name__, spans={n: _span(t) for n, t in tensors.items()}, touched={})

    def on_access(builder, addresses, size, reads, writes):
        where = f"{state['kernel']}, program {tuple(builder.grid_idx)}"
        if max(builder.grid_dim[1:]) > 65535:
            raise MemoryFault(f"{where}: grid {tuple(builder.grid_dim)} has more than 65535 programs on y or z")
        low, high = int(addresses.min()), int(addresses.max()) + size
        name = next((n for n, (a, b) in state["spans"].items() if a <= low and high <= b), None)
        if name is None:
            near = {n: (low - a, high - a, b - a) for n, (a, b) in state["spans"].items() if low < b and a < high}
            raise MemoryFault(f"{where}: bytes outside every argument; (from, to, its size) of the nearest: {near}")
        _check_race(state["touched"], where, name, state["spans"][name], builder, addresses, size, reads, writes)

    with _watch(on_launch, on_access):
        yield


def _check_race(touched, where, name, span, builder, addresses, size, reads, writes):
    unit = min(size, 2)  # bytes; one kernel may load pairs of what it stores singly
    if (span[0], unit) not in touched:  # who read and who wrote each unit: 0 nobody, -1 several programs
        touched[span[0], unit] = [np.zeros((span[1] - span[0]) // unit + 1, np.int32) for _ in range(2)]
    readers, writers = touched[span[0], unit]
    x, y, z = builder.grid_idx
    me = 1 + (x * builder.grid_dim[1] + y) * builder.grid_dim[2] + z
    first = ((addresses - np.uint64(span[0])) // np.uint64(unit)).astype(np.int64)
    at = (first[..., None] + np.arange(size // unit)).ravel()
    others = [writers[at]] + [readers[at]] * writes
    if any(((o != 0) & (o != me)).any() for o in others):
        raise MemoryFault(f"{where}: touches elements of {name} that another program touches, one of them writing")
    if writes:
        writers[at] = me
    if reads:
        readers[at] = np.where((readers[at] == 0) | (readers[at] == me), me, -1)
