"""Functions of users in every form, sync and async, and the row that is named when one goes wrong."""

import asyncio
import functools
import re
import threading
import time

import pytest

from fused_rl.trainers import functions
from fused_rl.trainers.config import InputError
from fused_rl.trainers.functions import FunctionScorer
from fused_rl.trainers.rollout import Response, Sample


def samples(*texts, **columns):
    """One sample per text, of lines 1, 2, …"""
    made = []
    for i, text in enumerate(texts):
        row = {"question": f"q{i}", "answer": f"a{i}", **columns, "__where__": f"d.jsonl, line {i + 1}", "__line__": i}
        made.append(Sample(row, [], Response([5] * len(text), "stop"), text))
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


def test_a_column_that_a_function_of_trl_needs_is_missed_before_the_run():
    scorer = FunctionScorer("my:f", lambda completions, answers, level=0, **columns: [])
    scorer.check({"answers": 1})
    with pytest.raises(
        InputError, match="d.jsonl, line 1: verifier 'my:f' takes the column 'answers'; the row has .'ans"
    ):
        scorer.check({"answer": 1, "__where__": "d.jsonl, line 1"})
    FunctionScorer("my:f", batch).check({})


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
