"""The verifier `math`: numbers and formulas, judged by math-verify (math_judge.py) in processes under limits."""

from collections.abc import Sequence
from pathlib import Path

from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.types import Incidents, Sample, where
from fused_rl.trainers.scorers.answers import answer_of
from fused_rl.trainers.scorers.builtin import Limited
from fused_rl.trainers.scorers.math_judge import unfit
from fused_rl.trainers.workers.limits import Pool, WorkerError

MATH_TIMEOUT = 1.0  # seconds of CPU for one answer: they take 0.01 to 0.3, or never end
OTHER_JUDGES = (
    "leave out the row, or name what can with --verifiers: exact_match, regex:<pattern> or a function of yours"
)


def unfit_for_math(row: dict, answer_column: str | None) -> str | None:
    """The row's answer and what it is, where mathematics cannot judge it."""
    answer = answer_of(row, answer_column)
    what = unfit(answer)
    return None if what is None else f"the answer {answer!r:.80}: {what}"


class MathVerifier(Limited):
    """1.0 where math-verify finds the response's final answer equal to the ground truth, else 0.0.

    One that takes more than `timeout` seconds of CPU, or too much memory, scores 0 and is reported: some expressions
    keep sympy busy for hours.
    """

    judge = Path(__file__).with_name("math_judge.py")

    def __init__(self, answer_column: str | None = None, timeout: float = MATH_TIMEOUT, **judged):
        super().__init__(**{"name": "math", "solved_at": 1.0} | judged)
        self.answer_column, self.restarts_told = answer_column, 0
        try:
            self.pool = Pool(self.judge, cpu_seconds=timeout)
        except WorkerError as error:
            raise InputError(
                f"verifier 'math': math-verify does not start: {error}; pip install 'math-verify>=0.9'"
            ) from error

    def check(self, row: dict) -> None:
        """The row must have an answer, and one that mathematics can judge."""
        problem = unfit_for_math(row, self.answer_column)
        if problem is not None:
            raise InputError(f"verifier 'math' cannot judge {problem}; {OTHER_JUDGES}")

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        cases = [(sample.text, answer_of(sample.row, self.answer_column)) for sample in samples]
        distinct = list(dict.fromkeys(cases))  # a group often agrees
        try:
            verdicts = dict(zip(distinct, self.pool.judge(distinct), strict=True))
        except WorkerError as error:
            place = "" if error.case is None else f" of {where(samples[cases.index(distinct[error.case])])}"
            remedy = "is there enough memory?"
            raise InputError(f"verifier 'math': an answer{place} cannot be judged: {error}; {remedy}") from error
        for sample, case in zip(samples, cases, strict=True):
            if verdicts[case].broke is not None:
                self.broken.append(f"{where(sample)} {verdicts[case].broke}")
        return [verdicts[case].score for case in cases]

    def take_incidents(self) -> Incidents:
        """Those since this was last called."""
        restarts, self.restarts_told = self.pool.restarts - self.restarts_told, self.pool.restarts
        return super().take_incidents()._replace(restarts=restarts)

    def close(self) -> None:
        """End its processes; the next call starts others."""
        self.pool.close()
