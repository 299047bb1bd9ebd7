"""Preference pairs in the Hub's common forms (forms.py), as token ids.

| chosen, rejected | prompt | prompt of the pair | response |
|---|---|---|---|
| text | text or messages | the prompt | the text |
| text that a template has rendered | none | all before the assistant's last turn that both share | the rest |
| other text | none | the tokens that both begin with | the rest |
| messages that begin with the assistant's | text or messages | the prompt, and the turns that both share | the others |
| other messages | none, or one of them | the turns that both share | the others |
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import bar, print_rank0
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.encode import Encoded, as_turns
from fused_rl.trainers.data.forms import FIX, Reader
from fused_rl.trainers.data.rows import BadRow, Rows
from fused_rl.trainers.options import MAIN, PositiveInt, RunConfig, Smoothing


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


def arithmetic(config: PairsConfig, world: int) -> dict[str, object]:
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
            len(prompt) + len(response) for prompt, response in self.sequences().values()
        )

    def sequences(self) -> dict[str, Encoded]:
        """Return both sequences by their name."""
        return {"chosen": self.chosen, "rejected": self.rejected}

    def predicted(self) -> list[int]:
        """Return the number of response tokens, chosen and rejected, that something predicts."""
        # Nothing predicts the first token of a response without a prompt.
        return [len(response) - (not prompt) for prompt, response in (self.chosen, self.rejected)]


class PairEncoder:
    """Preference rows in the Hub's forms to token ids."""

    def __init__(self, config, tokenizer, encoder: encode.Encoder | None = None):
        self.config = config
        self.tokenizer = tokenizer
        self.encoder = encode.Encoder.of(config, tokenizer) if encoder is None else encoder

    def pairs(self, rows: Rows) -> list[Pair]:
        """Return all rows that fit; print how many were dropped or cut, and why."""
        kept, dropped, truncated = [], {}, 0
        limit, column = self.config.max_response_length, self.config.margin_column
        columns = {
            option: getattr(self.config, option) for option in ("chosen_column", "rejected_column")
        }
        # Every row may lack a margin, but a column that was named is one that exists. A run's own config names the
        # usual one.
        is_named = column != type(self.config).model_fields["margin_column"].default
        if is_named and len(rows) and all(column not in row for row in rows.rows):
            raise InputError(
                f"{rows.source}: no row has the column {column!r} of --margin_column; the first has "
                f"{sorted(rows.rows[0])}"
            )
        for i in bar(range(len(rows)), "reading pairs"):
            with rows.collecting(i):
                sides = pair_sides(self.encoder, rows, i, self.config.prompt_column, columns)
                if self.config.too_long == "truncate":
                    truncated += sum(len(response) > limit for _, response in sides)
                    sides = [(prompt, self._cut(response)) for prompt, response in sides]
                margin = self._margin(rows, i)
                pair = Pair(*sides, margin=margin, where=rows.where(i))
                # Reasons are counted, so that one line says what a run leaves out.
                reason = self._unusable(pair)
                if reason is None:
                    kept.append(pair)
                else:
                    dropped[reason] = dropped.get(reason, 0) + 1
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        if dropped and not kept:
            raise InputError(f"{rows.source}: no pair is left of {len(rows)}: {reasons}")
        if dropped:
            print_rank0(
                f"{rows.source}: dropped {sum(dropped.values())} of {len(rows)} pairs: {reasons}"
            )
        if truncated:
            print_rank0(
                f"{rows.source}: cut {truncated} of {2 * len(rows)} responses to max_response_length"
            )
        return kept

    def _cut(self, response: list[int]) -> list[int]:
        """Return a response that fits; one that is cut ends in EOS like all others, which is where a reward is read."""
        limit = self.config.max_response_length
        if len(response) <= limit:
            return response
        return [*response[: limit - 1], self.tokenizer.eos_token_id]

    def _margin(self, rows: Rows, i: int) -> float:
        """Return row i's margin; a row may lack the column, and a table has null where others have a margin."""
        column = self.config.margin_column
        margin = Reader(rows).value(i, column) or 0
        if not isinstance(margin, (int, float)) or not math.isfinite(margin):
            reason = f"column {column!r} must be a number"
            raise BadRow(reason, FIX, came=f"got {margin!r:.80}")
        return float(margin)

    def _unusable(self, pair: Pair) -> str | None:
        for ids, response in (pair.chosen, pair.rejected):
            if len(ids) > self.config.max_prompt_length:
                return "with a prompt longer than max_prompt_length"
            if len(response) > self.config.max_response_length:
                return "with a response longer than max_response_length"
        # Equal sides differ by 0 under every model, so there is nothing to learn from them.
        return "whose two sides are the same tokens" if pair.chosen == pair.rejected else None


def pair_sides(
    encoder: encode.Encoder, rows: Rows, i: int, prompt_column: str | None, columns: dict[str, str]
) -> list[Encoded]:
    """Return the prompt and response of row i's chosen side, and of its rejected one; `columns` by option."""
    with rows.at(i):
        read = Reader(rows).pair(i, prompt_column, columns)
        # Texts without a prompt are whole conversations, which no template is applied to.
        if read.prompt is None and not read.own_prompts:
            return _whole_texts(encoder, read.responses)
        prompts = read.own_prompts or (read.prompt, read.prompt)
        sides = []
        for prompt, response in zip(prompts, read.responses, strict=True):
            before = encoder.messages(prompt)
            turns = before + as_turns(response)
            sides.append(encoder.pair(turns, read.tools, len(before)))
        return sides


def _whole_texts(encoder: encode.Encoder, texts: Sequence[Any]) -> list[Encoded]:
    """Return two texts as their prompt, which both begin with, and the rest of each."""
    encoder.check_no_system_prompt("a pair of whole texts")
    texts = [encoder.ended_text(text) for text in texts]
    # In a text that a template has written, a response begins where the assistant's turn does.
    common = os.path.commonprefix(texts)
    before = encoder.rendered_prompt(common)
    own = [*filter(None, map(encoder.rendered_prompt, texts))]
    if len(own) == len(texts) and (before is None or encoder.ends_turn(common)):
        # They differ in what the user asks, so each answers a prompt of its own.
        return [encoder.rendered_pair(*pair) for pair in zip(own, texts, strict=True)]
    if before is not None:
        return [encoder.rendered_pair(before, text) for text in texts]
    sides = [encoder.whole_text(text) for text in texts]
    # Each has a token left besides its end, even if one text is the beginning of the other.
    most = max(0, min(map(len, sides)) - 2)
    shared = 0
    while shared < most and sides[0][shared] == sides[1][shared]:
        shared += 1
    for ids in sides:
        if not encoder.tokenizer.decode(ids[shared:-1]).strip():
            raise encode.empty_completion()
    return [(ids[:shared], ids[shared:]) for ids in sides]


def pairs_of(config: PairsConfig, rows: Rows, encoder: encode.Encoder) -> list[Pair]:
    """Return all rows that fit; print how many were dropped or cut, and why."""
    return PairEncoder(config, encoder.tokenizer, encoder).pairs(rows)


def sides_of(pairs: list[Pair]) -> Iterator[tuple[list[int], str]]:
    """Yield the token ids of each side of each pair, prompt and response, and where it came from."""
    for pair in pairs:
        for prompt, response in (pair.chosen, pair.rejected):
            yield prompt + response, pair.where
