"""What PTX computes in registers: numpy arrays, an element per thread.

A register holds bits (an unsigned array of its width) or truth values; the type in an instruction says how it reads
and writes them. Results are those of IEEE arithmetic: of an approximation (`ex2.approx`, `rsqrt.approx`, `div.full`)
the rounded true value. Only what our kernels compile to is here; everything else is `Unknown`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

WARP = 32
BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
DTYPES = {}
for letter, table in (("b", BITS), ("u", BITS), ("s", SIGNED), ("f", FLOATS)):
    DTYPES |= {f"{letter}{width}": dtype for width, dtype in table.items()}
# The one that arithmetic makes.
NAN = {
    "f32": np.uint32(0x7FFFFFFF),
    "f64": np.uint64(0x7FFFFFFFFFFFFFFF),
}
SMALLEST = np.finfo(np.float32).tiny  # below it .ftz makes zeros


class Unknown(NotImplementedError):
    """An instruction that no kernel of ours has compiled to so far."""


def width_of(kind: str) -> int:
    """Bits of a value of a type; 1 for a predicate."""
    return 1 if kind == "pred" else int(kind.strip("bfsux"))


def read(bits, kind: str):
    """Bits of a register, or an immediate's, as numbers of a type; bf16 as fp32."""
    if kind == "pred":
        return bits
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    dtype = np.dtype(DTYPES[kind])
    return bits.astype(BITS[8 * dtype.itemsize], copy=False).view(dtype)


def write(values, kind: str, width: int):
    """Numbers of a type as the bits of a register of so many, extended by zeros or by the sign."""
    if kind == "pred":
        return values
    if kind == "bf16":
        return _round_to_bf16(values)
    values = values.astype(DTYPES[kind], copy=False)
    if width > 8 * values.itemsize:
        wider = SIGNED if kind[0] == "s" else BITS
        values = values.astype(wider[width])
    bits = values.view(BITS[width])
    return bits if kind not in NAN else np.where(values == values, bits, NAN[kind])


