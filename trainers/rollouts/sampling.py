"""How responses are drawn: temperature, what top_k, top_p and min_p leave, and the record of it for the loss.

The kept sets are recorded where tokens are drawn. Computed again from probabilities they would be others: ties and the
order of the filters differ between implementations, and rounding moves the border of a set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fused_rl import TokenSupport
from fused_rl.trainers.base.text import InputError


class NoDistribution(InputError):
    """Logits that are NaN or infinite, from which nothing can be drawn."""

    def __init__(self, responses: list[int], step: int | None = None):
        """`responses` of the batch, by number; the weights are those after `step`, where that is known."""
        self.responses = responses
        self.after = "" if step is None else f" with the weights after step {step}"
        super().__init__(f"sampling{self.after}: the model's logits are NaN or infinite in {len(responses)} responses")


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    temperature: float
    """0 is greedy; otherwise of the softmax, which the three below truncate, in the order k, p, min_p."""
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    """A response ends with (and includes) the first of these."""
    top_p: float = 1.0
    """Of the likeliest ids as few as have this much of the probability together; 1 is all."""
    top_k: int = 0
    """So many of the likeliest ids; 0 is all."""
    min_p: float = 0.0
    """The ids with at least this fraction of the likeliest one's probability; 0 is all."""
    seeds: tuple[int, ...] | None = None
    """One for each response, to draw it with where the sampler has generators of its own; None where it is greedy, or
    where nothing needs to be drawn again."""

    @property
    def truncates(self) -> bool:
        """Whether a token may be drawn from less than the whole vocabulary; greedy is no draw."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def truncated(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Scores (B, V) at the temperature, -inf where a filter takes an id away; by transformers, in its order."""
    from transformers.generation import logits_process as of_transformers

    filters = []
    if sampling.top_k > 0:
        filters.append(of_transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(of_transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        filters.append(of_transformers.MinPLogitsWarper(sampling.min_p))
    for warper in filters:
        scores = warper(None, scores)  # none of them reads the tokens so far
    return scores


class Record:
    """The kept sets of a batch of responses, noted token by token, and fetched from the device now and then."""

    def __init__(self, count: int):
        self.count = count
        self.noted: list[torch.Tensor] = []  # (b, V) bool: where a set is not the whole vocabulary, its ids
        self.fetched: list[TokenSupport] = []
        self.responses: list[int] = []  # of each row of what was noted

    def note(self, scores: torch.Tensor, ended: torch.Tensor, responses: list[int]) -> None:
        """The scores (b, V) that the next token of each of b responses is drawn from; none of those `ended`."""
        kept = scores.isfinite()
        self.noted.append(kept & ~(kept.all(1) | ended)[:, None])
        self.responses += responses

    def fetch(self, beside: torch.Tensor) -> torch.Tensor:
        """What was noted since the last time goes to the CPU, and in the same copy (n,) integers, returned as int64."""
        if not self.noted:
            return beside.cpu()
        noted = torch.cat(self.noted)
        self.noted = []
        found = torch.cat([beside, noted.flatten().nonzero()[:, 0]]).cpu()
        row = found[len(beside) :] // noted.shape[1]
        ids = found[len(beside) :] % noted.shape[1]
        lengths = row.bincount(minlength=len(noted))
        self.fetched.append(TokenSupport(ids, nn.functional.pad(lengths.cumsum(0), (1, 0))))
        return found[: len(beside)]

    def of_responses(self, lengths: list[int]) -> list[TokenSupport]:
        """The sets of each response, a row per token, on the CPU; what was noted after its length is left out."""
        response = torch.tensor(self.responses, dtype=torch.int64)
        order = response.argsort(stable=True)
        response = response[order]
        counts = response.bincount(minlength=self.count)
        token = torch.arange(len(response)) - (counts.cumsum(0) - counts)[response]
        own = order[token < torch.tensor(lengths)[response]]
        return TokenSupport.cat(self.fetched).select(own).split(lengths)


def of_response(support: TokenSupport | list[list[int]]) -> TokenSupport:
    """A sampler's record of one response, on the CPU; ValueError where it is none."""
    if not isinstance(support, TokenSupport):
        support = TokenSupport.from_lists(support)
    return support.to("cpu")


def joined(supports: Sequence[TokenSupport | list[list[int]] | None], lengths: Sequence[int]) -> TokenSupport | None:
    """The sets of all tokens of responses of these lengths, one after the other; None where no sampler told any.

    That of a response may be None, for the whole vocabulary.
    """
    if all(support is None for support in supports):
        return None
    parts = []
    for support, length in zip(supports, lengths, strict=True):
        parts.append(TokenSupport.from_lists([None] * length) if support is None else of_response(support))
    return TokenSupport.cat(parts)
