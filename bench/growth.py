"""How time and memory grow with the rows N, the vocabulary V and the length T: slopes on a log-log plot.

    python -m bench growth --device cpu

A slope of 1 is linear. From some thousand rows on, a program holds its logits a chunk at a time, or never (the linear
op); so N grows to a million by chunks of one buffer, and what may grow is what is kept per row.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import fused_rl
from bench import machine, options, results, timing

CHUNK = 4096  # rows of logits that exist at once while N grows
BUDGET = 40  # seconds, all sizes together
SECONDS = 0.5  # of repeats per size at most, three at least where one takes less


def bf16(*shape, device):
    """Standard normal numbers that want a gradient."""
    return torch.randn(*shape, device=device).to(torch.bfloat16).requires_grad_()


def rows_by_chunks(n, device, vocab=512):
    """logprob and entropy, forward and backward, of n rows that pass through one buffer of logits."""
    logits = bf16(min(n, CHUNK), vocab, device=device)
    targets = torch.randint(vocab, (len(logits),), device=device)

    def run():
        kept = []
        for start in range(0, n, CHUNK):
            rows = min(n - start, CHUNK)
            out = fused_rl.token_logprobs(logits[:rows], targets[:rows])
            loss = out.logprobs.sum() + out.entropy.sum()
            torch.autograd.grad(loss, logits)
            kept.append(out.logprobs.detach())
        return torch.cat(kept)

    return run


def vocabulary(v, device, n=64):
    """logprob and entropy, forward and backward, of 64 rows over v tokens."""
    logits = bf16(n, v, device=device)
    targets = torch.randint(v, (n,), device=device)

    def run():
        out = fused_rl.token_logprobs(logits, targets)
        loss = out.logprobs.sum() + out.entropy.sum()
        return torch.autograd.grad(loss, logits)

    return run


def linear_rows(n, device, hidden=32, vocab=512):
    """The same from n hidden states: logits exist a tile at a time."""
    states = bf16(n, hidden, device=device)
    weight = bf16(vocab, hidden, device=device)
    targets = torch.randint(vocab, (n,), device=device)

    def run():
        out = fused_rl.linear_token_logprobs(states, weight, targets, workspace_mb=16)
        loss = out.logprobs.sum() + out.entropy.sum()
        return torch.autograd.grad(loss, (states, weight))

    return run


def length(t, device, b=16):
    """gae of 16 sequences of t steps."""
    rewards = torch.randn(b, t, device=device)
    values = torch.randn(b, t, device=device)
    mask = torch.ones(b, t, dtype=torch.bool, device=device)
    return lambda: fused_rl.gae(rewards, values, mask, gamma=0.99, gae_lambda=0.95)


class Series(NamedTuple):
    axis: str
    make: Callable  # (size, device) -> run
    exponents: tuple[int, ...]  # sizes are powers of 2

    def sizes(self):
        return [1 << exponent for exponent in self.exponents]


SERIES = {
    "token_logprobs over N, by chunks": Series("N", rows_by_chunks, (10, 12, 14, 16, 18, 20)),
    "token_logprobs over V": Series("V", vocabulary, (10, 12, 14, 16, 18, 20)),
    "linear_token_logprobs over N": Series("N", linear_rows, (10, 12, 14, 16, 18, 20)),
    "gae over T": Series("T", length, (10, 12, 14, 16, 17)),
}


def slope(xs, ys) -> float:
    """Least-squares slope of log y over log x."""
    xs = [math.log(x) for x in xs]
    ys = [math.log(max(y, 1e-9)) for y in ys]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance, variance = 0.0, 0.0
    for x, y in zip(xs, ys, strict=True):
        covariance += (x - mean_x) * (y - mean_y)
        variance += (x - mean_x) ** 2
    return covariance / variance


def slopes(rows: list[dict]) -> tuple[float, float] | None:
    """Of time and of memory, over the upper half of the sizes: the smallest measure the call, not the growth."""
    upper = rows[max(0, len(rows) // 2 - 1) :]
    if len(upper) < 2:
        return None
    sizes = [row["size"] for row in upper]
    of_time = slope(sizes, [row["ms"] for row in upper])
    return of_time, slope(sizes, [row["extra_bytes"] or 1 for row in upper])


def measured(run, device, seconds):
    """Peak extra bytes, and samples in ms; the run that measures memory counts where it takes long."""
    samples = []

    def timed():
        started = time.perf_counter()
        run()
        machine.synchronize(device)
        samples.append(1e3 * (time.perf_counter() - started))

    memory = machine.peak_extra_bytes(timed, device)
    if samples[0] > 1e3 * seconds:
        return memory, samples
    samples.clear()
    while len(samples) < 3 or sum(samples) < 1e3 * seconds:
        timed()
    return memory, samples


def grown(name: str, series: Series, device: str, budget: timing.Budget) -> list[dict]:
    """The rows of one series, size by size, as long as there is time."""
    rows, samples, last = [], [0.0], series.sizes()[0]
    for size in series.sizes():
        seconds = min(SECONDS, budget.share() / 2)
        expected = 1e-3 * samples[0] * size / last
        if expected > budget.left():
            where = f"{series.axis} = {size}"
            rows.append(results.not_run(name, results.NO_TIME, "left out for time; --budget gives more", name, where))
            continue
        torch.manual_seed(0)
        run = series.make(size, device)
        if samples[0] < 1e3 * seconds:  # compiles, beyond a size that pays for it; what takes long has done so
            run()
        memory, samples = measured(run, device, seconds)
        last = size
        row = {"op": name, "axis": series.axis, "size": size}
        row["status"] = results.OK
        rows.append(row | {"ms": timing.median(samples), "samples_ms": samples, "extra_bytes": memory})
    return rows


def show(name: str, axis: str, rows: list[dict]):
    """Print one series, unless it has no two sizes."""
    found = slopes(rows)
    if found is None:
        return
    print(f"\n{name}: time grows with {axis}^{found[0]:.2f}, extra memory with {axis}^{found[1]:.2f}")
    cells = []
    for row in rows:
        memory = row["extra_bytes"] or 0
        cells.append([row["size"], row["ms"], len(row["samples_ms"]), memory / 1e6])
    print(results.table([axis, "ms", "runs", "extra MB"], cells))


def command(name: str, words: list[str]) -> int:
    """Measure and print every series."""
    args = options.arguments(__doc__, name, words)
    print(machine.heading(args.device))
    sizes = [len(series.exponents) for series in SERIES.values()]
    budget = timing.Budget(args.budget or BUDGET, sum(sizes))
    rows = []
    for name, series in SERIES.items():
        found = grown(name, series, args.device, budget)
        show(name, series.axis, results.measured(found))
        rows += found
        results.save(args, rows)
    for row in results.missing(rows):
        print(f"  not run: {results.name_of(row)}: {row['reason']}")
    return 0
