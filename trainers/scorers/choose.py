"""Who judges where nobody is named: what the answers of the rows are says it. Left out: guessing."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.scorers.answers import ANSWER_COLUMNS, answer_of
from fused_rl.trainers.scorers.math_judge import bare, unfit

MOST = 0.9  # from here on what is no mathematics decides: compared as a text, a number is judged too
EXAMPLES = 3
OF_OTHERS = "exact_match the whole response as text, regex:<pattern> and a function of yours what they are made for"
FACTOR = r"[-+]?\d+(?:\.\d+)?(?:\^(?:\d|\{\d+\}))?"
SIGN = r"\s*(?:[+*×·]|\\times|\\cdot)\s*"
# What mathematics judges in a way of its own, and whoever wrote it may mean as it stands.
DOUBTFUL = (
    (re.compile(r"[-+]?0\d+[A-Z]?"), "a number, or digits of a code: to math 7 is 007"),
    (re.compile(r"\+\d{7,}"), "a number, or a telephone's: to math 5551234 is +5551234"),
    (re.compile(r"\d+[A-Z]"), "a product, or a seat or a card: to math A2 is 2A"),
    (
        re.compile(rf"(?!{FACTOR}{SIGN}10\^)\(*{FACTOR}(?:\)*{SIGN}\(*{FACTOR}\)*)+(?:\s*/\s*\d+)?"),
        "a calculation, or its value: to math 6 is 2*3",
    ),
)
DECIMAL = re.compile(r"\d+\.\d+")
THOUSANDS = re.compile(r"(?<![\d,])\d{1,3}(?:,(?:\\!)?\d{3})+(?![\d,])")
IN_BRACKETS = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]|\\langle.*?\\rangle")


def choose(rows: Sequence[Rows], answer_column: str | None) -> tuple[str, str]:
    """The verifier that fits the rows, and why, in words; refuses answers of which it would judge some wrongly."""
    first, place = rows[0].rows[0], rows[0].where(0)
    metadata = first.get("metadata")
    if isinstance(metadata, dict) and metadata.get("source_dataset"):
        return "reasoning_gym", "since the rows name their dataset in metadata.source_dataset"
    if answer_column is None and all(first.get(column) is None for column in ANSWER_COLUMNS):
        remedy = "name scorers with --verifiers, or the column of the answers with --answer_column"
        raise InputError(f"{place}: nothing to judge responses by; the row has {sorted(first)}; {remedy}")

    places, mathematics, others = {}, {}, {}
    count = 0
    for answer, where in _answers(rows, answer_column):
        what = unfit(answer)
        kind = mathematics if what is None else others
        kind[answer] = kind.get(answer, 0) + 1
        places.setdefault(answer, where)
        count += 1
    of_others = _some(f"{answer!r:.40} ({unfit(answer)})" for answer in others)
    of_mathematics = _some(f"{answer!r:.40}" for answer in mathematics)
    if sum(others.values()) >= MOST * count:
        of_all = f"{sum(others.values())} of {count}" if mathematics else f"all {count}"
        told = "a response is right where it is the answer and nothing else; or name another with --verifiers"
        return "exact_match", f"since {of_all} answers are no mathematics: {of_others}; {told}"
    if others:
        both = f"{sum(mathematics.values())} are mathematics ({of_mathematics}), and {sum(others.values())} are not"
        said = f"no one scorer fits all answers: {both} ({of_others}); name who judges with --verifiers: math judges"
        raise InputError(f"{places[next(iter(others))]}: {said} the first alone, {OF_OTHERS}")
    for answer, what in _doubts(mathematics):
        said = f"the answer {answer!r:.40} is {what}; say which with --verifiers: math judges mathematics, {OF_OTHERS}"
        raise InputError(f"{places[answer]}: {said}")
    return "math", f"since all {count} answers are numbers or formulas: {of_mathematics}"


def _answers(rows: Sequence[Rows], answer_column: str | None) -> Iterable[tuple[str, str]]:
    """Each row's answer, and where it stands."""
    for part in rows:
        for i, row in enumerate(part.rows):
            with part.at(i):
                answer = answer_of(row, answer_column)
            yield answer, part.where(i)


def _doubts(answers: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Of what is mathematics, answers that may be texts too, and why."""
    texts = {answer: bare(answer) for answer in answers}
    # Where decimals are all there is, a last zero that is not one of as many digits is of versions.
    decimals = all(map(DECIMAL.fullmatch, texts.values()))
    places = {len(text.partition(".")[2]) for text in texts.values()}
    for answer, text in texts.items():
        what = next((what for form, what in DOUBTFUL if form.fullmatch(text)), None)
        fraction = re.fullmatch(r"(\d+)/(\d+)", text)
        if fraction and math.gcd(*map(int, fraction.groups())) > 1:
            what = "a fraction, or two numbers (a score, a beat): to math 3/4 is 6/8"
        elif decimals and len(places) > 1 and re.search(r"[1-9]0$", text.partition(".")[2]):
            what = "a number, or a version: to math 3.1 is 3.10"
        elif _is_list(text):
            what = "a set, or a list whose order matters, or a decimal comma: to math 2, 1 is 1, 2"
        if what is not None:
            yield answer, what


def _is_list(text: str) -> bool:
    """Whether commas stand outside of brackets and numbers; not where the names of the values are given, or "and"."""
    if "=" in text or re.search(r"\b(?:and|or)\b", text):
        return False
    text, before = re.sub(r"\\[,;:!]", "", THOUSANDS.sub("0", text)), None
    while text != before:
        text, before = IN_BRACKETS.sub("", text), text
    return "," in text


def _some(answers: Iterable[str]) -> str:
    """The first few of them, in words."""
    listed = list(itertools.islice(answers, EXAMPLES + 1))
    return ", ".join(listed[:EXAMPLES]) + (", …" if len(listed) > EXAMPLES else "")
