"""Single responses that are marked good or bad, as token ids: TRL's and LLaMA-Factory's rows for KTO.

| prompt | completion | label |
|---|---|---|
| text or messages | text or messages | true or 1 for a good response, false or 0 for a bad one |

Messages that end with the assistant's need no completion. A pair of chosen and rejected without a label is two rows.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy

from ..base import ranks
from ..base.files import hash_of
from ..base.options import PositiveInt
from ..base.text import InputError
from ..options import MAIN, RunConfig
from .encode import Encoded, Encoder
from .examples import Examples, Record, encode_rows
from .forms import FIX, RowReader
from .preferences import pair_sides
from .rows import BadRow, Rows

# The sides of a pair, good and bad, in the order in which they are encoded.
SIDES = ("chosen", "rejected")
LABELS = {"true": True, "1": True, "false": False, "0": False}


class MarkedConfig(RunConfig):
    """The options of a trainer on single responses that are marked good or bad."""

    batch_option: ClassVar = "batch_size"
    main: ClassVar = (*MAIN, "batch_size", "max_length", "label_column")

    prompt_column: str | None = None
    """Text or messages; None takes the first of prompt, messages, conversations, question, instruction and problem that
    a row has."""
    completion_column: str = "completion"
    """Text of the response, or its messages."""
    label_column: str = "label"
    """true or 1 for a good response, false or 0 for a bad one. A row without this column may have a chosen and a
    rejected response, and is then read as two rows, a good and a bad one."""
    max_length: PositiveInt = 1024
    """Longer rows (prompt and response, in tokens) are dropped, counted and reported."""
    batch_size: PositiveInt = 32
    """Rows per optimizer step, over all ranks."""

    @property
    def longest_sequence(self) -> int:
        return self.max_length


def batch_plan(config: MarkedConfig, world: int) -> dict[str, object]:
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


class MarkedRows(Examples):
    """Rows that fit, each with the response to another prompt beside its own."""

    def __init__(self, examples: Examples, max_length: int):
        super().__init__(examples.rows, examples.table, examples.make, examples.places)
        self.max_length = max_length
        groups = examples.column("group").tolist()
        # The mismatched response is that of the last row before with another prompt. The rows go round twice, as those
        # before the first are the last ones.
        mismatched, other = [], -1
        for i in range(2 * len(groups)):
            i %= len(groups)
            if groups[i - 1] != groups[i]:
                other = i - 1
            mismatched.append(other % len(groups))
        self.mismatched = mismatched[len(groups) :]

    def check_prompts(self) -> None:
        """Refuse rows that all have one prompt."""
        if len({*self.column("group")}) == 1:
            problem = f"all {len(self)} rows have the prompt of {self.where(0)}"
            why = "KTO also measures responses to other prompts"
            raise InputError(f"{problem}; {why}: give several, and hold several out (--eval_size)")

    def __getitem__(self, i) -> Any:
        if isinstance(i, slice):
            return super().__getitem__(i)
        prompt, response, desirable, where = super().__getitem__(i)
        _, mismatched, _, _ = super().__getitem__(self.mismatched[i])
        # The other response only estimates KTO's KL baseline (arXiv:2402.01306), so it may be cut.
        other = prompt, mismatched[: self.max_length - len(prompt)]
        return Marked((prompt, response), other, desirable, where)

    def column(self, name: str) -> numpy.ndarray:
        """Return a column of the table, with the mismatched response as one of the row's."""
        column = super().column(name)
        if name == "tokens" and len(column):
            tokens = super().column("prompt") + super().column("response")[self.mismatched]
            column = numpy.maximum(column, tokens.clip(max=self.max_length))
        return column


def marked_rows(config: MarkedConfig, rows: Rows, encoder: Encoder) -> MarkedRows:
    """Return every row that is short enough; print how many are not."""
    read = functools.partial(
        _read_marked,
        encoder,
        prompt_column=config.prompt_column,
        completion_column=config.completion_column,
        label_column=config.label_column,
    )
    examples = encode_rows(rows, encoder.key, read, _marked)
    limits = {"tokens": ("max_length", config.max_length)}
    return MarkedRows(examples.within_limits("row", limits), config.max_length)


def _marked(ids: list[list[int]], desirable: bool, rows: Rows, i: int) -> tuple:
    return ids[0], ids[1], desirable, rows.where(i)


def _read_marked(
    encoder: Encoder,
    reader: RowReader,
    *,
    prompt_column: str | None,
    completion_column: str,
    label_column: str,
) -> list[Record]:
    """Return the responses of a row with their marks: one, or both of a pair that has no label."""
    if reader.value(label_column) is None and all(
        reader.row.get(side) is not None for side in SIDES
    ):
        columns = {f"{side}_column": side for side in SIDES}
        chosen, rejected = pair_sides(encoder, reader, prompt_column, columns)
        return [_record(chosen, True), _record(rejected, False)]
    # A .csv file has text; 0 and 1 are equal to these.
    label = reader.cell(label_column, "label_column")
    label = LABELS.get(label.lower(), label) if isinstance(label, str) else label
    if label not in (False, True):
        reason = f"column {label_column!r} must be true or false"
        raise BadRow(reason, FIX, got=f"got {label!r:.80}")
    demonstrations = encoder.demonstrations(reader, prompt_column, completion_column, joined=False)
    return [_record(one[:2], bool(label)) for one in demonstrations]


def _record(ids: Encoded, desirable: bool) -> Record:
    return Record(ids, desirable, group=hash_of(ids[0]))
