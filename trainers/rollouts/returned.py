"""What samplers and scorers of the user's own return, as plain lists: checked in one place, with an error of one line.

Any iterable is a list, and any kind of number is one: Python's, numpy's, a tensor's. Text and mappings are neither.
"""

import contextlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch

from fused_rl import TokenSupport

from ..base.text import InputError
from .sampling import Sampling
from .types import Prompt, Response, Sample, Sampler, one_line

# Nats by which a log-probability may be above 0: servers round the softmax of 16-bit logits.
ROUNDING = 1e-4
# What vLLM returns for a log-probability of minus infinity, which no sampled token has.
MINUS_INFINITY = -9999.0
NOT_A_NUMBER = (TypeError, ValueError, RuntimeError)  # RuntimeError: a tensor of several


def checked_list(returned: object, source: str, noun: str, count: int) -> list:
    """Return what `source` returned as a list of `count`, and refuse what is none."""
    values: list = []
    if isinstance(returned, Iterable) and not isinstance(returned, str | Mapping):
        values = list(returned)
    if len(values) != count:
        got = f"{len(values)} {noun} ({one_line(returned)})"
        raise InputError(f"{source} returned {got}; expected a list of {count}")
    return values


def _number(value) -> float | None:
    """Return any kind of number as Python's, and None as it is; text raises one of `NOT_A_NUMBER`."""
    # float() alone takes text such as "1".
    return value if value is None else float(math.nan if isinstance(value, str) else value)


def sampled_by(sampler: Sampler, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
    """Return the sampler's response to each prompt."""
    returned = sampler.sample(prompts, sampling)
    return checked_list(returned, "the sampler", "responses", len(prompts))


def check_responses(
    responses: Sequence[Response],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocab: float,
    *,
    reports_logprobs: bool,
) -> None:
    """Refuse responses that no loss can be computed of; an error names the row."""
    for response, prompt in zip(responses, prompts, strict=True):
        problem = _problem_of(response, sampling, vocab, reports_logprobs)
        if problem is not None:
            raise InputError(f"the sampler's response to {prompt.where}: {problem}")


def _problem_of(
    response: Response, sampling: Sampling, vocab: float, reports_logprobs: bool
) -> str | None:
    """Return what is wrong with a response, in words; what is right becomes plain lists."""
    try:
        ids = response.ids = [operator.index(token) for token in response.ids]
        for name in ("logprobs", "trained"):
            if (values := getattr(response, name)) is not None:
                setattr(response, name, [_number(value) for value in values])
        if not isinstance(response.support, TokenSupport | None):
            response.support = TokenSupport.from_lists(response.support)
    except (AttributeError, *NOT_A_NUMBER) as error:
        return f"expected a Response of whole ids and numbers, got {one_line(response)} ({error})"
    if len(ids) > sampling.max_new_tokens or not all(0 <= token < vocab for token in ids):
        expected = f"at most {sampling.max_new_tokens} ids from 0 to below {vocab}"
        return f"expected {expected}, got {len(ids)}: {one_line(ids)}"
    for name in ("logprobs", "trained", "support"):
        values = getattr(response, name)
        if values is not None and len(values) != len(ids):
            return f"{len(values)} {name} for {len(ids)} ids"
    if not {*(response.trained or ())} <= {0, 1}:
        return f"trained={one_line(response.trained)}; expected True or False for each id"

    # What the sampler has declared: log-probabilities, and kept sets where the sampling truncates.
    if (response.logprobs is None) == reports_logprobs:
        return f"logprobs={response.logprobs!r:.80} of a sampler with reports_logprobs = {reports_logprobs}"
    for value in response.sampled(response.logprobs or []):
        if value is None or not MINUS_INFINITY < value <= ROUNDING:
            return f"a logprob is {value}; it must be above {MINUS_INFINITY:g}, and at most 0"
    if response.support is not None and not (response.support.ids < vocab).all():
        return f"id {response.support.ids.max()} in a kept set; expected ids below {vocab}"
    if sampling.truncates and response.support is None and response.sampled(ids):
        return "no kept sets, though the sampling truncates"

    # Of one turn the stop token is the last id; of several each turn may have had one.
    stops = [i for i, token in enumerate(ids) if token in sampling.stop_ids]
    expected = {"stop": [len(ids) - 1], "length": []}.get(response.finish)
    if expected is None or (response.trained is None and stops != expected):
        return (
            f"finish={response.finish!r} and stop tokens at {stops} of {len(ids)}; "
            "expected stop with the last id alone, or length with none"
        )
    return None


def check_scores(name: str, scores: object, samples: Sequence[Sample]) -> torch.Tensor:
    """Return the scores as (B,) fp32, NaN for None; refuse what is not one finite number or None for each sample."""
    values = []
    sample_scores = checked_list(scores, f"scorer {name!r}", "scores", len(samples))
    for score, sample in zip(sample_scores, samples, strict=True):
        value, is_fine = None, False
        with contextlib.suppress(*NOT_A_NUMBER):
            value = _number(score)
            is_fine = value is None or abs(value) <= torch.finfo(torch.float32).max
        if not is_fine:
            got = f"{one_line(score)} ({type(score).__name__}) as the score of {sample.where}"
            raise InputError(
                f"scorer {name!r} returned {got}, not a finite number; return None where it cannot score"
            )
        values.append(math.nan if value is None else value)
    return torch.tensor(values, dtype=torch.float32)
