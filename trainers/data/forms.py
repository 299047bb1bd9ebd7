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
from typing import Any, NamedTuple, TypeAlias

from .rows import BadRow

Message: TypeAlias = dict[str, Any]
"""role, content, and what chat templates read besides."""
Prompt: TypeAlias = str | list[Message]

FIX = "fix or remove the row"
CONVERSATIONS = ("messages", "ShareGPT conversations")
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


class Read(NamedTuple):
    """The prompt and the responses of a row, and the form that they were read in."""

    form: str
    prompt: Prompt | None
    """Text, or messages; a conversation that nothing follows has its responses inside. None before whole texts."""
    tools: list[dict] | None = None
    responses: tuple[Prompt, ...] = ()
    """Texts or messages that follow the prompt: a completion, or a chosen and a rejected one."""


def prompt_column_of(row: dict) -> str:
    """Return the column that holds a row's prompt where none is named."""
    # A table of rows of several forms has null where a row has another form.
    present = [name for name in PROMPT_COLUMNS if name in row]
    filled = [name for name in present if row[name] is not None]
    return (filled or present or PROMPT_COLUMNS)[0]


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


class Reader:
    """Reads one row, and knows afterwards in which form it was, and which of its columns were read."""

    def __init__(self, row: dict):
        self.row = row
        self.form = ""
        self.columns: set[str] = set()

    def prompt(self, column: str | None) -> Read:
        """Return the row's prompt alone, without the assistant's last turn."""
        self._check_readable()
        read = self._prompt(column)
        prompt = read.prompt
        # A conversation that was written for training ends with the answer, which a prompt must not give away.
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        return self._count_form(read._replace(prompt=prompt))

    def completion(
        self, column: str | None, completion_column: str, text_column: str | None = None
    ) -> Read:
        """Return the row's prompt and completion, a conversation that ends with the assistant, or a text alone."""
        self._check_readable()
        row = self.row
        other_columns = (*PROMPT_COLUMNS, completion_column)
        is_text = column is None and all(row.get(name) is None for name in other_columns)
        if text_column is not None or (is_text and isinstance(row.get("text"), str)):
            text = self.cell(text_column or "text", "text_column")
            if not isinstance(text, str):
                raise BadRow(f"column {text_column!r} must be text", FIX, got=f"got {text!r:.80}")
            return self._count_form(Read("texts", None, responses=(text,)))

        prompt_column = column or prompt_column_of(row)
        if row.get(prompt_column) is None and at_path(row, completion_column)[0] is None:
            problem = f"columns {prompt_column!r} and {completion_column!r} are missing or null"
            remedy = "name the right ones with --prompt_column and --completion_column"
            raise BadRow(problem, remedy, got=f"the row has {columns_of(row)}")
        read = self._prompt(column)
        # Alpaca's rows name it so; any other column must be given by name.
        is_alpaca = read.form == "Alpaca instructions" and row.get("output") is not None
        if is_alpaca and row.get(completion_column) is None:
            completion_column = "output"
        cell, _, _ = at_path(row, completion_column)
        if read.form in CONVERSATIONS:
            roles = [message["role"] for message in conversation(read.prompt)]
            last = roles[-1]
            if last == "assistant" and (
                cell is None or completion_column == (column or "messages")
            ):
                return self._count_form(read)
            if last == "assistant":
                reason = f"the conversation ends with the assistant's turn, and column {completion_column!r}"
                raise BadRow(f"{reason} has one too", "remove one of them")
            if cell is None:
                state = f"column {completion_column!r} {state_of(row, completion_column)}"
                remedy = "end it with the assistant's turn, or name the completion's column with --completion_column"
                reason = f"the conversation ends with the {last}'s turn, and {state}"
                raise BadRow(reason, remedy, got=f"the last roles are {', '.join(roles[-8:])}")
        cell = self.cell(completion_column, "completion_column")
        completion = response_of(cell, completion_column)
        form = "prompts and completions" if read.form == "prompts" else read.form
        return self._count_form(read._replace(form=form, responses=(completion,)))

    def pair(self, column: str | None, sides: dict[str, str]) -> Read:
        """Return the row's prompt with its chosen and its rejected response; `sides` has their columns by option."""
        self._check_readable()
        responses: list[Any] = [
            response_of(self.cell(name, option), name) for option, name in sides.items()
        ]
        chosen, rejected = responses
        if isinstance(chosen, str) != isinstance(rejected, str):
            reason = "one response is text and the other one is messages"
            raise BadRow(reason, "give both in the same form")

        # Whole conversations or texts hold their prompt.
        has_prompt = column is not None or self.row.get(prompt_column_of(self.row)) is not None
        if isinstance(chosen, str) and not has_prompt:
            return self._count_form(
                Read("pairs of whole texts", None, responses=(chosen, rejected))
            )
        if not has_prompt and chosen[0]["role"] != "assistant":
            conversations = [
                with_system(messages, self._system()) for messages in (chosen, rejected)
            ]
            return self._count_form(_split(*conversations, tools=self._tools()))
        read = self._prompt(column)
        prompt = conversation(read.prompt)
        if prompt[-1]["role"] == "assistant" and (
            isinstance(chosen, str) or chosen[0]["role"] == "assistant"
        ):
            reason = "the prompt ends with the assistant's turn, and the responses follow it"
            raise BadRow(reason, "remove that turn, or name the right column with --prompt_column")
        form = f"pairs after {read.form}"
        if isinstance(chosen, str):
            return self._count_form(read._replace(form=form, responses=(chosen, rejected)))
        # Both may begin with the prompt, and go on for some turns in the same words.
        conversations = [after_prompt(prompt, messages) for messages in (chosen, rejected)]
        return self._count_form(_split(*conversations, tools=read.tools)._replace(form=form))

    def value(self, column: str) -> Any:
        """Return a cell that has no meaning here, such as a label; None where the row has none."""
        self.columns.add(column)
        return self.row.get(column)

    def _check_readable(self) -> None:
        """Refuse a row with a column that belongs to the prompt and cannot be read."""
        for name in MEDIA:
            if self.row.get(name):
                remedy = "remove the column if the text makes sense without it, or remove the row"
                raise BadRow(f"column {name!r} is filled, and only text can be read", remedy)

    def _prompt(self, named: str | None) -> Read:
        column = named or prompt_column_of(self.row)
        cell = self.cell(column, "prompt_column")
        system = self._system()
        if not isinstance(cell, str):
            messages = with_system(messages_of(cell, column), system)
            is_sharegpt = isinstance(cell, list) and "from" in cell[0]
            form = "ShareGPT conversations" if is_sharegpt else "messages"
            return Read(form, messages, self._tools(wrapped=is_sharegpt))
        check_not_spelled(cell, column)
        form, prompt, earlier = "prompts", cell, []
        if column == "instruction":
            form = "Alpaca instructions"
            prompt, earlier = self._alpaca()
        if system is None and not earlier:
            return Read(form, prompt, self._tools())
        messages = [*earlier, {"role": "user", "content": prompt}]
        return Read(form, with_system(messages, system), self._tools())

    def _alpaca(self) -> tuple[str, list[Message]]:
        """Return an instruction with its input, and the earlier turns."""
        prompt = self.row["instruction"]
        context = self._text("input")
        if context:
            prompt = f"{prompt}\n\n{context}" if prompt else context
        earlier = []
        for question, answer in self.value("history") or []:
            earlier.append({"role": "user", "content": question})
            earlier.append({"role": "assistant", "content": answer})
        return prompt, messages_of(earlier, "history") if earlier else []

    def _system(self) -> str | None:
        texts = [self._text(name) for name in SYSTEM_COLUMNS]
        return next(filter(None, texts), None)

    def _tools(self, *, wrapped: bool = False) -> list[dict] | None:
        """Return the schemas of the tools that the row offers, bare ones as OpenAI wraps them."""
        cell = self.value("tools")
        tools = parsed_json(cell) if isinstance(cell, str) and cell.strip() else cell
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            reason = "column 'tools' must be a list of JSON schemas, as objects or as JSON text"
            raise BadRow(reason, FIX, got=f"got {cell!r:.80}")
        # Nulls in a text were written; those in objects may be a table's.
        tools = tools if isinstance(cell, str) else without_nulls(tools)
        # Some templates write nothing of a bare schema, and what OpenAI's servers show a model is wrapped.
        wrapped_tools = []
        for tool in tools:
            is_bare = "function" not in tool and (wrapped or {"name", "parameters"} <= set(tool))
            wrapped_tools.append({"type": "function", "function": tool} if is_bare else tool)
        return wrapped_tools

    def cell(self, column: str, option: str) -> Any:
        """Return a cell that must be there; an error names the option that names another column."""
        self.columns |= {column, column.partition(".")[0]}
        cell, _, _ = at_path(self.row, column)
        if cell is None:
            reason = f"column {column!r} {state_of(self.row, column)}"
            remedy = f"name the right column with --{option}"
            remedy += ", or remove the row" if column in self.row else ""
            raise BadRow(reason, remedy, got=f"the row has {columns_of(self.row)}")
        return cell

    def _text(self, column: str) -> str | None:
        """Return the text of a column that a row may lack."""
        cell = self.value(column)
        if cell is not None and not isinstance(cell, str):
            raise BadRow(f"column {column!r} must be text", FIX, got=f"got {cell!r:.80}")
        return cell

    def _count_form(self, read: Read) -> Read:
        self.form = read.form
        return read


