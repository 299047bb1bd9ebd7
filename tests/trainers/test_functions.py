"""Functions of users in every form, sync and async, and the row that is named when one goes wrong."""

import asyncio
import functools
import random
import re
import signal
import threading
import time

import numpy
import pytest
import torch

from fused_rl.trainers.base.guests import load_function
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.checks import check_scores
from fused_rl.trainers.rollouts.types import Response, Sample
from fused_rl.trainers.run.loop import Interruption
from fused_rl.trainers.scorers import functions
from fused_rl.trainers.scorers.functions import FunctionScorer


def samples(*texts, **columns):
    """One sample per text, of lines 1, 2, …"""
    made = []
    for i, text in enumerate(texts):
        row = {"question": f"q{i}", "answer": f"a{i}", **columns}
        made.append(Sample(row, [], Response([5] * len(text), "stop"), text, f"d.jsonl, line {i + 1}"))
    return made


def called(function, *texts, **columns):
    return FunctionScorer("my:f", function)(samples(*texts, **columns))


def batch(responses, rows):
    return [len(r) + len(row["answer"]) for r, row in zip(responses, rows, strict=True)]


def single(response, row):
    return None if not response else len(response) + len(row["answer"])


def as_trl(prompts, completions, answer, **columns):
    assert set(columns) == {"question", "completion_ids"} and prompts == columns["question"]
    assert [len(ids) for ids in columns["completion_ids"]] == [len(text) for text in completions]
    return [len(text) + len(a) for text, a in zip(completions, answer, strict=True)]


def as_trl_without_more(completions, answer="none"):
    return [len(text) + len(a) for text, a in zip(completions, answer, strict=True)]


async def async_batch(responses, rows):
    await asyncio.sleep(0)
    return batch(responses, rows)


async def async_single(response, row):
    await asyncio.sleep(0)
    return single(response, row)


async def async_trl(completions, **columns):
    await asyncio.sleep(0)
    return as_trl_without_more(completions, columns["answer"])


class Callable:
    async def __call__(self, response, row):
        return await async_single(response, row)


FORMS = [batch, single, as_trl, as_trl_without_more, async_batch, async_single, async_trl, Callable()]


@pytest.mark.parametrize(
    "function", [*FORMS, functools.partial(async_single)], ids=lambda function: getattr(function, "__name__", "object")
)
def test_every_form_is_called_as_it_is_written(function):
    assert called(function, "x", "yyy") == [3, 5]


def test_functions_of_trl_see_messages_where_the_prompt_is_messages():
    turn = [{"role": "user", "content": "q"}]
    seen = []

    def function(prompts, completions, **columns):
        seen.extend(zip(prompts, completions, strict=True))
        return [1.0] * len(prompts)

    called(function, "x", prompt=turn)
    assert seen == [(turn, [{"role": "assistant", "content": "x"}])]


def test_functions_of_trl_see_the_prompt_that_was_given_and_the_columns_of_all_rows():
    user, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "gold"}
    rows = [{"problem": "p", "question": "q"}, {"messages": [user, said], "hint": "h"}]
    given = [
        Sample(rows[0], [], Response([5], "stop"), "x", column="problem"),
        Sample(rows[1], [], Response([5], "stop"), "y"),
    ]
    seen = {}

    def function(completions, **columns):
        seen.update(columns, completions=completions)
        return [1.0] * len(completions)

    FunctionScorer("my:f", function)(given)
    assert seen["prompts"] == ["p", [user]], "--prompt_column names it, and the answer that stands in the row is none"
    assert seen["completions"] == ["x", [{"role": "assistant", "content": "y"}]]
    assert seen["hint"] == [None, "h"]


def test_what_trls_trainer_alone_gives_is_a_line():
    scorer = FunctionScorer("my:f", lambda completions, trainer_state, **columns: [])
    with pytest.raises(InputError, match="^verifier 'my:f' takes 'trainer_state' of TRL's trainer, which there is not"):
        scorer.check({"prompt": "a"})
    FunctionScorer("my:f", lambda completions, log_metric=None, **columns: []).check({"prompt": "a"})


def test_a_column_that_a_function_of_trl_needs_is_missed_before_the_run():
    scorer = FunctionScorer("my:f", lambda completions, answers, level=0, **columns: [])
    scorer.check({"answers": 1})
    with pytest.raises(InputError, match="^verifier 'my:f' takes the column 'answers'; the row has .'ans"):
        scorer.check({"answer": 1})
    FunctionScorer("my:f", batch).check({})
    with pytest.raises(
        InputError, match="'my:f' must take .responses, rows. .*; it takes .response, row, level.: missing .*'level'"
    ):
        FunctionScorer("my:f", lambda response, row, level: 1.0)


