"""From rows to prompts, and from prompts to scored responses: what a sampler returns, and what a scorer sees.

A sampler may be this process's model (generate.py) or a server; a scorer may read text (a verifier), token ids (a
reward model) or the dataset's row. Neither knows of the other, nor of the algorithm.
"""

import functools
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any, TypeVar

import numpy
import torch

from ..base import ranks
from ..base.screen import print_rank0
from ..base.text import InputError
from ..data import encode
from ..data.batch import Batch, make_batch
from ..data.examples import Examples, Record, encode_rows
from ..data.forms import RowReader
from ..data.rows import BadRow, Rows
from .returned import check_responses, check_scores, sampled_by
from .sampling import NoDistribution, Sampling
from .types import (
    NO_PROGRESS,
    Progress,
    Prompt,
    Response,
    Rollout,
    Sample,
    Sampler,
    Scorer,
    support_of,
)

Item = TypeVar("Item")


def prompts_of(
    rows: Rows,
    encoder: encode.Encoder,
    scorers: Sequence[Scorer],
    *checks: Callable[[dict], object],
    column: str | None,
    max_length: int,
    completion_column: str | None = None,
) -> Examples:
    """Return a `Prompt` for every row that is short enough.

    Args:
        rows: the rows.
        encoder: makes token ids of them.
        scorers: each checks every row.
        checks: more of them; each raises an InputError for a row that cannot be used.
        column: as the option prompt_column.
        max_length: of a prompt, in tokens.
        completion_column: of the completion that each row must have; None reads none.
    """
    checks = (*checks, *(scorer.check for scorer in scorers))
    read = functools.partial(
        _read_prompt, encoder, column=column, completion_column=completion_column
    )
    prompts = encode_rows(rows, encoder.key, read, _prompt)
    for scorer in scorers:
        # None is any column.
        rows.columns_read.update(rows.columns_filled if scorer.columns is None else scorer.columns)
        scorer.read_ahead(row for _, row in prompts.parsed_rows())
    # A row that a scorer cannot score is found here, and does not stop the run hours later.
    if checks:
        passed = numpy.zeros(len(rows), bool)
        for i, row in prompts.parsed_rows():
            with rows.collecting(i):
                for check_row in checks:
                    check_row(row)
                passed[i] = True
        prompts = prompts.chosen(passed[prompts.column("row")])
    return prompts.within_limits("prompt", {"prompt": ("max_prompt_length", max_length)})


def _read_prompt(
    encoder: encode.Encoder, reader: RowReader, *, column: str | None, completion_column: str | None
) -> list[Record]:
    prompt, ids = encoder.prompt(reader, column)
    completion: list[int] = []
    if completion_column is not None:
        demonstrations = encoder.demonstrations(reader, column, completion_column, joined=False)
        if len(demonstrations) > 1:
            raise BadRow("the completion has several turns of the assistant", "give one")
        completion = demonstrations[0].response
    return [Record([ids, completion], prompt)]


def _prompt(ids: list[list[int]], prompt: Any, rows: Rows, i: int) -> Prompt:
    return Prompt(ids[0], rows[i], rows.where(i), prompt, ids[1] or None)


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
    vocab: float = math.inf,
    progress: Progress = NO_PROGRESS,
) -> Rollout:
    """Sample `copies` responses to each of this rank's prompts, with ids below `vocab`, and score them.

    Scorers that ask for it see the run's `progress`.
    """
    # Sample. Copies of a prompt are neighbours, so that a sampler may compute it once; each gets a list of its own,
    # which it may change.
    began = time.monotonic()
    prompts = list(chain.from_iterable([prompt] * copies for prompt in prompts))
    sampling = replace(sampling, prompts=tuple(prompts))
    try:
        responses = _sampled(sampler, [list(prompt.ids) for prompt in prompts], sampling, device)
    except NoDistribution as error:
        places = [prompts[number].where for number in error.responses]
        rows = ", ".join(dict.fromkeys(places))
        problem = "the model's logits are NaN or infinite"
        raise InputError(
            f"sampling with the weights after step {error.step}: {problem}; their rows: {rows}"
        ) from error
    if sampler.is_checked:
        check_responses(
            responses, prompts, sampling, vocab, reports_logprobs=sampler.reports_logprobs
        )
    sampled_at = time.monotonic()

    # Score. A scorer reads the text without the stop token, which the model said to end it.
    spoken = []
    for response in responses:
        ended = bool(response.ids) and response.ids[-1] in sampling.stop_ids
        spoken.append(response.ids[:-1] if ended else response.ids)
    texts = tokenizer.batch_decode(spoken)
    samples = []
    for prompt, response, text in zip(prompts, responses, texts, strict=True):
        ids = response.extra.get("prompt_ids", prompt.ids)
        samples.append(Sample(prompt.row, ids, response, text, prompt.where, prompt.prompt))
    scores = {}
    rewards = torch.zeros(len(samples))
    for scorer in scorers:
        scorer.progress = progress
        scorer_values = scores[scorer.name] = _scores_by(scorer, samples)
        rewards = rewards + scorer.weight * scorer_values.nan_to_num()
    solved = _solved(scorers, scores, len(samples))
    incidents = _report_broken(scorers, len(samples))
    logged = _take_logged(scorers, responses)
    # It has been read, and an environment cannot be sent to another rank.
    for response in responses:
        response.extra.clear()
    scored_at = time.monotonic()

    # The batch to train on.
    batch = batch_of(samples, tokenizer.pad_token_id, device)
    seconds = {"time/rollout": sampled_at - began, "time/score": scored_at - sampled_at}
    return Rollout(samples, batch, scores, rewards, solved, seconds, incidents, logged)


