"""Rows as token ids, through the chat template where the tokenizer has one.

Text is tokenised once, when it is loaded; from there on only token ids travel. Template arguments, tools and tool calls
are refused if the template does not read them.
"""

import difflib
import functools
import json
import re
from typing import TypeAlias

from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import DataConfig, InputError

Encoded: TypeAlias = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""
PROMPT_COLUMNS = ("prompt", "messages", "question")


def load_tokenizer(name: str, revision: str | None = None):
    """Return the tokenizer of a model; without a pad token EOS is one, because pads are never read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError, JSON errors: as many as ways to be broken
        raise InputError(f"model={name!r}: its tokenizer cannot be loaded: {in_a_line(error)}") from error
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) == 0:
        raise InputError(f"model={name!r} comes without a tokenizer: copy the tokenizer's files into the folder")
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of {name} has no EOS token, so no response could ever end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids(tokenizer, generation_config) -> list[int]:
    """Return the token ids that end a response: the tokenizer's EOS and those of the model's generation config."""
    eos = generation_config.eos_token_id
    if not isinstance(eos, list):
        eos = [] if eos is None else [eos]
    return sorted({tokenizer.eos_token_id, *eos})


class Encoder:
    """Prompts and completions to token ids, through the chat template where the tokenizer has one.

    Raises:
        InputError: a row cannot be encoded; the message names its file and line.
    """

    def __init__(
        self,
        tokenizer,
        *,
        raw_prompt: bool = False,
        system_prompt: str | None = None,
        chat_template_kwargs: dict | None = None,
    ):
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.template_kwargs = chat_template_kwargs or {}
        self.chat = tokenizer.chat_template is not None and not raw_prompt
        for name, value in (("system_prompt", system_prompt), ("chat_template_kwargs", chat_template_kwargs)):
            if value is not None and not self.chat:
                raise InputError(f"{name} needs a tokenizer with a chat template and raw_prompt=false")
        if self.template_kwargs:  # the template would ignore a misspelt name
            known = variables(tokenizer.get_chat_template(tools=self.template_kwargs.get("tools")))
            for name in self.template_kwargs.keys() - (known - {"messages", "add_generation_prompt"}):
                near = "".join(f"; did you mean {word}?" for word in difflib.get_close_matches(name, known, n=1))
                raise InputError(f"chat_template_kwargs: the tokenizer's chat template does not read {name!r}{near}")

    @classmethod
    def of(cls, config: DataConfig, tokenizer) -> "Encoder":
        """Return the encoder that a run's config describes."""
        names = ("raw_prompt", "system_prompt", "chat_template_kwargs")
        return cls(tokenizer, **{name: getattr(config, name) for name in names})

    def prompt(self, rows: Rows, i: int, column: str | None) -> list[int]:
        """Return the token ids of row i's prompt, up to where the response begins."""
        messages = self._messages(rows, i, column)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        with rows.at(i):
            return self._encode_prompt(messages, self._tools(rows.rows[i]))

    def pair(self, rows: Rows, i: int, column: str | None, completion_column: str) -> Encoded:
        """Return the token ids of row i's prompt and of its completion or last turn, with EOS at its end."""
        return self.pairs(rows, i, column, completion_column)[0]

    def turns(self, rows: Rows, i: int, column: str | None) -> int:
        """Return how many assistant turns of row i's conversation `pairs` can train; 0 if it is no conversation."""
        if column is None and _is_text(rows.rows[i]):
            return 0
        messages = self._messages(rows, i, column)
        return len(_turns(messages)) if messages[-1]["role"] == "assistant" else 0

    def pairs(
        self, rows: Rows, i: int, column: str | None, completion_column: str, turns: str = "last"
    ) -> list[Encoded]:
        """Return what `pair` returns, for every turn of the assistant that is trained.

        If the last message is the assistant's, it is the completion, with all that it says (`SAID`). With turns="all"
        every assistant turn after the first message is one, each with what came before it. Otherwise the completion is
        a column. A row of `text` alone is trained after its first token, as it stands.
        """
        # Text alone.
        row = rows.rows[i]
        given = row.get(completion_column) is not None
        if column is None and _is_text(row):
            with rows.at(i):
                if given:
                    what = f"the row has text and {completion_column!r}, but no prompt"
                    raise InputError(f"{what}; name it with --prompt_column text, or remove a column")
                return [self._text(row["text"])]

        # A prompt and its completion, or a conversation.
        messages = self._messages(rows, i, column)
        completion = None
        if messages[-1]["role"] != "assistant" and (given or len(messages) == 1):
            completion = self._completion(rows, i, completion_column)
        with rows.at(i):
            tools = self._tools(row)
            if completion is not None:
                return [self._pair(messages, completion, tools)]
            if messages[-1]["role"] != "assistant":
                what = f"the conversation ends with role {messages[-1]['role']!r}, and column {completion_column!r}"
                raise InputError(f"{what} is missing: what is trained is the assistant's")
            if given and completion_column != (column or "messages"):
                what = f"the conversation ends with the assistant's turn, and column {completion_column!r} has one too"
                raise InputError(f"{what}; remove one of them")
            ends = _turns(messages) if turns == "all" else [len(messages) - 1]
            return [self._pair(messages[:end], messages[end], tools) for end in ends]

    def _text(self, text: str) -> Encoded:
        """Return the first token of a text and the others, which end in EOS."""
        if self.system_prompt is not None or self.template_kwargs:
            raise InputError("system_prompt and chat_template_kwargs have no meaning for a row of text")
        if not text:
            raise InputError("column 'text' is empty; remove the row")
        ids = self._with_one_bos(text)
        eos = self.tokenizer.eos_token_id
        first, rest = ids[:1], ids[1:]
        if not rest or rest[-1] != eos:
            rest = [*rest, eos]
        return first, rest

    def _completion(self, rows: Rows, i: int, column: str) -> dict:
        """Return the assistant's turn that a column holds, as text or as a list of one message."""
        cell = rows.get(i, column, "completion_column")
        with rows.at(i):
            if isinstance(cell, str):
                check_text_alone(cell, column)
                return {"role": "assistant", "content": cell}
            if _are_messages(cell) and self.chat and [message["role"] for message in cell] == ["assistant"]:
                return _without_nulls(cell[0])
            raise InputError(
                f"column {column!r} must be text, or with a chat template one message of the assistant; got "
                f"{cell!r:.80}; put conversations of several turns whole into a column messages"
            )

    def _pair(self, messages: list[dict], turn: dict, tools: list | None) -> Encoded:
        """Return the token ids of the messages, and of the assistant's turn after them."""
        # What follows the token that ends a response would never be trained on.
        eos_token = self.tokenizer.eos_token
        eos = self.tokenizer.eos_token_id
        spelled = json.dumps(eos_token, ensure_ascii=False)[1:-1]
        if spelled in json.dumps(turn, ensure_ascii=False, default=str):
            raise InputError(
                f"the completion spells {eos_token!r}, the token that ends a response; mend or remove the row"
            )
        prompt = self._encode_prompt(messages, tools)
        if not self.chat:
            return prompt, [*self.tokenizer(turn["content"], add_special_tokens=False).input_ids, eos]
        whole = self._template([*messages, turn], tools, add_generation_prompt=False)
        for name in [name for name in SAID if turn.get(name)]:
            without = {key: value for key, value in turn.items() if key != name}
            if self._template([*messages, without], tools, add_generation_prompt=False) == whole:
                what = f"the assistant's turn has {name}, but the chat template leaves it out"
                raise InputError(f"{what}; use a template that writes it, or remove the row")
        if whole[: len(prompt)] != prompt:
            raise InputError("the chat template does not continue its own generation prompt")
        completion = whole[len(prompt) :]
        end = completion.index(eos) if eos in completion else len(completion)  # templates add a newline after EOS
        return prompt, [*completion[:end], eos]

    def _tools(self, row: dict) -> list | None:
        """Return the row's tools for the template, which must read them."""
        tools = row.get("tools") if self.chat else None
        if tools and "tools" not in variables(self.tokenizer.get_chat_template(tools=tools)):
            raise InputError("the row has tools, but the chat template does not read them; remove the column")
        return tools or None

    def _messages(self, rows: Rows, i: int, column: str | None) -> list[dict]:
        row = rows.rows[i]
        if column is None:
            there = [name for name in PROMPT_COLUMNS if name in row]
            filled = [name for name in there if row[name] is not None]
            column = (filled or there or PROMPT_COLUMNS)[0]
        prompt = rows.get(i, column, "prompt_column")
        with rows.at(i):
            for name in [name for name in NOT_READ if row.get(name)]:
                raise InputError(f"column {name!r} is not read; remove it (for the template: --chat_template_kwargs)")
            if isinstance(prompt, str):
                check_text_alone(prompt, column)
                system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
                return [*system, {"role": "user", "content": prompt}]
            self._check_messages(prompt, column)
        return [_without_nulls(message) for message in prompt]

    def _check_messages(self, prompt, column: str) -> None:
        """Refuse what is no conversation that a chat template can take."""
        if not _are_messages(prompt):
            what = f"column {column!r} must be text or a list of messages with role and content, both text"
            raise InputError(f"{what}; got {str(prompt)[:80]!r}")
        if not self.chat:
            raise InputError(f"column {column!r} holds messages, but there is no chat template to use")
        if {message["role"] for message in prompt} == {"assistant"}:
            raise InputError(f"column {column!r} holds the assistant's messages alone, and no prompt")
        if self.system_prompt is not None:
            what = f"system_prompt has no meaning for column {column!r}, which holds messages"
            raise InputError(f"{what}; put a first one of role system into them, or leave it out")

    def _encode_prompt(self, messages: list[dict], tools: list | None) -> list[int]:
        if messages[-1]["role"] == "user" and not messages[-1]["content"]:  # a template may write a token all the same
            raise InputError("the prompt is empty; mend or remove the row")
        if self.chat:
            ids = self._template(messages, tools, add_generation_prompt=True)
        else:
            ids = self._with_one_bos(messages[-1]["content"])
            bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
            if len(ids) > 1 and ids[-1] == eos != bos:  # a prompt has not ended
                ids = ids[:-1]
        if not ids:
            raise InputError("the prompt is empty; mend or remove the row")
        return ids

    def _with_one_bos(self, text: str) -> list[int]:
        """Return the tokens of a text that may spell out the token that the tokenizer also adds."""
        ids = self.tokenizer(text).input_ids
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _template(self, messages: list[dict], tools: list | None, *, add_generation_prompt: bool) -> list[int]:
        # The template writes the special tokens itself: transformers adds none when it tokenises the result.
        options = self.template_kwargs | ({"tools": tools} if tools else {})
        options |= {"add_generation_prompt": add_generation_prompt, "tokenize": True, "return_dict": False}
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # templates raise of their own: "roles must alternate", and whatever Jinja does
            roles = ", ".join(message["role"] for message in messages[:8])
            raise InputError(f"the chat template does not take these messages ({roles}): {in_a_line(error)}") from error


