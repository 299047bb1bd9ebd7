"""How kernels over rows of logits are launched: compile-time options, alignment, temperature, programs per row."""

import contextlib
import functools
import struct

import torch
import triton
import triton.language as tl
from triton.runtime import driver

THREADS = 128  # per program
K = 8  # windows per tile: the sums of a lane are rescaled once per K elements
SEGMENT = 3  # tiles per segment; a short row has segments of one
SHORT = 32768  # columns: a row of no more is cut finer, so that a few hundred of them fill a device
WAVES = 8  # from so many waves of programs on, the last one takes a small part of the time, however empty it is
SATURATING = 0.5  # the share of the resident programs that saturates the memory, in our model
# Registers per thread of the row kernels; the second number is for sm_100, the data-centre Blackwell.
REGISTERS = (128, None)

# Ways to stream the forward pass, which only a measurement on a device can rank; all return the same bits. REGISTERS
# replaces that above; with AHEAD a tile is loaded before the previous one is computed. On an H100 the default takes the
# time of a copy at long rows, so of limits for registers only those of sm_100 are open, and AHEAD for short rows.
VARIANTS = {
    "default": {},
    "prefetch": {"REGISTERS": (168, 168), "AHEAD": True},
    "128 registers": {"REGISTERS": (128, 128)},
    "168 registers": {"REGISTERS": (128, 168)},
    "232 registers": {"REGISTERS": (128, 232)},
}
_chosen = VARIANTS["default"]


@contextlib.contextmanager
def variant(name: str):
    """Stream `logprob_fwd`, and whatever calls it, as VARIANTS[name] says while inside; this is for benchmarks.

    for name in launch.VARIANTS:
        with launch.variant(name):
            token_logprobs(logits, targets)  # compiled on its first call
    """
    global _chosen
    before, _chosen = _chosen, VARIANTS[name]
    try:
        yield
    finally:
        _chosen = before


def streaming() -> dict:
    """Return the compile-time arguments of the variant in use."""
    return {"AHEAD": _chosen.get("AHEAD", False)}


def launch_options(x, registers=None):
    """Return the compile-time arguments and options of a launch over the rows of x, in a dict that nobody changes.

    `registers` per thread are a pair like REGISTERS, which is the default.
    """
    if registers is None:
        registers = _chosen.get("REGISTERS", REGISTERS)
    return _options(
        x.element_size(), THREADS, registers, capability(x.device), bool(torch.version.hip)
    )


