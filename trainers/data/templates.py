"""What chat templates read and write: how they want messages to be written, and which parts they leave out."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence

from fused_rl.trainers.data.forms import Message

# What an assistant has to say in a turn besides the content: as a text, and as calls.
REASONING = ("reasoning_content", "thinking", "reasoning")
CALLS = ("tool_calls", "function_call")
OPEN, CLOSED = "<think>", "</think>"
# Where a generation prompt opens reasoning, and what it writes where the model is not to reason.
REASONING_BEGINS = re.compile(rf"{OPEN}|<\|channel>")
SKIPPED = re.compile(rf"(?:{OPEN}\s*{CLOSED}|<\|channel>thought\s*<channel\|>)\s*\Z")
NO_REASONING = re.compile(rf"{OPEN}\s*{CLOSED}")
# Words by which a template is told to begin a turn with reasoning, and to keep that of earlier turns.
BEGINS_REASONING = ("enable_thinking", "thinking")
KEEPS_REASONING = {
    "preserve_thinking": "true",
    "clear_thinking": "false",
    "truncate_history_thinking": "false",
}
# A user's message that marks a place in what a template writes.
MARK = "a message"

Write = Callable[[Sequence[Message]], str]
"""Messages to the text that a template makes of them."""


def reads(template: str, name: str) -> bool:
    """Return True if a chat template has a word in it."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


# Spellings.


def wants_parts(write: Write) -> bool:
    """Return True for a template that writes a content only as a list of parts, as some models of images have it."""
    for content in (MARK, _parts(MARK)):
        with contextlib.suppress(Exception):
            if MARK in write([{"role": "user", "content": content}]):
                return isinstance(content, list)
    return False


def spellings(messages: Sequence[Message], *, in_parts: bool) -> Iterator[Sequence[Message]]:
    """Yield the messages as templates may want them, the usual way first.

    The arguments of a call are an object or the text of JSON, and a turn that has calls alone has an empty content or
    null.
    """
    has_calls = any(message.get(name) for message in messages for name in CALLS)
    for as_text in (False, True) if has_calls else (False,):
        for empty in ("", None) if has_calls else ("",):
            yield [_spelled(message, in_parts, as_text, empty) for message in messages]


def _spelled(message: Message, in_parts: bool, as_text: bool, empty: str | None) -> Message:
    calls = message.get("tool_calls")
    if calls:
        if as_text:
            calls = [_with_text_arguments(call) for call in calls]
        message = message | {"tool_calls": calls, "content": message["content"] or empty}
    if in_parts and message["content"] is not None:
        message = message | {"content": _parts(message["content"])}
    return message


def _parts(text: str) -> list[dict]:
    return [{"type": "text", "text": text}]


def _with_text_arguments(call: dict) -> dict:
    function = call.get("function", call)
    function = function | {"arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}
    return call | {"function": function} if "function" in call else function


# What a template leaves out.


def left_out(write: Write, messages: Sequence[Message], text: str) -> str | None:
    """Return what of the messages is lost in the text that a template wrote of them; None if nothing is.

    Reasoning does not count, because many templates leave that of earlier turns out on purpose.
    """
    for i, message in enumerate(messages):
        for name in [name for name in CALLS if message.get(name)]:
            silent = {key: value for key, value in message.items() if key != name}
            if _writes_the_same(write, messages, i, silent, text):
                return f"the assistant's turn has {name}, but the chat template leaves it out"
        calls = message.get("tool_calls") or []
        if calls[1:] and _writes_the_same(
            write, messages, i, message | {"tool_calls": calls[:-1]}, text
        ):
            return (
                "the assistant's turn has several tool_calls, but the chat template writes only one"
            )
        for call in calls:
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                return "the chat template writes tool calls as Python dictionaries, not as JSON"
        # An assistant's turn may lose its reasoning; others may be reworded, but not left out.
        content, other = message["content"], MARK
        if isinstance(content, list):
            content, other = content[0]["text"], _parts(MARK)
        is_said = message["role"] == "assistant" or (content or "").strip() in text
        if not is_said and _writes_the_same(write, messages, i, message | {"content": other}, text):
            return f"the chat template leaves out what the {message['role']} says"
    return None


def _writes_the_same(
    write: Write, messages: Sequence[Message], i: int, other: Message, text: str
) -> bool:
    # A template that cannot do without a field reads it.
    with contextlib.suppress(Exception):
        return write([*messages[:i], other, *messages[i + 1 :]]) == text
    return False


def missing(turn: Message, text: str) -> str | None:
    """Return the field of an assistant's turn whose text is not in what a template wrote, or None."""
    written = squeezed(text)
    fields = (*REASONING, "content")
    return next((name for name in fields if squeezed(turn.get(name) or "") not in written), None)


def squeezed(text: str) -> str:
    """Return a text without white space and empty reasoning, which templates write as they like."""
    return "".join(NO_REASONING.sub("", text).split())


# Where a response begins.


def continuation(before: str, whole: str, turn: Message) -> str | None:
    """Return what a response adds to the text `before` it so that both say the `whole`; None if nothing does.

    Where generation begins with reasoning, templates may write the same turn without it, or with other white space.
    Then the response closes the reasoning that the prompt has opened.
    """
    if whole.startswith(before):
        return whole[len(before) :]
    # A prompt that closes reasoning at once stands where the turn is written without any.
    skipped = SKIPPED.search(before)
    if skipped is not None and whole.startswith(before[: skipped.start()]):
        rest = whole[skipped.start() :].removeprefix(CLOSED)
        return None if REASONING_BEGINS.match(rest.lstrip()) else rest
    start, space = before.rfind(OPEN), before[before.rfind(OPEN) + len(OPEN) :]
    if not opens_reasoning(before) or CLOSED in space or not whole.startswith(before[:start]):
        return None
    rest = whole[start:]
    if rest.lstrip().startswith(OPEN):
        rest = rest.lstrip().removeprefix(OPEN)
        return rest[len(os.path.commonprefix([rest, space])) :]

    # The template has left the reasoning out: it stands in the content, or in a field of its own.
    reasoning, closed, _ = (turn["content"] or "").partition(CLOSED)
    if closed:
        reasoning = reasoning.partition(OPEN)[2] if OPEN in reasoning else reasoning
        reasoning = reasoning[len(os.path.commonprefix([reasoning, space])) :]
    else:
        reasoning = next((turn[name].strip() for name in REASONING if turn.get(name)), "")
        reasoning = f"{reasoning}\n"
    gap = "" if rest[:1].isspace() else "\n\n"
    return f"{reasoning}{CLOSED}{gap}{rest}"


def opens_reasoning(before: str) -> bool:
    """Return True for a text that ends where reasoning has just been opened, or opened and closed."""
    opened = before[before.rfind(OPEN) :]
    return opened.startswith(OPEN) and not opened.removeprefix(OPEN).replace(CLOSED, "").strip()


def reasoning_apart(turn: Message) -> Message:
    """Return an assistant's turn with the reasoning that its content begins with in a field of its own."""
    reasoning, closed, answer = (turn["content"] or "").partition(CLOSED)
    if not closed or not reasoning.lstrip().startswith(OPEN):
        return turn
    reasoning = reasoning.lstrip().removeprefix(OPEN).strip()
    return turn | {"reasoning_content": reasoning, "content": answer.lstrip()}