def _is_text(row: dict) -> bool:
    """Return True for a row with text and without a prompt."""
    return isinstance(row.get("text"), str) and all(row.get(column) is None for column in PROMPT_COLUMNS)


def _turns(messages: list[dict]) -> list[int]:
    """Return the places of the assistant's turns, without one that opens the conversation and so has no prompt."""
    return [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]


def _without_nulls(message: dict) -> dict:
    """Return a message without the nulls that a Parquet table fills in for what other messages have."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _are_messages(value) -> bool:
    """Return True for a list of messages with a role and a text; an assistant's may call tools in place of a text."""
    if not isinstance(value, list) or not value:
        return False
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return False
        calls = message["role"] == "assistant" and message.get("tool_calls")
        if not isinstance(message.get("content"), str) and not (calls and message.get("content") is None):
            return False
    return True


SPELLED = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:.*\]\s*""", re.DOTALL)
NOT_READ = ("chat_template_kwargs", "image", "images", "videos")  # columns that mean something to other trainers
# What an assistant has to say in a turn besides the content.
SAID = ("tool_calls", "function_call", "reasoning_content", "thinking")
GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # transformers' own tag, around what is generated


def check_text_alone(text: str, column: str) -> None:
    """Refuse messages that became text on their way, as in a CSV."""
    if SPELLED.fullmatch(text):
        raise InputError(f"column {column!r} is a text that spells messages; write a list, in .jsonl or .parquet")


@functools.lru_cache(maxsize=8)
def variables(template: str) -> frozenset[str]:
    """Return the names that a chat template reads."""
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(GENERATION.sub("", template))))
