"""Checks of what samplers and scorers return, at every step; an error names the row."""

import math
from collections.abc import Iterable, Sequence

import torch

from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample, Sampler, shortened

ROUNDING = 1e-4  # nats by which a log-probability may be above 0


def check_sampler(sampler: Sampler, sampling: Sampling) -> None:
    """Refuse a sampling that truncates by a sampler that does not record its kept sets."""
    if sampling.truncates and not sampler.records_support:
        raise InputError(
            f"top_p={sampling.top_p:g} top_k={sampling.top_k} min_p={sampling.min_p:g} with a sampler that reports no "
            f"kept sets ({type(sampler).__name__}): every log-probability would be off by -ln(kept mass); drop the "
            "option, or have the sampler record the sets"
        )


def check_correction(sampler: Sampler, given: Sequence[str]) -> None:
    """Refuse options, `given` by name, that correct for a sampler whose log-probabilities are the policy's own."""
    if given and not sampler.tells_logprobs:
        raise InputError(
            f"{', '.join(given)} corrects for a sampler that differs from the policy, but here the policy itself is "
            "sampled; leave it out"
        )


def check_responses(
    responses: list[Response],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocab: int | None = None,
    *,
    sampler: Sampler | None = None,
    version: int | None = None,
) -> None:
    """Refuse responses that are not what `Response` and the sampler's declarations promise.

    Where they are known: `vocab`, the size of the model's vocabulary, `sampler`, what declares what it reports, and
    `version`, the step whose weights were to be sampled.
    """
    if len(responses) != len(prompts):
        raise InputError(f"the sampler returned {len(responses)} responses to {len(prompts)} prompts")
    for response, prompt in zip(responses, prompts, strict=True):
        problem = _problem_of(response, sampling, vocab or math.inf)
        problem = problem or _undeclared(response, sampler, version)
        if problem is not None:
            raise InputError(f"the sampler's response to {prompt.where}: {problem}")


def _problem_of(response: Response, sampling: Sampling, vocab: float) -> str | None:
    """Return what is wrong with the fields of a response."""
    ids = response.ids
    if len(ids) > sampling.max_new_tokens:
        return f"{len(ids)} tokens, but max_new_tokens is {sampling.max_new_tokens}"
    bad = [token for token in ids if not (isinstance(token, int) and 0 <= token < vocab)]
    if bad:
        return f"ids must be whole numbers from 0 to below {vocab}, got {shortened(bad[0])}"
    for name in ("logprobs", "trained", "support"):
        values = getattr(response, name)
        if values is not None and len(values) != len(ids):
            return f"{len(values)} {name} for {len(ids)} ids"
    sampled = response.drawn(response.logprobs or [])
    bad = [value for value in sampled if value is None or not -math.inf < value <= ROUNDING]
    if bad:
        return f"a logprob is {bad[0]}; it must be finite, and at most 0"
    if sampling.truncates and response.support is None and response.drawn(ids):
        return "no kept sets, though the sampling truncates"
    return _broken_end(response, sampling.stop_ids)


def _broken_end(response: Response, stop_ids: Sequence[int]) -> str | None:
    """Return what is wrong with where stop tokens stand."""
    ids = response.ids
    trained = response.trained
    stops = [i for i, token in enumerate(ids) if token in stop_ids]
    expected = [len(ids) - 1] if response.finish == "stop" else []
    if response.finish not in ("stop", "length") or (trained is None and stops != expected):
        return (
            f"finish={response.finish!r} and stop tokens at {stops} of {len(ids)}; only the last one may be, with stop"
        )
    own = [i for i in stops if trained and trained[i]]
    passed = [i for i in own if trained[i + 1 : i + 2] == [True]]
    if passed:
        return f"the policy goes on after its stop token at {passed[0]} of {len(ids)}; its turn ends there"
    return None


def _undeclared(response: Response, sampler: Sampler | None, version: int | None) -> str | None:
    """Return what the sampler declares and the response lacks, or the other weights that it was sampled with."""
    reports = response.logprobs is not None
    found = response.weight_version
    if sampler is not None and reports != sampler.tells_logprobs:
        return f"{'' if reports else 'no '}logprobs, but the sampler declares tells_logprobs = {sampler.tells_logprobs}"
    if sampler is not None and sampler.has_versions and found is None:
        return "no weight_version, but the sampler declares has_versions = True"
    if None in (found, version) or found == version:
        return None
    return (
        f"sampled with the weights after step {found}, but those after step {version} are to be sampled: the sampler "
        "did not take what was published, or somebody else gave it other weights"
    )


def without_stop(response: Response, stop_ids: Sequence[int]) -> list[int]:
    """Return its ids without the stop token at its end."""
    return response.ids[:-1] if response.ids and response.ids[-1] in stop_ids else response.ids


def check_scores(name: str, scores: Iterable[float | None], samples: Sequence[Sample]) -> torch.Tensor:
    """Return the scores as (B,) fp32, NaN for None; refuse what is not one finite number or None for each sample."""
    if isinstance(scores, str) or not isinstance(scores, Iterable):
        raise InputError(f"scorer {name!r} returned {shortened(scores)}; it must return a list of scores")
    scores = list(scores)
    if len(scores) != len(samples):
        raise InputError(f"scorer {name!r} returned {len(scores)} scores for {len(samples)} responses")
    values = []
    for score, sample in zip(scores, samples, strict=True):
        try:
            value = 0.0 if score is None else float(score)
        except (TypeError, ValueError):
            value = math.nan
        if isinstance(score, str) or not abs(value) <= torch.finfo(torch.float32).max:
            came = f"{shortened(score)} ({type(score).__name__}) as the score of {sample.where}"
            raise InputError(f"scorer {name!r} returned {came}, not a finite number; return None where it cannot score")
        values.append(math.nan if score is None else value)
    return torch.tensor(values, dtype=torch.float32)
