"""What a chat template is given besides text: what a run tells it, tools and their calls; and whether it reads them."""

import difflib
import functools
import inspect
import json
import re

from fused_rl.trainers.options.config import InputError, in_a_line

FOR_THE_TEMPLATE = {"tools", "documents"}  # of transformers' own arguments, those that reach the template
OF_TRANSFORMERS = {"messages", "raise_exception", "strftime_now"}  # given to every template
SAID = ("tool_calls", "function_call", "reasoning_content", "thinking")
"""Of an assistant's turn, what the model has to say besides the content."""
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


def without_nulls(message: dict) -> dict:
    """The message as JSON would have it: a Parquet table fills in null for what other messages have."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def check_text(tokenizer, turn: dict, where: str) -> None:
    """Refuse a turn that spells the token which ends a response: what it says next would never be trained on."""
    eos = tokenizer.eos_token
    if json.dumps(eos, ensure_ascii=False)[1:-1] in json.dumps(turn, ensure_ascii=False, default=str):
        what = f"the completion spells {eos!r}, the token that ends a response"
        raise InputError(f"{where}: {what}; mend or remove the row")
