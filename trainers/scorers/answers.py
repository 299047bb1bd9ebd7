"""The answer that a row holds, in the forms in which datasets have it."""

import numbers

from fused_rl.trainers.options import InputError

ANSWER_COLUMNS = ("ground_truth", "answer", "solution")


def answer_of(row: dict, column: str | None) -> str:
    """The row's ground truth; of a worked solution that ends in `#### 42`, as in gsm8k, the part after the marks."""
    columns = ANSWER_COLUMNS if column is None else (column,)
    named = column is not None
    column = next((c for c in columns if row.get(c) is not None), columns[0])
    value = row.get(column)
    if value is None:
        empty = [c for c in columns if c in row]
        if empty:
            raise InputError(
                f"column {empty[0]!r} is null; mend or remove the row{'' if named else ', or use --answer_column'}"
            )
        raise InputError(
            f"column {column!r} is missing; the row has {sorted(row)}; name the right one: --answer_column"
        )
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Number)) or value != value:
        shown = repr(value) if len(repr(value)) <= 80 else f"{value!r:.80}…"
        came = f"{shown} ({type(value).__name__})"
        remedy = "expected the answer as text or a number; write it so" + ("" if named else ", or use --answer_column")
        raise InputError(f"column {column!r} is {came}; {remedy}")
    answer = str(value).rsplit("####", 1)[-1].strip()
    if column == "solution" and "solution" in columns[1:]:
        answer = _last_box(answer)
    if not answer:
        raise InputError(f"column {column!r} has no answer: {value!r:.80}")
    return answer


def _last_box(text: str) -> str:
    """What stands in the last `\\boxed{}` of a worked solution; of a line without any, all of it."""
    depth = 0
    opened = text.rfind("\\boxed{")
    for at in range(opened + 6, len(text) if opened >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[opened + 7 : at].strip()
    if "\n" in text or "boxed" in text or "\\fbox" in text:
        what = "column 'solution' is a text of several lines without \\\\boxed{} or ####, or its box cannot be read"
        raise InputError(f"{what}; put the answer alone into a column, and name it with --answer_column")
    return text
