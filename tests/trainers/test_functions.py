"""What users write: scorers in both forms, sync and async, and surrogates; and what is said where one is none."""

import asyncio
import functools
import json
import math

import numpy
import pytest
import torch

import fused_rl
from fused_rl.trainers import grpo
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import to_yaml
from fused_rl.trainers.policy import options
from fused_rl.trainers.rollouts.returned import check_scores
from fused_rl.trainers.rollouts.roll_out import (
    prompts_of,
    roll_out,
    rollout_metrics,
    sample_rows_of,
)
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample
from fused_rl.trainers.scorers.functions import FunctionScorer
from fused_rl.trainers.scorers.load import load_scorers, parse_scorers
from fused_rl.trainers.scorers.options import ScorerConfig, with_scorers
from tests.trainers import runs, steps, tiny


def samples(*texts, **columns):
    """One sample per text, of lines 1, 2, …"""
    made = []
    for i, text in enumerate(texts):
        row = {"question": f"q{i}", "answer": f"a{i}", **columns}
        response = Response([5] * len(text), "stop")
        made.append(Sample(row, [], response, text, f"d.jsonl, line {i + 1}", f"q{i}"))
    return made


def called(function, *texts, **columns):
    return FunctionScorer("my:f", function)(samples(*texts, **columns))


def single(response, row):
    return None if not response else len(response) + len(row["answer"])


def as_trl(prompts, completions, answer, **columns):
    more = {"completion_ids", "trainer_state", "log_metric", "log_extra"}
    assert set(columns) == {"question", *more} and prompts == columns["question"]
    assert [len(ids) for ids in columns["completion_ids"]] == [len(text) for text in completions]
    return [len(text) + len(a) for text, a in zip(completions, answer, strict=True)]


def as_trl_without_more(completions, answer="none"):
    return [len(text) + len(a) for text, a in zip(completions, answer, strict=True)]


async def async_single(response, row):
    await asyncio.sleep(0)
    return single(response, row)


async def async_trl(completions, **columns):
    await asyncio.sleep(0)
    return as_trl_without_more(completions, columns["answer"])


class Judge:
    async def __call__(self, response, row):
        return await async_single(response, row)


FORMS = [
    single,
    as_trl,
    as_trl_without_more,
    async_single,
    async_trl,
    Judge(),
    functools.partial(single),
    functools.partial(async_trl),
]


@pytest.mark.parametrize("function", FORMS)
def test_every_form_is_called_as_it_is_written(function):
    assert called(function, "x", "yyy") == [3, 5]


def test_functions_of_trl_see_the_prompt_that_was_given_and_the_columns_of_all_rows():
    user, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "gold"}
    rows = [{"problem": "p", "question": "q"}, {"problem": [user, said], "hint": "h"}]
    encoder = Encoder(tiny.tokenizer())
    prompts = prompts_of(Rows(rows, "x"), encoder, [], column="problem", max_length=99)
    samples = []
    for prompt, text in zip(prompts, "xy", strict=True):
        given = prompt.row, prompt.ids, Response([5], "stop"), text, prompt.where, prompt.prompt
        samples.append(Sample(*given))
    seen = {}

    def function(completions, **columns):
        seen.update(columns, completions=completions)
        return [1.0] * len(completions)

    FunctionScorer("my:f", function)(samples)
    assert seen["prompts"] == ["p", [user]], "the answer that stands in the row is none"
    assert seen["completions"] == ["x", [{"role": "assistant", "content": "y"}]]
    assert seen["hint"] == [None, "h"]


def test_a_column_that_a_function_of_trl_needs_is_missed_before_the_run():
    scorer = FunctionScorer("my:f", lambda completions, answers, level=0, **columns: [])
    scorer.check({"answers": 1})
    FunctionScorer("my:f", logs).check({})
    with pytest.raises(
        InputError, match="^verifier 'my:f' takes the column 'answers'; the row has .'ans"
    ):
        scorer.check({"answer": 1})
    FunctionScorer("my:f", single).check({})


# TRL's trainer_state, log_metric and log_extra.