@functools.lru_cache(maxsize=64)
def _options(itemsize, threads, registers, capability, hip):
    vec = 16 // itemsize
    # more than one stage would make the loads go through shared memory
    shape = {
        "LANES": threads * vec,
        "VEC": vec,
        "num_stages": 1,
    }
    if hip:
        return shape | {"num_warps": threads // 64}
    # With 128 registers four programs fit on a multiprocessor. On sm_100, whose paired arithmetic needs registers in
    # pairs, ptxas spills under most limits; without a limit it takes 142 registers, and three programs fit.
    most = registers[(10, 0) <= capability < (12, 0)]
    return shape | {"num_warps": threads // 32} | ({"maxnreg": most} if most else {})


# Compiled kernels and their compile-time arguments, by what Triton compiled them for.
_compiled = {}


def launch(kernel, grid, pointers, numbers, options):
    """Run kernel[grid](*pointers, *numbers, **options) on the device of the first pointer, which is never None.

    Triton looks at all arguments of a launch, which takes 23 us of the host. Here it does so at the first launch of
    each kind: it compiles for the dtype of a pointer, for its alignment to 16 bytes, and for what is None. A number
    counts by its type, or by its value if the kernel has no list `do_not_specialize`.
    """
    # the dtype alone says that it begins at 16 bytes: at a small launch each object counts
    kinds = [
        x if x is None else x.dtype if x.data_ptr() & 15 == 0 else (x.dtype,) for x in pointers
    ]
    with torch.cuda.device_of(pointers[0]):
        if not isinstance(kernel, triton.JITFunction):  # it is interpreted
            kernel[grid](*pointers, *numbers, **options)
            return
        kinds += map(type, numbers) if kernel.do_not_specialize else numbers
        key = id(kernel), driver.active.get_current_device(), *kinds, *options.values()
        compiled, constants = _compiled.get(key, (None, ()))
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*pointers, *numbers, *constants)
            return
        compiled = kernel[grid](*pointers, *numbers, **options)
        names = kernel.arg_names[len(pointers) + len(numbers) :]
        _compiled[key] = compiled, [options[name] for name in names]


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up; `triton.cdiv`, which kernels may call too, takes 4 us of the host."""
    return -(-a // b)


@functools.lru_cache(maxsize=64)
def capability(device):
    """Return the compute capability of a CUDA device, and (0, 0) for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def aligned(x):
    """Return a view of x that begins at the 16-byte boundary at or before it, and the number of elements between."""
    shift = x.data_ptr() % 16 // x.element_size()
    if shift == 0:
        return x, 0
    spans = [(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    size = shift + 1 + sum(spans)
    return x.as_strided((size,), (1,), x.storage_offset() - shift), shift


def contiguous(*tensors):
    """Return the tensors without gaps between their elements, copied if they have some; None stays None."""
    return [None if x is None else x.contiguous() for x in tensors]


def temperature_scales(inv_temperature):
    """Return inv_t_ptr or None, inv_t, and log2(e) * inv_t as a sum of two fp32 numbers.

    With a tensor (N,) the three numbers are 0, as `lanes.row_scale` computes those of each row in the kernel.
    """
    if isinstance(inv_temperature, torch.Tensor):
        return inv_temperature.contiguous(), 0.0, 0.0, 0.0
    return None, float(inv_temperature), *split(inv_temperature * 1.4426950408889634)


def split(x: float) -> tuple[float, float]:
    """Return a number as the sum of two that survive a cast to fp32."""
    (high,) = struct.unpack("f", struct.pack("f", x))
    return high, x - high


def slots(device, options) -> int:
    """Return how many programs are resident at once, from their registers; 0 where there is no device to fill."""
    if torch.version.hip:
        return 4 * multiprocessors(device)
    each = 65536 // (32 * options["num_warps"] * options.get("maxnreg", 168))
    return each * multiprocessors(device)


def waves(programs: int, resident: int) -> float:
    """Return the time of equal programs as a multiple of the time that `resident` ones take at once.

    Fewer than SATURATING of these do not saturate the memory, so they finish no sooner than SATURATING of them would.
    """
    full, left = divmod(programs, resident)
    return full + max(left / resident, SATURATING) if left else full


@functools.lru_cache(maxsize=1024)
def choose_unsplit_rows(rows: int, segments: int, resident: int) -> int:
    """Return how many rows, from the first one, get one program each; the rows after them get one per segment.

    Whole rows fill every wave but the last. The rows of the last wave are split if it ends sooner that way.
    """
    if resident == 0:
        return rows
    left = rows % resident
    sooner = waves(left * segments, resident) < segments * waves(left, resident)
    return rows - left if sooner and rows < WAVES * resident else rows


def programs_per_row(rows: int, most: int, resident: int) -> int:
    """Return the programs per row of a kernel for which splitting is free: enough for WAVES, but at most `most`."""
    return max(1, min(most, WAVES * resident // max(1, rows)))


@triton.jit
def program_segments(unsplit_rows, segments):
    """Return the program's row, its first segment, the end of its segments, and True if it has the whole row."""
    program = tl.program_id(0)
    beyond = tl.maximum(program - unsplit_rows, 0)
    has_whole_row = program < unsplit_rows
    row = tl.where(has_whole_row, program, unsplit_rows + beyond // segments).to(tl.int64)
    first = tl.where(has_whole_row, 0, beyond % segments)
    return row, first, tl.where(has_whole_row, segments, first + 1), has_whole_row


@functools.lru_cache(maxsize=64)
def multiprocessors(device):
    """Return the number of multiprocessors of a CUDA device, and 0 for any other device."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 0
    )
