"""Rows as token ids, through the chat template where the tokenizer has one.

Text is tokenised once, when it is loaded; from there on only token ids travel. What a run tells a template, tools and
their calls are refused where the template does not read them.
"""

import difflib
import functools
import inspect
import json
import re

from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options.config import DataConfig, InputError
from fused_rl.trainers.options.text import in_a_line

PROMPT_COLUMNS = ("prompt", "messages", "question")


def load_tokenizer(name: str, revision: str | None = None):
    """The tokenizer of a model, with some pad token: what it is does not matter, pads are never read."""
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
    """Every token id that ends a response: the tokenizer's EOS and those of the model's generation config."""
    eos = generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [] if eos is None else [eos])})


class Encoder:
    """Prompts and completions to token ids, through the chat template where the tokenizer has one."""

    def __init__(
        self,
        tokenizer,
        *,
        raw_prompt: bool = False,
        system_prompt: str | None = None,
        chat_template_kwargs: dict | None = None,
    ):
        self.tokenizer, self.system_prompt, self.told = tokenizer, system_prompt, chat_template_kwargs or {}
        self.chat, self.heard = tokenizer.chat_template is not None and not raw_prompt, {"assistant"}
        for name, value in (("system_prompt", system_prompt), ("chat_template_kwargs", chat_template_kwargs)):
            if value is not None and not self.chat:
                raise InputError(f"{name} needs a tokenizer with a chat template and raw_prompt=false")
        if self.told:
            check_template_kwargs(tokenizer, self.told)

    @classmethod
    def of(cls, config: DataConfig, tokenizer) -> "Encoder":
        """The encoder that a run's config describes."""
        names = ("raw_prompt", "system_prompt", "chat_template_kwargs")
        return cls(tokenizer, **{name: getattr(config, name) for name in names})

    def prompt(self, rows: Rows, i: int, column: str | None) -> list[int]:
        """Token ids of row i's prompt, up to where the response begins."""
        messages, tools = self._messages(rows, i, column), self._tools(rows, i)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return self._encode_prompt(messages, tools, rows.where(i))

    def pair(self, rows: Rows, i: int, column: str | None, completion_column: str) -> tuple[list[int], list[int]]:
        """Token ids of row i's prompt and of the completion, which ends in EOS; of a conversation, of its last turn."""
        return self.pairs(rows, i, column, completion_column)[0]

    def turns(self, rows: Rows, i: int, column: str | None) -> int:
        """How many turns of the assistant row i's conversation has that `pairs` can train; 0 of what is none."""
        if column is None and _is_text(rows.rows[i]):
            return 0
        messages = self._messages(rows, i, column)
        return len(_turns(messages)) if messages[-1]["role"] == "assistant" else 0

    def pairs(
        self, rows: Rows, i: int, column: str | None, completion_column: str, turns: str = "last"
    ) -> list[tuple[list[int], list[int]]]:
        """What `pair` returns, of every turn of the assistant that is trained.

        With messages whose last one is the assistant's, that is the completion, with all that it says (`SAID`); with
        turns="all" so is every turn of the assistant after the first message, each with what came before it. Else the
        completion is a column. A row of `text` alone is trained after its first token, as it stands.
        """
        given = rows.rows[i].get(completion_column) is not None
        if column is None and _is_text(rows.rows[i]):
            if given:
                what = f"the row has text and {completion_column!r}, but no prompt"
                raise InputError(f"{rows.where(i)}: {what}; name it with --prompt_column text, or remove a column")
            return [self._text(rows.rows[i]["text"], rows.where(i))]
        messages, tools, where = self._messages(rows, i, column), self._tools(rows, i), rows.where(i)
        if messages[-1]["role"] != "assistant":
            if not given and len(messages) > 1:
                what = f"the conversation ends with role {messages[-1]['role']!r}, and column {completion_column!r}"
                raise InputError(f"{where}: {what} is missing: what is trained is the assistant's")
            return [self._pair(messages, self._completion(rows, i, completion_column), tools, where)]
        if given and completion_column != (column or "messages"):
            what = f"the conversation ends with the assistant's turn, and column {completion_column!r} has one too"
            raise InputError(f"{where}: {what}; remove one of them")
        ends = _turns(messages) if turns == "all" else [len(messages) - 1]
        return [self._pair(messages[:end], messages[end], tools, where) for end in ends]

    def _text(self, text: str, where: str) -> tuple[list[int], list[int]]:
        """The first token of a text and the others, which end in EOS."""
        if self.system_prompt is not None or self.told:
            raise InputError(f"{where}: system_prompt and chat_template_kwargs have no meaning for a row of text")
        ids, eos = self._with_one_bos(text), self.tokenizer.eos_token_id
        if not ids or not text:
            raise InputError(f"{where}: column 'text' is empty; remove the row")
        return ids[:1], ids[1:] if ids[1:] and ids[-1] == eos else [*ids[1:], eos]

    def _completion(self, rows: Rows, i: int, column: str) -> dict:
        """The assistant's turn that a column holds, as text or as a list of one message."""
        cell = rows.get(i, column, "completion_column")
        if isinstance(cell, str):
            check_text_alone(cell, column, rows.where(i))
            return {"role": "assistant", "content": cell}
        if _are_messages(cell) and self.chat and [message["role"] for message in cell] == ["assistant"]:
            return {key: value for key, value in cell[0].items() if value is not None or key == "content"}
        raise InputError(
            f"{rows.where(i)}: column {column!r} must be text, or with a chat template one message of the assistant; "
            f"got {cell!r:.80}; put conversations of several turns whole into a column messages"
        )

    def _pair(self, messages: list[dict], turn: dict, tools: list | None, where: str) -> tuple[list[int], list[int]]:
        """Token ids of the messages, and of the assistant's turn after them."""
        check_text(self.tokenizer, turn, where)
        prompt, eos = self._encode_prompt(messages, tools, where), self.tokenizer.eos_token_id
        if not self.chat:
            return prompt, [*self.tokenizer(turn["content"], add_special_tokens=False).input_ids, eos]
        whole = self._with_turn(messages, turn, tools, where)
        if whole[: len(prompt)] != prompt:
            raise InputError(f"{where}: the chat template does not continue its own generation prompt")
        completion = whole[len(prompt) :]
        if completion.count(eos) > 1:
            raise InputError(f"{where}: the chat template ends the assistant's turn {completion.count(eos)} times")
        end = completion.index(eos) if eos in completion else len(completion)  # templates add a newline after EOS
        return prompt, [*completion[:end], eos]

    def _with_turn(self, messages: list[dict], turn: dict, tools: list | None, where: str) -> list[int]:
        """Token ids of the messages and the assistant's turn, of which the template must leave nothing out."""
        whole = self._template([*messages, turn], tools, where, add_generation_prompt=False)
        for name in SAID:
            if turn.get(name):
                without = {key: value for key, value in turn.items() if key != name}
                if self._template([*messages, without], tools, where, add_generation_prompt=False) == whole:
                    what = f"the assistant's turn has {name}, but the chat template leaves it out"
                    raise InputError(f"{where}: {what}; use a template that writes it, or remove the row")
        return whole

    def _tools(self, rows: Rows, i: int) -> list | None:
        return tools_of(self.tokenizer, rows.rows[i], self.told, rows.where(i)) if self.chat else None

    def _messages(self, rows: Rows, i: int, column: str | None) -> list[dict]:
        if column is None:
            row = rows.rows[i]
            present = [c for c in PROMPT_COLUMNS if row.get(c) is not None] or [c for c in PROMPT_COLUMNS if c in row]
            column = (present or PROMPT_COLUMNS)[0]
        prompt = rows.get(i, column, "prompt_column")
        check_row(rows.rows[i], rows.where(i))
        if isinstance(prompt, str):
            check_text_alone(prompt, column, rows.where(i))
            system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
            return [*system, {"role": "user", "content": prompt}]
        if not _are_messages(prompt):
            raise InputError(
                f"{rows.where(i)}: column {column!r} must be text or a list of messages with role and content, both "
                f"text; got {str(prompt)[:80]!r}"
            )
        if not self.chat:
            raise InputError(f"{rows.where(i)}: column {column!r} holds messages, but there is no chat template to use")
        if all(message["role"] == "assistant" for message in prompt):
            raise InputError(f"{rows.where(i)}: column {column!r} holds the assistant's messages alone, and no prompt")
        check_roles(prompt, column, rows.where(i))
        if self.system_prompt is not None:
            what = f"system_prompt has no meaning for column {column!r}, which holds messages"
            raise InputError(f"{rows.where(i)}: {what}; put a first one of role system into them, or leave it out")
        # As JSON would have it: a Parquet table fills in null for what other messages have.
        return [{key: cell for key, cell in one.items() if cell is not None or key == "content"} for one in prompt]

    def _encode_prompt(self, messages: list[dict], tools: list | None, where: str) -> list[int]:
        if messages[-1]["role"] == "user" and not messages[-1]["content"]:  # a template may write a token all the same
            raise InputError(f"{where}: the prompt is empty; mend or remove the row")
        if self.chat:
            ids = self._template(messages, tools, where, add_generation_prompt=True)
            self._check_said(messages, tools, where, ids)
        else:
            ids = self._raw(messages[-1]["content"])
        if not ids:
            raise InputError(f"{where}: the prompt is empty, and a model needs a token to begin with")
        return ids

    def _check_said(self, messages: list[dict], tools: list | None, where: str, ids: list[int]) -> None:
        """Refuse a template that leaves out what a role says; asked once of each."""
        for at, message in enumerate(messages):
            if message["role"] in self.heard or not message["content"]:
                continue
            self.heard.add(message["role"])
            other = [*messages[:at], {**message, "content": message["content"] + " 0"}, *messages[at + 1 :]]
            if self._template(other, tools, where, add_generation_prompt=True) == ids:
                what = f"the chat template leaves out what role {message['role']!r} says"
                raise InputError(f"{where}: {what}; use a template that writes it, or remove the message")

    def _raw(self, text: str) -> list[int]:
        """A prompt's tokens without a chat template."""
        ids, bos, eos = self._with_one_bos(text), self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return ids[:-1] if len(ids) > 1 and ids[-1] == eos and bos != eos else ids  # a prompt has not ended

    def _with_one_bos(self, text: str) -> list[int]:
        """The tokens of a text that may spell out the token that the tokenizer also adds."""
        ids, bos = self.tokenizer(text).input_ids, self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _template(
        self, messages: list[dict], tools: list | None, where: str, *, add_generation_prompt: bool
    ) -> list[int]:
        # The template writes the special tokens itself: transformers adds none when it tokenises the result.
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                **({"tools": tools} if tools else {}),
                **self.told,
            )
        except Exception as error:  # templates raise of their own: "roles must alternate", and whatever Jinja does
            roles = ", ".join(message["role"] for message in messages[:8])
            what = f"the chat template does not take these messages ({roles})"
            raise InputError(f"{where}: {what}: {in_a_line(error)}") from error


