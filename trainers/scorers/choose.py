"""Who judges where nobody is named: what the answers of the rows are says it. Left out: guessing."""

from collections.abc import Iterable, Sequence

from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.scorers.answers import ANSWER_COLUMNS, answer_of
from fused_rl.trainers.scorers.math_judge import unfit

MOST = 0.9  # from here on what is no mathematics decides: compared as a text, a number is judged too
EXAMPLES = 3


def choose(rows: Sequence[Rows], answer_column: str | None) -> tuple[str, str]:
    """The verifier that fits the rows, and why, in words; refuses answers of which it would judge some wrongly."""
    first, place = rows[0].rows[0], rows[0].where(0)
    metadata = first.get("metadata")
    if isinstance(metadata, dict) and metadata.get("source_dataset"):
        return "reasoning_gym", "since the rows name their dataset in metadata.source_dataset"
    if all(first.get(column) is None for column in (answer_column, *ANSWER_COLUMNS) if column):
        remedy = "name scorers with --verifiers, or the column of the answers with --answer_column"
        raise InputError(f"{place}: nothing to judge responses by; the row has {sorted(first)}; {remedy}")

    (mathematics, of_mathematics, _), (others, of_others, where) = _sorted(rows, answer_column)
    count = mathematics + others
    if not others:
        return "math", f"since all {count} answers are numbers or formulas: {of_mathematics}"
    if others >= MOST * count:
        of_all = f"{others} of {count}" if mathematics else f"all {count}"
        told = "a response is right where it is the answer and nothing else; or name another with --verifiers"
        return "exact_match", f"since {of_all} answers are no mathematics: {of_others}; {told}"
    raise InputError(
        f"{where}: no one scorer fits all answers: {mathematics} are mathematics ({of_mathematics}), and "
        f"{others} are not ({of_others}); name who judges with --verifiers: math judges the first alone, exact_match "
        "the whole response as text, regex:<pattern> and a function of yours what they are made for"
    )


def _sorted(rows: Sequence[Rows], answer_column: str | None) -> list[tuple[int, str, str]]:
    """How many answers mathematics can judge, the first of them in words, and its row; and of all others the same."""
    counts, shown, places = [0, 0], [{}, {}], ["", ""]
    for part in rows:
        for i, row in enumerate(part.rows):
            with part.at(i):
                answer = answer_of(row, answer_column)
            what = unfit(answer)
            kind = int(what is not None)
            counts[kind] += 1
            places[kind] = places[kind] or part.where(i)
            if len(shown[kind]) <= EXAMPLES:
                shown[kind][repr(answer)[:40] + (f" ({what})" if what else "")] = None
    return list(zip(counts, map(_some, shown), places, strict=True))


def _some(answers: Iterable[str]) -> str:
    """The first few of them, in words."""
    listed = list(answers)
    return ", ".join(listed[:EXAMPLES]) + (", …" if len(listed) > EXAMPLES else "")
