"""What is drawn, who draws it and who judges it: the seams of a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from fused_rl import TokenSupport
from fused_rl.trainers.data.batch import Batch
from fused_rl.trainers.rollouts.sampling import Sampling


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt and the dataset row that it came from."""

    ids: list[int]
    row: dict
    where: str = "a row"
    """The file and line, or the like, that the row came from."""


@dataclass
class Response:
    """What a sampler returns for one prompt."""

    ids: list[int]
    """Token ids alone, the stop token included; may be empty."""
    finish: Literal["stop", "length"]
    """Ended by a stop token, or cut at `max_new_tokens`."""
    logprobs: list[float] | None = None
    """Of each id, in nats, of the distribution that it was drawn from; None where the sampler does not tell."""
    support: TokenSupport | list[list[int]] | None = None
    """The ids that each token was drawn from, itself among them; those of a token may be empty, for the whole
    vocabulary, and None is that for all tokens. Lists are taken too, but long responses by the thousand are slow so."""
    weight_version: int | None = None
    """The step that the sampler's weights are of; None where they are the policy's own."""


@dataclass
class Sample:
    """One response to one prompt, as a scorer sees it."""

    row: dict
    prompt_ids: list[int]
    response: Response
    text: str
    """The response without its stop token."""
    where: str = "a row"
    """Of its prompt."""


class Sampler(Protocol):
    """Draws responses; every rank calls it with its own prompts."""

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """One response per prompt (token ids), in their order."""

    def publish(self, step: int) -> None:
        """The policy's weights have changed: after an update, and after a resume."""


class Scorer(Protocol):
    """Judges samples, and knows what its own scores mean."""

    name: str
    weight: float
    """Of its score in the reward."""
    solved_at: float | None
    """A sample counts as solved from this score on; None: this scorer does not tell right from wrong."""

    def check(self, row: dict) -> None:
        """Raise InputError where a dataset row lacks what the scorer reads; called on every row before the run."""

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """One score per sample; None where the scorer does not apply to it."""


class Incidents(NamedTuple):
    """How often the limits of a scorer struck in one call."""

    timeouts: int
    """Samples that broke a limit and score 0 for it."""
    restarts: int
    """Processes that died of something else; their samples were scored again."""
    first: str | None
    """The first of the samples that broke a limit, and how."""


@runtime_checkable
class Watched(Protocol):
    """A scorer that works under limits, and tells when they strike."""

    def take_incidents(self) -> Incidents:
        """Those since this was last called."""


@dataclass
class Rollout:
    """This rank's samples, those of one prompt adjacent, as a batch and with their scores."""

    samples: list[Sample]
    batch: Batch
    scores: dict[str, torch.Tensor]
    """(B,) fp32 of each scorer, NaN where it does not apply."""
    rewards: torch.Tensor
    """(B,) fp32: the weighted sum of the scores that apply."""
    solved: torch.Tensor
    """(B,) bool: every scorer that tells right from wrong, and applies, says right."""
    seconds: dict[str, float]
    incidents: dict[str, float] = field(default_factory=dict)
    """`verifier/<name>/timeouts` and `…/restarts` of the scorers that work under limits, over all ranks."""

    @property
    def stopped(self) -> torch.Tensor:
        """(B,) bool: ended by a stop token."""
        return torch.tensor([sample.response.finish == "stop" for sample in self.samples])

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int64: tokens of each response."""
        return torch.tensor([len(sample.response.ids) for sample in self.samples])

    @property
    def rollout_logprobs(self) -> torch.Tensor | None:
        """(B, T - 1) fp32: the sampler's own log-probabilities, 0 where masked; None where it does not tell."""
        told = [sample.response.logprobs for sample in self.samples]
        if any(logprobs is None for logprobs in told):
            return None
        mask = self.batch.response_mask
        made = torch.zeros(mask.shape, device=mask.device)
        made[mask] = torch.cat([torch.tensor(logprobs) for logprobs in told]).to(mask.device)
        return made


def where(of: Prompt | Sample) -> str:
    """`rows.jsonl, line 3`, as far as it is known."""
    return of.where


def shortened(value) -> str:
    """A value of somebody else's in a line of 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except BaseException:  # of the type's own __repr__
        text = "what cannot be shown"
    return text if len(text) <= 80 else f"{text[:80]}…"
