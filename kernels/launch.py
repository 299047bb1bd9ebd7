"""How rows of logits are handed to a kernel: compile-time options, alignment, temperature, programs per row."""

import struct

import torch
import triton

THREADS = 128  # per program
K = 8  # windows of a tile: one rescaling per K elements of a lane
SEGMENT = 4  # tiles


def launch_options(x):
    """Compile-time arguments and options of a launch over the rows of x."""
    vec = 16 // x.element_size()
    shape = {"LANES": THREADS * vec, "VEC": vec, "num_stages": 1}  # more stages would go through shared memory
    if torch.version.hip:
        return shape | {"num_warps": THREADS // 64}
    # left alone, ptxas hoists the masks and addresses of a row's ends: 240 registers. 168 do without a spill, and three
    # programs share a multiprocessor; but not on Blackwell, whose paired arithmetic needs registers in pairs
    return shape | {"num_warps": THREADS // 32, "maxnreg": 168 if capability(x.device) < (10, 0) else 232}


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


def programs_per_row(x, lanes):
    """More than one where there are fewer rows than multiprocessors: one per segment."""
    segments = triton.cdiv(x.shape[1], SEGMENT * K * lanes)
    return segments if x.shape[0] < multiprocessors(x.device) else 1


def multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
