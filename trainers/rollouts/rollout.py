"""From prompts to scored responses: what a sampler returns, what a scorer sees, and the rollout made of both.

A sampler may be this process's model (generate.py) or a server; a scorer may read text (a verifier), token ids (a
reward model) or the dataset's row. Neither knows of the other, nor of the algorithm.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from fused_rl import TokenSupport
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.guests import own_generators
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data.encode import Batch, make_batch
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.sampling import NoDistribution, Sampling, check_sampler, first_broken, joined


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt and the dataset row that it came from."""

    ids: list[int]
    row: dict


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
    vocab: int | None = None,
) -> Rollout:
    """Sample `copies` responses to each of this rank's prompts, and score them; fails on all ranks or on none.

    `vocab` is the size of the model's vocabulary, where it is known.
    """
    # What can go wrong on one rank alone: a server, a verifier.
    began = time.monotonic()
    check_sampler(sampler, sampling)
    with engine.together():
        prompts = [prompt for prompt in prompts for _ in range(copies)]
        responses = _sampled(sampler, prompts, sampling)
        check_responses(responses, prompts, sampling, vocab)
        sampled = time.monotonic()

        texts = tokenizer.batch_decode([_without_stop(response) for response in responses])
        parts = zip(prompts, responses, texts, strict=True)
        samples = [Sample(prompt.row, prompt.ids, response, text) for prompt, response, text in parts]
        with own_generators():
            scores = {scorer.name: check_scores(scorer.name, scorer(samples), samples) for scorer in scorers}
        rewards = _rewards(scorers, scores, samples)

    # The batch to train on.
    incidents = _report_incidents(scorers, len(samples))
    scored = time.monotonic()
    batch = batch_of(samples, tokenizer.pad_token_id, device)
    seconds = {"time/rollout": sampled - began, "time/score": scored - sampled}
    return Rollout(samples, batch, scores, rewards, _solved(scorers, scores), seconds, incidents)


def _sampled(sampler: Sampler, prompts: list[Prompt], sampling: Sampling) -> list[Response]:
    """The sampler's responses; logits to draw from that are none are an error with their rows."""
    try:
        return sampler.sample([prompt.ids for prompt in prompts], sampling)
    except NoDistribution as error:
        rows = ", ".join(dict.fromkeys(_place(prompts[number]) for number in error.responses))
        raise InputError(
            f"sampling{error.after}: the model's logits are NaN or infinite; their rows: {rows}"
        ) from error


def batch_of(samples: list[Sample], pad_id: int, device: torch.device) -> Batch:
    """Prompts and responses as one batch, with the sets that the tokens were drawn from."""
    prompt_ids, response_ids = [s.prompt_ids for s in samples], [s.response.ids for s in samples]
    batch = make_batch(prompt_ids, response_ids, pad_id, device, where=[where(sample) for sample in samples])
    support = joined([s.response.support for s in samples], list(map(len, response_ids)))
    return batch if support is None else replace(batch, support=support.to(device))


def check_responses(
    responses: list[Response], prompts: list[Prompt], sampling: Sampling, vocab: int | None = None
) -> None:
    """Refuse what breaks the promises of `Response`; an error names the prompt's row."""
    if not isinstance(responses, list) or len(responses) != len(prompts):
        came = len(responses) if isinstance(responses, list) else type(responses).__name__
        raise InputError(
            f"the sampler returned {came} responses to {len(prompts)} prompts; it must return one for each"
        )
    for response, prompt in zip(responses, prompts, strict=True):
        problem = _broken_promise(response, sampling)
        if problem is not None:
            raise InputError(f"the sampler's response to {_place(prompt)}: {problem}")
    supports, ids = [response.support for response in responses], [response.ids for response in responses]
    broken = first_broken(supports, ids, vocab, needed=sampling.truncates)
    if broken is not None:
        number, problem = broken
        raise InputError(f"the sampler's response to {_place(prompts[number])}: {problem}")


def _place(prompt: Prompt) -> str:
    return prompt.row.get("__where__", "a row")


