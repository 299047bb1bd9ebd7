"""What the columns of a row mean, in the forms that people keep their rows in: the one place that knows these forms.

| form | columns |
|---|---|
| prompts and completions | prompt or question (text or messages), and a completion (text, or one or several messages) |
| messages | messages as OpenAI's, with tools, tool calls, and `weight: 0` at turns that are not trained |
| ShareGPT conversations | conversations of `from` and `value`, with system and tools |
| Alpaca instructions | instruction, input, output, system, history |
| pairs | chosen and rejected, after a prompt of any form above, or with their prompt inside |
| texts | text alone |

A row is read by its own columns, so a file may mix forms. docs/data.md shows each by example.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from .rows import BadRow

Message: TypeAlias = dict[str, Any]
"""role, content, and what chat templates read besides."""
Prompt: TypeAlias = str | list[Message]

FIX = "fix or remove the row"
SHAREGPT, ALPACA = "ShareGPT conversations", "Alpaca instructions"
PROMPT_COLUMNS = ("prompt", "messages", "conversations", "question", "instruction", "problem")
SYSTEM_COLUMNS = ("system", "system_prompt")
# ShareGPT's roles, and OpenAI's later and earlier ones, by the names that every chat template knows.
ROLES = {"human": "user", "function_call": "assistant", "observation": "tool"}
ROLES |= dict.fromkeys(("gpt", "bot", "model", "ai"), "assistant")
ROLES |= {"developer": "system", "function": "tool", "ipython": "tool"}
ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
# Keys by which OpenAI, ms-swift, LLaMA-Factory and axolotl say whether a turn is trained; the last one says if not.
WEIGHTS = ("weight", "loss", "loss_scale", "loss_weight", "train", "disable_loss")
# Kinds of parts of a content that are text.
PARTS = ("text", "reasoning", "tool_call")
# Columns of what a prompt shows besides its text.
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
# Messages that went through a .csv file come back as the text that spells them.
SPELLED = re.compile(
    r"""\s*\[\s*\{(?=.*["'](?:role|from)["']\s*:)(?=.*["'](?:content|value|tool_calls)["']\s*:).*\}\s*\]\s*""",
    re.DOTALL,
)
# What a turn says; what else a message has, such as an id or a weight, makes no other conversation of it.
SAID = ("role", "content", "name", "tool_calls", "reasoning_content", "reasoning", "thinking")


class RowContent(NamedTuple):
    """What a row says, whatever its form."""

    prompt: Prompt | None
    """Text, or messages; a conversation that nothing follows has its responses inside. None before whole texts."""
    tools: list[dict] | None = None
    responses: Sequence[Any] = ()
    """Messages that follow the prompt, or a whole text: a completion, or a chosen and a rejected response."""


def prompt_column_of(row: dict) -> str:
    """Return the column that holds a row's prompt where none is named."""
    # A table of rows of several forms has null where a row has another form.
    return min(PROMPT_COLUMNS, key=lambda name: (row.get(name) is None, name not in row))


def at_path(row: dict, path: str) -> tuple[Any, str, str]:
    """Return the value at a path through nested columns, or None; and where the path ended, and what is there.

    In `reward_model.ground_truth` a column that itself has a dot in its name comes first. Some files keep a nested
    column as JSON text.
    """
    level: Any = row
    names = path.split(".")
    depth = 0
    while depth < len(names):
        where = ".".join(names[:depth]) or "the row"
        if isinstance(level, str):
            with contextlib.suppress(ValueError):
                level = json.loads(level)
        if not isinstance(level, dict):
            return None, where, f"is {level!r:.80}, which has no columns"
        for end in range(len(names), depth, -1):
            inner = level.get(".".join(names[depth:end]))
            if inner is not None:
                break
        else:
            return None, where, f"has {columns_of(level)}"
        level, depth = inner, end
    return level, path, ""


class RowReader:
    """Reads one row, and knows afterwards in which form it was, and which of its columns were read."""

    def __init__(self, row: dict):
        self.row = row
        self.form = ""
        self.columns: set[str] = set()
        for name in MEDIA:
            if row.get(name):
                remedy = "remove the column if the text makes sense without it, or remove the row"
                raise BadRow(f"column {name!r} is filled, and only text can be read", remedy)

    def content(self, named: str | None, options: str = "prompt_column") -> RowContent:
        """Recognise the form of a row, and return its prompt as text or messages, and its tools."""
        column = named or prompt_column_of(self.row)
        prompt = self.cell(column, options)
        if not isinstance(prompt, str):
            messages = messages_of(prompt, column)
            is_sharegpt = isinstance(prompt, list) and "from" in prompt[0]
            self.form = SHAREGPT if is_sharegpt else "messages"
            prompt = messages
        else:
            check_not_spelled(prompt, column)
            self.form = ALPACA if column == "instruction" else "prompts"
            prompt = self._alpaca(prompt) if column == "instruction" else prompt
        system = self._system()
        if system is not None:
            prompt = with_system(conversation(prompt), system)
        return RowContent(prompt, self._tools())

    def prompt(self, column: str | None) -> RowContent:
        """Return the row's prompt alone, without the assistant's last turn."""
        content = self.content(column)
        prompt = content.prompt
        # A conversation that was written for training ends with the answer, which a prompt must not give away.
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            return content._replace(prompt=prompt[:-1])
        return content

    def completion(
        self, column: str | None, completion_column: str, text_column: str | None = None
    ) -> RowContent:
        """Return the row's prompt and completion, a conversation that ends with the assistant, or a text alone."""
        other_columns = (*PROMPT_COLUMNS, completion_column)
        is_text = column is None and all(self.row.get(name) is None for name in other_columns)
        if text_column is not None or (is_text and isinstance(self.row.get("text"), str)):
            self.form, text_column = "texts", text_column or "text"
            self.cell(text_column, "text_column")
            return RowContent(None, responses=[self._text(text_column)])

        cell, _, _ = at_path(self.row, completion_column)
        options = "completion_column"
        content = self.content(
            column, f"prompt_column and --{options}" if cell is None else "prompt_column"
        )
        prompt = conversation(content.prompt)
        if prompt[-1]["role"] == "assistant" and (
            cell is None or completion_column == (column or "messages")
        ):
            return content
        # Alpaca's rows name it so; any other column must be given by name.
        if cell is None and self.form == ALPACA:
            completion_column = "output"
        elif isinstance(content.prompt, list):
            options += ", or end the messages with the assistant's turn"
        response = response_of(self.cell(completion_column, options), completion_column)
        self.form += " and completions" if self.form == "prompts" else ""
        return content._replace(responses=[after_prompt(prompt, response)[len(prompt) :]])

    def pair(self, column: str | None, sides: dict[str, str]) -> RowContent:
        """Return the row's prompt with its chosen and its rejected response; `sides` has their columns by option."""
        responses: list[Any] = [
            response_of(self.cell(name, option), name) for option, name in sides.items()
        ]
        # Whole conversations or texts hold their prompt.
        has_prompt = column is not None or self.row.get(prompt_column_of(self.row)) is not None
        kinds = set() if has_prompt else {*map(type, responses)}
        if kinds == {str}:
            self.form = "pairs of whole texts"
            return RowContent(None, responses=responses)
        if kinds == {list} and responses[0][0]["role"] != "assistant":
            self.form = "pairs of conversations"
            system = self._system()
            conversations = [with_system(messages, system) for messages in responses]
            return _split(RowContent(None, self._tools()), *conversations)
        content = self.content(column)
        self.form = f"pairs after {self.form}"
        prompt = conversation(content.prompt)
        # Both may begin with the prompt, and go on for some turns in the same words.
        return _split(content, *(after_prompt(prompt, response) for response in responses))

    def value(self, column: str) -> Any:
        """Return a cell that has no meaning here, such as a label; None where the row has none."""
        self.columns |= {column, column.partition(".")[0]}
        return at_path(self.row, column)[0]

    def cell(self, column: str, option: str) -> Any:
        """Return a cell that must be there; an error names the option that names another column."""
        cell = self.value(column)
        if cell is None:
            state = "is null" if column in self.row else "is missing"
            remedy = f"name the right column with --{option}"
            remedy += ", or remove the row" if column in self.row else ""
            raise BadRow(
                f"column {column!r} {state}", remedy, got=f"the row has {columns_of(self.row)}"
            )
        return cell

    def _alpaca(self, instruction: str) -> Prompt:
        """Return an instruction with its input, after the earlier turns."""
        text = "\n\n".join(filter(None, [instruction, self._text("input")]))
        turns = []
        for question, answer in self.value("history") or []:
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answer})
        return messages_of([*turns, *conversation(text)], "history") if turns else text

    def _system(self) -> str | None:
        texts = [self._text(name) for name in SYSTEM_COLUMNS]
        return next(filter(None, texts), None)

    def _tools(self) -> list[dict] | None:
        """Return the schemas of the tools that the row offers, bare ones as OpenAI wraps them."""
        # Nulls in a text were written; those in objects may be a table's.
        cell = without_nulls(self.value("tools"))
        tools = parsed_json(cell) if isinstance(cell, str) and cell.strip() else cell
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            reason = "column 'tools' must be a list of JSON schemas, as objects or as JSON text"
            raise BadRow(reason, FIX, got=f"got {cell!r:.80}")
        # Some templates write nothing of a bare schema, and what OpenAI's servers show a model is wrapped.
        bare_keys = set() if self.form == SHAREGPT else {"name", "parameters"}
        wrapped_tools = []
        for tool in tools:
            is_bare = "function" not in tool and bare_keys <= set(tool)
            wrapped_tools.append({"type": "function", "function": tool} if is_bare else tool)
        return wrapped_tools

    def _text(self, column: str) -> str | None:
        """Return the text of a column that a row may lack."""
        cell = self.value(column)
        if cell is not None and not isinstance(cell, str):
            raise BadRow(f"column {column!r} must be text", FIX, got=f"got {cell!r:.80}")
        return cell


def columns_of(row: dict) -> str:
    """Return the names of a row's columns, the first ones of very many."""
    return f"{sorted(map(str, row))!s:.400}"


def conversation(prompt: Prompt | None) -> list[Message]:
    """Return a prompt as messages: a text is the user's."""
    if isinstance(prompt, list):
        return prompt
    return [{"role": "user", "content": prompt}]


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """Return messages with a system message before them, if they do not begin with one."""
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            reason = "the row has a system prompt in a column, and another one in its first message"
            raise BadRow(reason, "remove one of them")
        return messages
    return [{"role": "system", "content": system}, *messages]


def _split(content: RowContent, chosen: list[Message], rejected: list[Message]) -> RowContent:
    """Return two conversations as the turns that they share and those in which they differ."""
    shared = 0
    # The last turn is a response even where the other conversation has the same one.
    max_shared = min(len(chosen), len(rejected)) - 1
    while shared < max_shared and said_by(chosen[shared]) == said_by(rejected[shared]):
        shared += 1
    prompt, sides = chosen[:shared], (chosen[shared:], rejected[shared:])
    if any(side[0]["role"] != "assistant" for side in sides):
        reason = "the two conversations differ before the assistant's turn"
        raise BadRow(reason, "a pair answers one prompt: remove the row")
    is_all = prompt == conversation(content.prompt)
    return content._replace(prompt=content.prompt if is_all else prompt, responses=sides)


def said_by(message: Message) -> Message:
    """Return what a message says, and by whom; white space around its text makes no difference."""
    said = {key: message[key] for key in SAID if key in message}
    return said | {"content": (message["content"] or "").strip()}


def after_prompt(prompt: list[Message], response: Prompt) -> list[Message]:
    """Return the conversation of a prompt and a response, text or messages that follow it or begin with it as well."""
    if isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    if [*map(said_by, response[: len(prompt)])] == [*map(said_by, prompt)]:
        return response
    last, first = prompt[-1]["role"], response[0]["role"]
    if last == "system" or first == "tool" or first == "assistant" != last:
        return prompt + response
    reason = f"the prompt ends with the {last}'s turn, and a response begins with the {first}'s"
    raise BadRow(reason, "remove one of them, or name the right column with --prompt_column")


def response_of(cell: Any, column: str) -> Prompt:
    """Return a response as text, or as messages that end with the assistant's."""
    if isinstance(cell, str):
        check_not_spelled(cell, column)
        return cell
    messages = messages_of(cell, column)
    last = messages[-1]["role"]
    if last != "assistant":
        reason = f"the messages of column {column!r} end with the {last}'s turn"
        raise BadRow(reason, "end them with the assistant's")
    return messages


def check_not_spelled(text: str, column: str) -> None:
    """Refuse a text that messages became, as in a .csv file."""
    if SPELLED.fullmatch(text):
        reason = f"column {column!r} is a text that spells messages"
        raise BadRow(reason, "give a list in a .jsonl")


def messages_of(cell: Any, column: str) -> list[Message]:
    """Return messages in transformers' form, of a list of OpenAI's or ShareGPT's, or of a single one."""
    cell = [cell] if isinstance(cell, dict) else cell
    if not isinstance(cell, list) or not cell or not all(isinstance(one, dict) for one in cell):
        reason = (
            f"column {column!r} must be text or a list of messages with role and content, both text"
        )
        raise BadRow(reason, "name another column, or fix the row", got=f"got {cell!r:.80}")
    return [_message_of(message, column) for message in cell]


def _message_of(message: dict, column: str) -> Message:
    """Return one message with its role by transformers' name, its text, and what else it says."""
    # A table fills in null for what other rows' messages have.
    fields = {key: value for key, value in message.items() if value is not None}
    name, content = fields.pop("role", None), fields.pop("content", None)
    # ShareGPT's keys.
    if name is None:
        name, content = fields.pop("from", None), fields.pop("value", None)
    name = str(name).lower()
    if name not in ROLES:
        accepted_roles = "system, user, assistant or tool, or ShareGPT's human, gpt, function_call or observation"
        reason = f"a message of column {column!r} has an unknown role or none"
        raise BadRow(reason, f"expected {accepted_roles}", got=f"got {message!r:.80}")
    calls = fields.pop("tool_calls", None)
    if name == "function_call":
        calls, content = _functions(content), None
    for key in WEIGHTS:
        weight = fields.pop(key, None)
        if weight not in (0, 1, None):
            reason = f"the {key} of a message must be 0 or 1"
            raise BadRow(reason, FIX, got=f"got {weight!r:.40}")
        if weight == (key == "disable_loss"):
            fields["weight"] = 0
    if calls:
        fields["tool_calls"] = [_call_of(call) for call in parsed_list(calls)]
    if not isinstance(content, str) and content is not None:
        content, fields = _text_of_parts(content, column, fields)
    if content is None and not fields.get("tool_calls"):
        reason = f"a message of column {column!r} has no content"
        raise BadRow(reason, "give its text", got=f"got {message!r:.80}")
    return {"role": ROLES[name], "content": content, **fields}


def _text_of_parts(content: Any, column: str, fields: Message) -> tuple[str, Message]:
    """Return the text of a content in parts, and what else a message says with its reasoning and calls in parts."""
    said: dict[Any, list[str]] = {kind: [] for kind in PARTS}
    for part in as_list(content):
        # OpenAI's key, and LLaMA-Factory's. A table fills in null for the other one.
        keys = without_nulls(part) if isinstance(part, dict) else {"type": type(part).__name__}
        kind, text = keys.get("type"), keys.get("text", keys.get("value"))
        if kind not in PARTS or not isinstance(text, str):
            reason = f"a message of column {column!r} has content of type {kind!r:.40}"
            raise BadRow(reason, "only text can be read", got=f"got {part!r:.80}")
        said[kind].append(text)
    if said["reasoning"]:
        fields = fields | {"reasoning_content": "".join(said["reasoning"])}
    if said["tool_call"]:
        calls = [call for text in said["tool_call"] for call in _functions(text)]
        fields = fields | {"tool_calls": [*map(_call_of, calls)]}
    return "".join(said["text"]), fields


def _call_of(call: Any) -> dict:
    """Return a tool call with its arguments as an object, without a table's nulls."""
    call = without_nulls(call)
    # OpenAI's have the function inside; others are the function.
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call must be an object with a name", FIX, got=f"got {call!r:.80}")
    arguments = function.get("arguments", {})
    # What is written in a text is no null of a table. Some files quote it twice.
    while isinstance(arguments, str):
        arguments = {} if arguments.strip() in ("", "null") else parsed_json(arguments)
        function = function | {"arguments": arguments}
    if not isinstance(arguments, dict):
        reason = "the arguments of a tool call must be an object"
        raise BadRow(reason, FIX, got=f"got {arguments!r:.80}")
    return call | {"function": function} if "function" in call else function


def _functions(content: Any) -> list:
    """Return the tool calls of a ShareGPT turn, which spells one or a list of them as JSON."""
    return [{"type": "function", "function": call} for call in parsed_list(content)]


def parsed_list(value: Any) -> list:
    """Return a list, or the one value in a list, of which either may be spelled as JSON."""
    return as_list(parsed_json(value) if isinstance(value, str) else value)


def as_list(value: Any) -> list:
    """Return a list, or the one value in a list."""
    return value if isinstance(value, list) else [value]


def parsed_json(text: str) -> Any:
    """Return what a text of JSON says."""
    try:
        return json.loads(text)
    except ValueError as error:
        reason = "the tools or a tool call cannot be parsed as JSON"
        raise BadRow(reason, FIX, got=f"got {text!r:.80}") from error


def without_nulls(value: Any) -> Any:
    """Return a value without keys that are null at any depth: a table fills these in for what other rows have."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
