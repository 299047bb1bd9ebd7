"""What a chat template may be told besides the messages, and whether it listens."""

import difflib
import inspect
import re

from fused_rl.trainers.config import InputError

FOR_THE_TEMPLATE = {"tools", "documents"}  # of transformers' own arguments, those that reach the template


def check_template_kwargs(tokenizer, given: dict) -> None:
    """Refuse what the tokenizer's chat template does not read, and what is not the template's but the trainer's.

    A template takes any name and ignores those that it does not know, so a slip of the pen would change nothing.
    """
    ours = set(inspect.signature(tokenizer.apply_chat_template).parameters) - FOR_THE_TEMPLATE
    words = set(re.findall(r"\w+", tokenizer.get_chat_template(tools=given.get("tools"))))
    for name in given:
        if name in ours:
            raise InputError(f"chat_template_kwargs: {name} is set by the trainer and cannot be given")
        if name not in words:
            near = difflib.get_close_matches(name, words, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"chat_template_kwargs: the tokenizer's chat template does not read {name!r}{hint}")