def logs(completions, trainer_state, log_metric, log_extra, **columns):
    """As TRL's documentation has it: a score that changes with the step, two metrics, and a column."""
    step = trainer_state.global_step
    log_metric("my/step", step)
    log_metric("my/first", torch.tensor(float(len(completions))))
    log_extra("lengths", [len(text) for text in completions])
    share = trainer_state.epoch / trainer_state.num_train_epochs if trainer_state.max_steps else 0
    return [share] * len(completions)


class LogsAsync:
    async def __call__(self, completions, **given):
        await asyncio.sleep(0)
        return logs(completions, **given)


def test_a_function_of_trl_sees_the_step_and_what_it_logs_is_kept(files, tmp_path):
    # 16 rows for training are 4 steps of 4, and the 8 steps are two passes over them; drawn a step ahead.
    config = runs.grpo_config(files, tmp_path, steps=8, eval_every=4, verifiers=None, lag=1)
    grpo.train(config, scorers=[logs, LogsAsync()])
    metrics = tiny.read_metrics(tmp_path)
    # The step's own metrics are those of the rollout, before its update; an evaluation is after it.
    assert [entry["my/step"] for entry in metrics[1:]] == list(range(8))
    evaluated = {e["step"]: e["eval/my/step"] for e in metrics if "eval/my/step" in e}
    assert evaluated == {0: 0, 4: 4, 8: 8}
    assert metrics[-1]["rewards/logs/mean"] == pytest.approx(7 / 8)
    assert metrics[-1]["my/first"] == 16
    assert metrics[-1]["eval/my/first"] == (4 * 1 + 4 * 2) / 2  # greedy, and two samples of each
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert all(row["lengths"] <= len(row["response"]) for row in map(json.loads, lines))


def rolled_out(function):
    """A rollout of two responses that a function scores."""
    sampler = steps.Sampler([Response([70], "length"), Response([71, 72], "length")])
    prompts = [Prompt([7, 8], {"question": "q"})] * 2
    how = Sampling(1.0, 4, (3,))
    scorer = FunctionScorer("my:f", function)
    return roll_out(sampler, [scorer], prompts, how, tiny.tokenizer(), torch.device("cpu"))


def test_what_is_logged_is_a_mean_over_all_ranks_and_stands_beside_the_names_of_the_run(
    monkeypatch,
):
    def function(completions, log_metric, log_extra):
        log_metric("val/stop_rate", 1)
        log_extra("reward", ["a", "b"])
        return [0.0] * len(completions)

    of_other = [("val/stop_rate", 3.0), ("val/stop_rate", 8.0), ("other", 5.0)]
    monkeypatch.setattr(ranks, "gather", lambda mine: [mine, of_other])
    rollout = rolled_out(function)
    monkeypatch.undo()
    found = rollout_metrics(rollout, {}, 1)
    assert (found["val/stop_rate"], found["logged/val/stop_rate"], found["other"]) == (0, 4, 5)
    scorers = [FunctionScorer("my:f", function)]
    (row,) = sample_rows_of("training", rollout, [1], 1, 1, tiny.tokenizer(), scorers)
    assert (row["reward"], row["logged/reward"]) == (0.0, "b")
    assert row["scores"] == {"my:f": 0.0} and row["row"] == rollout.samples[1].where


def test_a_column_has_a_value_for_each_response():
    def function(completions, log_extra):
        log_extra("mine", [1])
        return [0.0] * len(completions)

    with pytest.raises(InputError, match="'my:f': log_extra.'mine', ….*1 values for 2 responses"):
        rolled_out(function)


async def async_raises(response, row):
    await asyncio.sleep(0)
    return 1 / (response != "bad")


@pytest.mark.parametrize("function", [lambda response, row: 1 / (response != "bad"), async_raises])
def test_what_a_function_raises_is_its_own_and_the_row_is_named(function, capsys):
    with pytest.raises(ZeroDivisionError):
        called(function, "ok", "bad", "ok")
    said = "verifier 'my:f' raised on the response 'bad' to d.jsonl, line 2:\n"
    assert capsys.readouterr().err == said


def test_async_calls_go_on_together_on_one_loop():
    running, most, loops = [], [], set()

    async def function(response, row):
        running.append(response)
        most.append(len(running))
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0.01 * (3 - len(response)))  # they end in another order
        running.remove(response)
        return len(response)

    scorer = FunctionScorer("my:f", function)
    assert scorer(samples(*["a", "bb", "ccc"] * 3)) == [1, 2, 3] * 3 and max(most) == 9
    scorer(samples("a"))
    assert len(loops) == 1  # a client that the function keeps belongs to it


