"""What samplers and scorers promise, held to at every step."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import torch

from fused_rl import TokenSupport
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.sampling import Sampling, joined, of_response
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample, shortened, where


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
        problem = _broken_promise(response, sampling) or _broken_record(response, sampling.truncates)
        if problem is not None:
            raise InputError(f"the sampler's response to {where(prompt)}: {problem}")

    # What is in the kept sets, of all responses at once: one by one it would take longer than all else.
    lengths = [len(response.ids) for response in responses]
    support = joined([response.support for response in responses], lengths)
    if support is None:
        return
    tokens = torch.tensor(list(chain.from_iterable(response.ids for response in responses)), dtype=torch.int64)
    broken = _broken_row(support, tokens, vocab)
    if broken is not None:
        row, problem = broken
        ends = list(accumulate(lengths))
        number = bisect_right(ends, row)
        token = row - ends[number] + lengths[number]
        place = where(prompts[number])
        raise InputError(f"the sampler's response to {place}: the kept set of token {token} {problem}")


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


def _broken_record(response: Response, needed: bool) -> str | None:
    """What is wrong with the form of a record of kept sets."""
    if response.support is None:
        return "no kept sets, though the sampling truncates" if needed and response.ids else None
    try:
        count = len(of_response(response.support))
    except (TypeError, ValueError) as error:
        return f"support is not a list of different ids for each token: {error}"
    return None if count == len(response.ids) else f"{count} kept sets for {len(response.ids)} ids"


def _broken_row(support: TokenSupport, tokens: torch.Tensor, vocab: int | None) -> tuple[int, str] | None:
    """The first row of N whose set has an id outside the vocabulary, or lacks its token (N,) int64; and which."""
    lengths, ids = support.offsets.diff(), support.ids
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


def without_stop(response: Response) -> list[int]:
    return response.ids[:-1] if response.finish == "stop" else response.ids


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
            f"scorer {name!r} returned {came} as the score of {where(sample)}, not a finite number; "
            "for a response that it cannot score, return None"
        )
    return number