def _sampled(
    sampler: Sampler, prompts: list[list[int]], sampling: Sampling, device: torch.device
) -> list[Response]:
    """Return a response to each prompt; processes that hold parts of the same sequences share the work."""
    if ranks.sequence_group() is None:
        return sampled_by(sampler, prompts, sampling)
    mine = ranks.my_items(len(prompts))
    sampling = sampling.select(mine)
    # Copies of a prompt must not be sampled by the same random numbers, and the processes' generators stay alike.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(sampling.seeds[0] if sampling.seeds else 0)
        try:
            responses = sampled_by(sampler, [prompts[i] for i in mine], sampling)
        except NoDistribution as error:
            broken = [mine[number] for number in error.responses]
            raise NoDistribution(broken, error.step) from error
    return ranks.gather_items(responses, len(prompts))


def _scores_by(scorer: Scorer, samples: list[Sample]) -> torch.Tensor:
    """Return a scorer's scores (B,); of processes that hold parts of the same sequences the first calls it, or they
    share the work of one that says so.
    """

    def checked() -> torch.Tensor:
        return check_scores(scorer.name, scorer(samples), samples)

    # What a scorer returns is checked where it was called: a generator cannot be sent, and a tensor may be on a GPU.
    return checked() if getattr(scorer, "shares_work", False) else ranks.on_sequence_leader(checked)


