"""TRL's primitives, and those that `fused_rl.integrations.trl` puts in their place: lost digits, memory, time.

    python bench/repro/integrations_trl.py             prints both tables and draws docs/integrations-trl.png
    python bench/repro/integrations_trl.py --no-cost   leaves out memory and time, which take minutes

The logits of the hard cases are exact: a head of width 1, hidden states of 1. Truth is fp64 of the same logits.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench import machine
from bench.results import table

VOCABULARY = 32000
GAPS = (10, 15, 20, 24, 26, 27, 28, 30, 35)
OFFSETS = (0, 10, 30, 100, 300)
DISTANCES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
BASES = tuple(range(100, 230, 4))  # of the other tokens' logits; softmax does not see it
TEMPERATURE = 0.9
OUTPUTS = ("log_probs", "entropy", "is_top1")
SHAPE = (512, 1024, 32000)  # tokens, width, vocabulary: of a CPU's patience


class Side(NamedTuple):
    """The primitives of one of the two."""

    name: str
    head: Callable
    divergence: Callable
    logprobs: Callable
    entropy: Callable


def sides() -> tuple[Side, Side]:
    """TRL's own, and ours."""
    from trl.kernels import chunked_divergence, chunked_logprob
    from trl.trainer import utils

    from fused_rl.integrations import trl as ours

    def side(name, heads, divergences, functions):
        primitives = heads.ChunkedLogProbFunction.apply, divergences.ChunkedDivergenceFunction.apply
        return Side(name, *primitives, functions.selective_log_softmax, functions.entropy_from_logits)

    return side("TRL", chunked_logprob, chunked_divergence, utils), side("patched", ours, ours, ours)