def _is_text(row: dict) -> bool:
    """A row of text, and of no prompt."""
    return isinstance(row.get("text"), str) and all(row.get(column) is None for column in PROMPT_COLUMNS)


def _turns(messages: list[dict]) -> list[int]:
    """Where the assistant's turns stand; one that opens the conversation has no prompt, and is none."""
    return [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]


def _are_messages(value) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and _is_message(message) for message in value)


def _is_message(message: dict) -> bool:
    """One with a role and a text, or in place of a text the calls of tools."""
    content, role = message.get("content"), message.get("role")
    says_nothing = content is None and role == "assistant" and bool(message.get("tool_calls"))
    return isinstance(role, str) and (isinstance(content, str) or says_nothing)


SPELLED = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:.*\]\s*""", re.DOTALL)
OTHERS_ROLES = {"human": "user", "gpt": "assistant"}
NOT_READ = {"chat_template_kwargs": "give --chat_template_kwargs, for all rows"}
NOT_READ |= dict.fromkeys(("image", "images", "videos"), "text alone is trained on; remove the column")


def check_row(row: dict, where: str) -> None:
    """Refuse columns that mean something to other trainers, and nothing here."""
    for name, remedy in NOT_READ.items():
        if row.get(name):
            raise InputError(f"{where}: column {name!r} is not read: {remedy}")


def check_text_alone(text: str, column: str, where: str) -> None:
    """Refuse messages that became text on their way, as in a CSV."""
    if SPELLED.fullmatch(text):
        what = f"column {column!r} is a text that spells messages"
        raise InputError(f"{where}: {what}; write them as a list, in .jsonl or .parquet")


def check_roles(messages: list[dict], column: str, where: str) -> None:
    """Refuse the usual roles by other names, which a template would take as they are."""
    for role in (message["role"] for message in messages):
        meant = OTHERS_ROLES.get(role.lower(), role.lower())
        if meant != role and meant in ("system", "user", "assistant"):
            raise InputError(f"{where}: column {column!r} has a message of role {role!r}; rename it to {meant!r}")


FOR_THE_TEMPLATE = {"tools", "documents"}  # of transformers' own arguments, those that reach the template
OF_TRANSFORMERS = {"messages", "raise_exception", "strftime_now"}  # given to every template
# What an assistant has to say in a turn besides the content.
SAID = ("tool_calls", "function_call", "reasoning_content", "thinking")
GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # transformers' own tag, around what is generated


def variables(tokenizer, tools: list | None = None) -> frozenset[str]:
    """What the tokenizer's chat template reads of what it is told."""
    return _undeclared(tokenizer.get_chat_template(tools=tools))


