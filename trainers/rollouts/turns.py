"""The tokens of another speaker's turn, a tool's or an environment's, as the model's own chat template writes them."""

import functools
from collections.abc import Sequence
from typing import Any

from ..base.text import InputError
from ..data.encode import Encoder
from ..data.forms import Message
from ..data.rows import BadRow
from .types import Response

# Stands for what the policy said, which the template is to leave as it is.
SAID = "what the policy said"
# Some templates write a tool's answer only after a call.
CALL = {"type": "function", "function": {"name": "tool", "arguments": {}}}


class Conversation:
    """What others say to the policy, between two of its turns, as tokens for `after_turn`.

    Args:
        tokenizer: the policy's, with a chat template.
        chat_template_kwargs: the run's, such as enable_thinking=False.
    """

    def __init__(self, tokenizer: Any, **chat_template_kwargs: Any):
        self.encoder = Encoder(tokenizer, chat_template_kwargs=chat_template_kwargs)
        if not self.encoder.chat:
            raise InputError("the tokenizer has no chat template: write the tokens yourself")
        # A tool gives the same answer to many responses.
        self._ids_after = functools.lru_cache(maxsize=1000)(self._template_ids)

    def text(self, turn: Response) -> str:
        """Return what the policy said in a turn, without special tokens."""
        return self.encoder.tokenizer.decode(turn.ids, skip_special_tokens=True)

    def reply(self, turn: Response, content: str, role: str = "user") -> list[int]:
        """Return the token ids from where the policy's turn ends to where its next one begins.

        Args:
            turn: the policy's turn, as the sampler that the options make returns it.
            content: what is said to the policy.
            role: who says it: user or tool, if the template has tools.

        Raises:
            InputError: the template does not write such a message.
        """
        return self.replies(turn, role, (CALL["function"]["name"], content))

    def replies(self, turn: Response, role: str, *said: tuple[str, str]) -> list[int]:
        """Return what `reply` does for several messages, each with the name of its tool."""
        ids = self._ids_after(role, *said)
        # The template ends the policy's turn as the policy did, or in its place if the turn was cut.
        if turn.finish == "length":
            return list(ids[_place(ids, self._end) or 0 :])
        ends = [_place(ids, stop) for stop in (turn.ids[-1], self._end)]
        end = next((place for place in ends if place is not None), -1)
        return list(ids[end + 1 :])

    def _template_ids(self, role: str, *said: tuple[str, str]) -> tuple[int, ...]:
        """Return the ids of all that the template writes behind the policy's words."""
        messages: list[Message] = []
        for name, content in said:
            messages.append({"role": role, "content": content})
            if role == "tool":
                messages[-1]["name"] = name
        turns: list[Message] = [{"role": "assistant", "content": SAID}]
        if role == "tool":
            function = CALL["function"] | {"name": said[0][0]}
            turns.insert(0, turns[0] | {"tool_calls": [CALL | {"function": function}]})
        problems: list[BadRow] = []
        for turn in turns:
            try:
                return tuple(self.encoder.ids(self._text_after(turn, *messages)))
            except BadRow as problem:
                problems.append(problem)
        raise InputError(f"a message of role {role}: {problems[-1]}")

    def _text_after(self, *messages: Message) -> str:
        """Return the text behind the policy's words, up to where it speaks again if another speaks after them."""
        user: Message = {"role": "user", "content": "a message"}
        speaks_again = messages[-1]["role"] != "assistant"
        text = self.encoder.render([user, *messages], None, add_generation_prompt=speaks_again)
        _, said, after = text.partition(SAID)
        if not said:
            raise BadRow("the chat template leaves out the assistant's turn", "use another one")
        return after

    @functools.cached_property
    def _end(self) -> int:
        """The id that ends the policy's turn in the template, its first special one behind the policy's words."""
        tokenizer = self.encoder.tokenizer
        ids = self.encoder.ids(self._text_after({"role": "assistant", "content": SAID}))
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        return next((i for i in ids if i in special), tokenizer.eos_token_id)


def _place(ids: Sequence[int], token: int) -> int | None:
    """Return where a token first stands."""
    return ids.index(token) if token in ids else None