def _broken_promise(response: Response, sampling: Sampling) -> str | None:
    ids, told = response.ids, response.logprobs
    stops = [i for i, token in enumerate(ids) if token in sampling.stop_ids]
    if len(ids) > sampling.max_new_tokens:
        return f"{len(ids)} tokens, but max_new_tokens is {sampling.max_new_tokens}"
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        return "ids must be whole numbers, 0 or more"
    if response.finish not in ("stop", "length"):
        return f"finish={response.finish!r}, which must be stop or length"
    if (response.finish == "stop") != (stops == [len(ids) - 1]) or stops[:-1]:
        return (
            f"finish={response.finish!r} and stop tokens at {stops} of {len(ids)}; only the last one may be, with stop"
        )
    if told is not None and len(told) != len(ids):
        return f"{len(told)} logprobs for {len(ids)} ids"
    if told is not None and not all(map(math.isfinite, told)):
        return "a logprob is NaN or infinite"
    return None


def _without_stop(response: Response) -> list[int]:
    return response.ids[:-1] if response.finish == "stop" else response.ids


def check_scores(name: str, scores: list[float | None], samples: Sequence[Sample]) -> torch.Tensor:
    """The scores as (B,) fp32, NaN for None; an error names the scorer, and the row of a score that is no number.

    Args:
        name: the scorer's.
        scores: what it returned: a list, tuple, array or tensor of one number or None for each sample.
        samples: what it was called with.
    """
    no_list = isinstance(scores, (str, bytes, dict, set)) or not isinstance(scores, Iterable)
    if no_list or getattr(scores, "ndim", 1) == 0:  # a tensor or an array of one number
        came = "None" if scores is None else f"{shortened(scores)} ({type(scores).__name__})"
        raise InputError(f"scorer {name!r} returned {came}; it must return a list of one score for each response")
    scores = list(scores)
    if len(scores) != len(samples):
        raise InputError(
            f"scorer {name!r} returned {len(scores)} scores for {len(samples)} responses; it must return one for each"
        )
    checked = [_score_of(name, score, sample) for score, sample in zip(scores, samples, strict=True)]
    return torch.tensor(checked, dtype=torch.float32)


def _score_of(name: str, score, sample: Sample) -> float:
    """One score as a float that fp32 can hold, NaN for None."""
    if score is None:
        return math.nan
    try:
        number = math.nan if isinstance(score, (str, bytes)) else float(score)
    except Exception:  # whatever the type's own conversion raises
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:
        came = f"{shortened(score)} ({type(score).__name__})"
        raise InputError(
            f"scorer {name!r} returned {came} as the score of {where(sample)}, not a finite number; "
            "for a response that it cannot score, return None"
        )
    return number


def where(sample: Sample) -> str:
    """`rows.jsonl, line 3`, as far as the row knows."""
    return sample.row.get("__where__", "a row")


def shortened(value) -> str:
    """A value of somebody else's in a line of 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except BaseException:  # of the type's own __repr__
        text = "what cannot be shown"
    return text if len(text) <= 80 else f"{text[:80]}…"


def _report_incidents(scorers: Sequence[Scorer], count: int) -> dict[str, float]:
    """The metrics of what struck on any rank since the last time; rank 0 prints a line where something did."""
    metrics = {}
    for scorer in scorers:
        if not isinstance(scorer, Watched):
            continue
        of_ranks, counts = zip(*engine.gather((scorer.take_incidents(), count)), strict=True)
        timeouts, restarts = sum(i.timeouts for i in of_ranks), sum(i.restarts for i in of_ranks)
        metrics[f"verifier/{scorer.name}/timeouts"] = float(timeouts)
        metrics[f"verifier/{scorer.name}/restarts"] = float(restarts)

        said = []
        if timeouts:
            first = next(i.first for i in of_ranks if i.first is not None)
            said.append(f"{timeouts} of {sum(counts)} answers broke a limit and score 0; first: {first}")
        if restarts:
            said.append(f"{restarts} processes died, and their answers were scored again")
        if said and engine.rank() == 0:
            tell(f"{scorer.name}: {'; '.join(said)}")
    return metrics


def _rewards(scorers: Sequence[Scorer], scores: dict[str, torch.Tensor], samples: Sequence[Sample]) -> torch.Tensor:
    """(B,) the weighted sums; refuses one that fp32 cannot hold."""
    weighted = [scorer.weight * scores[scorer.name].nan_to_num() for scorer in scorers]
    rewards = torch.stack(weighted).sum(0)
    for reward, sample in zip(rewards.tolist(), samples, strict=True):
        if not math.isfinite(reward):
            raise InputError(f"the reward of {where(sample)} is {reward}: the weighted sum of its scores is too large")
    return rewards


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
    return metrics | scorer_metrics(rollout.scores) | rollout.incidents | rollout.seconds


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