def _round_to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    rounded = (bits + (0x7FFF + odd)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


# --------------------------------------------------------------------------- arithmetic


def _fma(x, y, z):
    if x.dtype != np.float32:
        return x * y + z
    exact = x.astype(np.float64) * y  # of two fp32; so the sum is rounded once
    return (exact + z).astype(np.float32)


def _divide(x, y):
    if x.dtype.kind == "f":
        return x / y
    # What a division by 0 gives is not defined, and not an error.
    quotient = np.abs(x) // np.maximum(np.abs(y), 1)
    return quotient * np.sign(x) * np.sign(y)


def _remainder(x, y):
    return x - _divide(x, y) * y


def _minimum(x, y):
    return np.fmin(x, y) if x.dtype.kind == "f" else np.minimum(x, y)


def _maximum(x, y):
    return np.fmax(x, y) if x.dtype.kind == "f" else np.maximum(x, y)


def _exp2(x):
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def _rsqrt(x):
    return (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)


def _flush(x):
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


def _flushed(function):
    def compute(*numbers):
        return _flush(function(*map(_flush, numbers)))

    return compute


# name -> function of operands that all have the result's type
SAME_TYPE = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "div": _divide,
    "ex2": _exp2,
    "fma": _fma,
    "mad": _fma,
    "max": _maximum,
    "min": _minimum,
    "mov": np.copy,
    "mul": np.multiply,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": _remainder,
    "rsqrt": _rsqrt,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
KEEP_NAN = {"max": np.maximum, "min": np.minimum}
# What may stand between such a name and its type.
HOW = {
    "rn",
    "approx",
    "full",
    "ftz",
    "lo",
    "NaN",
    "wide",
    "hi",
}

# --------------------------------------------------------------------------- comparisons, shifts, conversions

COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _comparison(how):
    compare = COMPARISONS.get(how[:2], np.equal)

    def decide(x, y):
        unordered = np.isnan(x) | np.isnan(y)
        if how in ("nan", "num"):
            return unordered == (how == "nan")
        return compare(x, y) | unordered if how.endswith("u") else compare(x, y) & ~unordered

    return decide


def _shift_left(x, count):
    width = 8 * x.itemsize
    moved = x << np.minimum(count, width - 1).astype(x.dtype)
    return np.where(count < width, moved, 0)


def _shift_right(x, count):
    width = 8 * x.itemsize
    moved = x >> np.minimum(count, width - 1).astype(x.dtype)
    return moved if x.dtype.kind == "i" else np.where(count < width, moved, 0)


def _bit_field(x, begin, length):
    return (x >> begin) & ((np.uint32(1) << length) - 1)


def _signed_bit_field(x, begin, length):
    field = _bit_field(x, begin, length)
    sign = np.uint32(1) << (length - np.uint32(1))
    return (field ^ sign) - sign


def _permute_bytes(x, y, selector):
    both = x.astype(np.uint64) | y.astype(np.uint64) << 32
    result = np.zeros_like(both)
    for i in range(4):
        chosen = selector >> (4 * i) & 15
        byte = both >> (8 * (chosen & 7)).astype(np.uint64) & 255
        sign = np.where(byte > 127, 255, 0).astype(np.uint64)
        result |= np.where(chosen > 7, sign, byte) << np.uint64(8 * i)
    return result.astype(np.uint32)


def _to_integer(kind):
    """Toward zero; what does not fit becomes the nearest that does, NaN becomes 0."""
    limits = np.iinfo(DTYPES[kind])

    def convert(x):
        above, below = x >= float(limits.max) + 1, x < limits.min
        inside = np.where(above | below | np.isnan(x), 0, x).astype(DTYPES[kind])
        return np.where(above, limits.max, np.where(below, limits.min, inside))

    return convert


def _pack(kind):
    def halves(high, low):
        high, low = (
            write(x, kind, 16) if kind == "bf16" else x.astype(np.float16).view(np.uint16)
            for x in (high, low)
        )
        return high.astype(np.uint32) << 16 | low

    return halves


class Plan(NamedTuple):
    """What to compute of which types."""

    function: Callable
    result: str
    operands: tuple[str, ...]


def plan(name: str, words: tuple[str, ...], count: int) -> Plan:
    """Of an instruction that touches nothing but registers: `words` follow its name, `count` operands its result.

    Raises:
        Unknown: where it is none that our kernels have compiled to so far.
    """
    kind = words[-1]
    how = set(words[:-1])
    if name == "cvt":
        return _conversion(*words)
    if name == "setp" and len(words) == 2:
        return Plan(_comparison(words[0]), "pred", (kind, kind))
    if name == "selp":
        return Plan(lambda x, y, chosen: np.where(chosen, x, y), kind, (kind, kind, "pred"))
    if name in ("shl", "shr"):
        return Plan(_shift_left if name == "shl" else _shift_right, kind, (kind, "u32"))
    if (name, kind) in SPECIAL:
        return Plan(SPECIAL[name, kind], "b32", ("b32",) * count)
    if name not in SAME_TYPE or how - HOW or kind not in (*DTYPES, "pred"):
        raise Unknown(".".join((name, *words)))
    return _arithmetic(name, how, kind, count)


SPECIAL = {
    ("bfe", "u32"): _bit_field,
    ("bfe", "s32"): _signed_bit_field,
    ("popc", "b32"): np.bitwise_count,
    ("prmt", "b32"): _permute_bytes,
}


def _arithmetic(name, how, kind, count):
    function = KEEP_NAN[name] if "NaN" in how else SAME_TYPE[name]
    if how & {"wide", "hi"}:  # the product of two, of twice their width, or its upper half
        double = f"{kind[0]}{2 * width_of(kind)}"

        def widened(x, y, *addend):
            numbers = x.astype(DTYPES[double]), y.astype(DTYPES[double])
            return function(*numbers, *addend)

        if "hi" in how:
            return Plan(lambda x, y: widened(x, y) >> width_of(kind), kind, (kind, kind))
        return Plan(widened, double, (kind, kind, double)[:count])
    if "ftz" in how and kind == "f32":
        function = _flushed(function)
    return Plan(function, kind, (kind,) * count)


def _conversion(*words):
    *how, to, kind = words
    if set(how) - {"rn", "rzi"}:
        raise Unknown("cvt." + ".".join(words))
    if to in ("bf16x2", "f16x2"):
        return Plan(_pack(to.removesuffix("x2")), "b32", (kind, kind))
    if "rzi" in how:
        return Plan(_to_integer(to), to, (kind,))
    return Plan(lambda x: x, to, (kind,))


# --------------------------------------------------------------------------- between the threads of a warp

REDUCTIONS = {"add": np.add, "max": np.maximum, "min": np.minimum}


def warp_sources(how: str, threads: int, distance):
    """The thread whose value each thread takes in a shuffle."""
    thread = np.arange(threads)
    if how == "bfly":
        return thread ^ distance
    if how == "up":
        return np.where(thread % WARP >= distance, thread - distance, thread)
    raise Unknown(f"shfl.{how}")


def reduce_warps(how: str, values):
    reduced = REDUCTIONS[how].reduce(values.reshape(-1, WARP), 1, dtype=values.dtype)
    return np.repeat(reduced, WARP)
