"""What samplers and scorers promise, held to at every step."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch

from fused_rl import TokenSupport
from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.sampling import Sampling, of_response
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample, Sampler, shortened, support_of

ROUNDING = 1e-4  # nats by which a log-probability may be above 0


def check_sampler(sampler: Sampler, sampling: Sampling) -> None:
    """Refuse a sampling that truncates by a sampler that does not record what it left to draw from."""
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
    responses: Any,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocab: int | None = None,
    *,
    sampler: Sampler | None = None,
    version: int | None = None,
) -> None:
    """Refuse what breaks the promises of `Response`; an error names the prompt's row.

    Where they are known: `vocab`, the size of the model's vocabulary, `sampler`, what declares what it tells, and
    `version`, the step whose weights were to be sampled.
    """
    if not isinstance(responses, list) or len(responses) != len(prompts):
        came = len(responses) if isinstance(responses, list) else type(responses).__name__
        raise InputError(
            f"the sampler returned {came} responses to {len(prompts)} prompts; it must return one for each"
        )
    for response, prompt in zip(responses, prompts, strict=True):
        problem = _broken_promise(response, sampling, vocab) or _broken_record(response, sampling.truncates)
        problem = problem or _undeclared(response, sampler, version)
        if problem is not None:
            raise InputError(f"the sampler's response to {prompt.where}: {problem}")
    _check_sets(responses, prompts, vocab)


def _check_sets(responses: Sequence[Response], prompts: Sequence[Prompt], vocab: int | None) -> None:
    """What is in the kept sets, of all responses at once: one by one it would take longer than all else."""
    support = support_of(responses)
    if support is None:
        return
    drawn = [response.drawn(response.ids) for response in responses]
    tokens = torch.tensor(list(chain.from_iterable(drawn)), dtype=torch.int64)
    broken = _broken_row(support, tokens, vocab)
    if broken is not None:
        row, problem = broken
        ends = list(accumulate(map(len, drawn)))
        number = bisect_right(ends, row)
        of_response = responses[number].drawn(range(len(responses[number].ids)))
        token = of_response[row - ends[number]]  # counted from the response's end
        place = prompts[number].where
        raise InputError(f"the sampler's response to {place}: the kept set of token {token} {problem}")


def _undeclared(response: Response, sampler: Sampler | None, version: int | None) -> str | None:
    """What its sampler declares and it lacks, or the other weights that it was drawn with."""
    tells = response.logprobs is not None
    found = response.weight_version
    if sampler is not None and tells != sampler.tells_logprobs:
        return f"{'' if tells else 'no '}logprobs, but the sampler declares tells_logprobs = {sampler.tells_logprobs}"
    if sampler is not None and sampler.has_versions and found is None:
        return "no weight_version, but the sampler declares has_versions = True"
    if None in (found, version) or found == version:
        return None
    return (
        f"drawn with the weights after step {found}, but those after step {version} are to be sampled: the sampler did "
        "not take what was published, or somebody else gave it other weights"
    )


def _broken_promise(response: Response, sampling: Sampling, vocab: int | None) -> str | None:
    if not isinstance(response, Response) or not isinstance(response.ids, list):
        return f"expected a Response with a list of token ids, got {shortened(response)}"
    ids = response.ids
    told = response.logprobs
    trained = response.trained
    if len(ids) > sampling.max_new_tokens:
        return f"{len(ids)} tokens, but max_new_tokens is {sampling.max_new_tokens}"
    bad = [token for token in ids if not isinstance(token, int) or not 0 <= token < (vocab or math.inf)]
    if bad:
        return f"ids must be whole numbers from 0 to below {vocab or 'the vocabulary size'}, got {shortened(bad[0])}"
    if response.finish not in ("stop", "length"):
        return f"finish={response.finish!r}, which must be stop or length"
    if trained is not None and not _are_flags(trained, len(ids)):
        return f"trained is {shortened(trained)}; it must be a bool for each of {len(ids)} ids"
    if told is not None and len(told) != len(ids):
        return f"{len(told)} logprobs for {len(ids)} ids"
    drawn = [] if told is None else response.drawn(told)
    bad = [value for value in drawn if value is None or not -math.inf < value <= ROUNDING]
    if bad:
        return f"a logprob is {bad[0]}; it must be finite, and at most 0"
    return _broken_end(response, sampling.stop_ids)


def _are_flags(trained: list[bool], count: int) -> bool:
    return isinstance(trained, list) and [type(flag) for flag in trained] == [bool] * count


def _broken_end(response: Response, stop_ids: Sequence[int]) -> str | None:
    """What is wrong with where stop tokens stand."""
    ids = response.ids
    trained = response.trained
    stops = [i for i, token in enumerate(ids) if token in stop_ids]
    if trained is None and ((response.finish == "stop") != (stops == [len(ids) - 1]) or stops[:-1]):
        return (
            f"finish={response.finish!r} and stop tokens at {stops} of {len(ids)}; only the last one may be, with stop"
        )
    passed = [i for i in stops if trained and trained[i] and trained[i + 1 : i + 2] == [True]]
    if passed:
        return f"the policy drew on after its stop token at {passed[0]} of {len(ids)}; its turn ends there"
    return None


def _broken_record(response: Response, needed: bool) -> str | None:
    """What is wrong with the form of a record of kept sets."""
    if response.support is None:
        drawn = response.drawn(response.ids)
        return "no kept sets, though the sampling truncates" if needed and drawn else None
    try:
        count = len(of_response(response.support))
    except (TypeError, ValueError) as error:
        return f"support is not a list of different ids for each token: {error}"
    return None if count == len(response.ids) else f"{count} kept sets for {len(response.ids)} ids"


def _broken_row(support: TokenSupport, tokens: torch.Tensor, vocab: int | None) -> tuple[int, str] | None:
    """The first row of N whose set has an id outside the vocabulary, or lacks its token (N,) int64; and which."""
    lengths = support.offsets.diff()
    ids = support.ids
    row = torch.repeat_interleave(lengths)
    if vocab is not None and bool((ids >= vocab).any()):
        at = int((ids >= vocab).nonzero()[0])
        return int(row[at]), f"has id {int(ids[at])}, outside the model's vocabulary of {vocab}"
    found = lengths == 0  # the whole vocabulary
    found[row[ids == tokens[row]]] = True
    if bool(found.all()):
        return None
    missing = int((~found).nonzero()[0])
    return missing, f"of {int(lengths[missing])} ids lacks the token itself, {int(tokens[missing])}"


def without_stop(response: Response, stop_ids: Sequence[int]) -> list[int]:
    """Its ids without the stop token at its end."""
    return response.ids[:-1] if response.ids and response.ids[-1] in stop_ids else response.ids


def check_scores(name: str, scores: list[float | None], samples: Sequence[Sample]) -> torch.Tensor:
    """The scores as (B,) fp32, NaN for None; an error names the scorer, and the row of a score that is no number.

    They come as a list, tuple, array or tensor of one number or None for each sample.
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
            f"scorer {name!r} returned {came} as the score of {sample.where}, not a finite number; "
            "for a response that it cannot score, return None"
        )
    return number
