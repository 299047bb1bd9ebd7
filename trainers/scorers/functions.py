"""Scorers that users write: a function of one response and its row, or of many as TRL calls reward functions.

    def f(response, row): ...                   one score
    def f(prompts, completions, **columns): ... one score for each; every column of the dataset by its name

The second kind may also take TRL's `trainer_state`, `log_metric` and `log_extra`. Each may be `async`. What one raises
ends the run with its own traceback.
"""

import asyncio
import contextlib
import inspect
import math
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..base import ranks
from ..base.screen import print_line
from ..base.text import InputError, name_of
from ..rollouts.types import Sample, one_line
from .builtin import BaseScorer

# What a function of TRL's kind is given beside the columns of the dataset; the last one where there are environments.
GIVEN = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_metric",
    "log_extra",
    "environments",
)


class FunctionScorer(BaseScorer):
    """A function of the user's own; None as a score is "not applicable"."""

    def __init__(self, name: str, function: Any, **common):
        super().__init__(name, **common)
        # An environment has given its reward when its response ended, which has it under the name of the class.
        if hasattr(function, "get_reward"):
            kind = name_of(function)

            def rewards(completions: list, **columns: Any) -> list[float | None]:
                return columns.get(kind, [None] * len(completions))

            function = rewards

        self.function: Any = function
        self.logged: list[tuple[str, float]] = []

        # Which of the two kinds it is, and which columns it takes, its parameters say by their names.
        parameters = inspect.signature(function).parameters.values()
        self.takes_many = any(p.name in ("completions", "environments") for p in parameters)
        self.takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.takes = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.needs = [p.name for p in parameters if p.default is p.empty and p.name in self.takes]

        # An object with an async __call__ is async too. The event loop lives as long as the scorer, since clients that
        # the function keeps belong to it.
        calls = (function, type(function).__call__)
        self.is_async = any(map(inspect.iscoroutinefunction, calls))
        if self.is_async:
            self.loop = asyncio.new_event_loop()

        # Anything else is refused before the run, and not when the first response is scored.
        takes_one = self.takes[:2] == ["response", "row"] and len(self.needs) <= 2
        if not (self.takes_many or takes_one):
            forms = "(response, row), or (completions, **columns) as in TRL"
            raise InputError(
                f"verifier {name!r} must take {forms}; it takes ({', '.join(self.takes)})"
            )

    @property
    def columns(self) -> Collection[str] | None:
        """The columns of a row that the function names; None for one that may read any."""
        return self.takes if self.takes_many and not self.takes_all else None

    def check(self, row: dict) -> None:
        """Check that a function of TRL's kind finds the columns that it names."""
        missing = [name for name in self.needs if self.takes_many and name not in (*GIVEN, *row)]
        if missing:
            raise InputError(
                f"verifier {self.name!r} takes the column {missing[0]!r}; the row has {sorted(row)}"
            )

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        if self.takes_many:
            extra: dict[str, list] = {}
            with self._named(*samples):
                scores = self.function(**self._columns(samples, extra))
                if self.is_async:
                    scores = self.loop.run_until_complete(scores)
            for column, values in extra.items():
                if len(values) != len(samples):
                    raise InputError(
                        f"scorer {self.name!r}: log_extra({column!r}, …) gave {len(values)} values for "
                        f"{len(samples)} responses"
                    )
                for sample, value in zip(samples, values, strict=True):
                    sample.logged[column] = value
            return scores
        if self.is_async:
            return self.loop.run_until_complete(self._all(samples))

        # One by one, each with a copy of the row, which the function may change.
        scores = []
        for sample in samples:
            with self._named(sample):
                scores.append(self.function(sample.text, dict(sample.row)))
        return scores

    @contextlib.contextmanager
    def _named(self, sample: Sample, *further: Sample) -> Iterator[None]:
        """Say which response it was before the traceback of the user's function, the first of several."""
        try:
            yield
        except Exception:
            response = f"the response {one_line(sample.text)} to {sample.where}"
            if further:
                response = f"{1 + len(further)} responses, the first of them {response}"
            print_line(f"verifier {self.name!r} raised on {response}:", to_errors=True)
            raise

    async def _all(self, samples: Sequence[Sample]) -> list[float | None]:
        async def one(sample: Sample):
            with self._named(sample):
                return await self.function(sample.text, dict(sample.row))

        return await asyncio.gather(*map(one, samples))

    def _columns(self, samples: Sequence[Sample], extra: dict[str, list]) -> dict[str, object]:
        """Return what TRL gives a reward function and this one takes; completions are messages where prompts are.

        What the function logs of each sample is put into `extra`.
        """

        def log_metric(name: str, value: float) -> None:
            self.logged.append((name, float(value)))

        def log_extra(column: str, values: Sequence) -> None:
            extra.setdefault(column, []).extend(values)

        # Rows may differ in their columns; what a row lacks is None, as in TRL. The prompt is in `prompts`.
        rows = [sample.row | sample.response.extra for sample in samples]
        arguments: dict[str, object] = {}
        for column in set().union(*rows) - {"prompt"}:
            arguments[column] = [row.get(column) for row in rows]
        prompts, completions = [], []
        for sample in samples:
            prompt = sample.prompt
            turn = [{"role": "assistant", "content": sample.text}]
            prompts.append(prompt)
            answer = turn if isinstance(prompt, list) else sample.text
            completions.append(sample.response.extra.get("completions", answer))
        arguments |= {"prompts": prompts, "completions": completions}
        arguments["completion_ids"] = [list(sample.response.ids) for sample in samples]
        # trl/trainer/grpo_trainer.py, _calculate_rewards.
        arguments |= {"log_metric": log_metric, "log_extra": log_extra}
        arguments["trainer_state"] = self._trainer_state()
        return {name: arguments[name] for name in arguments if self.takes_all or name in self.takes}

    def _trainer_state(self):
        """Return the run's progress as TRL gives it; a step here is one rollout."""
        from transformers import TrainerState

        step, steps, steps_per_epoch = self.progress
        return TrainerState(
            epoch=step / steps_per_epoch,
            global_step=step,
            max_steps=steps,
            num_train_epochs=math.ceil(steps / steps_per_epoch),
            logging_steps=1,
            is_local_process_zero=os.environ.get("LOCAL_RANK", "0") == "0",  # a launcher's
            is_world_process_zero=ranks.process_index() == 0,
        )
