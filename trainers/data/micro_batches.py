"""Micro-batches of at most so many tokens: sequences of similar length, as many micro-batches on every rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import ranks


@dataclass
class Padding:
    """The tokens that the models' training passes compute in a step, and those of them that are no pads."""

    computed: int = 0
    tokens: int = 0

    def add(self, model_input: Any) -> None:
        """Count the `input_ids` of a pass, of which `tokens` are no pads."""
        self.computed += model_input.input_ids.numel()
        self.tokens += model_input.tokens

    def fraction(self) -> float:
        """Return the fraction of pads over all ranks, and begin anew."""
        computed, tokens = ranks.global_counts(
            torch.tensor(self.computed), torch.tensor(self.tokens)
        )
        self.computed = self.tokens = 0
        return (computed - tokens) / max(computed, 1)


TokensOf = Callable[[list[int]], int]
"""The indices of sequences -> the tokens that a model computes, pads included, if they go through it at once."""


def padded_tokens(lengths: Sequence[int]) -> TokensOf:
    """Return the tokens of sequences of these lengths, padded to the longest that goes with them."""
    return lambda indices: len(indices) * max(lengths[i] for i in indices)


def by_tokens(units: list[list[int]], tokens_of: TokensOf, max_tokens: int) -> list[list[int]]:
    """Return the indices of sequences in micro-batches of at most `max_tokens`, the shortest first. Call on all ranks.

    The indices of a unit stay together where they fit. A sequence of more tokens is a micro-batch of its own.
    """
    longest = {i: tokens_of([i]) for unit in units for i in unit}
    ordered = sorted(units, key=lambda unit: max(longest[i] for i in unit))
    return as_many_on_all_ranks(_filled(ordered, tokens_of, max_tokens))


def _filled(units: list[list[int]], tokens_of: TokensOf, max_tokens: int) -> list[list[int]]:
    filled: list[list[int]] = []
    for unit in units:
        if filled and tokens_of(filled[-1] + unit) <= max_tokens:
            filled[-1] = filled[-1] + unit
        elif len(unit) == 1 or tokens_of(unit) <= max_tokens:
            filled.append(unit)
        else:
            filled += _filled([[i] for i in unit], tokens_of, max_tokens)
    return filled


def as_many_on_all_ranks(micro_batches: list[list[int]]) -> list[list[int]]:
    """Return as many micro-batches as the rank with the most has, the largest ones halved; none is left empty.

    Every rank must have as many sequences as any other has micro-batches.
    """
    # A pass gathers weights and reduces gradients with all ranks, so they must run equally many.
    count = int(ranks.global_max(torch.tensor(len(micro_batches))))
    micro_batches = [*micro_batches]
    while len(micro_batches) < count:
        largest = max(range(len(micro_batches)), key=lambda i: len(micro_batches[i]))
        indices = micro_batches[largest]
        half = len(indices) // 2
        micro_batches[largest : largest + 1] = indices[:half], indices[half:]
    return micro_batches