def _solved(scorers: Sequence[Scorer], scores: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Return (B,) bool: a judge applies, and each that applies says right."""
    # NaN, where a scorer does not apply, passes no threshold and fails none.
    solved = torch.zeros(count, dtype=torch.bool)
    wrong = solved.clone()
    for scorer in scorers:
        if scorer.solved_at is not None:
            passed = scores[scorer.name] >= scorer.solved_at
            solved |= passed
            wrong |= ~passed & ~scores[scorer.name].isnan()
    return solved & ~wrong


def batch_of(samples: list[Sample], pad_id: int, device: torch.device) -> Batch:
    """Return prompts and responses as one batch, with the kept sets of the tokens that count."""
    responses = [sample.response for sample in samples]
    places = [sample.where for sample in samples]
    prompt_ids = [sample.prompt_ids for sample in samples]
    response_ids = [response.ids for response in responses]
    trained = [response.trained for response in responses]
    batch = make_batch(prompt_ids, response_ids, pad_id, device, where=places, trained=trained)
    support = support_of(responses)
    return batch if support is None else replace(batch, support=support)


def _report_broken(scorers: Sequence[Scorer], count: int) -> dict[str, float]:
    """Return the metrics of limits that were broken on any rank since the last call; rank 0 prints a line of them."""
    metrics = {}
    limited: list[Any] = [scorer for scorer in scorers if hasattr(scorer, "broken")]
    for scorer in limited:
        # What is reported once is forgotten, so that the next rollout counts its own.
        broken_by_rank, counts = zip(*ranks.gather((scorer.broken, count)), strict=True)
        scorer.broken = []
        broken = [*chain.from_iterable(broken_by_rank)]
        metrics[f"verifier/{scorer.name}/timeouts"] = float(len(broken))
        if broken:
            print_rank0(
                f"{scorer.name}: {len(broken)} of {sum(counts)} answers broke a limit and score 0; first: {broken[0]}"
            )
    return metrics


def _take_logged(
    scorers: Sequence[Scorer], responses: Sequence[Response]
) -> list[tuple[str, float]]:
    """Return the metrics of responses, and those that scorers have logged since the last call, over all ranks."""
    logged = [*chain.from_iterable(response.extra.get("logged", ()) for response in responses)]
    reporting: list[Any] = [scorer for scorer in scorers if hasattr(scorer, "logged")]
    for scorer in reporting:
        logged += scorer.logged
        scorer.logged = []
    return [*chain.from_iterable(ranks.gather(logged))]


def means_of(logged: Sequence[tuple[str, float]], run_names: Collection[str]) -> dict[str, float]:
    """Return the means of the metrics that scorers logged, which are not those named `run_names`."""
    values: dict[str, list[float]] = {}
    for name, value in logged:
        values.setdefault(name, []).append(value)
    return _under_free_names(run_names, {name: fmean(numbers) for name, numbers in values.items()})


def _under_free_names(run_names: Collection[str], logged: dict[str, Item]) -> dict[str, Item]:
    """Return what scorers logged, with a prefix where a name is one of `run_names`, so that none is lost."""
    return {
        f"logged/{name}" if name in run_names else name: value for name, value in logged.items()
    }


def rollout_metrics(
    rollout: Rollout, columns: dict[str, torch.Tensor], step: int
) -> dict[str, float]:
    """Return the metrics of the responses over all ranks: the means of `columns`, (B,) or (B, T), and lengths."""
    # Every rank has as many samples as the others, so a mean over all is a sum over ranks by one count.
    lengths = rollout.lengths.double()
    columns = columns | {"completions/mean_length": lengths, "val/stop_rate": rollout.stopped}
    count = len(lengths) * ranks.world_size()
    sums = {name: column.double().sum() for name, column in columns.items()}
    totals = ranks.global_sums(sums)
    metrics = {name: total / count for name, total in totals.items()}
    metrics |= {
        "completions/min_length": -ranks.global_max(-lengths.min()),
        "completions/max_length": ranks.global_max(lengths.max()),
        "completions/clipped_ratio": 1 - metrics["val/stop_rate"],
        "val/num_eos_tokens": metrics["val/stop_rate"] * count,
        "episode": step * count,
    }

    # Each scorer's mean and deviation over the samples that it applies to, and the share of the others.
    for name, values in rollout.scores.items():
        applies = values[~values.isnan()].double()
        moments = [torch.ones_like(applies).sum(), applies.sum()]
        moments.append(applies.square().sum())
        moments.append(values.isnan().double().sum())
        summed = ranks.global_sum(torch.stack(moments))
        applied, total, square, none = summed.tolist()
        if applied:
            mean = total / applied
            metrics[f"rewards/{name}/mean"] = mean
            metrics[f"rewards/{name}/std"] = math.sqrt(max(square / applied - mean**2, 0))
        metrics[f"rewards/{name}/none"] = none / (applied + none)
    metrics |= rollout.incidents | rollout.seconds
    return metrics | means_of(rollout.logged, metrics)


def right_answer(row: dict, prompt: Any, scorers: Sequence[Scorer]) -> dict[str, Any]:
    """Return the answer that a scorer finds in a row, or else the "columns" that scorers may read beside the prompt."""
    answers = [getattr(scorer, "answer", lambda _: None)(row) for scorer in scorers]
    stated = [answer for answer in answers if answer is not None]
    if stated:
        return {"answer": stated[0]}
    turns = prompt if isinstance(prompt, list) else []
    texts = [prompt, *(turn.get("content") for turn in turns)]
    columns = {}
    for name, value in row.items():
        is_read = any(scorer.columns is None or name in scorer.columns for scorer in scorers)
        if is_read and value not in (None, "", *texts):
            columns[name] = value
    return {"columns": columns} if columns else {}


def sample_rows_of(
    of: str,
    rollout: Rollout,
    places: Sequence[int],
    count: int,
    seed: object,
    tokenizer,
    scorers: Sequence[Scorer] = (),
) -> list[dict]:
    """Return lines of samples.jsonl: `count` of the samples at `places`, chosen by a generator of their own.

    They say what they are `of` and what the `scorers` read in the row; their text has its special tokens.
    """
    # With a generator of its own the choice neither depends on how often samples are shown nor changes what is sampled.
    rows = []
    generator = random.Random(str(seed))
    for i in generator.sample(places, min(count, len(places))):
        sample = rollout.samples[i]
        texts = {
            "prompt": tokenizer.decode(sample.prompt_ids),
            "response": tokenizer.decode(sample.response.ids),
        }
        row: dict[str, Any] = {"of": of, "row": sample.where, **texts}
        row |= right_answer(sample.row, sample.prompt, scorers)
        scores = {name: values[i].item() for name, values in rollout.scores.items()}
        row |= {"reward": rollout.rewards[i].item(), "scores": scores}
        row["prompt_tokens"] = len(sample.prompt_ids)
        row["tokens"] = len(sample.response.ids)
        rows.append(row | _under_free_names((*row, "step"), sample.logged))
    return rows
