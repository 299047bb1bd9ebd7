"""How rows of logits are handed to a kernel: compile-time options, alignment, temperature, programs per row."""

import contextlib
import struct

import torch
import triton
import triton.language as tl

THREADS = 128  # per program
K = 8  # windows of a tile: one rescaling per K elements of a lane
SEGMENT = 3  # tiles; one in a short row
SHORT = 32768  # columns: a row of no more is cut finer, so that a few hundred of them fill a device
WAVES = 8  # of programs: from there on the last one, however empty, is a small part of the time
SATURATING = 0.5  # the share of the programs that fit whose loads in flight suffice, a model
# of a thread of the row kernels; the second on sm_100, the Blackwell of data centres
REGISTERS = (128, None)

# Ways to stream the forward pass that counts do not tell apart from the default far enough: all return the same bits.
# REGISTERS in its place; AHEAD: a tile is loaded before the one before it is computed, STAGES: into shared memory
VARIANTS = {
    "default": {},
    "prefetch": {"REGISTERS": (168, 168), "AHEAD": True},
    "stages": {"REGISTERS": (128, 168), "STAGES": 3},
    "128 registers": {"REGISTERS": (128, 128)},
    "168 registers": {"REGISTERS": (168, 168)},
    "232 registers": {"REGISTERS": (232, 232)},
}
_chosen = VARIANTS["default"]


@contextlib.contextmanager
def variant(name: str):
    """Inside, `logprob_fwd`, and what calls it, streams as VARIANTS[name] says; for benchmarks.

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
    """The compile-time arguments of the chosen variant."""
    return {"STAGES": _chosen.get("STAGES", 1), "AHEAD": _chosen.get("AHEAD", False)}


def launch_options(x, registers=None):
    """Compile-time arguments and options of a launch over the rows of x; `registers`: of a thread, as REGISTERS."""
    vec = 16 // x.element_size()
    # more stages would go through shared memory
    shape = {
        "LANES": THREADS * vec,
        "VEC": vec,
        "num_stages": 1,
    }
    if torch.version.hip:
        return shape | {"num_warps": THREADS // 64}
    # 128 registers are four programs on a multiprocessor. On sm_100, whose paired arithmetic needs registers in pairs,
    # ptxas spills under most limits; without a limit it takes 142, which are three programs.
    if registers is None:
        registers = _chosen.get("REGISTERS", REGISTERS)
    most = registers[(10, 0) <= capability(x.device) < (12, 0)]
    return shape | {"num_warps": THREADS // 32} | ({"maxnreg": most} if most else {})


def capability(device):
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def aligned(x):
    """x from the 16-byte boundary before it on, and the elements between the two."""
    shift = x.data_ptr() % 16 // x.element_size()
    if shift == 0:
        return x, 0
    spans = [(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    size = shift + 1 + sum(spans)
    return x.as_strided((size,), (1,), x.storage_offset() - shift), shift


def temperature_scales(inv_temperature):
    """inv_t_ptr or None, inv_t, and log2(e) * inv_t as a sum of two fp32."""
    if isinstance(inv_temperature, torch.Tensor):
        return inv_temperature.contiguous(), 0.0, 0.0, 0.0
    exact = inv_temperature * 1.4426950408889634
    scale = struct.unpack("f", struct.pack("f", exact))[0]
    return None, float(inv_temperature), scale, exact - scale


def slots(device, options) -> int:
    """Programs that are resident at once, by their registers; 0 where there is no device to fill."""
    if torch.version.hip:
        return 4 * multiprocessors(device)
    each = 65536 // (32 * options["num_warps"] * options.get("maxnreg", 168))
    return each * multiprocessors(device)


def waves(programs: int, resident: int) -> float:
    """Time of equal programs, in that of `resident` ones at once; below SATURATING of them each has its own rate."""
    full, left = divmod(programs, resident)
    return full + max(left / resident, SATURATING) if left else full


def whole_rows(rows: int, segments: int, resident: int) -> int:
    """How many rows, from the first one, get a program each; those after them get one per segment.

    Whole rows fill every wave but the last. The rows of that one are split where this ends it sooner.
    """
    if resident == 0:
        return rows
    left = rows % resident
    sooner = waves(left * segments, resident) < segments * waves(left, resident)
    return rows - left if sooner and rows < WAVES * resident else rows


def parts_of_row(rows: int, most: int, resident: int) -> int:
    """Programs per row where splitting costs nothing: enough for WAVES, `most` at most."""
    return max(1, min(most, WAVES * resident // max(1, rows)))


@triton.jit
def share_of(whole, segments):
    """Return the program's row, first segment and end, and True if it has the whole row."""
    program = tl.program_id(0)
    beyond = tl.maximum(program - whole, 0)
    alone = program < whole
    row = tl.where(alone, program, whole + beyond // segments).to(tl.int64)
    first = tl.where(alone, 0, beyond % segments)
    return row, first, tl.where(alone, segments, first + 1), alone


def multiprocessors(device):
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 0
    )
