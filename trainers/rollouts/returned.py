"""What samplers and scorers of the user's own return, as plain lists: checked in one place, with an error of one line.

Any iterable is a list, and any kind of number is one: Python's, numpy's, a tensor's. Text and mappings are neither.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.sampling import Sampling, joined
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample, Sampler, shortened

# Nats by which a log-probability may be above 0: servers round the softmax of 16-bit logits.
ROUNDING = 1e-4
# What vLLM returns for a log-probability of minus infinity, which no sampled token has.
MINUS_INFINITY = -9999.0


def listed(returned: object, who: str, what: str, count: int) -> list:
    """Return what `who` returned as a list of `count`, and refuse what is none."""
    if isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
        hint = " (is a `return` missing?)" if returned is None else ""
        raise InputError(f"{who} returned {shortened(returned)}; expected a list of {what}{hint}")
    values = list(returned)
    if len(values) != count:
        raise InputError(f"{who} returned {len(values)} {what}, expected {count}")
    return values


def _number(value) -> float | None:
    """Return a number, or None as it is; NaN for what is neither."""
    try:
        # float() takes text such as "1".
        return value if value is None else float("nan" if isinstance(value, str) else value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def sampled_by(sampler: Sampler, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
    """Return the sampler's response to each prompt."""
    returned = sampler.sample(prompts, sampling)
    return listed(returned, "the sampler", "responses", len(prompts))


def check_responses(
    responses: Sequence[Response],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocab: float,
    *,
    tells_logprobs: bool,
) -> None:
    """Refuse responses that no loss can be computed of; an error names the row."""
    for response, prompt in zip(responses, prompts, strict=True):
        problem = _problem_of(response, sampling, vocab, tells_logprobs)
        if problem is not None:
            raise InputError(f"the sampler's response to {prompt.where}: {problem}")


def _problem_of(
    response: Response, sampling: Sampling, vocab: float, tells_logprobs: bool
) -> str | None:
    """Return what is wrong with a response, in words; what is right becomes plain lists."""
    if not isinstance(response, Response):
        return f"expected a Response, got {shortened(response)}"
    if response.finish not in ("stop", "length"):
        return f"finish={response.finish!r}; expected stop or length"

    # The ids, and what stands beside each of them.
    for name in ("ids", "logprobs", "trained"):
        values = getattr(response, name)
        if isinstance(values, str) or not isinstance(values, Iterable | None):
            return f"{name} must be a list, got {shortened(values)}"
        setattr(response, name, values if values is None else list(values))
    ids = response.ids
    if len(ids) > sampling.max_new_tokens:
        return f"{len(ids)} tokens, but max_new_tokens is {sampling.max_new_tokens}"
    for place, token in enumerate(ids):
        try:
            ids[place] = operator.index(token)
        except TypeError:
            ids[place] = -1
        if not 0 <= ids[place] < vocab:
            return f"ids must be whole numbers from 0 to below {vocab}, got {shortened(token)}"
    for name in ("logprobs", "trained", "support"):
        values = getattr(response, name)
        if values is not None and len(values) != len(ids):
            return f"{len(values)} {name} for {len(ids)} ids"
    for value in response.trained or []:
        if value not in (False, True):
            return f"trained must be True or False for each id, got {shortened(value)}"

    # What the sampler has declared: log-probabilities, and kept sets where the sampling truncates.
    reports = response.logprobs is not None
    if reports != tells_logprobs:
        return f"{'' if reports else 'no '}logprobs, but the sampler declares tells_logprobs = {tells_logprobs}"
    response.logprobs = response.logprobs and [*map(_number, response.logprobs)]
    for value in response.sampled(response.logprobs or []):
        if value is None or not MINUS_INFINITY < value <= ROUNDING:
            return f"a logprob is {value}; it must be above {MINUS_INFINITY:g}, and at most 0"
    if sampling.truncates and response.support is None and response.sampled(ids):
        return "no kept sets, though the sampling truncates"
    if (place := _outside_of_its_set(response)) is not None:
        return f"the kept set of token {place} is without its id, {ids[place]}"

    # Of one turn the stop token is the last id; of several each turn may have had one.
    stops = [i for i, token in enumerate(ids) if token in sampling.stop_ids]
    expected = [len(ids) - 1] if response.finish == "stop" else []
    if response.trained is None and stops != expected:
        return (
            f"finish={response.finish!r} and stop tokens at {stops} of {len(ids)}; "
            "only the last one may be, with stop"
        )
    return None


def _outside_of_its_set(response: Response) -> int | None:
    """Return the first place whose id was sampled, and is not in its own kept set; None without one."""
    support = joined([response.support], [len(response.ids)])
    if support is None:
        return None
    sizes = support.offsets.diff()
    place_of = torch.arange(len(sizes)).repeat_interleave(sizes)
    is_inside = sizes == 0
    is_inside[place_of[support.ids == torch.tensor(response.ids)[place_of]]] = True
    places = response.sampled(range(len(sizes)))
    return next((place for place in places if not is_inside[place]), None)


def check_scores(name: str, scores: object, samples: Sequence[Sample]) -> torch.Tensor:
    """Return the scores as (B,) fp32, NaN for None; refuse what is not one finite number or None for each sample."""
    values = []
    of_samples = listed(scores, f"scorer {name!r}", "scores", len(samples))
    for score, sample in zip(of_samples, samples, strict=True):
        value = _number(score)
        if value is not None and not abs(value) <= torch.finfo(torch.float32).max:
            came = f"{shortened(score)} ({type(score).__name__}) as the score of {sample.where}"
            raise InputError(
                f"scorer {name!r} returned {came}, not a finite number; return None where it cannot score"
            )
        values.append(math.nan if value is None else value)
    return torch.tensor(values, dtype=torch.float32)
