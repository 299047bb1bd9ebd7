"""Preference pairs in the Hub's common forms, as token ids.

| chosen, rejected | prompt | meaning |
|---|---|---|
| text | text or messages | the response alone |
| text | none | a conversation spelled out as text |
| messages: the assistant's turn | text or messages | the response alone |
| messages: several turns | none, or one of them | a conversation; its last turn is the response |
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.encode import SAID
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import InputError

LARGEST_MARGIN = torch.finfo(torch.float32).max  # the loss is computed in fp32


@dataclass
class Pair:
    """Token ids of one preference, and where it came from."""

    chosen: tuple[list[int], list[int]]
    """Prompt and response."""
    rejected: tuple[list[int], list[int]]
    """The same, of the worse response."""
    margin: float
    where: str

    def tokens(self) -> int:
        """Of both sequences."""
        return sum(map(len, (*self.chosen, *self.rejected)))

    def asked(self) -> list[int]:
        """The prompt; of a conversation spelled out as text all of it."""
        return self.chosen[0] or self.chosen[1]


class PairEncoder:
    """Preference rows in the Hub's forms to token ids."""

    def __init__(self, config, tokenizer):
        self.config = config
        self.tokenizer = tokenizer
        self.encoder = encode.Encoder.of(config, tokenizer)

    def pairs(self, rows: Rows) -> list[Pair]:
        """All rows that fit; how many were dropped, and why, or cut is printed."""
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
            self.truncated += sum(len(response) > limit for _, response in sides)
            cut = []
            for prompt, response in sides:
                too_long = len(response) > limit
                cut.append((prompt, [*response[: limit - 1], eos] if too_long else response))
            sides = cut
        margin = rows.rows[i].get(self.config.margin_column)
        a_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
        if margin is not None and not (a_number and abs(margin) <= LARGEST_MARGIN):
            column = self.config.margin_column
            raise InputError(f"{rows.where(i)}: column {column!r} must be a number, got {margin!r:.80}")
        return Pair(*sides, margin=float(margin or 0), where=rows.where(i))

    def _unusable(self, pair: Pair, row: dict) -> str | None:
        sides = (row[self.config.chosen_column], row[self.config.rejected_column])
        if len({_opening(side, row.get(self.config.prompt_column)) for side in sides}) > 1:
            return "whose two sides answer different prompts"
        if max(len(pair.chosen[0]), len(pair.rejected[0])) > self.config.max_prompt_length:
            return "with a prompt longer than max_prompt_length"
        if max(len(pair.chosen[1]), len(pair.rejected[1])) > self.config.max_response_length:
            return "with a response longer than max_response_length"
        return "whose two sides are the same tokens" if pair.chosen == pair.rejected else None

    def _side(self, rows: Rows, i: int, column: str) -> tuple[list[int], list[int]]:
        option = "chosen_column" if column == self.config.chosen_column else "rejected_column"
        prompt_column = self.config.prompt_column
        value = rows.get(i, column, option)
        prompt = rows.rows[i].get(prompt_column)
        alone = isinstance(value, list) and len(value) == 1 and _role(value) == "assistant"
        if alone or (isinstance(value, str) and prompt_column in rows.rows[i]):
            prompt = rows.get(i, prompt_column, "prompt_column")
        with rows.at(i):
            if alone:
                more = [name for name in SAID if value[0].get(name)]
                if more:
                    remedy = "give the whole conversation, with the prompt's messages before it"
                    raise InputError(f"column {column!r} is a turn with {more[0]}; {remedy}")
                value = value[0].get("content")
            if isinstance(value, str) and prompt is None:
                encode.check_text_alone(value, column)
                return self._whole_text(value)
            if isinstance(value, str) and _role(prompt) == "assistant":
                raise InputError(f"column {prompt_column!r} ends with the assistant's turn")
            if not isinstance(value, str) and _role(value) != "assistant":
                what = f"column {column!r} must be text, or messages that end with the assistant's text"
                raise InputError(f"{what}; got {str(value)[:80]!r}")
            asked = prompt[-1].get("content") if _role(prompt) else prompt
            before = [] if isinstance(value, str) else value[:-1]
            if before and prompt is not None and all(message.get("content") != asked for message in before):
                what = f"column {column!r} holds several messages, and the prompt is none of them"
                raise InputError(f"{what}; give whole conversations and no prompt, or after a prompt one message")
        row = {"prompt": prompt, column: value} if isinstance(value, str) else {"prompt": value}
        return self._encode(rows, i, row, column)

    def _encode(self, rows: Rows, i: int, row: dict, column: str) -> tuple[list[int], list[int]]:
        tools = {"tools": rows.rows[i].get("tools")}
        number = i + 1 if rows.numbers is None else rows.numbers[i]
        located = Rows([row | tools], rows.source, [number])
        return self.encoder.pair(located, 0, "prompt", column)

    def _whole_text(self, text: str) -> tuple[list[int], list[int]]:
        """A conversation spelled out as text: the tokenizer's own beginning, and EOS once."""
        ids = self.tokenizer(text).input_ids
        eos = self.tokenizer.eos_token_id
        return [], ids if ids and ids[-1] == eos else [*ids, eos]


def _role(messages) -> str | None:
    """Return the role of the last message; None for what is no list of messages."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return last.get("role") if isinstance(last, dict) else None


def _opening(side: str | list[dict], prompt: str | list[dict] | None) -> str | None:
    """What the user says first before this response."""
    messages = side if isinstance(side, list) and len(side) > 1 else prompt
    if not isinstance(messages, list):
        return messages
    return next((message.get("content") for message in messages if message.get("role") == "user"), None)


def sides_of(pairs: list[Pair]) -> Iterator[tuple[list[int], str]]:
    """Token ids of each side of each pair, prompt and response, and where it came from."""
    for pair in pairs:
        for prompt, response in (pair.chosen, pair.rejected):
            yield prompt + response, pair.where
