"""Preference pairs in the Hub's common forms (forms.py), as token ids.

| chosen, rejected | prompt | prompt of the pair | response |
|---|---|---|---|
| text | text or messages | the prompt | the text |
| text | none | the tokens that both begin with | the rest |
| messages that begin with the assistant's | text or messages | the prompt, and the turns that both share | the others |
| other messages | none, or one of them | the turns that both share | the others |
"""

import contextlib
import functools
import json
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..base import ranks
from ..base.options import PositiveInt, Smoothing
from ..base.screen import print_rank0
from ..base.text import InputError
from ..options import MAIN, RunConfig
from .encode import Encoded, Encoder
from .examples import Examples, Record, encode_rows
from .forms import FIX, RowReader
from .rows import BadRow, Rows


class PairsConfig(RunConfig):
    """The options of every trainer on pairs of a chosen and a rejected response."""

    batch_option: ClassVar = "batch_size"
    main: ClassVar = (*MAIN, "batch_size", "max_response_length")

    prompt_column: str | None = None
    """Text or messages that both responses answer; None takes the first of prompt, messages, conversations, question,
    instruction and problem that a row has, and rows without any of them hold whole conversations or texts."""
    chosen_column: str = "chosen"
    """The better response, or the conversation that ends with it: text or messages."""
    rejected_column: str = "rejected"
    """The worse response, in the same form as the better one."""
    margin_column: str = "margin"
    """By how much the chosen score should lead at least; 0 for rows without this column."""
    max_response_length: PositiveInt = 512
    """Maximum length of each response in tokens, EOS included."""
    too_long: Literal["drop", "truncate"] = "drop"
    """Drop a pair with a longer response, or truncate the response so that it still ends in EOS."""
    batch_size: PositiveInt = 32
    """Pairs per optimizer step, over all ranks."""
    label_smoothing: Smoothing = 0.0
    """Probability that a label is wrong."""

    @property
    def longest_sequence(self) -> int:
        return self.max_prompt_length + self.max_response_length


def batch_plan(config: PairsConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    local = ranks.divide_over("batch_size", config.batch_size, world)
    micro_batches = config.micro_batches_of(2 * local)
    if config.micro_batch_size is not None and config.micro_batch_tokens is None:
        size = pairs_at_once(config.micro_batch_size)
        micro_batches = f"{math.ceil(local / size)} of {size} pairs = {2 * size} sequences"
    return {
        "processes": world,
        "pairs per step": f"{config.batch_size} = {world} processes x {local}",
        "micro-batches per process and step": micro_batches,
        "pairs in the run": config.in_run(config.batch_size),
        "optimizer steps": config.in_run(1),
    }


def pairs_at_once(micro_batch_size: int) -> int:
    """Return the pairs of a micro-batch: chosen and rejected go through one forward pass."""
    return max(1, micro_batch_size // 2)


@dataclass
class Pair:
    """Token ids of one preference, and where it came from."""

    chosen: Encoded
    """Prompt and response."""
    rejected: Encoded
    """The same, of the worse response."""
    margin: float
    where: str

    def tokens(self) -> int:
        """Return the number of tokens of both sequences."""
        return sum(map(len, (*self.chosen, *self.rejected)))

    def padded_tokens(self) -> int:
        """Return the number of tokens of both sequences, padded to the same length."""
        return 2 * max(
            len(prompt) + len(response) for prompt, response in (self.chosen, self.rejected)
        )

    def predicted(self) -> list[int]:
        """Return the number of response tokens, chosen and rejected, that something predicts."""
        # Nothing predicts the first token of a response without a prompt.
        return [len(response) - (not prompt) for prompt, response in (self.chosen, self.rejected)]


def pair_sides(
    encoder: Encoder, reader: RowReader, prompt_column: str | None, columns: dict[str, str]
) -> list[Encoded]:
    """Return the prompt and response of a row's chosen side, and of its rejected one; `columns` by option."""
    content = reader.pair(prompt_column, columns)
    # Texts without a prompt are whole conversations, which no template is applied to.
    if content.prompt is None:
        return encoder.pair_of_texts(content.responses)
    before = encoder.messages(content.prompt)
    turns = [before + response for response in content.responses]
    return [encoder.pair(messages, content.tools, len(before)) for messages in turns]


def _read_pair(
    encoder: Encoder,
    reader: RowReader,
    *,
    prompt_column: str | None,
    columns: dict[str, str],
    margin_column: str,
    max_tokens: int | None,
) -> list[Record]:
    """Return a row's pair with its margin and the number of responses cut to `max_tokens`."""
    sides = pair_sides(encoder, reader, prompt_column, columns)
    cut = 0
    for i, (prompt, response) in enumerate(sides):
        # A response that is cut ends in EOS like all others, which is where a reward is read.
        if max_tokens is not None and len(response) > max_tokens:
            sides[i] = prompt, [*response[: max_tokens - 1], encoder.tokenizer.eos_token_id]
            cut += 1
    chosen, rejected = sides
    # Equal sides differ by 0 under every model, so there is nothing to learn from them.
    same = "whose two sides are the same tokens" if chosen == rejected else None
    return [Record([*chosen, *rejected], [_margin(reader, margin_column), cut], same)]


def _margin(reader: RowReader, column: str) -> float:
    """Return a row's margin; a row may lack the column, and a table has null where others have a margin."""
    margin = reader.value(column) or 0
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(float(margin)):
            return float(margin)
    raise BadRow(f"column {column!r} must be a number", FIX, got=f"got {margin!r:.80}")


def _pair(ids: list[list[int]], margin_and_cut: tuple[float, int], rows: Rows, i: int) -> Pair:
    return Pair((ids[0], ids[1]), (ids[2], ids[3]), margin_and_cut[0], rows.where(i))


def pairs_of(config: PairsConfig, rows: Rows, encoder: Encoder) -> Examples:
    """Return all rows that fit; print how many were dropped or cut, and why."""
    limit = config.max_response_length
    read = functools.partial(
        _read_pair,
        encoder,
        prompt_column=config.prompt_column,
        columns={"chosen_column": config.chosen_column, "rejected_column": config.rejected_column},
        margin_column=config.margin_column,
        max_tokens=limit if config.too_long == "truncate" else None,
    )
    pairs = encode_rows(rows, encoder.key, read, _pair)
    # Every row may lack a margin, but a column that was named is one that exists. A run's own config names the usual.
    column = config.margin_column
    is_named = column != type(config).model_fields["margin_column"].default
    if is_named and len(rows) and column not in rows.columns_filled:
        raise InputError(
            f"{rows.source}: no row has the column {column!r} of --margin_column; they have "
            f"{sorted(rows.columns_filled)}"
        )
    if config.too_long == "truncate":
        cut = sum(json.loads(margin_and_cut)[1] for margin_and_cut in pairs.column("beside"))
        if cut:
            summary = f"cut {cut} of {2 * len(rows)} responses to max_response_length={limit}"
            print_rank0(f"{rows.source}: {summary}")
    limits = {"prompt": ("max_prompt_length", config.max_prompt_length)}
    return pairs.within_limits("pair", limits | {"response": ("max_response_length", limit)})
