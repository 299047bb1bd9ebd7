"""Time, memory and error of a host's functions, patched beside unpatched: the tables of docs/integrations.md.

    make test-integrations      makes the environments
    OMP_NUM_THREADS=1 .venv-verl/bin/python bench/repro/integrations_hosts.py verl
    OMP_NUM_THREADS=1 .venv-openrlhf/bin/python bench/repro/integrations_hosts.py openrlhf

Time is CPU seconds of the forward and backward pass, the least of several runs that alternate; memory is the resident
set at its peak beyond the inputs, gradients included; error is the largest deviation from fp64 of the same logits.
"""

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[0] = str(root)
    sys.path.append(str(root / "tests" / "hosts" / "stubs"))  # what needs a GPU to build or to run

import importlib

import torch

from bench import machine
from tests.hosts import cases

ROUNDS = 3
ROWS, HIDDEN, VOCAB = 512, 512, 32000


def verl_cases():
    """{name: (function of the inputs, inputs)}; looked up at each call, so that the patch is seen."""
    import verl.utils.torch_functional as functional
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    def from_logits(logits, labels):
        entropy = functional.entropy_from_logits(logits)
        return functional.logprobs_from_logits(logits, labels, inplace_backward=False).float() + entropy.float()

    def from_logits_chunked(logits, labels):
        entropy = functional.entropy_from_logits_with_chunking(logits)
        return functional.logprobs_from_logits(logits, labels, inplace_backward=False).float() + entropy.float()

    def from_hidden(hidden, weight, labels):
        logprobs, entropy = FusedLinearForPPO().forward(hidden, weight, labels)
        return logprobs + entropy.float()

    return {
        "log-probability and entropy, fp32": (from_logits, logits_of(torch.float32)),
        "log-probability and entropy, bf16": (from_logits, logits_of(torch.bfloat16)),
        "the same, entropy in chunks, bf16": (from_logits_chunked, logits_of(torch.bfloat16)),
        "`FusedLinearForPPO`, fp32": (from_hidden, head_of(torch.float32)),
        "`FusedLinearForPPO`, bf16": (from_hidden, head_of(torch.bfloat16)),
    }


def openrlhf_cases():
    """As `verl_cases`. OpenRLHF's actor casts its logits to fp32 first, which is in both."""
    from openrlhf.models import utils

    def from_logits(logits, labels):
        return utils.compute_entropy(logits) + utils.log_probs_from_logits(logits, labels)

    def as_the_actor(logits, labels):
        return from_logits(logits.to(torch.float32), labels)

    return {
        "log-probability and entropy, fp32": (from_logits, logits_of(torch.float32)),
        "the same, bf16 logits cast as the actor casts": (as_the_actor, logits_of(torch.bfloat16)),
    }


def logits_of(dtype):
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB).mul_(2).to(dtype).requires_grad_()
    return logits, torch.randint(0, VOCAB, (ROWS,))


def head_of(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).mul_(0.1).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,))


def run(function, inputs):
    for tensor in inputs:
        tensor.grad = None
    function(*inputs).sum().backward()


def measure(integration, function, inputs):
    """(CPU seconds, peak bytes) of the host and of ours."""
    seconds, peaks = ([], []), [0, 0]
    for turn in range(2 * ROUNDS + 2):  # the first of each compiles
        ours = turn % 2
        if ours:
            integration.patch()
        begin = time.process_time()
        run(function, inputs)
        seconds[ours].append(time.process_time() - begin)
        for tensor in inputs:
            tensor.grad = None
        if turn >= 2 * ROUNDS:
            peaks[ours] = machine.peak_extra_bytes(lambda: run(function, inputs), "cpu")
        integration.unpatch()
    return [(min(values[1:]), peak) for values, peak in zip(seconds, peaks, strict=True)]


def error_rows(host, integration):
    """Error of log-probability and entropy on the hard cases, the host's and ours."""
    if host == "verl":
        import verl.utils.torch_functional as module

        names = "logprobs_from_logits", "entropy_from_logits"
    else:
        from openrlhf.models import utils as module

        names = "log_probs_from_logits", "compute_entropy"
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases.HARD_CASES:
            logits, labels = cases.hard_logits(case, dtype)
            row = [f"{case}, {str(dtype).removeprefix('torch.')}"]
            for name, what, arguments in zip(names, ("logprobs", "entropy"), ((labels,), ()), strict=True):
                exact, _ = cases.truth(what, logits, labels)
                row.append(f"{cases.error(getattr(module, name)(logits, *arguments), exact):.1e}")
                with integration.patch():
                    row.append(f"{cases.error(getattr(module, name)(logits, *arguments), exact):.1e}")
            yield row


def print_table(header, rows):
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(row) + " |")
    print()


def main(host: str) -> None:
    integration = importlib.import_module(f"fused_rl.integrations.{host}")
    print(
        f"{ROWS} tokens, {HIDDEN} hidden, {VOCAB} words, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    rows = []
    for name, (function, inputs) in (verl_cases if host == "verl" else openrlhf_cases)().items():
        (theirs, their_peak), (ours, our_peak) = measure(integration, function, inputs)
        times = f"{theirs:.2f} s", f"{ours:.2f} s", f"{theirs / ours:.1f}"
        rows.append([name, *times, f"{their_peak / 2**20:.0f} MiB", f"{our_peak / 2**20:.0f} MiB"])
    print_table(["", "time, host", "ours", "ratio", "peak memory, host", "ours"], rows)
    header = ["largest error", "log-probability, host", "ours", "entropy, host", "ours"]
    print_table(header, error_rows(host, integration))


if __name__ == "__main__":
    main(sys.argv[1])
