"""Single responses that are marked good or bad, as token ids: TRL's and LLaMA-Factory's rows for KTO.

| prompt | completion | label |
|---|---|---|
| text or messages | text, or a list of one message | true or 1 for a good response, false or 0 for a bad one |

Messages that end with the assistant's need no completion. A pair of chosen and rejected without a label is two rows.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.memory import Footprint
from fused_rl.trainers.base.screen import bar
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.encode import Encoded, Encoder
from fused_rl.trainers.data.rows import Rows, log_dropped
from fused_rl.trainers.options import MAIN, PositiveInt, RunConfig

# The columns of a pair, and whether each is a good response.
SIDES = {"chosen": True, "rejected": False}


class MarkedConfig(RunConfig):
    """The options of a trainer on single responses that are marked good or bad."""

    batch_option: ClassVar = "batch_size"
    main: ClassVar = (*MAIN, "batch_size", "max_length", "label_column")

    prompt_column: str | None = None
    """Text or messages; None takes prompt, messages or question, whichever exists."""
    completion_column: str = "completion"
    """Text of the response, or a list of one message."""
    label_column: str = "label"
    """true or 1 for a good response, false or 0 for a bad one. Rows without this column may have chosen and rejected
    responses: each is then two rows, a good and a bad one."""
    max_length: PositiveInt = 1024
    """Longer rows (prompt and response, in tokens) are dropped, counted and reported."""
    batch_size: PositiveInt = 32
    """Rows per optimizer step, over all ranks."""

    def footprint(self) -> Footprint:
        """Return the same with sequences of `max_length`."""
        return super().footprint()._replace(prompt_tokens=0, response_tokens=self.max_length)

    @property
    def splits_rows(self) -> bool:
        # A pair becomes two rows.
        return True

    def check_first_row(self, encoder: Encoder, rows: Rows) -> None:
        _read(self, encoder, unpaired(self, rows), 0)


def arithmetic(config: MarkedConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    local = ranks.divide_over("batch_size", config.batch_size, world)
    return {
        "processes": world,
        "rows per step": f"{config.batch_size} = {world} processes x {local}",
        "rows in the run": config.in_run(config.batch_size),
        "optimizer steps": config.in_run(1),
    }


@dataclass
class Marked:
    """Token ids of a prompt with its response, and with a response to another prompt."""

    matched: Encoded
    mismatched: Encoded
    desirable: bool
    where: str

    def tokens(self) -> int:
        """Return the number of tokens of both sequences."""
        return sum(map(len, (*self.matched, *self.mismatched)))


def marked_rows(config: MarkedConfig, encoder: Encoder, rows: Rows) -> list[Marked]:
    """Return every row that is short enough; print how many are not."""
    rows = unpaired(config, rows)
    kept = []
    for i in bar(range(len(rows)), "reading rows"):
        (prompt, response), desirable = _read(config, encoder, rows, i)
        if len(prompt) <= config.max_prompt_length and len(prompt + response) <= config.max_length:
            kept.append((prompt, response, desirable, rows.where(i)))
    log_dropped(rows, len(kept), "longer than max_prompt_length or max_length")

    # The mismatched response is that of the row before. Neighbours with one prompt, as from a pair,
    # have the same.
    marked = []
    mismatched = kept[-1][1] if kept else []
    for before, (prompt, response, desirable, where) in itertools.pairwise(kept[-1:] + kept):
        if before[0] != prompt:
            mismatched = before[1]
        # The other response only estimates KTO's KL baseline (arXiv:2402.01306), so it may be cut.
        other = prompt, mismatched[: config.max_length - len(prompt)]
        marked.append(Marked((prompt, response), other, desirable, where))
    return marked


def unpaired(config: MarkedConfig, rows: Rows) -> Rows:
    """Return the rows with each pair without a label as two: a conversation, or the prompt with one response."""
    spread = []
    numbers = []
    for i, row in enumerate(rows.rows):
        # Both rows of a pair keep its number in the file, by which errors name it.
        number = i + 1 if rows.numbers is None else rows.numbers[i]
        if row.get(config.label_column) is not None or any(row.get(side) is None for side in SIDES):
            spread.append(row)
            numbers.append(number)
            continue
        for side, desirable in SIDES.items():
            # A list of several messages begins with the prompt.
            is_conversation = isinstance(row[side], list) and len(row[side]) > 1
            column = "messages" if is_conversation else config.completion_column
            spread.append(row | {column: row[side], config.label_column: desirable})
            numbers.append(number)
    return Rows(spread, rows.source, numbers)


def _read(config: MarkedConfig, encoder: Encoder, rows: Rows, i: int) -> tuple[Encoded, bool]:
    label = rows.get(i, config.label_column, "label_column")
    # 0 and 1 are equal to these.
    if label not in (False, True):
        what = f"column {config.label_column!r} must be true or false, got {label!r:.80}"
        raise InputError(f"{rows.where(i)}: {what}")
    (pair,) = encoder.pairs(rows, i, config.prompt_column, config.completion_column)
    return pair, bool(label)