def state_of(row: dict, column: str) -> str:
    """Return "is null" or "is missing"."""
    return "is null" if column in row else "is missing"


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


def _split(chosen: list[Message], rejected: list[Message], tools: list[dict] | None) -> Read:
    """Return two conversations as the turns that they share and those in which they differ."""
    shared = 0
    # The last turn is a response even where the other conversation has the same one.
    max_shared = min(len(chosen), len(rejected)) - 1
    while shared < max_shared and said_by(chosen[shared]) == said_by(rejected[shared]):
        shared += 1
    sides = chosen[shared:], rejected[shared:]
    if any(side[0]["role"] != "assistant" for side in sides):
        reason = "the two conversations differ before the assistant's turn"
        raise BadRow(reason, "a pair answers one prompt: remove the row")
    return Read("pairs of conversations", chosen[:shared], tools, sides)


def said_by(message: Message) -> Message:
    """Return what a message says, and by whom; white space around its text makes no difference."""
    said = {key: message[key] for key in SAID if key in message}
    return said | {"content": (message["content"] or "").strip()}


def after_prompt(prompt: list[Message], messages: list[Message]) -> list[Message]:
    """Return the conversation of a prompt and the messages that follow it, or that begin with it as well."""
    if [*map(said_by, messages[: len(prompt)])] == [*map(said_by, prompt)]:
        return messages
    if messages[0]["role"] in ("assistant", "tool"):
        return prompt + messages
    reason = "the conversations of the responses do not begin with the prompt"
    raise BadRow(reason, "remove the prompt's column, or give the turns after the prompt alone")


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
    if name is None and "from" in fields:
        name, content = fields.pop("from"), fields.pop("value", None)
    if name is None:
        reason = f"a message of column {column!r} has no role"
        remedy = "give messages with role and content, or with ShareGPT's from and value"
        raise BadRow(reason, remedy, got=f"it has {columns_of(message)}")
    name = str(name).lower()
    role = ROLES.get(name)
    if role is None:
        accepted_roles = "system, user, assistant or tool, or ShareGPT's human, gpt, function_call or observation"
        reason = f"a message of column {column!r} has an unknown role"
        raise BadRow(reason, f"expected {accepted_roles}", got=f"got {name!r:.40}")
    if name == "function_call":
        fields["tool_calls"] = _spelled_calls(content)
        content = None

    calls = fields.pop("tool_calls", None)
    calls = parsed_json(calls) if isinstance(calls, str) else calls
    weights = {key: fields.pop(key) for key in WEIGHTS if key in fields}
    for key, weight in weights.items():
        if weight not in (0, 1):
            reason = f"the {key} of a message must be 0 or 1"
            raise BadRow(reason, FIX, got=f"got {weight!r:.40}")
    if any(weight == (key == "disable_loss") for key, weight in weights.items()):
        fields["weight"] = 0
    if calls:
        fields["tool_calls"] = [_call_of(call) for call in as_list(calls)]
    if not isinstance(content, str) and content is not None:
        content, fields = _text_of_parts(content, column, fields)
    if content is None and not fields.get("tool_calls"):
        reason = f"a message of column {column!r} has no content"
        raise BadRow(reason, "give its text", got=f"got {message!r:.80}")
    return {"role": role, "content": content, **fields}


