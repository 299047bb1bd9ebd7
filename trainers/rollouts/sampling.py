"""How responses are sampled: temperature, top_k, top_p and min_p, seeds, and the record of kept sets for the loss.

Kept sets are recorded where tokens are sampled. Computed again from probabilities they would be others: ties and the
order of the filters differ between implementations, and rounding moves the border of a set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fused_rl import TokenSupport

from ..base.text import InputError

# Seeds are below this, which every server takes.
SEED_LIMIT = 2**31


class NoDistribution(InputError):
    """Logits that are NaN or infinite in some responses of a batch, by number."""

    def __init__(self, responses: list[int], step: int | None = None):
        self.responses = responses
        self.step = step
        super().__init__(
            f"the model's logits after step {step} are NaN or infinite in {len(responses)} responses"
        )


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled."""

    temperature: float
    """0 is greedy; otherwise of the softmax, which the three below truncate, in the order k, p, min_p."""
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    """A response ends with (and includes) the first of these."""
    top_p: float = 1.0
    """The smallest set of most likely ids that together have this probability; 1 keeps all."""
    top_k: int = 0
    """This number of most likely ids; 0 keeps all."""
    min_p: float = 0.0
    """The ids with at least this fraction of the most likely id's probability; 0 keeps all."""
    seeds: tuple[int, ...] | None = None
    """One for each response, for samplers with generators of their own; None for greedy responses."""
    prompts: tuple[Any, ...] = ()
    """The `Prompt` of each response, for samplers that read its row."""

    def select(self, responses: Sequence[int]) -> "Sampling":
        """Return how the responses of these numbers are sampled."""
        seeds = self.seeds and tuple(self.seeds[i] for i in responses)
        return replace(self, seeds=seeds, prompts=tuple(self.prompts[i] for i in responses))

    @property
    def truncates(self) -> bool:
        """True if a token may be sampled from less than the whole vocabulary; greedy is no draw."""
        filters = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return self.temperature > 0 and filters


class Seeds:
    """Seeds of one rank's responses, from a generator of their own: a resumed run samples the same responses."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> tuple[int, ...]:
        """Return the next so many, from 0 to 2^31 - 1."""
        drawn = torch.randint(SEED_LIMIT, (count,), generator=self.generator)
        return tuple(drawn.tolist())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the generator's state."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from another's state."""
        self.generator.set_state(state["generator"])


def processed_scores(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return logits (B, V) at the temperature in fp32, -inf where a filter takes an id away; greedy, as they are.

    The filters are those of transformers, in its order.
    """
    import transformers

    if not sampling.temperature:
        return logits
    # The filters take the tokens so far as well, and none of these reads them.
    scores = logits.float()
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    no_ids = torch.LongTensor()
    if sampling.top_k > 0:
        scores = transformers.TopKLogitsWarper(sampling.top_k)(no_ids, scores)
    if sampling.top_p < 1:
        scores = transformers.TopPLogitsWarper(sampling.top_p)(no_ids, scores)
    if sampling.min_p > 0:
        scores = transformers.MinPLogitsWarper(sampling.min_p)(no_ids, scores)
    return scores


@dataclass
class Record:
    """The kept sets of a batch of responses, noted token by token, and fetched from the device now and then."""

    count: int
    noted: list[torch.Tensor] = field(default_factory=list)
    """(b, V) bool: where a set is not the whole vocabulary, its ids."""
    fetched: list[TokenSupport] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)  # of each row of what was noted

    def note(self, scores: torch.Tensor, ended: torch.Tensor, responses: list[int]) -> None:
        """Note the scores (b, V) that the next token of each of b responses is sampled from, unless it has `ended`."""
        # A set that is the whole vocabulary is noted as empty: without a filter at work there is nothing to fetch.
        kept = scores.isfinite()
        left_out = kept.all(1) | ended
        self.noted.append(kept & ~left_out[:, None])
        self.responses += responses

    def fetch(self, numbers: torch.Tensor) -> torch.Tensor:
        """Copy what was noted to the CPU; (n,) integers in `numbers` are returned as int64, by the same copy."""
        if not self.noted:
            return numbers.cpu()
        # The places of True in one flat list need a single copy, whose length the host does not have to know first.
        noted = torch.cat(self.noted)
        self.noted = []
        places = noted.flatten().nonzero()[:, 0]
        on_cpu = torch.cat([numbers, places]).cpu()
        row = on_cpu[len(numbers) :] // noted.shape[1]
        ids = on_cpu[len(numbers) :] % noted.shape[1]
        lengths = row.bincount(minlength=len(noted))
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
        self.fetched.append(TokenSupport(ids, offsets))
        return on_cpu[: len(numbers)]

    def by_response(self, lengths: list[int]) -> list[TokenSupport]:
        """Return the sets of each response, a row per token, on the CPU, up to its length."""
        # What was noted is ordered by step, each with the rows that still went on: sort it by response, and number each
        # response's tokens, to leave out those that a row sampled after its stop token.
        response = torch.tensor(self.responses, dtype=torch.int64)
        order = response.argsort(stable=True)
        response = response[order]
        counts = response.bincount(minlength=self.count)
        first = counts.cumsum(0) - counts
        token = torch.arange(len(response)) - first[response]
        rows = order[token < torch.tensor(lengths)[response]]
        return TokenSupport.cat(self.fetched).select(rows).split(lengths)


def joined(
    supports: Sequence[TokenSupport | list[list[int]] | None], lengths: Sequence[int]
) -> TokenSupport | None:
    """Return the sets of all tokens of responses, in order, on the CPU; None if each is the whole vocabulary."""
    if all(support is None for support in supports):
        return None
    # Where some responses have sets and others none, those without have the whole vocabulary at each of their tokens.
    sets = []
    for support, length in zip(supports, lengths, strict=True):
        if support is None:
            support = [None] * length
        if not isinstance(support, TokenSupport):
            support = TokenSupport.from_lists(support)
        sets.append(support.to("cpu"))
    return TokenSupport.cat(sets)