@functools.lru_cache(maxsize=8)
def _undeclared(template: str) -> frozenset[str]:
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(GENERATION.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the tokenizer's chat template cannot be read: {in_a_line(error)}") from error
    return frozenset(meta.find_undeclared_variables(parsed))


def check_template_kwargs(tokenizer, given: dict) -> None:
    """Refuse what the tokenizer's chat template does not read, and what is not the template's but the trainer's.

    A template takes any name and ignores those that it does not know, so a slip of the pen would change nothing.
    """
    ours = set(inspect.signature(tokenizer.apply_chat_template).parameters) - FOR_THE_TEMPLATE | OF_TRANSFORMERS
    known = variables(tokenizer, given.get("tools")) - ours
    for name in given:
        if name in ours:
            raise InputError(f"chat_template_kwargs: {name} is set by the trainer and cannot be given")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"chat_template_kwargs: the tokenizer's chat template does not read {name!r}{hint}")


def tools_of(tokenizer, row: dict, told: dict, where: str) -> list | None:
    """The row's tools for the template; refuses what no template takes, and tools that this one does not read."""
    tools = row.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{where}: column 'tools' must be a list of functions as JSON objects, got {tools!r:.80}")
    if "tools" in told:
        raise InputError(f"{where}: the row has tools, and chat_template_kwargs has others; give them in one place")
    if tools and "tools" not in variables(tokenizer, tools):
        raise InputError(f"{where}: the row has tools, but the chat template does not read them; remove the column")
    return tools or None


def check_text(tokenizer, turn: dict, where: str) -> None:
    """Refuse a turn that spells the token which ends a response: what it says next would never be trained on."""
    eos = tokenizer.eos_token
    if json.dumps(eos, ensure_ascii=False)[1:-1] in json.dumps(turn, ensure_ascii=False, default=str):
        what = f"the completion spells {eos!r}, the token that ends a response"
        raise InputError(f"{where}: {what}; mend or remove the row")