def raises_on_the_second(responses, rows):
    return [1 / (r != "bad") for r in responses]


def single_raises(response, row):
    return raises_on_the_second([response], [row])[0]


async def async_raises(response, row):
    await asyncio.sleep(0 if response == "bad" else 3600)
    return single_raises(response, row)


async def async_batch_raises(responses, rows):
    return raises_on_the_second(responses, rows)


def trl_raises(completions, **columns):
    return raises_on_the_second(completions, None)


def raises_on_two_together(responses, rows):
    return [1 / (2 - len(responses))]


ALONE = r"it was called with 3 responses, to d.jsonl, line 1 … d.jsonl, line 3; alone it raises on d.jsonl, line 2$"
ONE = "it was called with the response to d.jsonl, line 2$"


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (raises_on_the_second, ALONE),
        (trl_raises, ALONE),
        (async_batch_raises, ALONE),
        (single_raises, ONE),
        (async_raises, ONE),
    ],
)
def test_a_function_that_raises_is_named_with_its_row(function, place):
    started = time.monotonic()
    with pytest.raises(InputError) as raised:
        called(function, "ok", "bad", "ok")
    said = str(raised.value)
    assert re.match(
        r"verifier 'my:f' raised ZeroDivisionError: .* \(test_functions.py, line \d+\); for a response", said
    )
    assert re.search(place, said) and time.monotonic() - started < 60
    assert not asyncio.all_tasks(functions.event_loop())  # the others were cancelled


def test_where_no_row_raises_alone_the_batch_is_named():
    with pytest.raises(InputError, match="to d.jsonl, line 1 … d.jsonl, line 2$"):
        called(raises_on_two_together, "a", "b")


def test_async_calls_go_on_together_so_many_at_once_on_one_loop(monkeypatch):
    monkeypatch.setattr(functions, "CONCURRENCY", 3)
    running, most, loops = [0], [0], set()

    async def function(response, row):
        running[0] += 1
        most[0] = max(most[0], running[0])
        loops.add(asyncio.get_running_loop())
        assert threading.current_thread() is threading.main_thread()
        await asyncio.sleep(0.01 * (3 - len(response)))  # they end in another order
        running[0] -= 1
        return len(response)

    texts = ["a", "bb", "ccc"] * 3
    assert called(function, *texts) == [1, 2, 3] * 3 and most == [3]
    called(function, "a")
    assert loops == {functions.event_loop()}


def test_an_async_function_that_does_not_answer_is_cancelled_and_named(monkeypatch):
    monkeypatch.setattr(functions, "AWAIT_TIMEOUT", 0.05)
    cancelled = []

    async def slow(response, row):
        try:
            await asyncio.sleep(3600 if response == "slow" else 0)
        except asyncio.CancelledError:
            cancelled.append(response)
            raise
        return 1.0

    with pytest.raises(InputError, match=r"did not return within 0.05 s; .* the response to d.jsonl, line 2$"):
        called(slow, "a", "slow")
    assert cancelled == ["slow"] and called(slow, "a") == [1.0]

    async def times_out_by_itself(response, row):
        raise TimeoutError("the server says nothing")

    with pytest.raises(InputError, match="raised TimeoutError: the server says nothing"):
        called(times_out_by_itself, "a")


def test_an_async_batch_that_does_not_return_is_cancelled(monkeypatch):
    monkeypatch.setattr(functions, "FUNCTION_TIMEOUT", 0.1)
    cancelled = []

    async def child(name):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    async def never(responses, rows):
        return await asyncio.gather(*(child(r) for r in responses))

    with pytest.raises(InputError, match="did not return within 0.1 s"):
        called(never, "a", "b")
    assert sorted(cancelled) == ["a", "b"] and not asyncio.all_tasks(functions.event_loop())


