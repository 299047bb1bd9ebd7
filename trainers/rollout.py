"""From prompts to scored responses: what a sampler returns, what a scorer sees, and the rollout made of both.

A sampler may be this process's model (generate.py) or a server; a scorer may read text (a verifier), token ids (a
reward model) or the dataset's row. Neither knows of the other, nor of the algorithm.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from fused_rl.trainers import engine
from fused_rl.trainers.config import InputError
from fused_rl.trainers.data import Batch, make_batch


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt and the dataset row that it came from."""

    ids: list[int]
    row: dict


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    temperature: float
    """0 is greedy; the whole softmax at this temperature otherwise."""
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    """A response ends with (and includes) the first of these."""


@dataclass
class Response:
    """What a sampler returns for one prompt."""

    ids: list[int]
    """Token ids alone, the stop token included; may be empty."""
    finish: Literal["stop", "length"]
    """Ended by a stop token, or cut at `max_new_tokens`."""
    logprobs: list[float] | None = None
    """Of each id, in nats, of the distribution that it was drawn from; None where the sampler does not tell."""
    support: list[list[int]] | None = None
    """The ids that each token was drawn from; None for the whole vocabulary."""
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


@torch.no_grad()
def roll_out(
    sampler: Sampler,
    scorers: Sequence[Scorer],
    prompts: list[Prompt],
    sampling: Sampling,
    tokenizer,
    device: torch.device,
    *,
    copies: int = 1,
) -> Rollout:
    """Sample `copies` responses to each of this rank's prompts, and score them."""
    began = time.monotonic()
    prompts = [prompt for prompt in prompts for _ in range(copies)]
    responses = sampler.sample([prompt.ids for prompt in prompts], sampling)
    sampled = time.monotonic()

    texts = tokenizer.batch_decode([_without_stop(response) for response in responses])
    together = zip(prompts, responses, texts, strict=True)
    samples = [Sample(prompt.row, prompt.ids, response, text) for prompt, response, text in together]
    scores = {scorer.name: check_scores(scorer.name, scorer(samples), samples) for scorer in scorers}
    scored = time.monotonic()

    prompt_ids, response_ids = [s.prompt_ids for s in samples], [s.response.ids for s in samples]
    where = [s.row.get("__where__", "a row") for s in samples]
    batch = make_batch(prompt_ids, response_ids, tokenizer.pad_token_id, device, where=where)
    seconds = {"time/rollout": sampled - began, "time/score": scored - sampled}
    return Rollout(samples, batch, scores, _rewards(scorers, scores), _solved(scorers, scores), seconds)


def _without_stop(response: Response) -> list[int]:
    return response.ids[:-1] if response.finish == "stop" else response.ids


def check_scores(name: str, scores: list[float | None], samples: Sequence[Sample]) -> torch.Tensor:
    """The scores as (B,) fp32, NaN for None; an error names the scorer, and the row where one is not finite."""
    if len(scores) != len(samples):
        raise InputError(f"scorer {name!r} returned {len(scores)} scores for {len(samples)} responses")
    made = torch.tensor([math.nan if score is None else float(score) for score in scores])
    for score, stored, sample in zip(scores, made.tolist(), samples, strict=True):
        if score is not None and not math.isfinite(stored):  # stored: 1e39 is infinite in fp32
            where = sample.row.get("__where__", "a row")
            raise InputError(f"scorer {name!r} returned {score} as the score of {where}, not a finite fp32 number")
    return made


def _rewards(scorers: Sequence[Scorer], scores: dict[str, torch.Tensor]) -> torch.Tensor:
    weighted = [scorer.weight * scores[scorer.name].nan_to_num() for scorer in scorers]
    return torch.stack(weighted).sum(0)


def _solved(scorers: Sequence[Scorer], scores: dict[str, torch.Tensor]) -> torch.Tensor:
    judges = [scorer for scorer in scorers if scorer.solved_at is not None]
    if not judges:
        return torch.zeros(len(next(iter(scores.values()))), dtype=torch.bool)
    right = [(scores[judge.name] >= judge.solved_at) | scores[judge.name].isnan() for judge in judges]
    applies = [~scores[judge.name].isnan() for judge in judges]
    return torch.stack(right).all(0) & torch.stack(applies).any(0)


def rollout_metrics(rollout: Rollout, group_size: int, step: int) -> dict[str, float]:
    """What the responses were like, over all ranks."""
    rewards, lengths = rollout.rewards.double(), rollout.lengths.double()
    groups = rewards.view(-1, group_size)
    columns = {
        "reward": rewards,
        "reward_std": groups.std(1).repeat_interleave(group_size),
        "frac_reward_zero_std": (groups == groups[:, :1]).all(1).repeat_interleave(group_size),
        "completions/mean_length": lengths,
        "val/stop_rate": rollout.stopped,
    }
    count = len(rewards) * engine.world_size()
    totals = engine.global_sum(torch.stack([column.double().sum() for column in columns.values()]))
    metrics = dict(zip(columns, (totals / count).tolist(), strict=True))
    metrics |= {
        "completions/min_length": -engine.global_max(-lengths.min()),
        "completions/max_length": engine.global_max(lengths.max()),
        "completions/clipped_ratio": 1 - metrics["val/stop_rate"],
        "val/num_eos_tokens": metrics["val/stop_rate"] * count,
        "objective/scores": metrics["reward"],
        "episode": step * count,
    }
    return metrics | scorer_metrics(rollout.scores) | rollout.seconds


def scorer_metrics(scores: dict[str, torch.Tensor]) -> dict[str, float]:
    """Mean and standard deviation of each scorer's scores, over all ranks and the samples that it applies to."""
    metrics = {}
    for name, values in scores.items():
        applies = values[~values.isnan()].double()
        moments = torch.stack([torch.ones_like(applies).sum(), applies.sum(), applies.square().sum()])
        count, total, square = engine.global_sum(moments).tolist()
        mean, mean_square = total / max(count, 1), square / max(count, 1)
        metrics[f"rewards/{name}/mean"] = mean
        metrics[f"rewards/{name}/std"] = math.sqrt(max(mean_square - mean**2, 0))
    return metrics