def _text_of_parts(content: Any, column: str, fields: Message) -> tuple[str, Message]:
    """Return the text of a content in parts, and what else a message says with its reasoning and calls in parts."""
    said: dict[Any, list[str]] = {kind: [] for kind in PARTS}
    for part in as_list(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        # OpenAI's key, and LLaMA-Factory's. A table fills in null for the other one.
        key = "value" if kind in PARTS and part.get("text") is None else "text"
        text = part.get(key) if kind in PARTS else None
        if not isinstance(text, str):
            problem = f"a message of column {column!r} has content of type {kind!r:.40}"
            problem += " without a text" if kind in PARTS else ""
            raise BadRow(problem, "only text can be read", got=f"got {part!r:.80}")
        said[kind].append(text)
    if said["reasoning"]:
        fields = fields | {"reasoning_content": "".join(said["reasoning"])}
    if said["tool_call"]:
        calls = [call for text in said["tool_call"] for call in _spelled_calls(text)]
        fields = fields | {"tool_calls": [*map(_call_of, calls)]}
    return "".join(said["text"]), fields


def _call_of(call: Any) -> dict:
    """Return a tool call with its arguments as an object, without a table's nulls."""
    if not isinstance(call, dict):
        raise BadRow("a tool call must be an object", FIX, got=f"got {call!r:.80}")
    call = {key: value for key, value in call.items() if value is not None}
    # OpenAI's have the function inside; others are the function.
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call has no name", FIX, got=f"got {call!r:.80}")
    arguments = function.get("arguments")
    # What is written in a text is no null of a table. Some files quote it twice.
    spelled = arguments
    while isinstance(spelled, str):
        spelled = parsed_json(spelled) if spelled.strip() else {}
        function = function | {"arguments": spelled}
    function = {key: value for key, value in function.items() if value is not None}
    if not isinstance(function.get("arguments", {}), dict):
        reason = "the arguments of a tool call must be an object"
        raise BadRow(reason, FIX, got=f"got {arguments!r:.80}")
    if not isinstance(arguments, str):
        function = without_nulls(function)
    return call | {"function": function} if "function" in call else function


def _spelled_calls(content: Any) -> list:
    """Return the tool calls of a ShareGPT turn, which spells one or a list of them as JSON."""
    calls = parsed_json(content) if isinstance(content, str) else content
    return [{"type": "function", "function": call} for call in as_list(calls)]


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
