"""Preference pairs in the Hub's common forms, as token ids.

| chosen, rejected | prompt | meaning |
|---|---|---|
| text | text or messages | the response alone |
| text | none | a conversation spelled out as text |
| messages that begin with the assistant's | text or messages | what follows the prompt; the last turn is the response |
| other messages | none, or one of them | a conversation; its last turn is the response |
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.memory import Footprint
from fused_rl.trainers.base.screen import bar, print_rank0
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.encode import Encoded
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import MAIN, PositiveInt, RunConfig, Smoothing


class PairsConfig(RunConfig):
    """The options of every trainer on pairs of a chosen and a rejected response."""

    batch_option: ClassVar = "batch_size"
    main: ClassVar = (*MAIN, "batch_size", "max_response_length")

    prompt_column: str | None = None
    """Text or messages that both responses answer; None takes prompt, messages or question, whichever exists, and rows
    without any of them hold whole conversations."""
    chosen_column: str = "chosen"
    """The better response, or the conversation that ends with it: text or messages."""
    rejected_column: str = "rejected"
    """The worse response, as chosen_column."""
    margin_column: str = "margin"
    """Least lead of the chosen score; rows without this column have 0."""
    max_response_length: PositiveInt = 512
    """Maximum length of each response in tokens, EOS included."""
    too_long: Literal["drop", "truncate"] = "drop"
    """Drop a pair with a longer response, or truncate the response so that it still ends in EOS."""
    batch_size: PositiveInt = 32
    """Pairs per optimizer step, over all ranks."""
    label_smoothing: Smoothing = 0.0
    """Probability that a label is wrong."""

    needs_responses: ClassVar = False
    """True if a response without a token that something predicts has no score: a reward is read even there."""

    def check_first_row(self, encoder: encode.Encoder, rows: Rows) -> None:
        # A dry run loads no model, and still finds a wrong name of a column.
        rows.get(0, self.chosen_column, "chosen_column")
        rows.get(0, self.rejected_column, "rejected_column")

    def footprint(self) -> Footprint:
        return super().footprint()._replace(response_tokens=self.max_response_length)


def arithmetic(config: PairsConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    local = ranks.divide_over("batch_size", config.batch_size, world)
    size = pairs_at_once(config.micro_batch_size)
    return {
        "processes": world,
        "pairs per step": f"{config.batch_size} = {world} processes x {local}",
        "micro-batches per process and step": f"{math.ceil(local / size)} of {size} pairs = {2 * size} sequences",
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

    def predicted(self) -> list[int]:
        """Return the number of response tokens, chosen and rejected, that something predicts."""
        # Nothing predicts the first token of a response without a prompt.
        return [len(response) - (not prompt) for prompt, response in (self.chosen, self.rejected)]


class PairEncoder:
    """Preference rows in the Hub's forms to token ids."""

    def __init__(self, config, tokenizer):
        self.config = config
        self.tokenizer = tokenizer
        self.encoder = encode.Encoder.of(config, tokenizer)

    def pairs(self, rows: Rows) -> list[Pair]:
        """Return all rows that fit; print how many were dropped or cut, and why."""
        kept, dropped, truncated = [], {}, 0
        limit, column = self.config.max_response_length, self.config.margin_column
        for i in bar(range(len(rows)), "reading pairs"):
            sides = [self._side(rows, i, option) for option in ("chosen_column", "rejected_column")]
            # A response that is cut ends in EOS like all others, which is where a reward is read.
            if self.config.too_long == "truncate":
                for side, (prompt, response) in enumerate(sides):
                    if len(response) > limit:
                        truncated += 1
                        sides[side] = prompt, [*response[: limit - 1], self.tokenizer.eos_token_id]
            # A row may lack the column, and a table has null where others have a margin.
            margin = rows.rows[i].get(column) or 0
            if not isinstance(margin, (int, float)) or not math.isfinite(margin):
                raise InputError(
                    f"{rows.where(i)}: column {column!r} must be a number, got {margin!r:.80}"
                )
            pair = Pair(*sides, margin=float(margin), where=rows.where(i))
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

    def _unusable(self, pair: Pair) -> str | None:
        # A log-probability over no token is 0 whatever the model is; a reward is read even there.
        if self.config.needs_responses and 0 in pair.predicted():
            return "with an empty response"
        for ids, response in (pair.chosen, pair.rejected):
            if len(ids) > self.config.max_prompt_length:
                return "with a prompt longer than max_prompt_length"
            if len(response) > self.config.max_response_length:
                return "with a response longer than max_response_length"
        # Equal sides differ by 0 under every model, so there is nothing to learn from them.
        return "whose two sides are the same tokens" if pair.chosen == pair.rejected else None

    def _side(self, rows: Rows, i: int, option: str) -> Encoded:
        row = rows.rows[i]
        column = getattr(self.config, option)
        prompt_column = self.config.prompt_column or encode.prompt_column_of(row)
        side = rows.get(i, column, option)
        # Text without a prompt is a whole conversation, which no template is applied to.
        if isinstance(side, str) and self.config.prompt_column is None and prompt_column not in row:
            # It has the tokenizer's own beginning, and EOS once.
            ids = self.tokenizer(side).input_ids
            eos = self.tokenizer.eos_token_id
            return [], ids if ids[-1:] == [eos] else [*ids, eos]
        # A response alone becomes a turn, so that the chat template writes it as any other.
        messages = [{"role": "assistant", "content": side}] if isinstance(side, str) else side
        if not encode.are_messages(messages) or messages[-1]["role"] != "assistant":
            what = f"column {column!r} must be text, or messages that end with the assistant's text"
            raise InputError(f"{rows.where(i)}: {what}; got {side!r:.80}")
        # Messages that begin with the assistant follow a prompt, and others contain it.
        begins = messages[0]["role"] != "assistant"
        prompt = messages if begins else rows.get(i, prompt_column, "prompt_column")
        with rows.at(i):
            before = self.encoder.conversation(prompt, column if begins else prompt_column)
            return self.encoder.pair(before if begins else before + messages, row.get("tools"))


def sides_of(pairs: list[Pair]) -> Iterator[tuple[list[int], str]]:
    """Yield the token ids of each side of each pair, prompt and response, and where it came from."""
    for pair in pairs:
        for prompt, response in (pair.chosen, pair.rejected):
            yield prompt + response, pair.where
