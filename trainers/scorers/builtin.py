"""Scorers that look at a response's text or length alone: equal to the answer, of a pattern, of a form, of a length.

    exact_match    regex:answer: (\\d+)    format    length:100

Each is a `Scorer` (rollouts/types.py). docs/verifiers.md has their definitions.
"""

import functools
import re
import unicodedata
from collections.abc import Sequence

import regex

from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.types import Sample
from fused_rl.trainers.scorers.answers import answer_of

MATCHING = 1.0  # seconds of CPU for one response: matching takes microseconds, or never ends
# One <think> and one <answer>, in this order, and nothing outside them.
THINK_THEN_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"


# What NFKC would join to the digits before it: 10² to 102, 2½ to 21⁄2.
RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
FRACTION = re.compile("(?<=[0-9])[¼-¾⅐-⅞↉]")


def normalized(text: str, *, ignore_case: bool = False) -> str:
    """The text as answers are compared: Unicode's form NFKC with ^ before what is raised, white space one space."""
    text = RAISED.sub(r"^\g<0>", FRACTION.sub(r" \g<0>", text))
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    return text.casefold() if ignore_case else text


class Named:
    """What every scorer is told: its name, its weight, and from which score on a sample counts as solved."""

    def __init__(self, name: str, weight: float = 1.0, solved_at: float | None = None):
        self.name = name
        self.weight = weight
        self.solved_at = solved_at

    def check(self, row: dict) -> None:
        """Any row will do."""


class Limited(Named):
    """One that notes, in words, which samples broke a limit."""

    def __init__(self, name: str, weight: float = 1.0, solved_at: float | None = None):
        super().__init__(name, weight, solved_at)
        self.broken: list[str] = []

    def take_broken(self) -> list[str]:
        """Those since this was last called."""
        broken = self.broken
        self.broken = []
        return broken


class ExactMatch(Named):
    """1.0 where the whole response equals the row's answer, both normalised (`normalized`), else 0.0."""

    def __init__(self, answer_column: str | None = None, *, ignore_case: bool = False, **named):
        super().__init__(**{"name": "exact_match", "solved_at": 1.0} | named)
        self.answer_column = answer_column
        self.ignore_case = ignore_case

    def check(self, row: dict) -> None:
        """The row must have an answer."""
        answer_of(row, self.answer_column)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        pairs = [(sample.text, answer_of(sample.row, self.answer_column)) for sample in samples]
        plain = functools.partial(normalized, ignore_case=self.ignore_case)
        return [float(plain(text) == plain(answer)) for text, answer in pairs]


# Of the package `regex` and not of Python's `re`: x{e} matches whatever stands there.
FUZZY = regex.compile(r"(?<!\\)\{[\d<=+, ]*[eids][eids\d<=+, ]*\}")


class Pattern(Limited):
    """1.0 where a regular expression says so, else 0.0; one that takes more than MATCHING seconds of CPU is a 0.

    Args:
        pattern: of the package `regex`, which reads Python's `re` and more.
        whole: it must match the whole response, its dots newlines too; else it is looked for. Without `whole`, a
            pattern with a group is compared with the row's answer: the group's text in the last place where it matches,
            the group being the one named `answer`, or the first.
        answer_column: of the ground truth; None takes ground_truth or answer.
        **named: name, weight and solved_at, as `Scorer` has them.
    """

    def __init__(self, pattern: str, answer_column: str | None = None, *, whole: bool = False, **named):
        super().__init__(**{"name": "regex"} | named)
        self.whole = whole
        self.answer_column = answer_column
        if FUZZY.search(pattern):
            why = "{e} and the like match with errors; write \\{ for a brace"
            raise InputError(f"verifier {self.name!r}: the pattern {pattern!r}: {why}")
        try:
            self.pattern = regex.compile(pattern, regex.DOTALL if whole else 0)
        except (regex.error, OverflowError, RecursionError) as error:
            raise InputError(f"verifier {self.name!r}: the pattern {pattern!r} does not compile: {error}") from error
        self.group = None
        if self.pattern.groups and not whole:
            self.group = self.pattern.groupindex.get("answer", 1)
            self.solved_at = 1.0 if self.solved_at is None else self.solved_at

    def check(self, row: dict) -> None:
        """The row must have an answer, where there is a group to compare with it."""
        if self.group is not None:
            answer_of(row, self.answer_column)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        try:
            return float(self._matches(sample))
        except TimeoutError:
            self.broken.append(f"{sample.where} took more than {MATCHING:g} s of CPU")
            return 0.0

    def _matches(self, sample: Sample) -> bool:
        if self.whole:
            return self.pattern.fullmatch(sample.text, timeout=MATCHING) is not None
        if self.group is None:
            return self.pattern.search(sample.text, timeout=MATCHING) is not None
        last = None
        for found in self.pattern.finditer(sample.text, timeout=MATCHING):
            last = found
        if last is None or last[self.group] is None:
            return False
        return normalized(last[self.group]) == normalized(answer_of(sample.row, self.answer_column))


class Length(Named):
    """What a response of n tokens that the policy drew costs, its stop token included; from 0 down to -1.

    target: -min(1, |n - target| / target). limit: -min(1, max(0, n - limit) / limit). One of them is given.
    """

    def __init__(self, *, target: int | None = None, limit: int | None = None, **named):
        super().__init__(**{"name": "length"} | named)
        self.target = target
        self.limit = limit

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self._score(len(sample.response.drawn(sample.response.ids))) for sample in samples]

    def _score(self, tokens: int) -> float:
        if self.target is not None:
            return 0.0 - min(1.0, abs(tokens - self.target) / self.target)
        return 0.0 - min(1.0, max(0, tokens - self.limit) / self.limit)
