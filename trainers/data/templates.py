"""What chat templates read and write: how they want messages to be written, and where a response begins."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .forms import Message
from .rows import BadRow

# What an assistant may say besides the content, as a text.
REASONING = ("reasoning_content", "thinking", "reasoning")
# A user's message that marks a place in what a template writes.
MARK = "a message"
OPEN, CLOSED = "<think>", "</think>"
# Where a generation prompt opens reasoning, and what it writes where the model is not to reason.
REASONING_BEGINS = re.compile(rf"{OPEN}|<\|channel>")
SKIPPED = re.compile(rf"(?:{OPEN}\s*{CLOSED}|<\|channel>thought\s*<channel\|>)\s*\Z")
NO_REASONING = re.compile(rf"(?:{OPEN}|\A)\s*{CLOSED}")
# White space, as it stands or as JSON writes it, and the marks by which JSON quotes.
SPACE = re.compile(r"\\+[nrt]|\\+|\s+")
# Words by which templates are asked to begin a turn with reasoning.
BEGINS_REASONING = ("enable_thinking", "thinking")

Write = Callable[[Sequence[Message]], str]
"""Messages to the text that a template makes of them."""


def mentions(template: str, name: str) -> bool:
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
    has_calls = any(message.get("tool_calls") for message in messages)
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


# What a template leaves out, or writes too often.


def unwritten(
    messages: Sequence[Message], tools: list | None, text: str, *, with_reasoning: bool = False
) -> BadRow | None:
    """Return the error of what is not in the text that a template wrote of messages and tools, or None.

    Texts of tools and calls have to be there as often as they were said. Reasoning, which many templates leave out of
    earlier turns on purpose, is only looked for where it is asked for, and must not be repeated either.
    """
    functions = [tool.get("function", tool) for tool in tools or []]
    calls = [call.get("function", call) for m in messages for call in m.get("tool_calls") or []]
    named_texts = {
        "reasoning": [t for m in messages if with_reasoning for t in _thoughts_of(m)],
        "tools": [f.get(key) or "" for f in functions for key in ("name", "description")],
        "tool_calls": [*_texts_of(calls)],
    }
    written, lost = squeezed(text), []
    answers = [squeezed((message["content"] or "").rpartition(CLOSED)[2]) for message in messages]
    said = [*answers]
    for name, texts in named_texts.items():
        squeezed_texts = [*map(squeezed, texts)]
        said += squeezed_texts
        for one in filter(None, {*squeezed_texts}):
            times, times_said = written.count(one), sum(other.count(one) for other in said)
            # A row may have its reasoning in two places, of which one is enough.
            if times < times_said if name != "reasoning" else not 0 < times <= times_said:
                lost.append(name)
    if any(call.get("arguments") and str(call["arguments"]) in text for call in calls):
        lost.append("JSON of tool_calls, which it writes as Python")
    for message, answer in zip(messages, answers, strict=True):
        if answer not in written:
            lost.append(f"what the {message['role']} says")
    if not lost:
        return None
    remedy = "remove that from the row, or use another chat template"
    return BadRow(f"the chat template leaves out or repeats {lost[0]}", remedy)


def _thoughts_of(message: Message) -> set[str]:
    """Return what a message says as reasoning, in fields of its own and in the content."""
    thoughts = {message.get(name) or "" for name in REASONING}
    begins, closed, _ = (message["content"] or "").rpartition(CLOSED)
    begins = begins.strip().removeprefix(OPEN)
    return thoughts | ({begins + closed} if begins else set())


def _texts_of(value: Any) -> Iterator[str]:
    """Yield the name of a call and each text of its arguments."""
    if isinstance(value, str):
        yield value
    if isinstance(value, dict):
        value = [inner for key, inner in value.items() if key not in ("id", "type")]
    if isinstance(value, list):
        for inner in value:
            yield from _texts_of(inner)


def squeezed(text: str) -> str:
    """Return a text without white space, quotes of JSON and empty reasoning, which templates write as they like."""
    text = NO_REASONING.sub("", text) if CLOSED in text else text
    return SPACE.sub("", text) if "\\" in text else "".join(text.split())


# Where a response begins.


def continuation(before: str, rendered: str, turn: Message) -> str | None:
    """Return what a response adds to the text `before` it so that both say what is `rendered`; None if nothing does.

    Where generation begins with reasoning, templates may write the same turn without it, or with other white space.
    Then the response closes the reasoning that the prompt has opened.
    """
    if rendered.startswith(before):
        return rendered[len(before) :]
    # A prompt that closes reasoning at once stands where the turn is written without any.
    skipped = SKIPPED.search(before)
    if skipped is not None and rendered.startswith(before[: skipped.start()]):
        rest = rendered[skipped.start() :].removeprefix(CLOSED)
        return None if REASONING_BEGINS.match(rest.lstrip()) else rest
    start, space = before.rfind(OPEN), before[before.rfind(OPEN) + len(OPEN) :]
    if not opens_reasoning(before) or CLOSED in space or not rendered.startswith(before[:start]):
        return None
    rest = rendered[start:]
    if rest.lstrip().startswith(OPEN):
        rest = rest.lstrip().removeprefix(OPEN)
        return rest[len(os.path.commonprefix([rest, space])) :]
    if CLOSED in rest:
        return rest

    # The template has left the reasoning out: it stands in the content, or in a field of its own.
    reasoning, closed, _ = (turn["content"] or "").partition(CLOSED)
    if closed:
        reasoning = reasoning.partition(OPEN)[2] if OPEN in reasoning else reasoning
        reasoning = reasoning[len(os.path.commonprefix([reasoning, space])) :]
    else:
        reasoning = next((turn[name].strip() for name in REASONING if turn.get(name)), "")
        reasoning = f"{reasoning}\n"
    # White space that an answer begins with stays behind the end of the reasoning, unless the row has put it there.
    gap = "" if rest.startswith("\n") or (closed and rest[:1].isspace()) else "\n\n"
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
