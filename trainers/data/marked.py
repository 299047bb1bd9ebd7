"""Single responses that are marked good or bad, as token ids: TRL's and LLaMA-Factory's rows for KTO.

| prompt | completion | label |
|---|---|---|
| text or messages | text or messages | true or 1 for a good response, false or 0 for a bad one |

Messages that end with the assistant's need no completion. A pair of chosen and rejected without a label is two rows.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import bar
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.encode import Encoded, Encoder, fit
from fused_rl.trainers.data.forms import FIX, Reader, columns_of, state_of
from fused_rl.trainers.data.preferences import pair_sides
from fused_rl.trainers.data.reading import log_dropped
from fused_rl.trainers.data.rows import BadRow, Rows
from fused_rl.trainers.options import MAIN, PositiveInt, RunConfig

# The sides of a pair, good and bad, in the order in which they are encoded.
SIDES = ("chosen", "rejected")


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

    def sequences(self) -> dict[str, Encoded]:
        """Return the sequence that is trained, by its mark."""
        return {"good" if self.desirable else "bad": self.matched}

    def tokens(self) -> int:
        """Return the number of tokens of both sequences."""
        return sum(map(len, (*self.matched, *self.mismatched)))


def marked_rows(config: MarkedConfig, rows: Rows, encoder: Encoder) -> list[Marked]:
    """Return every row that is short enough; print how many are not."""
    kept, dropped = [], 0
    for i in bar(range(len(rows)), "reading rows"):
        with rows.collecting(i):
            responses = _read(config, rows, i, encoder)
            encoded_responses = [encoded for encoded, _ in responses]
            if fit(encoded_responses, config.max_prompt_length, config.max_length):
                for encoded, desirable in responses:
                    kept.append((*encoded, desirable, rows.where(i)))
            else:
                dropped += 1
    log_dropped(rows, dropped, "longer than max_prompt_length or max_length")

    if kept and all(prompt == kept[0][0] for prompt, *_ in kept):
        what = f"all {len(kept)} rows have the prompt of {kept[0][-1]}"
        why = "KTO also measures responses to other prompts"
        raise InputError(f"{what}; {why}: give several, and hold several out (--eval_size)")

    # The mismatched response is that of the last row before with another prompt. The rows go round twice, as
    # those before the first are the last ones.
    marked, mismatched = [], []
    for before, (prompt, response, desirable, where) in itertools.pairwise(kept + kept):
        if before[0] != prompt:
            mismatched = before[1]
        # The other response only estimates KTO's KL baseline (arXiv:2402.01306), so it may be cut.
        other = prompt, mismatched[: config.max_length - len(prompt)]
        marked.append(Marked((prompt, response), other, desirable, where))
    return marked[-len(kept) :]


def _read(config: MarkedConfig, rows: Rows, i: int, encoder: Encoder) -> list[tuple[Encoded, bool]]:
    """Return the responses of row i with their marks: one, or both of a pair that has no label."""
    label = Reader(rows).value(i, config.label_column)
    is_pair = all(rows.rows[i].get(side) is not None for side in SIDES)
    if label is None and is_pair:
        columns = {f"{side}_column": side for side in SIDES}
        chosen, rejected = pair_sides(encoder, rows, i, config.prompt_column, columns)
        return [(chosen, True), (rejected, False)]
    # 0 and 1 are equal to these.
    if label not in (False, True):
        column = config.label_column
        if label is None:
            reason = f"column {column!r} {state_of(rows.rows[i], column)}"
            remedy = "name the right column with --label_column"
            raise BadRow(reason, remedy, came=f"the row has {columns_of(rows.rows[i])}")
        reason = f"column {column!r} must be true or false"
        raise BadRow(reason, FIX, came=f"got {label!r:.80}")
    encoded = encoder.pairs(rows, i, config.prompt_column, config.completion_column)
    return [(one, bool(label)) for one in encoded]
