"""Preference pairs in the Hub's common forms, as token ids.

| chosen, rejected | prompt | meaning |
|---|---|---|
| text | text or messages | the response alone |
| text | none | a conversation spelled out as text |
| messages: the assistant's turn | text or messages | the response alone |
| messages: several turns | none, or one of them | a conversation; its last turn is the response |
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.encode import SAID, Encoded
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import InputError


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


class PairEncoder:
    """Preference rows in the Hub's forms to token ids."""

    def __init__(self, config, tokenizer):
        self.config = config
        self.tokenizer = tokenizer
        self.encoder = encode.Encoder.of(config, tokenizer)

    def pairs(self, rows: Rows) -> list[Pair]:
        """Return all rows that fit; print how many were dropped or cut, and why."""
        kept = []
        dropped = {}
        self.truncated = 0
        for i in range(len(rows)):
            pair = self._pair(rows, i)
            reason = self._unusable(pair, rows.rows[i])
            if reason is None:
                kept.append(pair)
            else:
                dropped[reason] = dropped.get(reason, 0) + 1
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        if dropped and not kept:
            raise InputError(f"{rows.source}: no pair is left of {len(rows)}: {reasons}")
        if dropped and ranks.rank() == 0:
            tell(f"{rows.source}: dropped {sum(dropped.values())} of {len(rows)} pairs: {reasons}")
        if self.truncated and ranks.rank() == 0:
            tell(f"{rows.source}: cut {self.truncated} of {2 * len(rows)} responses to max_response_length")
        return kept

    def _pair(self, rows: Rows, i: int) -> Pair:
        columns = (self.config.chosen_column, self.config.rejected_column)
        sides = [self._side(rows, i, column) for column in columns]
        if self.config.too_long == "truncate":
            limit = self.config.max_response_length
            eos = self.tokenizer.eos_token_id
            for side, (prompt, response) in enumerate(sides):
                if len(response) > limit:
                    self.truncated += 1
                    sides[side] = prompt, [*response[: limit - 1], eos]
        margin = rows.rows[i].get(self.config.margin_column)
        if margin is not None and not (isinstance(margin, (int, float)) and math.isfinite(margin)):
            column = self.config.margin_column
            raise InputError(f"{rows.where(i)}: column {column!r} must be a number, got {margin!r:.80}")
        return Pair(*sides, margin=float(margin or 0), where=rows.where(i))

    def _unusable(self, pair: Pair, row: dict) -> str | None:
        sides = (row[self.config.chosen_column], row[self.config.rejected_column])
        prompt = row.get(self.config.prompt_column)
        openings = {_opening(side, prompt) for side in sides}
        if len(openings) > 1:
            return "whose two sides answer different prompts"
        for ids, response in (pair.chosen, pair.rejected):
            if len(ids) > self.config.max_prompt_length:
                return "with a prompt longer than max_prompt_length"
            if len(response) > self.config.max_response_length:
                return "with a response longer than max_response_length"
        return "whose two sides are the same tokens" if pair.chosen == pair.rejected else None

    def _side(self, rows: Rows, i: int, column: str) -> Encoded:
        option = "chosen_column" if column == self.config.chosen_column else "rejected_column"
        prompt_column = self.config.prompt_column
        value = rows.get(i, column, option)
        prompt = rows.rows[i].get(prompt_column)
        alone = isinstance(value, list) and len(value) == 1 and _role(value) == "assistant"
        if alone or (isinstance(value, str) and prompt_column in rows.rows[i]):
            prompt = rows.get(i, prompt_column, "prompt_column")

        # The forms of the table above, each refused with a line where it is not whole.
        with rows.at(i):
            if alone:
                for name in [name for name in SAID if value[0].get(name)]:
                    raise InputError(f"column {column!r} is a turn with {name}; give the whole conversation")
                value = value[0].get("content")
            if isinstance(value, str) and prompt is None:
                encode.check_text_alone(value, column)
                ids = self.tokenizer(value).input_ids  # with the tokenizer's own beginning, and EOS once
                eos = self.tokenizer.eos_token_id
                return [], ids if ids and ids[-1] == eos else [*ids, eos]
            if not isinstance(value, str) and _role(value) != "assistant":
                what = f"column {column!r} must be text, or messages that end with the assistant's text"
                raise InputError(f"{what}; got {str(value)[:80]!r}")
            last = prompt[-1].get("content") if _role(prompt) else prompt
            before = [] if isinstance(value, str) else value[:-1]
            if before and prompt is not None and all(message.get("content") != last for message in before):
                what = f"column {column!r} holds several messages, and the prompt is none of them"
                raise InputError(f"{what}; give whole conversations and no prompt, or after a prompt one message")
        row = {"prompt": prompt, column: value} if isinstance(value, str) else {"prompt": value}
        row["tools"] = rows.rows[i].get("tools")
        number = i + 1 if rows.numbers is None else rows.numbers[i]
        return self.encoder.pair(Rows([row], rows.source, [number]), 0, "prompt", column)


def _role(messages) -> str | None:
    """Return the role of the last message; None for what is no list of messages."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return last.get("role") if isinstance(last, dict) else None


def _opening(side: str | list[dict], prompt: str | list[dict] | None) -> str | None:
    """Return the first message of the user before this response."""
    messages = side if isinstance(side, list) and len(side) > 1 else prompt
    if not isinstance(messages, list):
        return messages
    return next((message.get("content") for message in messages if message.get("role") == "user"), None)


def sides_of(pairs: list[Pair]) -> Iterator[tuple[list[int], str]]:
    """Yield the token ids of each side of each pair, prompt and response, and where it came from."""
    for pair in pairs:
        for prompt, response in (pair.chosen, pair.rejected):
            yield prompt + response, pair.where
