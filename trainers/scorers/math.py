"""The verifier `math`: numbers and formulas, compared by `fused_rl.judging`."""

import contextlib
import operator
import re
from collections.abc import Iterable, Sequence

from fused_rl import judging

from ..base import ranks
from ..base.text import InputError
from ..data.rows import BadRow
from ..rollouts.types import Sample
from .builtin import BaseScorer, answers_of

NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+%?")
# LaTeX's commands, whole texts in it among them: what is left of a formula has no three letters in a row.
COMMANDS = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
# How much longer than a response a row's answer may take, so that a run resumed on a busier machine has the same rows.
PATIENCE = 10


class MathVerifier(BaseScorer):
    """1.0 where math-verify finds the final answer equal to the ground truth within `timeout` CPU seconds, else 0.0."""

    compares = True

    def __init__(self, name: str = "math", timeout: float = judging.CPU_SECONDS, **common):
        super().__init__(name, **common)
        self.broken: list[str] = []
        self.problems: dict[str, str] = {}  # of the rows' answers
        try:
            self.pool = judging.pool(timeout)
        except ImportError as error:
            raise InputError(f"verifier 'math': {error}; pip install 'math-verify>=0.9'") from error

    def read_ahead(self, rows: Iterable[dict]) -> None:
        """Read the answers of all rows in the pool, where one that never ends costs itself alone."""
        answers: set[str] = set()
        for row in rows:
            with contextlib.suppress(BadRow):  # which `check` raises
                answers.update(answers_of(row, self.answer_column))
        formulas = [(answer,) for answer in sorted(answers) if not NUMBER.fullmatch(answer)]
        # Processes share the work, and all have what each has found: their rows must be the same.
        mine = formulas[ranks.process_index() :: ranks.processes()]
        verdicts = self.pool.judge(mine, _problem, PATIENCE * self.pool.cpu_seconds)
        for share in ranks.gather_processes([*zip(mine, verdicts, strict=True)]):
            self.problems |= {answer: limit or problem for (answer,), (problem, limit) in share}

    def check(self, row: dict) -> None:
        """Check that the row has an answer that math-verify reads as a number or a formula."""
        super().check(row)
        for answer in answers_of(row, self.answer_column):
            problem = self.problems.get(answer)
            if problem:
                remedy = "write it as a number or in LaTeX, or compare it as text: --verifiers exact_match"
                reason = f"verifier 'math': the answer {problem}"
                raise BadRow(reason, remedy, got=f"got {answer!r:.80}")

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        # The responses of a group often agree, so each distinct case is judged once.
        cases = [
            [(sample.text, answer) for answer in answers_of(sample.row, self.answer_column)]
            for sample in samples
        ]
        distinct = list(dict.fromkeys(case for sample_cases in cases for case in sample_cases))
        verdicts = dict(zip(distinct, self.pool.judge(distinct), strict=True))

        # Any of the answers counts. Cases that broke a limit score 0, and are counted with the row and the reason.
        best = [
            max([verdicts[case] for case in sample_cases], key=operator.itemgetter(0))
            for sample_cases in cases
        ]
        self.broken += [
            f"{sample.where} {why}" for sample, (_, why) in zip(samples, best, strict=True) if why
        ]
        return [score for score, _ in best]


def _problem(answer: str) -> str:
    """Return why an answer is not read as a formula, or nothing."""
    # math-verify would read a word as a product of variables, in which the order of letters does not matter.
    if re.search(r"[^\W\d_]{3,}", COMMANDS.sub(" ", answer)):
        return "has a word"
    return "" if judging.parsed(answer) else "cannot be parsed"
