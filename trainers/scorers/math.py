"""The verifier `math`: numbers and formulas, compared by `fused_rl.judging`."""

import re
from collections.abc import Sequence

from fused_rl import judging
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.rows import BadRow
from fused_rl.trainers.rollouts.types import Sample
from fused_rl.trainers.scorers.builtin import BaseScorer, answers_of

NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+%?")
# LaTeX's commands, whole texts in it among them: what is left of a formula has no three letters in a row.
COMMANDS = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+"
)


class MathVerifier(BaseScorer):
    """1.0 where math-verify finds the final answer equal to the ground truth within `timeout` CPU seconds, else 0.0."""

    compares = True

    def __init__(self, name: str = "math", timeout: float = judging.CPU_SECONDS, **common):
        super().__init__(name, **common)
        self.broken: list[str] = []
        try:
            self.pool = judging.pool(timeout)
        except ImportError as error:
            raise InputError(f"verifier 'math': {error}; pip install 'math-verify>=0.9'") from error

    def check(self, row: dict) -> None:
        """Check that the row has an answer that math-verify reads as a number or a formula."""
        for answer in answers_of(row, self.answer_column):
            if not NUMBER.fullmatch(answer):
                _check_formula(answer)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        # The responses of a group often agree, so each distinct case is judged once.
        cases = [
            [(sample.text, answer) for answer in answers_of(sample.row, self.answer_column)]
            for sample in samples
        ]
        distinct = list(dict.fromkeys(case for sample_cases in cases for case in sample_cases))
        verdicts = dict(zip(distinct, self.pool.judge(distinct), strict=True))

        # Any of the answers counts. Cases that broke a limit score 0, and are counted with the row and the reason.
        verdicts_by_sample = [[verdicts[case] for case in sample_cases] for sample_cases in cases]
        best = [
            max(case_verdicts, key=lambda verdict: verdict[0])
            for case_verdicts in verdicts_by_sample
        ]
        self.broken += [
            f"{sample.where} {why}" for sample, (_, why) in zip(samples, best, strict=True) if why
        ]
        return [score for score, _ in best]


def _check_formula(answer: str) -> None:
    # math-verify would read a word as a product of variables, in which the order of letters does not matter.
    words = re.findall(r"[^\W\d_]{3,}", COMMANDS.sub(" ", answer))
    if words or not judging.parsed(answer):
        problem = "has a word" if words else "cannot be parsed"
        remedy = "write it as a number or in LaTeX, or compare it as text: --verifiers exact_match"
        raise BadRow(f"verifier 'math': the answer {problem}", remedy, got=f"got {answer!r:.80}")
