"""Compiled kernels read back: registers, spills, and what their main loops issue per element.

headroom = time at the memory roof / time to issue the instructions, by the model of one H200: 132 multiprocessors at
1.755 GHz, each issuing 128 lanes, of them 64 ALU and 16 special-function lanes, per clock; 4.3 TB/s copied. Below 1 a
kernel is bound by instructions. The model knows nothing of latency.
"""

import collections
import re
import subprocess
import tempfile
from pathlib import Path

BYTES_PER_SECOND = 4.3e12
CLOCKS_PER_SECOND = 132 * 1.755e9
NVIDIA = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
NVIDIA_LABEL = re.compile(r"^(\.L_?\w+):")
AMD = re.compile(r"^\s+([a-z]+_[a-z0-9_]+)\s*(.*)$")
AMD_LABEL = re.compile(r"^(\.LBB\w+):")
AMD_MEMORY = re.compile(
    r"(?:global|buffer)_(load|store)_(?:dword(?:x(\d))?|([us]?short|[us]?byte))"
)
AMD_SPECIAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt)_")
IDLE = ("NOP", "s_nop", "s_waitcnt")
# What a Hopper multiprocessor issues to its half-rate integer and comparison pipe.
ALU = {
    "F2FP",
    "FCHK",
    "FMNMX",
    "FSEL",
    "FSETP",
    "IADD3",
    "IMNMX",
    "ISETP",
    "LEA",
    "LOP3",
    "P2R",
    "PLOP3",
    "PRMT",
    "R2P",
    "SEL",
    "SHF",
    "VIADD",
    "VIADDMNMX",
    "VIMNMX",
}


def inspect_kernel(kernel, vendor: str, element_bytes: int = 4) -> dict:
    """Resources of a compiled kernel, and the figures of its main loops (empty for a kernel that streams nothing)."""
    listing = _listing(kernel, vendor)
    loops = [_opcodes(loop) for loop in _innermost_loops(listing)]
    loops = [opcodes for opcodes in loops if sum(_moved(opcodes)[0])]
    most = max((_bytes(opcodes) for opcodes in loops), default=0)
    main = [opcodes for opcodes in loops if _bytes(opcodes) == most]
    # at the end of a row, loads of both branches count, but only one of them is computed
    computes = max(map(_special, main), default=0)
    main = [opcodes for opcodes in main if _special(opcodes) > 0.75 * computes or not computes]
    # a loop over rows that begin anywhere may load everything twice; its twin is as long, and says what it is for
    special = {_special(opcodes) for opcodes in main}
    main += [x for x in loops if 2 * _bytes(x) == most and _special(x) in special]
    elements = min((sum(_moved(opcodes)[0]) for opcodes in main), default=0) / element_bytes
    moved = min(map(_bytes, main), default=0)
    main = [_figures(opcodes, elements, moved) for opcodes in main]
    main.sort(key=lambda loop: loop["instructions"])
    found = _resources(kernel, listing, vendor)
    found["loops"] = main
    found["headroom"] = [headroom(loop) for loop in main]
    return found


def headroom(loop: dict) -> float:
    """Time at the memory roof over the time to issue a main loop's instructions."""
    clocks = max(loop["instructions"] / 128, loop["alu"] / 64, loop["special"] / 16)
    issue = clocks / CLOCKS_PER_SECOND
    return loop["bytes"] / loop["elements"] / BYTES_PER_SECOND / issue


def _nvidia_tool(tool, option, cubin):
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [path, option, file.name]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def _listing(kernel, vendor):
    """[(label or None, opcode or None, operands)] of a compiled kernel."""
    if vendor == "hip":
        text = kernel.asm["amdgcn"]
        pattern = AMD
        label = AMD_LABEL
    else:
        text = _nvidia_tool("nvdisasm", "-c", kernel.asm["cubin"])
        pattern = NVIDIA
        label = NVIDIA_LABEL
    listing = []
    for line in text.splitlines():
        if found := label.match(line):
            listing.append((found[1], None, ""))
        elif found := pattern.match(line):
            listing.append((None, found[1], found[2]))
    return listing


def _innermost_loops(listing):
    """Slices of the listing between a label and the last branch back to it, those with no such slice inside."""
    at, loops = {}, {}
    for i, (label, opcode, operands) in enumerate(listing):
        if label:
            at[label] = i
        elif opcode.startswith(("BRA", "s_cbranch")):
            target = re.search(r"\.L\w+", operands)
            if target and target[0] in at:
                loops[at[target[0]]] = i
    spans = [(first, last) for first, last in loops.items() if last - first > 1]
    innermost = []
    for first, last in spans:
        inside = [span for span in spans if first < span[0] and span[1] < last]
        if not inside:
            innermost.append(listing[first:last])
    return innermost


def _opcodes(loop):
    """Those of a slice of a listing, without what only waits."""
    opcodes = [opcode for _, opcode, _ in loop if opcode]
    return [opcode for opcode in opcodes if not opcode.startswith(IDLE)]


def _width(opcode):
    """(bytes that a thread loads from global memory, bytes that it stores)."""
    name = opcode.split(".")[0]
    if name in ("LDG", "LDGSTS", "STG"):
        widths = [int(bits) // 8 for bits in ("128", "64") if "." + bits in opcode]
        width = widths[0] if widths else 2 if "16" in opcode else 4
        return (0, width) if name == "STG" else (width, 0)
    found = AMD_MEMORY.match(opcode)
    if not found:
        return 0, 0
    width = 2 if found[3] else 4 * int(found[2] or 1)
    return (width, 0) if found[1] == "load" else (0, width)


def _moved(opcodes):
    """Return the bytes of each load, and those of each store."""
    return tuple(zip(*map(_width, opcodes), strict=True)) or ((), ())


def _bytes(opcodes):
    return sum(map(sum, _moved(opcodes)))


def _special(opcodes):
    return sum(x.startswith("MUFU") or bool(AMD_SPECIAL.match(x)) for x in opcodes)


def _figures(opcodes, elements, moved):
    """What a loop issues per element, and moves per round, between memory and the cache."""
    loads, stores = _moved(opcodes)
    count = collections.Counter(opcode.split(".")[0] for opcode in opcodes)
    alu = sum(n for name, n in count.items() if name in ALU)
    special = _special(opcodes)
    return {
        "elements": elements,
        "bytes": moved,
        "load": min(filter(None, loads), default=0),
        "store": min(filter(None, stores), default=0),
        "barriers": count["BAR"] + count["s_barrier"],
        "instructions": len(opcodes) / elements,
        "alu": alu / elements,
        "special": special / elements,
    }


def _resources(kernel, listing, vendor):
    """Registers, spills and bytes of shared memory."""
    if vendor == "hip":
        text = kernel.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        scratch = _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
        spills = _number(r"\.vgpr_spill_count:\s+(\d+)", text) + scratch
    else:
        usage = _nvidia_tool("cuobjdump", "-res-usage", kernel.asm["cubin"])
        registers = _number(r"REG:(\d+)", usage)
        opcodes = [opcode for _, opcode, _ in listing if opcode]
        spills = sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)
    return {"registers": registers, "spills": spills, "shared": kernel.metadata.shared}


def _number(pattern, text) -> int:
    return int(re.search(pattern, text)[1])