def edits(response, row):
    row["answer"] = "mine"
    return 0.0


def edits_ids(completions, completion_ids, answer, **columns):
    completion_ids[0].clear()
    answer[0] = "mine"
    return [0.0] * len(completions)


@pytest.mark.parametrize("function", [edits, edits_ids])
def test_a_function_sees_copies_of_rows_and_ids(function):
    seen = samples("ab")
    FunctionScorer("my:f", function)(seen)
    assert seen[0].row["answer"] == "a0"
    assert seen[0].response.ids == [5, 5]


def test_a_score_may_be_any_one_number():
    returned = [torch.tensor(0.5), numpy.float32(0.5), numpy.array(0.5), torch.tensor([0.5]), None]
    found = check_scores("my:f", returned, samples(*"abcde"))
    assert found[:4].tolist() == [0.5] * 4 and found[4].isnan()


BROKEN = [
    # Its keys would be read as scores.
    ({0: 1.0, 1: 2.0}, "returned 0 scores .{0: 1.0, 1: 2.0}.; expected a list of 2"),
    ("11", "returned 0 scores .'11'.; expected a list of 2"),
    ([1.0, "1"], "returned '1' .str. as the score of d.jsonl, line 2"),
    ([1.0, math.nan], "returned nan .float. as the score of d.jsonl, line 2"),
    ([1.0, 1e39], "returned 1e.39 .float. as the score of d.jsonl, line 2"),
]


@pytest.mark.parametrize(("returned", "message"), BROKEN)
def test_scores_that_are_none_are_a_line_with_name_and_row(returned, message):
    with pytest.raises(InputError, match=f"^scorer 'my:f' {message}"):
        check_scores("my:f", returned, samples("a", "b"))


def half(response, row):
    """Its scores end at 0.5."""
    return 0.5


def test_scorers_are_objects_in_python_and_stand_by_name_in_the_config():
    config = ScorerConfig(verifier_weights=[1, 2, 3])
    given = with_scorers(config, ["math", half, Judge()])
    found = [(one.name, one.weight) for one in parse_scorers(given)]
    assert found == [("math", 1), ("half", 2), ("Judge", 3)]
    named = f"verifiers:\n- math\n- {__name__}:half\n- {__name__}:Judge\n"
    assert named in to_yaml(given) and config.verifiers is None
    (scorer,) = load_scorers(with_scorers(ScorerConfig(), [half]))
    assert scorer.function is half and (scorer.name, scorer.solved_at) == ("half", 1.0)
    with pytest.raises(InputError, match="are both given"):
        with_scorers(ScorerConfig(verifiers="math"), [half])
    with pytest.raises(InputError, match="verifiers names 'half' twice"):
        parse_scorers(with_scorers(ScorerConfig(), [half, half]))


def test_functions_that_share_a_name_are_told_apart():
    functions = [functools.partial(times, factor=factor) for factor in (2, 3)]
    given = with_scorers(ScorerConfig(), [*functions, Judge(), Judge()])
    assert [one.name for one in parse_scorers(given)] == ["times", "times_2", "Judge", "Judge_4"]
    scorers = load_scorers(with_scorers(ScorerConfig(), functions))
    assert [scorer(samples("ab"))[0] for scorer in scorers] == [4, 6]


def times(response, row, factor):
    return factor * len(response)


# Surrogates.


def weighted(log_ratio, advantages, logprobs, sequences, options, weight=1.0):
    return -weight * log_ratio.exp() * advantages, {"ratio": log_ratio.exp()}


@pytest.mark.parametrize("surrogate", [f"{__name__}:weighted", weighted])
def test_a_surrogate_is_an_object_or_a_name_with_options_and_reports_metrics(surrogate):
    ones = torch.ones(2, 3)
    for more, weight in (({}, 1), ({"surrogate_options": {"weight": 3.0}}, 3)):
        chosen = options.loss_options(steps.config_of(surrogate=surrogate, **more))
        loss, metrics = fused_rl.policy_loss(ones, ones, ones, ones.bool(), options=chosen)
        assert (loss, metrics["surrogate/ratio"]) == (-weight, 1)