def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_a_function_moves_no_generator_of_the_run_and_draws_other_numbers_at_each_step():
    def reseeds(responses, rows):
        drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
        random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
        return [0.0] * len(responses)

    async def async_reseeds(response, row):
        return reseeds([response], [row])[0]

    drawn = []
    torch.manual_seed(7)
    for function in (reseeds, async_reseeds):
        before = states()
        called(function, "a")
        called(function, "a")
        assert states() == before and drawn[0] == drawn[1]  # as a resumed run would
        torch.rand(1)  # as sampling does
        called(function, "a")
        assert all(x != y for x, y in zip(drawn[0], drawn[2], strict=True))
        drawn.clear()


def test_a_function_changes_no_type_of_the_runs_tensors():
    def function(responses, rows):
        torch.set_default_dtype(torch.float64)
        return [1.0 for _ in responses]

    called(function, "a", "b")
    assert torch.get_default_dtype() == torch.float32


def test_a_module_that_seeds_when_it_is_imported_moves_no_generator(tmp_path, monkeypatch):
    (tmp_path / "seeding_module.py").write_text(
        "import torch\ntorch.manual_seed(0)\ndef f(responses, rows): return []\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = states()
    load_function("seeding_module:f", "verifier")
    assert states() == before


def edits(responses, rows):
    for row in rows:
        row["answer"] = "mine"
        row["metadata"]["level"] = 9
        assert not [name for name in row if name.startswith("_")]
    return [0.0] * len(rows)


def edits_ids(completions, completion_ids, metadata, **columns):
    completion_ids[0].clear()
    metadata[0]["level"] = 9
    return [0.0] * len(completions)


@pytest.mark.parametrize("function", [edits, edits_ids])
def test_a_function_sees_copies_of_rows_and_ids(function):
    seen = samples("ab", metadata={"level": 1})
    FunctionScorer("my:f", function)(seen)
    assert seen[0].row["metadata"] == {"level": 1} and seen[0].row["answer"] == "a0"
    assert seen[0].response.ids == [5, 5]


class Unreadable(Exception):
    def __str__(self):
        raise SystemExit("no text")


class Base(BaseException):
    pass


def of_error(error):
    def function(response, row):
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unreadable(), "raised Unreadable: its message cannot be read"),
        (Base("x\ny"), "raised Base: x y"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt: no reason given"),
        (GeneratorExit(), "raised GeneratorExit"),
        (asyncio.CancelledError(), "raised CancelledError"),
        (ValueError("m" * 100_000), "raised ValueError: mmm"),
        (SystemExit("m" * 100_000), "called sys.exit.'mmm"),
    ],
)
def test_whatever_a_function_raises_is_one_line_with_the_row(error, said):
    async def awaits(response, row):
        raise error

    for function in (of_error(error), lambda responses, rows: of_error(error)(responses, rows), awaits):
        with pytest.raises(InputError, match=f"verifier 'my:f' {said}") as refused:
            called(function, "a")
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 600
        assert "d.jsonl, line 1" in str(refused.value)


@pytest.fixture
def ctrl_c():
    """As in a terminal, whatever this process was started by: one in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_inside_a_function_stops_at_once(ctrl_c):
    def interrupted(responses, rows):
        signal.raise_signal(signal.SIGINT)
        return [0.0]

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        called(interrupted, "a")
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_ctrl_c_of_a_run_is_noted_inside_a_function_and_the_second_stops(ctrl_c):
    interruption = Interruption()
    interruption.begin()
    try:
        assert called(lambda responses, rows: [signal.raise_signal(signal.SIGINT) or 1.0], "a") == [1.0]
        assert interruption.received
        with pytest.raises(KeyboardInterrupt):
            called(lambda responses, rows: [signal.raise_signal(signal.SIGINT)], "a")
    finally:
        interruption.end()


@pytest.mark.parametrize("score", [torch.tensor(0.5), numpy.float32(0.5), numpy.array(0.5), torch.tensor([0.5]), True])
def test_a_score_may_be_any_one_number(score):
    seen = samples("a", "b")
    found = check_scores("my:f", FunctionScorer("my:f", lambda responses, rows: [score, None])(seen), seen)
    assert found[0] == float(score) and found[1].isnan()
    found = check_scores("my:f", FunctionScorer("my:f", lambda responses, rows: map(float, [score] * 2))(seen), seen)
    assert found.tolist() == [float(score)] * 2


@pytest.mark.parametrize("returned", [torch.tensor(0.5), numpy.array(0.5), 0.5, None])
def test_one_number_for_all_responses_is_refused(returned):
    with pytest.raises(InputError, match="scorer 'my:f' returned .*; it must return a list of one score for each"):
        check_scores("my:f", returned, samples("a", "b"))
