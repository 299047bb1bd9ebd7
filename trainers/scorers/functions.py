"""Scorers that users write: a function of responses and rows, of one response, or as TRL calls reward functions.

    def f(responses, rows): ...                 one score for each; the texts, and the dataset's rows
    def f(response, row): ...                   one score
    def f(prompts, completions, **columns): ... one score for each; every column of the dataset by its name

Each may be `async`. docs/verifiers.md says what a function may do, and what becomes of one that goes wrong.
"""

import asyncio
import copy
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

from fused_rl.trainers.base.guests import Expired, ctrl_c, own_generators, place, raised, within
from fused_rl.trainers.data.encode import PROMPT_COLUMNS
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.types import Sample, shortened, where
from fused_rl.trainers.scorers.builtin import Named

FUNCTION_TIMEOUT = 600.0  # seconds for one call of a user's function, or for the import of its module
AWAIT_TIMEOUT = 120.0  # seconds for one response that an async function of one response is given
SEARCH_TIMEOUT = 30.0  # seconds to find the row that a function of many raises on
CONCURRENCY = 64  # responses that an async function of one response works on at once
# By the first two parameters; none are those of a wrapper, (*args), of a function that it does not tell.
FORMS = {("responses", "rows"): "batch", ("response", "row"): "single", (): "batch"}
GIVEN = ("prompts", "completions", "completion_ids")  # to a function of TRL's kind, beside the columns
OF_TRL = ("trainer_state", "log_extra", "log_metric", "environments")  # what TRL gives besides, and there is none here


class FunctionScorer(Named):
    """A function of the user's own; None as a score is "not applicable".

    It runs in the main thread, so that it may hold state, a GPU or a client; an async one runs on the run's one event
    loop. What goes wrong in it is an InputError, but for `os._exit` and a crash in C code, which end the run.
    """

    def __init__(self, name: str, function: Callable, **judged):
        super().__init__(name, **judged)
        self.function = function
        self.form = form_of(name, function)
        self.columns = columns_of(function) if self.form == "columns" else ()
        self.at: Sample | None = None  # the response that a function of one response is called with

    def check(self, row: dict) -> None:
        """A function of TRL's kind must find the columns that it names; else the function knows what it reads."""
        missing = [name for name in self.columns if name not in row]
        if missing:
            what = f"verifier {self.name!r} takes the column {missing[0]!r}"
            if missing[0] in OF_TRL:
                what = f"verifier {self.name!r} takes {missing[0]!r} of TRL's trainer, which there is not here"
                raise InputError(f"{what}; give it a default, or leave it out")
            raise InputError(f"{what}; the row has {sorted(row)}")

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        self.at = None
        with own_generators(), ctrl_c() as interrupted:
            return self._judged(samples, interrupted)

    def _judged(self, samples: Sequence[Sample], interrupted: list[int]) -> list[float | None]:
        try:
            return within(FUNCTION_TIMEOUT, lambda: self._called(samples))
        except (Expired, Late) as error:
            limit = AWAIT_TIMEOUT if isinstance(error, Late) else FUNCTION_TIMEOUT
            what = f"did not return within {limit:g} s; give what it waits for a time-out of its own"
            raise InputError(f"verifier {self.name!r} {what}; {self._with(samples)}") from error
        except SystemExit as error:
            what = (
                f"called sys.exit({shortened(error.code)}){place(error, __file__)}; raise an exception to end the run"
            )
            raise InputError(f"verifier {self.name!r} {what}; {self._with(samples)}") from error
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and interrupted:
                raise
            what = f"{raised(error, __file__)}; for a response that it cannot score, return None"
            raise InputError(f"verifier {self.name!r} {what}; {self._with(samples, error)}") from error

    def _called(self, samples: Sequence[Sample]):
        """What the function returns, of whatever type; of one of single responses the list of its scores."""
        samples = _copies(samples)
        if self.form == "columns":
            returned = self.function(**keywords(self.function, samples))
        elif self.form == "batch":
            returned = self.function([sample.text for sample in samples], [sample.row for sample in samples])
        elif is_async(self.function):
            returned = self._each(samples)
        else:
            returned = [self._one(sample) for sample in samples]
        if inspect.isawaitable(returned):
            returned = _run(returned)
        return list(returned) if isinstance(returned, Iterator) else returned

    def _one(self, sample: Sample):
        self.at = sample
        return self.function(sample.text, sample.row)

    async def _each(self, samples: Sequence[Sample]) -> list:
        """An async function of one response on all of them, so many at once."""
        turn = asyncio.Semaphore(CONCURRENCY)

        async def one(sample: Sample):
            async with turn:
                try:
                    return await _in_time(self.function(sample.text, sample.row))
                except (Exception, Late):
                    self.at = self.at or sample
                    raise

        return await asyncio.gather(*(one(sample) for sample in samples))

    def _with(self, samples: Sequence[Sample], error: BaseException | None = None) -> str:
        """What it was called with, as near to the row as can be told."""
        if not samples:
            return "it was called with no responses"
        if self.at is not None:
            return f"it was called with the response to {where(self.at)}"
        batch = f"it was called with {len(samples)} responses, to {where(samples[0])} … {where(samples[-1])}"
        found = None if error is None or len(samples) == 1 else self._culprit(samples, error)
        return batch if found is None else f"{batch}; alone it raises on {where(found)}"

    def _culprit(self, samples: Sequence[Sample], error: BaseException) -> Sample | None:
        """The first response on which it raises the same alone; None where there is none, or time runs out."""

        def first_that_raises() -> Sample | None:
            for sample in samples:
                try:
                    self._called([sample])
                except type(error):
                    return sample
            return None

        try:
            return within(SEARCH_TIMEOUT, first_that_raises)
        except KeyboardInterrupt:
            raise
        except BaseException:  # another one, or the time is over
            return None


