"""How time and memory grow with the rows N, the vocabulary V and the length T: slopes on a log-log plot.

    python bench/growth.py --device cpu

A slope of 1 is linear. From some thousand rows on, a program holds its logits a chunk at a time, or never (the linear
op); so N grows to a million by chunks of one buffer, and what may grow is what is kept per row.
"""

import math
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

import fused_rl
from bench import measure

CHUNK = 4096  # rows of logits that exist at once while N grows
BUDGET = 40  # seconds, all sizes together
SECONDS = 0.5  # of repeats per size at most, three at least where one takes less


def rows_by_chunks(n, device, vocab=512):
    """logprob and entropy, forward and backward, of n rows that pass through one buffer of logits."""
    logits = torch.randn(min(n, CHUNK), vocab, device=device).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(vocab, (len(logits),), device=device)

    def run():
        kept = []
        for start in range(0, n, CHUNK):
            end = min(start + CHUNK, n) - start
            out = fused_rl.token_logprobs(logits[:end], targets[:end])
            torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), logits)
            kept.append(out.logprobs.detach())
        return torch.cat(kept)

    return run


def vocabulary(v, device, n=64):
    """logprob and entropy, forward and backward, of 64 rows over v tokens."""
    logits = torch.randn(n, v, device=device).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(v, (n,), device=device)

    def run():
        out = fused_rl.token_logprobs(logits, targets)
        return torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), logits)

    return run


def linear_rows(n, device, hidden=32, vocab=512):
    """The same from n hidden states: logits exist a tile at a time."""
    states = torch.randn(n, hidden, device=device).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, hidden, device=device).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(vocab, (n,), device=device)

    def run():
        out = fused_rl.linear_token_logprobs(states, weight, targets, workspace_mb=16)
        return torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), (states, weight))

    return run


def length(t, device, b=16):
    """gae of 16 sequences of t steps."""
    rewards, values = torch.randn(b, t, device=device), torch.randn(b, t, device=device)
    mask = torch.ones(b, t, dtype=torch.bool, device=device)
    return lambda: fused_rl.gae(rewards, values, mask, gamma=0.99, gae_lambda=0.95)


SERIES = {
    "token_logprobs over N, by chunks": ("N", rows_by_chunks, [1 << k for k in (10, 12, 14, 16, 18, 20)]),
    "token_logprobs over V": ("V", vocabulary, [1 << k for k in (10, 12, 14, 16, 18, 20)]),
    "linear_token_logprobs over N": ("N", linear_rows, [1 << k for k in (10, 12, 14, 16, 18, 20)]),
    "gae over T": ("T", length, [1 << k for k in (10, 12, 14, 16, 17)]),
}


def slope(xs, ys):
    """Least-squares slope of log y over log x."""
    xs, ys = [math.log(x) for x in xs], [math.log(max(y, 1e-9)) for y in ys]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def measured(run, device, seconds):
    """Peak extra bytes, and samples in ms; the run that measures memory counts where it takes long."""
    samples = []

    def timed():
        started = time.perf_counter()
        run()
        measure.synchronize(device)
        samples.append(1e3 * (time.perf_counter() - started))

    memory = measure.peak_extra_bytes(timed, device)
    if samples[0] > 1e3 * seconds:
        return memory, samples
    samples.clear()
    while len(samples) < 3 or sum(samples) < 1e3 * seconds:
        timed()
    return memory, samples


def main(args):
    rows, not_run = [], {}
    print(measure.heading(args.device))
    budget = measure.Budget(args.budget or BUDGET, sum(len(sizes) for _, _, sizes in SERIES.values()))
    for name, (axis, make, sizes) in SERIES.items():
        samples, last = [0.0], sizes[0]
        for size in sizes:
            seconds, left = min(SECONDS, budget.share() / 2), budget.end - time.perf_counter()
            if 1e-3 * samples[0] * size / last > left:
                not_run[f"{name}, {axis} = {size}"] = "left out for time; --budget gives more"
                continue
            torch.manual_seed(0)
            run = make(size, args.device)
            if samples[0] < 1e3 * seconds:  # compiles, beyond a size that pays for it; what takes long has done so
                run()
            memory, samples = measured(run, args.device, seconds)
            last = size
            rows.append({"op": name, "axis": axis, "size": size, "ms": measure.median(samples),
                         "samples_ms": samples, "extra_bytes": memory})  # fmt: skip
        own = [r for r in rows if r["op"] == name]
        # The smallest sizes measure the call, not the growth: the slope is that of the upper half.
        upper = own[max(0, len(own) // 2 - 1) :]
        sizes_up = [r["size"] for r in upper]
        if len(upper) < 2:
            continue
        print(f"\n{name}: time grows with {axis}^{slope(sizes_up, [r['ms'] for r in upper]):.2f}, "
              f"extra memory with {axis}^{slope(sizes_up, [r['extra_bytes'] or 1 for r in upper]):.2f}")  # fmt: skip
        cells = [[r["size"], r["ms"], len(r["samples_ms"]), (r["extra_bytes"] or 0) / 1e6] for r in own]
        print(measure.table([axis, "ms", "runs", "extra MB"], cells))
        measure.save(args, rows, not_run=not_run)
    for what, reason in not_run.items():
        print(f"  not run: {what}: {reason}")


if __name__ == "__main__":
    sys.exit(main(measure.arguments(__doc__, "growth")))
