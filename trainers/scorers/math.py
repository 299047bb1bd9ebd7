"""The verifier `math`: numbers and formulas, compared by math-verify in processes under limits (pool.py)."""

import logging
import re
from collections.abc import Sequence

from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.types import Sample
from fused_rl.trainers.scorers.answers import answer_of
from fused_rl.trainers.scorers.builtin import Limited
from fused_rl.trainers.scorers.pool import Pool

MATH_TIMEOUT = 1.0  # seconds of CPU for one answer: they take 0.01 to 0.3, or never end
NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+%?")
# LaTeX's commands, whole texts in it among them: what is left of a formula has no three letters in a row.
COMMANDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
KNOWN = ("so it is \\boxed{\\frac{1}{2}}", "0.5")


def math_fits(answer: str) -> bool:
    """Return True for an answer with digits or LaTeX and without words: dates and labels pass, too."""
    return re.search(r"[\d\\]", answer) is not None and not words_in(answer)


def words_in(answer: str) -> list[str]:
    """Runs of three letters and more, which math-verify would read as products of variables."""
    return re.findall(r"[^\W\d_]{3,}", COMMANDS.sub(" ", answer))


def parsed(answer: str) -> list:
    """The reference answer as math-verify reads it; empty if it cannot."""
    from math_verify import parse

    return parse(f"${answer.replace('$', '')}$", fallback_mode="no_fallback", parsing_timeout=None)


def judge(response: str, answer: str) -> bool:
    """Return True if the response's final answer equals the reference, as text or by math-verify."""
    from math_verify import parse, verify
    from sympy.core import random as sympy_random

    if response.strip() == answer:
        return True
    sympy_random.seed(0)  # it compares at random points
    try:
        found = parse(response.rsplit("####", 1)[-1], parsing_timeout=None)
        return verify(parsed(answer), found, timeout_seconds=None)
    except MemoryError:
        raise
    except Exception:  # of sympy, on nonsense: a wrong answer
        return False


class MathVerifier(Limited):
    """1.0 where math-verify finds the response's final answer equal to the ground truth, else 0.0.

    One that takes more than `timeout` seconds of CPU, or too much memory, scores 0 and is reported: some expressions
    keep sympy busy for hours.
    """

    def __init__(self, answer_column: str | None = None, timeout: float = MATH_TIMEOUT, **judged):
        super().__init__(**{"name": "math", "solved_at": 1.0} | judged)
        self.answer_column = answer_column
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that nobody keeps the time
        try:
            works = judge(*KNOWN)  # and imports what the processes that are forked need
        except ImportError as error:
            raise InputError(f"verifier 'math': {error}; pip install 'math-verify>=0.9'") from error
        if not works:
            raise InputError(f"verifier 'math': math-verify does not find {KNOWN} equal; reinstall it")
        self.pool = Pool(judge, timeout)

    def check(self, row: dict) -> None:
        """The row must have an answer, and one that math-verify reads as a number or a formula."""
        answer = answer_of(row, self.answer_column)
        if NUMBER.fullmatch(answer):
            return
        words = words_in(answer)
        if words or not parsed(answer):
            what = f"has the word {words[0]!r}" if words else "cannot be parsed"
            other = "write it as a number or in LaTeX, or compare it as text: --verifiers exact_match"
            raise InputError(f"verifier 'math': the answer {answer!r:.80} {what}; {other}")

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        cases = [(sample.text, answer_of(sample.row, self.answer_column)) for sample in samples]
        distinct = list(dict.fromkeys(cases))  # a group often agrees
        verdicts = dict(zip(distinct, self.pool.judge(distinct), strict=True))
        for sample, case in zip(samples, cases, strict=True):
            if verdicts[case].broke is not None:
                self.broken.append(f"{sample.where} {verdicts[case].broke}")
        return [verdicts[case].score for case in cases]

    def close(self) -> None:
        """End its processes."""
        self.pool.close()
