"""TRL's primitives: lost digits, memory, time.

The logits of the hard cases are exact: a head of width 1, hidden states of 1.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from bench import plain
from bench.repro.integrations.turns import cost
from fused_rl import reference

VOCABULARY = 32000
GAPS = (10, 15, 20, 24, 26, 27, 28, 30, 35)
OFFSETS = (0, 10, 30, 100, 300)
DISTANCES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
BASES = tuple(range(100, 230, 4))  # of the other tokens' logits; softmax does not see it
TEMPERATURE = 0.9
FIRST = torch.zeros(1, dtype=torch.long)  # a target, where none matters
SHAPE = (512, 1024, 32000)  # tokens, width, vocabulary: of a CPU's patience


class Side(NamedTuple):
    """The primitives of one of the two."""

    head: Callable
    divergence: Callable
    logprobs: Callable
    entropy: Callable

    def of_head(self, hidden, weight, targets):
        """log-probabilities and entropies."""
        outputs = ("log_probs", "entropy", "is_top1")
        return self.head(hidden, weight, None, targets, 1.0, VOCABULARY, None, 1.0, outputs)[:2]


def sides() -> dict[str, Side]:
    """TRL's own, and ours."""
    from trl.kernels import chunked_divergence, chunked_logprob
    from trl.trainer import utils

    from fused_rl.integrations import trl as ours

    def side(heads, divergences, functions):
        head = heads.ChunkedLogProbFunction.apply
        divergence = divergences.ChunkedDivergenceFunction.apply
        return Side(
            head, divergence, functions.selective_log_softmax, functions.entropy_from_logits
        )

    return {
        "TRL": side(chunked_logprob, chunked_divergence, utils),
        "patched": side(ours, ours, ours),
    }


# The hard cases.


def as_head(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(V,) -> hidden (1, 1) and weight (V, 1) that give exactly these logits."""
    return torch.ones(1, 1, dtype=logits.dtype), logits[:, None].clone()


def peaked(gap: float, base: float = 0.0) -> torch.Tensor:
    """A token that stands `gap` above the others, which differ a little."""
    logits = base + 0.1 * plain.normal(0, VOCABULARY)
    logits[7] = base + gap
    return logits


def exact_entropy(logits: torch.Tensor) -> float:
    rows = logits.double()[None]
    return reference.token_logprobs(rows, FIRST).entropy.item()


def head_entropy(side: Side, logits: torch.Tensor) -> float:
    _, entropy = side.of_head(*as_head(logits), FIRST)
    return entropy.item()


def worst_entropy(side: Side, gap: float) -> float:
    """Of all BASES, the entropy that is furthest from the truth."""
    rows = [peaked(gap, base) for base in BASES]
    found = [(head_entropy(side, row), exact_entropy(row)) for row in rows]
    return max(found, key=lambda pair: abs(pair[0] - pair[1]))[0]


def largest_error(side: Side, offset: float) -> float:
    """Of log-probabilities of bf16 logits at a temperature, in nats."""
    logits = (offset + 3 * plain.normal(1, 256, 1000)).bfloat16()
    index = torch.arange(len(logits))
    exact = plain.chosen((logits.double() / TEMPERATURE).log_softmax(-1), index)
    return plain.largest(side.logprobs(logits, index, TEMPERATURE), exact)


def close_pair(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits, noise = plain.normal(2, 2, VOCABULARY)
    return 3 * logits, 3 * logits + distance * noise


def head_kl(side: Side, distance: float) -> float:
    """beta = 0: KL(teacher || student)."""
    student, teacher = close_pair(distance)
    return side.divergence(*as_head(student), None, *as_head(teacher), None, 0.0)[0].item()


def exact_kl(distance: float) -> float:
    student, teacher = close_pair(distance)
    rows = teacher.double()[None], student.double()[None]
    return reference.token_kl(*rows).item()


def hard_cases() -> Iterator[dict]:
    """A row per case: what it is, the truth, and the values of both."""

    def row(case, exact, value):
        found = {"case": case, "exact": exact}
        for name, side in sides().items():
            found[name] = value(side)
        return found

    for gap in GAPS:
        exact = exact_entropy(peaked(gap))
        yield row(
            f"fp32 head, entropy, peak of {gap} nats",
            exact,
            lambda side, gap=gap: worst_entropy(side, gap),
        )
    for offset in OFFSETS:
        yield row(
            f"bf16 logits at {offset}, log-prob's error",
            0.0,
            lambda side, at=offset: largest_error(side, at),
        )
    banned = peaked(5)
    banned[::3] = -torch.inf
    exact = exact_entropy(banned)
    yield row("fp32 head, entropy, -inf columns", exact, lambda side: head_entropy(side, banned))
    yield row(
        "fp32 logits, entropy, -inf columns", exact, lambda side: side.entropy(banned[None]).item()
    )
    for distance in DISTANCES:
        exact = exact_kl(distance)
        yield row(
            f"fp32 heads {distance:g} apart, KL", exact, lambda side, at=distance: head_kl(side, at)
        )


# What the functions cost.


def costs(rounds: int) -> Iterator[dict]:
    """Forward and backward at SHAPE; memory is beside inputs and gradients."""
    tokens, width, vocab = SHAPE
    targets = torch.randint(vocab, (tokens,), generator=plain.seeded(0))
    for dtype in (torch.bfloat16, torch.float32):
        sizes = ((tokens, width), (vocab, width)) * 2
        # The student's hidden states and head, whose gradients are wanted, and the teacher's.
        tensors = []
        for seed, size in enumerate(sizes):
            scaled = plain.normal(seed, *size).mul_(width**-0.25)
            tensors.append(scaled.to(dtype))
        leaves = (tensors[0].requires_grad_(), tensors[1].requires_grad_())
        teacher = tensors[2:]

        def logprobs(side, hidden, weight):
            found, entropy = side.of_head(hidden, weight, targets)
            (found.sum() + 0.01 * entropy.sum()).backward()

        def kl(side, hidden, weight, beta=0.0, teacher=teacher):
            found = side.divergence(hidden, weight, None, *teacher, None, beta)[0]
            found.sum().backward()

        def jensen_shannon(side, hidden, weight, kl=kl):
            kl(side, hidden, weight, 0.5)

        calls = {
            "log-probabilities and entropy": logprobs,
            "KL": kl,
            "Jensen-Shannon": jensen_shannon,
        }
        for name, call in calls.items():

            def run(side, call=call, leaves=leaves):
                for leaf in leaves:
                    leaf.grad = None
                call(side, *leaves)

            ways = {of: functools.partial(run, side) for of, side in sides().items()}
            yield cost(f"{name}, {str(dtype).removeprefix('torch.')}", ways, rounds)