def as_head(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(V,) -> hidden (1, 1) and weight (V, 1) that give exactly these logits."""
    return torch.ones(1, 1, dtype=logits.dtype), logits[:, None].clone()


def exact_entropy(logits: torch.Tensor) -> float:
    """fp64 without cancellation: no term is negative."""
    s = logits.double() - logits.max()
    rest = s.exp().scatter(0, logits.argmax()[None], 0)
    spread = -(rest * s.masked_fill(rest == 0, 0)).sum()
    return (rest.sum().log1p() + spread / (1 + rest.sum())).item()


def exact_kl(x: torch.Tensor, y: torch.Tensor) -> float:
    """KL of y's distribution from x's, in fp64."""
    p, q = y.double().log_softmax(0), x.double().log_softmax(0)
    return (p.exp() * (torch.expm1(q - p) - (q - p))).sum().item()


def head_entropy(side: Side, logits: torch.Tensor) -> float:
    return side.head(*as_head(logits), None, torch.zeros(1, dtype=torch.long), 1.0, 32768, None, 1.0, OUTPUTS)[1].item()


def worst_entropy(side: Side, gap: float) -> float:
    """Of all BASES, the entropy that is furthest from the truth."""
    rows = [peaked(gap, base) for base in BASES]
    found = [(head_entropy(side, row), exact_entropy(row)) for row in rows]
    return max(found, key=lambda pair: abs(pair[0] - pair[1]))[0]


def peaked(gap: float, base: float = 0.0) -> torch.Tensor:
    """A token that stands `gap` above the others, which differ a little."""
    generator = torch.Generator().manual_seed(0)
    logits = base + 0.1 * torch.randn(VOCABULARY, generator=generator)
    logits[7] = base + gap
    return logits


def offset_rows(offset: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (offset + 3 * torch.randn(256, 1000, generator=generator)).bfloat16()


def largest_error(side: Side, offset: float) -> float:
    """Of log-probabilities of bf16 logits at a temperature, in nats."""
    logits = offset_rows(offset)
    index = torch.arange(len(logits))
    truth = (logits.double() / TEMPERATURE).log_softmax(-1).gather(-1, index[:, None])[:, 0]
    return (side.logprobs(logits, index, TEMPERATURE).double() - truth).abs().max().item()


def banned() -> torch.Tensor:
    logits = peaked(5)
    logits[::3] = -torch.inf
    return logits


def close_pair(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(VOCABULARY, generator=generator)
    return logits, logits + distance * torch.randn(VOCABULARY, generator=generator)


def head_kl(side: Side, distance: float) -> float:
    """beta = 0: KL(teacher || student)."""
    student, teacher = close_pair(distance)
    return side.divergence(*as_head(student), None, *as_head(teacher), None, 0.0)[0].item()


def hard_cases() -> Iterator[dict]:
    """One row per case: what it is, the truth, and the values of both."""
    both = sides()

    def row(case, truth, value):
        return {"case": case, "exact": truth} | {side.name: value(side) for side in both}

    for gap in GAPS:
        truth = exact_entropy(peaked(gap))
        yield row(f"fp32 head, entropy, peak of {gap} nats", truth, lambda side, gap=gap: worst_entropy(side, gap))
    for offset in OFFSETS:
        yield row(f"bf16 logits at {offset}, log-prob's error", 0.0, lambda side, at=offset: largest_error(side, at))
    logits = banned()
    truth = exact_entropy(logits)
    yield row("fp32 head, entropy, -inf columns", truth, lambda side: head_entropy(side, logits))
    yield row("fp32 logits, entropy, -inf columns", truth, lambda side: side.entropy(logits[None]).item())
    for distance in DISTANCES:
        truth = exact_kl(*close_pair(distance))
        yield row(f"fp32 heads {distance:g} apart, KL", truth, lambda side, at=distance: head_kl(side, at))


def draw(rows: list[dict], path: Path) -> None:
    """Three panels: peaks, offsets, close heads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = zip(figure.subplots(1, 3), (("peak", GAPS), ("error", OFFSETS), ("apart", DISTANCES)), strict=True)
    for axes, (word, x) in panels:
        found = [row for row in rows if word in row["case"]]
        for name, style in (("TRL", "o-"), ("patched", "s-"), ("exact", "k--")):
            if not (word == "error" and name == "exact"):
                axes.plot(x, [row[name] for row in found], style, markersize=4, label=name)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.legend(fontsize=7)
    peaks, offsets, close = figure.axes
    peaks.set(title="entropy of a fused fp32 head, nats", xlabel="nats the likeliest token stands above the others")
    peaks.set_yscale("symlog", linthresh=1e-8)
    peaks.set_ylim(bottom=-1e-3)
    offsets.set(title="bf16 log-probabilities, largest error, nats", xlabel="offset of the logits")
    offsets.set_yscale("log")
    offsets.set_xscale("symlog", linthresh=10)
    offsets.set_xlim(left=-1)
    close.set(title="KL of two heads, nats", xlabel="distance of their logits", xscale="log")
    close.set_yscale("symlog", linthresh=1e-9)
    close.set_ylim(bottom=-1e-8)
    figure.savefig(path, dpi=120)


def costs(repeats: int) -> Iterator[list[str]]:
    """Forward and backward at SHAPE: dtype, what, and the columns of `measured`."""
    n, width, vocab = SHAPE
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(vocab, (n,), generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        make = [torch.randn(*shape, generator=generator) for shape in ((n, width), (vocab, width)) * 2]
        hidden, weight, other, head = (x.mul_(width**-0.25).to(dtype) for x in make)
        hidden.requires_grad_()
        weight.requires_grad_()

        def logprobs(side, hidden=hidden, weight=weight):
            found = side.head(hidden, weight, None, targets, 1.0, 32768, None, 1.0, OUTPUTS)
            (found[0].sum() + 0.01 * found[1].sum()).backward()

        def divergence(side, beta, hidden=hidden, weight=weight, teacher=(other, head)):
            side.divergence(hidden, weight, None, *teacher, None, beta)[0].sum().backward()

        calls = {"log-probabilities and entropy": logprobs}
        for name, beta in (("KL", 0.0), ("Jensen-Shannon", 0.5)):
            calls[name] = lambda side, beta=beta, run=divergence: run(side, beta)
        for name, call in calls.items():
            yield [str(dtype).removeprefix("torch."), name, *measured(call, (hidden, weight), repeats)]


def measured(call: Callable[[Side], None], leaves: tuple[torch.Tensor, ...], repeats: int) -> list[str]:
    """Peak MB of both beside inputs and gradients (of the call before); median CPU seconds of both; median ratio."""

    def once(side):
        for leaf in leaves:
            leaf.grad = None
        start = time.process_time()
        call(side)
        return time.process_time() - start

    both = sides()
    for side in both:
        once(side)  # what compiles or loads does it here
    memory = []
    for side in both:
        once(side)
        memory.append(machine.peak_extra_bytes(lambda side=side: once(side), "cpu") / 1e6)
    seconds = torch.tensor([[once(side) for side in both] for _ in range(repeats)])
    theirs, ours = seconds.median(0).values.tolist()
    ratio = (seconds[:, 1] / seconds[:, 0]).median().item()
    return [f"{memory[0]:.0f}", f"{memory[1]:.0f}", f"{theirs:.2f}", f"{ours:.2f}", f"{ratio:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--png", type=Path, default=machine.ROOT / "docs" / "integrations-trl.png")
    parser.add_argument("--no-cost", action="store_true", help="only the hard cases")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rows = list(hard_cases())
    columns = ["case", "exact", "TRL", "patched"]
    cells = [[row["case"], *(f"{row[name]:.3g}" for name in columns[1:])] for row in rows]
    print(table(columns, cells))
    draw(rows, arguments.png)
    print(f"\ndrew {arguments.png}")
    if not arguments.no_cost:
        print("\nforward and backward of {} x {} x {} (tokens, width, vocabulary), {} thread\n".format(*SHAPE, 1))
        heads = ["dtype", "what", "TRL MB", "patched MB", "TRL CPU s", "patched CPU s", "ratio"]
        print(table(heads, list(costs(arguments.repeats))))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
