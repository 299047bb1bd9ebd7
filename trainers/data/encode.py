"""Rows as token ids, through the chat template where the tokenizer has one; what it does not read is refused."""

import re
from pathlib import Path
from typing import TypeAlias

from fused_rl.trainers.base.text import InputError, in_a_line
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import DataConfig

Encoded: TypeAlias = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""
PROMPT_COLUMNS = ("prompt", "messages", "question")


def load_tokenizer(name: str, revision: str | None = None):
    """Return the tokenizer of a model; without a pad token EOS is one, because pads are never read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    # OSError, ValueError, KeyError, JSON errors: as many as ways to be broken.
    except Exception as error:
        hint = ""
        if Path(name, "config.yaml").is_file():
            hint = f" (it is the folder of a run: give {name}/model)"
        elif not Path(name).is_dir():
            hint = " (there is no such folder, so it is taken for a name on the Hub)"
        raise InputError(
            f"model={name!r}{hint}: its tokenizer cannot be loaded: {in_a_line(error)}"
        ) from error
    # A folder without a tokenizer's files gives one of special tokens alone, and no error.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise InputError(
            f"model={name!r} comes without a tokenizer: copy the tokenizer's files into the folder"
        )
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of {name} has no EOS token, so no response could ever end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids(tokenizer, generation_config) -> list[int]:
    """Return the token ids that end a response: the tokenizer's EOS and those of the model's generation config."""
    eos = generation_config.eos_token_id
    # transformers has a number, a list or None in this place.
    if not isinstance(eos, list):
        eos = [] if eos is None else [eos]
    return sorted({tokenizer.eos_token_id, *eos})


def prompt_column_of(row: dict) -> str:
    """Return the column that holds a row's prompt where none is named."""
    # A table of rows of several forms has null where a row has another form.
    present = [name for name in PROMPT_COLUMNS if name in row]
    filled = [name for name in present if row[name] is not None]
    return (filled or present or PROMPT_COLUMNS)[0]


