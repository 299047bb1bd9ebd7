"""What the compilers make of every kernel, for NVIDIA sm_80, sm_90, sm_100 and AMD gfx942, gfx950, without a device.

    python bench/codegen.py                       # the table below, from the launches that our functions make
    python bench/codegen.py --only logprob

A subprocess (`TRITON_INTERPRET=0`) calls the launching functions with CPU tensors under a driver that only names its
target, so that each kernel is compiled with exactly the types, specialisations and options of a real launch; then it
reads the machine code. Per kernel: registers, spills, shared memory, barriers; of its innermost loops that move most
bytes: widths of loads and stores, and per element instructions, ALU instructions and special functions. A kernel may
have two such loops (rows that begin at a 16-byte boundary, and others): the figures are min / max.

headroom = time at the memory roof / time to issue the instructions, by the model of one H200: 132 multiprocessors at
1.755 GHz, each issuing 128 lanes, of them 64 ALU and 16 special-function lanes, per clock; 4.3 TB/s copied. Below 1 a
kernel is bound by instructions. The model knows nothing of latency.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
BYTES_PER_SECOND, CLOCKS_PER_SECOND = 4.3e12, 132 * 1.755e9
VOCAB = 151936
ROWS = 2

# ------------------------------------------------------------------------------------------------- the launches


def _logprob_inputs(dtype="bfloat16", vocab=VOCAB, softcap=None, mask=True, per_row=False, rows=ROWS):
    import torch

    logits = torch.empty(rows, vocab, dtype=getattr(torch, dtype))
    targets, row = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    common = (row.bool() if mask else None, row if per_row else 0.7, softcap)
    return logits, targets, row, common


def logprob_fwd(split=False, **options):
    from fused_rl.kernels import logprob

    logits, targets, _, common = _logprob_inputs(**options)
    with _device(logprob, multiprocessors=10**6 if split else 0):
        logprob.logprob_fwd(logits, targets, *common)


@contextlib.contextmanager
def _device(module, **facts):
    """Let `module` ask CPU tensors' device for the target's capability, and for these facts."""
    from triton.runtime import driver

    arch = driver.active.get_current_target().arch
    facts["capability"] = divmod(arch, 10) if isinstance(arch, int) else None
    saved = {name: getattr(module, name) for name in facts}
    for name, fact in facts.items():
        setattr(module, name, lambda device, fact=fact: fact)
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(module, name, function)


def logprob_bwd(grads=("logprobs", "entropy", "lse"), inplace=False, **options):
    from fused_rl.kernels import logprob

    logits, targets, row, (mask, inv_t, softcap) = _logprob_inputs(**options)
    upstream = [row if name in grads else None for name in ("logprobs", "entropy", "lse")]
    out = logits if inplace else None
    with _device(logprob):
        logprob.logprob_bwd(*upstream, logits, targets, mask, row, row, row, inv_t, softcap, out=out)


def _kl_inputs(dtype="bfloat16", vocab=VOCAB, mask=True, per_row=False):
    import torch

    x, y = (torch.empty(1, ROWS, vocab, dtype=getattr(torch, dtype)) for _ in range(2))
    row = torch.ones(ROWS)
    return (x, y, row.bool() if mask else None, row if per_row else 0.7), row


def kl_fwd(jensen_shannon=False, **options):
    from fused_rl.kernels import jensen_shannon as js
    from fused_rl.kernels import kl
    from fused_rl.kernels.states import KLState

    rows, row = _kl_inputs(**options)
    if jensen_shannon:
        js.js_fwd(*rows, row.expand(len(KLState._fields), -1).contiguous())
    else:
        kl.kl_fwd(*rows)


def kl_bwd(jensen_shannon=False, wants=(True, False), **options):
    from fused_rl.kernels import kl
    from fused_rl.kernels.states import KLState

    rows, row = _kl_inputs(**options)
    state, sums = (
        row.expand(len(KLState._fields), -1).contiguous(),
        row.expand(3, -1).contiguous() if jensen_shannon else None,
    )
    kl.kl_bwd(row, *rows, row, state, sums, *wants)


def gae():
    import torch

    from fused_rl.kernels import gae as module

    rewards = torch.ones(ROWS, 4096)
    module.gae(rewards, rewards, rewards.bool(), 0.99, 0.95, torch.float32)


# name -> (function that launches, its arguments, bytes that the main loop reads per element); a line per kernel
CASES = {
    "logprob_fwd bf16": (logprob_fwd, {}, 2),
    "logprob_bwd bf16": (logprob_bwd, {}, 2),
    "kl_fwd bf16": (kl_fwd, {}, 4),
    "kl_bwd bf16": (kl_bwd, {}, 4),
    "js_fwd bf16": (kl_fwd, {"jensen_shannon": True}, 4),
    "gae fp32": (gae, {}, 18),  # reward, value and mask of a token and of its successor
}
# every other way in which these kernels are launched: they must compile
VARIANTS = {
    "logprob_fwd fp32, per-row temperature, softcap": (
        logprob_fwd,
        {"dtype": "float32", "per_row": True, "softcap": 30.0, "mask": False},
        4,
    ),
    "logprob_fwd fp16": (logprob_fwd, {"dtype": "float16"}, 2),
    "logprob_fwd bf16, split": (logprob_fwd, {"split": True}, 2),
    "logprob_bwd fp32, logprobs, softcap": (
        logprob_bwd,
        {"dtype": "float32", "grads": ("logprobs",), "softcap": 30.0, "mask": False},
        4,
    ),
    "logprob_bwd fp16, entropy, per-row temperature": (
        logprob_bwd,
        {"dtype": "float16", "grads": ("entropy",), "per_row": True},
        2,
    ),
    "logprob_bwd bf16, lse, in place": (logprob_bwd, {"grads": ("lse",), "inplace": True}, 2),
    "kl_fwd fp32, per-row temperature": (kl_fwd, {"dtype": "float32", "mask": False, "per_row": True}, 8),
    "kl_bwd fp32, per-row temperature": (kl_bwd, {"dtype": "float32", "mask": False, "per_row": True}, 8),
    "kl_fwd fp32, odd vocabulary": (kl_fwd, {"dtype": "float32", "vocab": 50257}, 8),
    "kl_fwd fp16": (kl_fwd, {"dtype": "float16"}, 4),
    "kl_fwd fp16, odd vocabulary": (kl_fwd, {"dtype": "float16", "vocab": 50257}, 4),
    "kl_fwd bf16, odd vocabulary": (kl_fwd, {"vocab": 50257}, 4),
    "kl_bwd fp32, odd vocabulary": (kl_bwd, {"dtype": "float32", "vocab": 50257, "wants": (True, True)}, 8),
    "kl_bwd bf16, Jensen-Shannon": (kl_bwd, {"jensen_shannon": True, "wants": (True, True)}, 4),
}


# ------------------------------------------------------------------------------------------------- machine code

NVIDIA = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
AMD = re.compile(r"^\s+([a-z]+_[a-z0-9_]+)\s*(.*)$")
# what a Hopper multiprocessor issues to its half-rate integer and comparison pipe
ALU = {"FMNMX", "FSEL", "FSETP", "IADD3", "IMNMX", "ISETP", "LEA", "LOP3", "PLOP3", "PRMT", "SEL", "SHF", "VIADD"} | {
    "VIMNMX",
    "VIADDMNMX",
    "F2FP",
    "FCHK",
    "P2R",
    "R2P",
}


def _nvidia_tool(tool, option, cubin):
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def _listing(kernel, vendor):
    """[(label or None, opcode or None, operands)] of a compiled kernel."""
    if vendor == "hip":
        text, pattern, label = kernel.asm["amdgcn"], AMD, re.compile(r"^(\.LBB\w+):")
    else:
        text, pattern, label = _nvidia_tool("nvdisasm", "-c", kernel.asm["cubin"]), NVIDIA, re.compile(r"^(\.L_?\w+):")
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
    spans = [span for span in loops.items() if span[1] - span[0] > 1]
    return [listing[a:b] for a, b in spans if not any(a < c and d < b for c, d in spans)]


def _width(opcode):
    """(bytes that a thread loads from global memory, bytes that it stores)."""
    name = opcode.split(".")[0]
    if name in ("LDG", "STG"):
        width = next((int(w) // 8 for w in ("128", "64") if "." + w in opcode), 2 if "16" in opcode else 4)
        return (width, 0) if name == "LDG" else (0, width)
    found = re.match(r"(?:global|buffer)_(load|store)_(?:dword(?:x(\d))?|([us]?short|[us]?byte))", opcode)
    if not found:
        return 0, 0
    width = 2 if found[3] else 4 * int(found[2] or 1)
    return (width, 0) if found[1] == "load" else (0, width)


def _loop(loop, element_bytes):
    opcodes = [opcode for _, opcode, _ in loop if opcode and not opcode.startswith(("NOP", "s_nop", "s_waitcnt"))]
    loads, stores = zip(*map(_width, opcodes), strict=True)
    elements = sum(loads) / element_bytes
    count = collections.Counter(opcode.split(".")[0] for opcode in opcodes)
    special = count["MUFU"] + sum(n for name, n in count.items() if re.match(r"v_(exp|log|rcp|rsq|sqrt)_", name))
    return {
        "elements": elements,
        "bytes": sum(loads) + sum(stores),
        "load": min((w for w in loads if w), default=0),
        "store": min((w for w in stores if w), default=0),
        "barriers": count["BAR"] + count["s_barrier"],
        "instructions": len(opcodes) / elements,
        "alu": sum(n for name, n in count.items() if name in ALU) / elements,
        "special": special / elements,
    }


def _resources(kernel, listing, vendor):
    if vendor == "hip":
        text = kernel.asm["amdgcn"]
        field = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
        scratch = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])
        registers, spills = field["vgpr_count"], field["vgpr_spill_count"] + scratch
    else:
        registers = int(re.search(r"REG:(\d+)", _nvidia_tool("cuobjdump", "-res-usage", kernel.asm["cubin"]))[1])
        spills = sum(1 for _, op, _ in listing if op and op.startswith(("LDL", "STL")))
    return {"registers": registers, "spills": spills, "shared": kernel.metadata.shared}


def inspect_kernel(kernel, vendor, element_bytes):
    """Resources of a compiled kernel, and the figures of its main loops (empty for a kernel that streams nothing)."""
    listing = _listing(kernel, vendor)
    loops = [loop for loop in _innermost_loops(listing) if any(_width(op)[0] for _, op, _ in loop if op)]
    loops = [_loop(loop, element_bytes) for loop in loops]
    most = max((loop["bytes"] for loop in loops), default=0)
    main = sorted((loop for loop in loops if loop["bytes"] == most), key=lambda loop: loop["instructions"])
    return _resources(kernel, listing, vendor) | {"loops": main, "headroom": [headroom(loop) for loop in main]}


def headroom(loop):
    issue = max(loop["instructions"] / 128, loop["alu"] / 64, loop["special"] / 16) / CLOCKS_PER_SECOND
    return loop["bytes"] / loop["elements"] / BYTES_PER_SECOND / issue


# ------------------------------------------------------------------------------------------------- the subprocess


class _Driver:
    """Answers what a launch asks before it compiles; there is no device behind it."""

    def __init__(self, target):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*TARGETS[target])

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return str(self.target)  # triton keeps one cache of kernels per device

    def get_current_stream(self, device):
        return 0


def launches(run, arguments, target, compile_them=True):
    """[(kernel's name, cache key, compiled kernel or None)] of what `run(**arguments)` launches on a target."""
    import torch
    from triton import knobs
    from triton.runtime import driver, jit

    seen, launch, hip = [], jit.JITFunction.run, torch.version.hip

    def warm(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if compile_them:
            seen.append((self.__name__, None, kernel))

    def skip(*, key, fn, **_):
        seen.append((fn.name, key, None))
        return True

    driver.set_active(_Driver(target))
    torch.version.hip = "0" if TARGETS[target][0] == "hip" else None
    jit.JITFunction.run = warm
    knobs.runtime.jit_cache_hook = None if compile_them else skip
    try:
        run(**arguments)
    finally:
        jit.JITFunction.run, torch.version.hip, knobs.runtime.jit_cache_hook = launch, hip, None
    return seen


def _inspect_all(cases, targets):
    for name, (run, arguments, element_bytes) in cases.items():
        for target in targets:
            for kernel_name, _, kernel in launches(run, arguments, target):
                figures = inspect_kernel(kernel, TARGETS[target][0], element_bytes)
                print(json.dumps({"case": name, "kernel": kernel_name, "target": target} | figures), flush=True)


def _count_variants():
    """Distinct compiled kernels over 20 lengths, 5 temperatures, 3 vocabularies and their strides, per kernel."""
    seen = collections.Counter()
    keys = set()
    for rows in range(1, 40, 2):
        for temperature in (0.3, 0.7, 1.0, 1.3, 2):
            for vocab in (32000, 50257, 1):
                logits, targets, row, (mask, _, _) = _logprob_inputs(rows=rows, vocab=vocab)
                from fused_rl.kernels import logprob

                def run(x=logits, t=targets, g=row, m=mask, inv_t=1 / temperature):
                    logprob.logprob_fwd(x, t, m, inv_t, None)  # noqa: B023
                    logprob.logprob_bwd(g, g, None, x, t, m, g, g, g, inv_t, None)  # noqa: B023

                keys.update(launches(run, {}, "sm_90", compile_them=False))
    for name, *_ in keys:
        seen[name] += 1
    print(json.dumps({"variants": seen}))


def subprocess_lines(*arguments):
    """What this file, run with these arguments and triton's compiler in place of its interpreter, prints as JSON."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(Path(__file__).resolve()), "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _between(loops, name, form="{:.2f}"):
    return " / ".join(dict.fromkeys(form.format(loop[name]) for loop in (loops[0], loops[-1])))


def table(rows):
    head = ["case", "kernel", "target", "regs", "spills", "smem", "load B", "store B", "barriers", "instr/el", "ALU/el"]
    lines = [[*head, "special/el", "headroom"]]
    for row in rows:
        line = [row["case"], row["kernel"], row["target"], row["registers"], row["spills"], row["shared"]]
        if loops := row["loops"]:
            line += [_between(loops, name, "{}") for name in ("load", "store", "barriers")]
            line += [_between(loops, name) for name in ("instructions", "alu", "special")]
            line.append(" / ".join(f"{h:.2f}" for h in row["headroom"]) if "sm_90" in row["target"] else "")
        lines.append([str(cell) for cell in line] + [""] * (13 - len(line)))
    widths = [max(len(line[i]) for line in lines) for i in range(13)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated, of " + ", ".join(TARGETS))
    parser.add_argument("--variants", action="store_true", help="compile every other way in which kernels are launched")
    parser.add_argument("--count", action="store_true", help="count compiled variants over lengths and temperatures")
    parser.add_argument("--json", action="store_true", help="print JSON, in this process")
    args = parser.parse_args()
    if not args.json:
        return print(table(subprocess_lines(*sys.argv[1:])))
    if args.count:
        return _count_variants()
    cases = {name: case for name, case in (VARIANTS if args.variants else CASES).items() if args.only in name}
    return _inspect_all(cases, args.targets.split(","))


if __name__ == "__main__":
    main()
