"""What the compilers make of every kernel, for NVIDIA sm_80, 90, 100, 120 and AMD gfx942, gfx950, without a device.

    python -m tests.tools.codegen                       # the table below, from the launches that our functions make
    python -m tests.tools.codegen --only logprob

A subprocess (`TRITON_INTERPRET=0`) calls the launching functions with CPU tensors under a driver that only names its
target, so that each kernel is compiled with exactly the types, specialisations and options of a real launch; then it
reads the machine code. Per kernel: registers, spills, shared memory, barriers; of its innermost loops that move most
bytes: widths of loads and stores, and per element instructions, ALU instructions and special functions. A kernel may
have two such loops (rows that begin at a 16-byte boundary, and others): the figures are min / max; `machine_code.py`
reads them, and says what headroom is.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys

from bench import machine, results
from tests.tools import machine_code

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
VOCAB = 151936
ROWS = 2

# ------------------------------------------------------------------------------------------------- the launches


def _logprob_inputs(
    dtype="bfloat16", vocab=VOCAB, softcap=None, mask=True, per_row=False, rows=ROWS
):
    import torch

    logits = torch.empty(rows, vocab, dtype=getattr(torch, dtype))
    targets = torch.zeros(rows, dtype=torch.int64)
    row = torch.ones(rows)
    mask = row.bool() if mask else None
    common = (mask, row if per_row else 0.7, softcap)
    return logits, targets, row, common


def logprob_fwd(split=False, **options):
    from fused_rl.kernels import launch, logprob

    logits, targets, _, common = _logprob_inputs(**options)
    with _device(launch, multiprocessors=10**6 if split else 0):
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
    from fused_rl.kernels import launch, logprob

    logits, targets, row, (mask, inv_t, softcap) = _logprob_inputs(**options)
    upstream = [row if name in grads else None for name in ("logprobs", "entropy", "lse")]
    out = logits if inplace else None
    with _device(launch):
        logprob.logprob_bwd(
            *upstream, logits, targets, mask, row, row, row, inv_t, softcap, out=out
        )


def _several(targets, count):
    return targets[:, None].repeat(1, count)


def targets_fwd(count=64, **options):
    from fused_rl.kernels import launch
    from fused_rl.kernels import targets as module

    logits, targets, _, common = _logprob_inputs(**options)
    with _device(launch):
        module.targets_fwd(logits, _several(targets, count), *common)


def targets_bwd(count=64, grads=("entropy", "lse"), **options):
    from fused_rl.kernels import launch
    from fused_rl.kernels import targets as module

    logits, targets, row, (mask, inv_t, softcap) = _logprob_inputs(**options)
    upstream = [row if name in grads else None for name in ("entropy", "lse")]
    dlogprobs = _several(row, count)
    targets = _several(targets, count)
    with _device(launch):
        module.targets_bwd(
            dlogprobs, *upstream, logits, targets, mask, row, row, row, inv_t, softcap
        )


def _kl_inputs(dtype="bfloat16", vocab=VOCAB, mask=True, per_row=False, rows=ROWS, inv_t=0.7):
    import torch

    shape = (1, rows, vocab)
    x = torch.empty(shape, dtype=getattr(torch, dtype))
    y = torch.empty_like(x)
    row = torch.ones(rows)
    mask = row.bool() if mask else None
    return (x, y, mask, row if per_row else inv_t), row


def kl_fwd(jensen_shannon=False, split=False, softcap=None, shares=None, **options):
    from fused_rl.kernels import jensen_shannon as js
    from fused_rl.kernels import kl, launch
    from fused_rl.kernels.states import KLState

    rows, row = _kl_inputs(**options)
    if jensen_shannon:
        js.js_fwd(*rows, row.expand(len(KLState._fields), -1).contiguous(), softcap, shares)
    else:
        count = 10**6 if split else 0
        with _device(launch, multiprocessors=count):
            kl.kl_fwd(*rows, softcap)


def kl_bwd(jensen_shannon=False, wants=(True, False), softcap=None, shares=None, **options):
    from fused_rl.kernels import kl
    from fused_rl.kernels.states import KLState

    rows, row = _kl_inputs(**options)
    state = row.expand(len(KLState._fields), -1).contiguous()
    sums = row.expand(3, -1).contiguous() if jensen_shannon else None
    kl.kl_bwd(row, *rows, row, state, sums, *wants, softcap, shares)


def gae():
    import torch

    from fused_rl.kernels import gae as module

    rewards = torch.ones(ROWS, 4096)
    module.gae(rewards, rewards, rewards.bool(), 0.99, 0.95, torch.float32)


def sample_token(dtype="bfloat16", vocab=VOCAB):
    import torch

    from fused_rl.kernels import sampling

    logits = torch.empty(ROWS, vocab, dtype=getattr(torch, dtype))
    sampling.sample_token(logits, torch.zeros(2, dtype=torch.int64), 0.7)


def _kept_inputs(dtype="bfloat16", softcap=None, per_row=False, first=None, mask=True):
    import torch

    from fused_rl.kernels.states import RowSupport

    logits, targets, row, _ = _logprob_inputs(dtype)
    ranges = torch.tensor([0, 8]), torch.tensor([8, 16])
    kept, x = RowSupport(torch.arange(16), *ranges), torch.zeros(16)
    mask = row.bool() if mask else None
    return x, kept, targets, mask, row, (row if per_row else 0.7, softcap), logits, first


def kept_fwd(given=False, **options):
    from fused_rl.kernels import support
    from fused_rl.kernels.states import RowStatistics

    x, kept, targets, mask, row, common, logits, first = _kept_inputs(**options)
    logits = None if given else logits
    into = RowStatistics(*(row.clone() for _ in RowStatistics._fields))
    support.kept_fwd(x, kept, targets, mask, *common, logits=logits, first=first, into=into)


def kept_bwd(grads=("logprobs", "entropy", "lse"), given=False, **options):
    from fused_rl.kernels import support

    x, kept, targets, mask, row, common, logits, first = _kept_inputs(**options)
    upstream = [row if name in grads else None for name in ("logprobs", "entropy", "lse")]
    out = x.clone() if given else logits
    support.kept_bwd(
        *upstream, x, kept, targets, mask, row, row, row, *common, out=out, first=first
    )


def kept_linear(dtype="bfloat16", bias=True, add=False):
    """The three kernels between hidden states, the head and the kept logits."""
    import torch

    from fused_rl.kernels import support

    x, kept, *_ = _kept_inputs(dtype)
    hidden, weight = (torch.empty(n, 4096, dtype=getattr(torch, dtype)) for n in (ROWS, 64))
    head = weight[:, 0].clone() if bias else None
    support.kept_dot(x, hidden, weight, head, kept)
    support.kept_hidden(x, weight, kept)
    rows, ids, ends = torch.zeros(16, dtype=torch.int64), torch.arange(2), torch.tensor([8, 16])
    there = (weight.clone(), None if head is None else head.clone()) if add else (None, None)
    support.kept_head(x, rows, ids, ends, hidden, 64, *there, (True, bias))


# name -> (function that launches, its arguments, bytes that the main loop reads per element); a line per kernel
CASES = {
    "logprob_fwd bf16": (logprob_fwd, {}, 2),
    "logprob_bwd bf16": (logprob_bwd, {}, 2),
    "kl_fwd bf16": (kl_fwd, {}, 4),
    "kl_bwd bf16": (kl_bwd, {}, 4),
    "js_fwd bf16": (kl_fwd, {"jensen_shannon": True}, 4),
    "kept_fwd bf16": (kept_fwd, {}, 2),
    "kept_bwd bf16": (kept_bwd, {}, 4),
    "kept_linear bf16": (kept_linear, {}, 2),
    "targets_fwd bf16": (targets_fwd, {}, 2),  # the row kernel, and K elements of each row
    "targets_bwd bf16": (targets_bwd, {}, 2),
    "sample_token bf16": (sample_token, {}, 2),
    "gae fp32": (gae, {}, 18),  # reward, value and mask of a token and of its successor
}
# Every other way in which these kernels are launched: they must compile. name -> (function, its arguments)
FP32, FP16 = {"dtype": "float32"}, {"dtype": "float16"}
ODD = {"vocab": 50257}
PER_ROW = {"dtype": "float32", "per_row": True, "mask": False}
CAPPED = {"dtype": "float32", "softcap": 30.0, "mask": False}
JENSEN_SHANNON = {"jensen_shannon": True}
MIXTURE = JENSEN_SHANNON | {"shares": (0.9, 0.1)}
VARIANTS = {
    "logprob_fwd fp32, per-row temperature, softcap": (logprob_fwd, PER_ROW | CAPPED),
    "logprob_fwd fp16": (logprob_fwd, FP16),
    "logprob_fwd bf16, split": (logprob_fwd, {"split": True}),
    "logprob_bwd fp32, logprobs, softcap": (logprob_bwd, CAPPED | {"grads": ("logprobs",)}),
    "logprob_bwd fp16, entropy, per-row temperature": (
        logprob_bwd,
        FP16 | {"grads": ("entropy",), "per_row": True},
    ),
    "logprob_bwd bf16, lse, in place": (logprob_bwd, {"grads": ("lse",), "inplace": True}),
    "targets_fwd fp32, per-row temperature, softcap": (targets_fwd, PER_ROW | CAPPED),
    "targets_bwd fp32, logprobs, per-row temperature, softcap": (
        targets_bwd,
        PER_ROW | CAPPED | {"grads": ()},
    ),
    "targets_bwd fp16, entropy": (targets_bwd, FP16 | {"grads": ("entropy",)}),
    "kl_fwd fp32, per-row temperature": (kl_fwd, PER_ROW),
    "kl_bwd fp32, per-row temperature": (kl_bwd, PER_ROW),
    "kl_fwd fp32, odd vocabulary": (kl_fwd, FP32 | ODD),
    "kl_fwd fp16": (kl_fwd, FP16),
    "kl_fwd fp16, odd vocabulary": (kl_fwd, FP16 | ODD),
    "kl_fwd bf16, odd vocabulary": (kl_fwd, ODD),
    "kl_fwd bf16, split": (kl_fwd, {"split": True}),
    "kl_fwd bf16, softcap": (kl_fwd, {"softcap": 30.0}),
    "kl_fwd fp32, odd vocabulary, softcap": (kl_fwd, FP32 | ODD | {"softcap": 30.0}),
    "kl_bwd bf16, softcap": (kl_bwd, {"softcap": 30.0, "wants": (True, True)}),
    "js_fwd bf16, softcap": (kl_fwd, JENSEN_SHANNON | {"softcap": 30.0}),
    "js_fwd fp32, odd vocabulary": (kl_fwd, JENSEN_SHANNON | FP32 | ODD),
    "kl_bwd fp32, odd vocabulary": (kl_bwd, FP32 | ODD | {"wants": (True, True)}),
    "kept_fwd fp32, per-row temperature, softcap": (kept_fwd, PER_ROW | CAPPED),
    "kept_fwd fp16, one rank's columns": (kept_fwd, FP16 | {"first": 64}),
    "kept_fwd of given logits": (kept_fwd, {"given": True, "mask": False}),
    "kept_bwd fp32, logprobs, softcap": (
        kept_bwd,
        PER_ROW | CAPPED | {"grads": ("logprobs",), "mask": True},
    ),
    "kept_bwd fp16, entropy, one rank's columns": (
        kept_bwd,
        FP16 | {"grads": ("entropy",), "first": 64, "mask": False},
    ),
    "kept_bwd of given logits": (kept_bwd, {"given": True, "mask": False}),
    "kept_linear fp32, no bias": (kept_linear, FP32 | {"bias": False}),
    "kept_linear fp16, added to a gradient": (kept_linear, FP16 | {"add": True}),
    "sample_token fp32": (sample_token, FP32),
    "sample_token fp16, odd vocabulary": (sample_token, FP16 | ODD),
    "kl_bwd bf16, Jensen-Shannon": (kl_bwd, JENSEN_SHANNON | {"wants": (True, True)}),
    "js_fwd bf16, any mixture": (kl_fwd, MIXTURE),
    "kl_bwd bf16, any mixture": (kl_bwd, MIXTURE | {"wants": (True, True)}),
}

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


def launches(run, arguments, target):
    """[(kernel's name, compiled kernel)] of what `run(**arguments)` launches on a target."""
    import torch
    from triton.runtime import driver, jit

    seen, launch, hip = [], jit.JITFunction.run, torch.version.hip

    def warm(self, *args, grid, warmup, **kwargs):
        seen.append((self.__name__, launch(self, *args, grid=grid, warmup=True, **kwargs)))

    driver.set_active(_Driver(target))
    torch.version.hip = "0" if TARGETS[target][0] == "hip" else None
    jit.JITFunction.run = warm
    try:
        run(**arguments)
    finally:
        jit.JITFunction.run, torch.version.hip = launch, hip
    return seen


def _inspect_all(cases, targets):
    """Print the figures of every kernel and target as JSON."""
    import triton

    for name, (run, arguments, *element_bytes) in cases.items():
        for target in targets:
            vendor = TARGETS[target][0]
            for kernel_name, kernel in launches(run, arguments, target):
                figures = machine_code.inspect_kernel(kernel, vendor, *element_bytes)
                row = {"case": name, "kernel": kernel_name, "target": target, "status": "ok"}
                row["triton"] = triton.__version__
                print(json.dumps(row | figures), flush=True)


def subprocess_lines(*arguments):
    """What this file, run with these arguments and triton's compiler in place of its interpreter, prints as JSON."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    words = [sys.executable, "-m", "tests.tools.codegen", "--json", *arguments]
    done = subprocess.run(words, cwd=machine.ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


COLUMNS = [
    "case",
    "kernel",
    "target",
    "triton",
    "registers",
    "spills",
    "shared bytes",
    "load bytes",
    "store bytes",
]
COLUMNS += ["barriers", "instructions", "ALU", "special", "headroom"]


def table(rows: list[dict]) -> str:
    """A line per kernel and target; a pair is of the first and the last loop."""
    lines = []
    for row in rows:
        found = [row["case"], row["kernel"], row["target"], row["triton"]]
        found += [str(row[name]) for name in ("registers", "spills", "shared")]
        ends = row["loops"][:1] + row["loops"][-1:]
        for name in ("load", "store", "barriers", "instructions", "alu", "special"):
            texts = [f"{loop[name]:.3g}" for loop in ends]
            found.append(" / ".join(dict.fromkeys(texts)))
        headroom = row["headroom"] if row["target"] == "sm_90" else []
        lines.append([*found, " / ".join(f"{value:.2f}" for value in headroom)])
    return results.table(COLUMNS, lines)


def command(name: str, words: list[str]) -> int:
    """The table of every kernel, as a group of the suite: the rows are kept too."""
    from bench import options

    args = options.arguments(__doc__, name, words)
    args.device = "cpu"
    rows = subprocess_lines()
    print(table(rows))
    results.save(args, rows)
    return 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--targets", default=",".join(TARGETS), help="comma-separated, of " + ", ".join(TARGETS)
    )
    parser.add_argument(
        "--variants",
        action="store_true",
        help="compile every other way in which kernels are launched",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in this process")
    args = parser.parse_args()
    if not args.json:
        return print(table(subprocess_lines(*sys.argv[1:])))
    listed = VARIANTS if args.variants else CASES
    cases = {name: case for name, case in listed.items() if args.only in name}
    return _inspect_all(cases, args.targets.split(","))


if __name__ == "__main__":
    main()