class Encoder:
    """Encodes prompts and completions; raises an InputError with the file and line of a row that it cannot encode."""

    def __init__(
        self, tokenizer, *, raw_prompt=False, system_prompt=None, chat_template_kwargs=None
    ):
        """Take the options of `DataConfig` by their names."""
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.template_kwargs = chat_template_kwargs or {}
        self.chat = tokenizer.chat_template is not None and not raw_prompt
        if not self.chat and (system_prompt is not None or self.template_kwargs):
            raise InputError(
                "system_prompt and chat_template_kwargs need a tokenizer with a chat template"
            )
        # A template ignores names that it does not read, misspelt ones among them.
        if self.template_kwargs:
            template = tokenizer.get_chat_template(tools=self.template_kwargs.get("tools"))
            for name in self.template_kwargs:
                if not reads(template, name) or name in ("messages", "add_generation_prompt"):
                    raise InputError(
                        f"chat_template_kwargs: the tokenizer's chat template does not read {name!r}"
                    )

    @classmethod
    def of(cls, config: DataConfig, tokenizer) -> "Encoder":
        """Return the encoder that a run's config describes."""
        return cls(
            tokenizer,
            raw_prompt=config.raw_prompt,
            system_prompt=config.system_prompt,
            chat_template_kwargs=config.chat_template_kwargs,
        )

    def prompt(self, rows: Rows, i: int, column: str | None) -> list[int]:
        """Return the token ids of row i's prompt, up to where the response begins."""
        # A conversation that was written for training ends with the answer, which a prompt must not
        # give away.
        messages = self._messages(rows, i, column)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        with rows.at(i):
            return self._prompt(messages, rows.rows[i].get("tools"))

    def pairs(
        self,
        rows: Rows,
        i: int,
        column: str | None,
        completion_column: str,
        turns: str = "last",
    ) -> list[Encoded]:
        """Return the token ids of each prompt and completion that row i trains, with EOS at the end.

        The completion is a column, or the last message if that is the assistant's; with turns="all" each of its turns
        after the first message. A row of `text` alone is trained after its first token, as it stands.
        """
        # Text alone.
        row = rows.rows[i]
        others = (*PROMPT_COLUMNS, completion_column)
        has_others = any(row.get(name) is not None for name in others)
        if column is None and isinstance(row.get("text"), str) and not has_others:
            ids = self._with_one_bos(row["text"])
            if not ids:
                raise InputError(f"{rows.where(i)}: column 'text' is empty; remove the row")
            eos = self.tokenizer.eos_token_id
            first, rest = ids[:1], ids[1:]
            # Some tokenizers write EOS themselves.
            if rest[-1:] != [eos]:
                rest = [*rest, eos]
            return [(first, rest)]

        # A conversation, or a prompt and its completion.
        messages = self._messages(rows, i, column)
        if messages[-1]["role"] != "assistant":
            cell = rows.get(i, completion_column, "completion_column")
            cell = [{"role": "assistant", "content": cell}] if isinstance(cell, str) else cell
            if not are_messages(cell) or [message["role"] for message in cell] != ["assistant"]:
                what = "must be text, or a list of one message of the assistant"
                raise InputError(
                    f"{rows.where(i)}: column {completion_column!r} {what}; got {cell!r:.80}"
                )
            messages, turns = messages + cell, "last"
        elif row.get(completion_column) is not None and completion_column != (column or "messages"):
            what = f"the conversation ends with the assistant's turn, and column {completion_column!r} has one too"
            raise InputError(f"{rows.where(i)}: {what}; remove one of them")
        ends = [len(messages)]
        if turns == "all":
            # A first message of the assistant answers nothing, so it is not trained.
            every = range(2, len(messages) + 1)
            ends = [end for end in every if messages[end - 1]["role"] == "assistant"] or ends
        with rows.at(i):
            return [self.pair(messages[:end], row.get("tools")) for end in ends]

    def pair(self, messages: list[dict], tools: list | None) -> Encoded:
        """Return the token ids of all messages but the last, and of that, which is the assistant's."""
        # What follows the token that ends a response would never be trained on.
        turn = without_nulls(messages[-1])
        eos = self.tokenizer.eos_token_id
        if self.tokenizer.eos_token in str(turn):
            what = f"the completion spells {self.tokenizer.eos_token!r}, the token that ends a response"
            raise InputError(f"{what}; mend or remove the row")
        prompt = self._prompt(messages[:-1], tools)
        whole = self._template([*messages[:-1], turn], tools, add_generation_prompt=False)

        # A template that does not know tool calls or reasoning would leave them out without a word.
        for name in [name for name in SAID if turn.get(name)]:
            silent = {key: value for key, value in turn.items() if key != name}
            if whole == self._template(
                [*messages[:-1], silent], tools, add_generation_prompt=False
            ):
                what = f"the assistant's turn has {name}, but the chat template leaves it out"
                raise InputError(f"{what}; use a template that writes it, or remove the row")
        if whole is None:
            completion = self.tokenizer(turn["content"], add_special_tokens=False).input_ids
            return prompt, [
                *completion,
                eos,
            ]

        # The response is what the template adds to the prompt that a sampler would get.
        if whole[: len(prompt)] != prompt:
            raise InputError("the chat template does not continue its own generation prompt")
        completion = whole[len(prompt) :]
        # Templates add a newline after EOS, which nobody would sample.
        if eos in completion:
            completion = completion[: completion.index(eos)]
        return prompt, [*completion, eos]

    def conversation(self, cell: str | list[dict], column: str) -> list[dict]:
        """Return a cell, text of the user or messages, as messages."""
        if isinstance(cell, str):
            # Messages that went through a .csv file come back as the text that spells them.
            if SPELLED.fullmatch(cell):
                raise InputError(
                    f"column {column!r} is a text that spells messages; give a list in a .jsonl"
                )
            messages = [{"role": "user", "content": cell}]
            if self.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": self.system_prompt})
            return messages
        if not are_messages(cell):
            what = f"column {column!r} must be text or a list of messages with role and content, both text"
            raise InputError(f"{what}; got {cell!r:.80}")
        if self.system_prompt is not None:
            what = f"system_prompt has no meaning for column {column!r}, which holds messages"
            raise InputError(f"{what}; put a first one of role system into them, or leave it out")
        return [without_nulls(message) for message in cell]

    def _messages(self, rows: Rows, i: int, column: str | None) -> list[dict]:
        column = column or prompt_column_of(rows.rows[i])
        cell = rows.get(i, column, "prompt_column")
        with rows.at(i):
            return self.conversation(cell, column)

    def _prompt(self, messages: list[dict], tools: list | None) -> list[int]:
        last = messages[-1] if messages else None
        if last is None or (last["role"] == "user" and not last["content"]):
            ids = []  # a template may write a token all the same
        elif self.chat:
            ids = self._template(messages, tools, add_generation_prompt=True)
        elif len(messages) > 1:
            raise InputError(
                "the prompt has several messages, but there is no chat template to use"
            )
        else:
            ids = self._with_one_bos(messages[0]["content"])
            bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
            # A prompt has not ended, so an EOS that the tokenizer adds is taken off.
            if len(ids) > 1 and ids[-1] == eos != bos:
                ids = ids[:-1]
        if not ids:
            raise InputError("the prompt is empty; mend or remove the row")
        return ids

    def _with_one_bos(self, text: str) -> list[int]:
        """Return the tokens of a text that may spell out the token that the tokenizer also adds."""
        ids = self.tokenizer(text).input_ids
        # Two of them would be a beginning that the model has never seen.
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _template(
        self, messages: list[dict], tools: list | None, *, add_generation_prompt: bool
    ) -> list[int] | None:
        """Return the token ids of messages, None without a template, which writes the special tokens itself."""
        if not self.chat:
            return None
        options = self.template_kwargs | {"add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = tools
            if not reads(self.tokenizer.get_chat_template(tools=tools), "tools"):
                raise InputError(
                    "the row has tools, but the chat template does not read them; remove the column"
                )
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, **options
            )
        # Templates raise of their own, such as "roles must alternate", and so does Jinja.
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages[:8])
            raise InputError(
                f"the chat template does not take these messages ({roles}): {in_a_line(error)}"
            ) from error


def without_nulls(message: dict) -> dict:
    """Return a message without the nulls that a Parquet table fills in for what other messages have."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def are_messages(cell) -> bool:
    """Return True for a list of messages with a role and a text; an assistant's may call tools in place of a text."""
    for message in cell if isinstance(cell, list) else ():
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return False
        has_calls = message["role"] == "assistant" and message.get("tool_calls")
        calls_alone = has_calls and message.get("content") is None
        if not calls_alone and not isinstance(message.get("content"), str):
            return False
    return isinstance(cell, list) and bool(cell)


SPELLED = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:.*\]\s*""", re.DOTALL)
# What an assistant has to say in a turn besides the content.
SAID = ("tool_calls", "function_call", "reasoning_content", "thinking")


def reads(template: str, name: str) -> bool:
    """Return True if a chat template has a word in it."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None