def _copies(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with rows and token ids that a function may change."""
    rows = copy.deepcopy([sample.row for sample in samples])
    made = []
    for sample, row in zip(samples, rows, strict=True):
        response = replace(sample.response, ids=list(sample.response.ids))
        made.append(replace(sample, row=row, prompt_ids=list(sample.prompt_ids), response=response))
    return made


def form_of(name: str, function: Callable) -> str:
    """How a function is called: "batch", "single" or "columns"; refuses one that takes none of these."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C that does not tell
        return "batch"
    if "completions" in signature.parameters:
        return "columns"
    taken = ", ".join(str(p.replace(annotation=p.empty)) for p in _parameters(function))
    forms = "(responses, rows) and return a list, or (response, row) and return a number, by these names"
    told = f"verifier {name!r} must take {forms}, or (completions, **columns) as in TRL; it takes ({taken})"
    try:
        signature.bind([], [])
    except TypeError as error:
        raise InputError(f"{told}: {error}") from error
    first = tuple(p.name for p in _parameters(function) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    if first[:2] not in FORMS:
        raise InputError(told)
    return FORMS[first[:2]]


def columns_of(function: Callable) -> tuple[str, ...]:
    """The columns that a function of TRL's kind cannot do without."""
    needed = [p.name for p in _parameters(function) if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    return tuple(name for name in needed if name not in GIVEN)


def keywords(function: Callable, samples: Sequence[Sample]) -> dict[str, list]:
    """What TRL gives a reward function, and this one takes: prompts as the rows have them, completions as text (as
    messages, where the prompt is messages), their token ids, and every other column."""
    rows = [sample.row for sample in samples]
    columns = dict.fromkeys(key for row in rows for key in row if key not in ("prompt", *GIVEN))
    given = {column: [row.get(column) for row in rows] for column in columns}
    given["prompts"] = [_prompt_of(sample) for sample in samples]
    given["completions"] = [_completion_of(sample) for sample in samples]
    given["completion_ids"] = [sample.response.ids for sample in samples]
    parameters = _parameters(function)
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return given
    return {p.name: given[p.name] for p in parameters if p.name in given}


def _parameters(function: Callable) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _prompt_of(sample: Sample):
    """As the row has it, without a last turn of the assistant, which the policy was not given."""
    columns = PROMPT_COLUMNS if sample.column is None else (sample.column,)
    prompt = next((sample.row[column] for column in columns if sample.row.get(column) is not None), None)
    answered = isinstance(prompt, list) and prompt and prompt[-1].get("role") == "assistant"
    return prompt[:-1] if answered else prompt


def _completion_of(sample: Sample):
    turn = [{"role": "assistant", "content": sample.text}]
    return turn if isinstance(_prompt_of(sample), list) else sample.text


def is_async(function: Callable) -> bool:
    """Whether calling it makes a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Late(BaseException):
    """One response took an async function too long; not an Exception, so that none of its own swallows it."""


async def _in_time(awaitable: Awaitable):
    """What it comes to, within AWAIT_TIMEOUT seconds; a time-out of the function's own is an error like others."""
    task, struck = asyncio.ensure_future(awaitable), []

    def expire():
        struck.append(task.cancel())

    timer = asyncio.get_running_loop().call_later(AWAIT_TIMEOUT, expire)
    try:
        return await task
    except asyncio.CancelledError as error:
        if struck:
            raise Late from error
        raise
    finally:
        timer.cancel()


def _run(awaitable: Awaitable):
    """What it comes to, on the run's event loop; whatever it raises, nothing that it began goes on."""
    loop = event_loop()
    try:
        return loop.run_until_complete(awaitable)
    except BaseException:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=0.5))
        raise


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The run's one event loop: clients that a function keeps belong to it."""
    return asyncio.new_event_loop()
