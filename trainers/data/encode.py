"""Rows as token ids, through the chat template where the tokenizer has one; what it does not read is refused.

A prompt has the ids that generation will see, and a completion those that follow it, up to the token that ends a turn.
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fused_rl.trainers.base.files import base_of_adapters, check_exists
from fused_rl.trainers.base.text import InputError, in_a_line
from fused_rl.trainers.data.forms import FIX, Message, Prompt, Reader, conversation
from fused_rl.trainers.data.rows import BadRow, Rows
from fused_rl.trainers.data.templates import (
    BEGINS_REASONING,
    CALLS,
    CLOSED,
    KEEPS_REASONING,
    MARK,
    OPEN,
    REASONING,
    REASONING_BEGINS,
    continuation,
    left_out,
    missing,
    opens_reasoning,
    reads,
    reasoning_apart,
    spellings,
    wants_parts,
)

Encoded: TypeAlias = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""
# Marks a text that is given as a prompt and goes to the model as it is.
RENDERED = "is_rendered"
READ_AS_IT_IS = "give the prompt as the exact text that the model reads, with --raw_prompt"


def load_tokenizer(name: str, revision: str | None = None):
    """Return the tokenizer of a model; without a pad token EOS is one, because pads are never read."""
    from transformers import AutoTokenizer

    check_exists(name)
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


def saved_stop_ids(name: str, revision: str | None, tokenizer) -> list[int]:
    """Return the ids that end a response of a model, as its saved generation config names them."""
    from transformers import GenerationConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    # A name that can be read nowhere is refused where the model is loaded.
    with contextlib.suppress(OSError):
        # Adapters end a response as their model does.
        adapters = find_adapter_config_file(name, revision=revision)
        if adapters is not None:
            saved = json.loads(Path(adapters).read_bytes())
            name, revision = saved["base_model_name_or_path"], saved.get("revision")
            name = base_of_adapters(Path(adapters).parent, name, revision)
    # transformers looks in both as well, in this order.
    for file in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError):
            config = GenerationConfig.from_pretrained(
                name, config_file_name=file, revision=revision
            )
            return stop_ids(tokenizer, config)
    return [tokenizer.eos_token_id]


class Encoder:
    """Encodes prompts and completions; raises a BadRow with the file and line of a row that it cannot encode."""

    def __init__(
        self,
        tokenizer,
        *,
        raw_prompt=False,
        system_prompt=None,
        chat_template_kwargs=None,
        stop_ids: Collection[int] = (),
    ):
        """Take the options of `DataConfig` by name, and the ids that end a response beside the tokenizer's EOS."""
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

        # The tokens that end a response, by their text; and those with which no text of a user begins.
        self.stop_ids = {tokenizer.eos_token_id, *stop_ids}
        special = {
            i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        special[tokenizer.eos_token_id] = tokenizer.eos_token
        self.stop_tokens = {special[i]: i for i in sorted(self.stop_ids) if i in special}
        self.stop_pattern = re.compile("|".join(map(re.escape, self.stop_tokens)))
        self.special_tokens = tuple(special.values())
        self._tools_written: dict[str, bool] = {}

    @classmethod
    def of(cls, config: Any, tokenizer) -> "Encoder":
        """Return the encoder that a config describes, by its model and the options of `DataConfig`."""
        return cls(
            tokenizer,
            raw_prompt=config.raw_prompt,
            system_prompt=config.system_prompt,
            chat_template_kwargs=config.chat_template_kwargs,
            stop_ids=saved_stop_ids(config.model, config.revision, tokenizer),
        )

    # Rows.

    def prompt(self, rows: Rows, i: int, column: str | None) -> list[int]:
        """Return the token ids of row i's prompt, up to where the response begins."""
        _, ids = self.read_prompt(rows, i, column)
        return ids

    def read_prompt(
        self, rows: Rows, i: int, column: str | None
    ) -> tuple[Prompt | None, list[int]]:
        """Return row i's prompt, text or messages, and its token ids."""
        with rows.at(i):
            read = Reader(rows).prompt(i, column)
            return read.prompt, self._prompt(self.messages(read.prompt), read.tools)

    def pairs(
        self,
        rows: Rows,
        i: int,
        column: str | None,
        completion_column: str,
        turns: str = "last",
    ) -> list[Encoded]:
        """Return the token ids of each prompt and completion that row i trains, with the token that ends a turn.

        Of a conversation the assistant's last turn is trained, or with turns="all" each of its turns after the first
        message; of a completion in messages each of its turns. A text alone is trained after its first token.
        """
        with rows.at(i):
            read = Reader(rows).completion(i, column, completion_column)
            if read.prompt is None:
                (text,) = read.responses
                self.check_no_system_prompt("a text")
                ids = self.whole_text(str(text))
                return [(ids[:1], ids[1:])]
            messages = self.messages(read.prompt)
            # A first message of the assistant answers nothing, so it is not trained.
            answers = range(1, len(messages))
            for completion in read.responses:
                messages = messages + as_turns(completion)
                answers, turns = range(answers.stop, len(messages)), "all"
            trained = [i for i in answers if messages[i]["role"] == "assistant"]
            trained = [i for i in trained if "weight" not in messages[i]]
            if not trained:
                reason = "no turn of the assistant can be trained: each has weight 0, or nothing comes before it"
                raise BadRow(reason, "remove the row")
            ends = trained if turns == "all" else trained[-1:]
            return [self.pair(messages[: i + 1], read.tools) for i in ends]

    def messages(self, prompt: Prompt | None) -> list[Message]:
        """Return a prompt as messages, with the run's system prompt before a text."""
        messages = conversation(prompt)
        if isinstance(prompt, list):
            self.check_no_system_prompt("a prompt of messages")
            begins = self.generation_prompt.strip()
            for message in messages:
                text = (message["content"] or "").rstrip()
                if begins and text.endswith(begins) and self.is_rendered(text):
                    reason = "a message is a whole prompt that a chat template has written"
                    raise BadRow(reason, "give it as text, without a system prompt beside it")
            return messages
        if self.chat and self.is_rendered(str(prompt)):
            self.check_no_system_prompt("a prompt that a chat template has written")
            return [messages[0] | {RENDERED: True}]
        if self.system_prompt is None:
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def check_no_system_prompt(self, beside: str) -> None:
        """Refuse a row in which the run's system prompt has no place."""
        if self.system_prompt is not None:
            remedy = "begin the row with a message of role system, or leave the option out"
            raise BadRow(f"system_prompt has no meaning for {beside}", remedy)

    # One sequence.

    def pair(
        self, messages: list[Message], tools: list | None, start: int | None = None
    ) -> Encoded:
        """Return the token ids of the messages before `start`, and of the others, of which the last is the assistant's.

        `start` is by default the last message's place.
        """
        *earlier, last = messages
        # The template writes the ends of earlier turns itself.
        earlier = [message for message, _ in map(self._split_end, earlier)]
        turn, end = self._without_end(last)
        if self._is_raw(earlier):
            prompt = self._prompt(earlier, tools)
            for name in (*REASONING, *CALLS):
                if turn.get(name):
                    reason = f"the assistant's turn has {name}, but there is no chat template to write it"
                    raise BadRow(reason, "give text, or a model with a chat template")
            if not self.chat:
                return prompt, [*self.ids(turn["content"]), end]
            return self._after_rendered(earlier[0]["content"], turn, end)

        # The response is what the template adds to the text that generation would see.
        before = self.render(earlier, tools, add_generation_prompt=True)
        whole = self.render([*earlier, turn], tools, add_generation_prompt=False)
        if opens_reasoning(before) and whole.count(OPEN) > before.count(OPEN):
            # The template writes the reasoning of a field, and takes that in a content for the answer.
            turn = reasoning_apart(turn)
            whole = self.render([*earlier, turn], tools, add_generation_prompt=False)
        response = continuation(before, whole, turn)
        if response is None:
            raise self._not_continued(before, whole)
        self._check_said(turn, before, response)
        prompt = self._prompt(earlier, tools, before)
        completion = self._ended(self._behind(prompt, response, self.ids(before + response)))
        if start is None or start == len(earlier):
            return prompt, completion

        # Several turns have the same ids, cut where the first of them begins.
        ids = prompt + completion
        prompt = self._prompt(messages[:start], tools)
        others = [message for message in messages[start:-1] if message["role"] == "assistant"]
        if ids[: len(prompt)] != prompt or any(missing(message, whole) for message in others):
            reason = "the chat template rewrites earlier turns, so several turns do not continue their prompt"
            raise BadRow(reason, self._switch(KEEPS_REASONING) or "give responses of one turn")
        return prompt, ids[len(prompt) :]

    def _after_rendered(self, before: str, turn: Message, end: int) -> Encoded:
        """Return the token ids of a prompt that a template has written, and of the turn after it as it stands."""
        response = content = turn["content"]
        # The response closes the reasoning that such a prompt has opened, unless it does so in its own words.
        is_whole = content.lstrip().startswith(OPEN) or CLOSED not in content
        if opens_reasoning(before) and is_whole:
            whole = before[: before.rfind(OPEN)] + content
            response = continuation(before, whole, turn)
            if response is None:
                raise self._not_continued(before, whole)
        if end == self.tokenizer.eos_token_id:
            end = self.end_of_turn
        # After such a prompt, white space is as it stands.
        return self._begun(before), [*self._continued(response), end]

    @functools.cached_property
    def end_of_turn(self) -> int:
        """The id of the token by which the template ends the assistant's turn, or EOS."""
        said = [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
        ids = []
        with contextlib.suppress(BadRow):
            text = self.render(said, None, add_generation_prompt=False)
            ids = self.ids(text.rpartition(MARK)[2])
        return next((i for i in ids if i in self.stop_ids), self.tokenizer.eos_token_id)

    def whole_text(self, text: str) -> list[int]:
        """Return the token ids of a text with one token that begins it and one that ends it."""
        # Without a token of its own it would only teach to end at once.
        if not self.stop_pattern.sub("", text).strip():
            raise BadRow("the text is empty", "remove the row")
        return self._closed(self._begun(self.ended_text(text)))

    def ended_text(self, text: str) -> str:
        """Return a text without a turn of the assistant that a template has begun behind all that is said."""
        if not self.is_rendered(text):
            return text
        begun = self.stop_pattern.split(self.generation_prompt)[-1]
        return text.removesuffix(begun) if begun.strip() else text

    def rendered_prompt(self, text: str) -> str | None:
        """Return a text that the template has written up to where the assistant's last turn begins; None for others.

        It ends as generation would see it.
        """
        head, reasoning = self._head_and_reasoning
        end = text.rfind(head) + len(head)
        if not head.strip() or end < len(head):
            return None
        return text[:end] + reasoning

    def ends_turn(self, text: str) -> bool:
        """Return True for a rendered text in which the assistant's last turn has ended."""
        head, _ = self._head_and_reasoning
        return self.stop_pattern.search(text[text.rfind(head) + len(head) :]) is not None

    @functools.cached_property
    def _head_and_reasoning(self) -> tuple[str, str]:
        """The generation prompt up to where it opens reasoning, and from there on."""
        opened = REASONING_BEGINS.search(self.generation_prompt)
        cut = len(self.generation_prompt) if opened is None else opened.start()
        return self.generation_prompt[:cut], self.generation_prompt[cut:]

    def rendered_pair(self, before: str, text: str) -> Encoded:
        """Return the token ids of the prompt `before`, and of the response that the rendered text adds to it."""
        response = continuation(before, text, {"content": None})
        if response is None:
            raise self._not_continued(before, text)
        said = self.stop_pattern.split(response)[0]
        if not said.replace(CLOSED, "").strip():
            raise empty_completion()
        prompt = self._begun(before)
        return prompt, self._closed(self._behind(prompt, response, self._begun(before + response)))

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text without any that the tokenizer would add."""
        return self._tokenized(text, add_special_tokens=False)

    @functools.cached_property
    def wants_parts(self) -> bool:
        """True if the template writes a content only as a list of parts."""
        write = functools.partial(self.tokenizer.apply_chat_template, tokenize=False)
        return wants_parts(functools.partial(write, **self.template_kwargs))

    @functools.cached_property
    def generation_prompt(self) -> str:
        """What the template writes between a user's message and the answer, or its end; empty without a template."""
        before, after = "", ""
        asked = [{"role": "user", "content": MARK}]
        # Some templates want more than a user's message; texts are read without them all the same.
        with contextlib.suppress(BadRow):
            if self.chat:
                before = self.render(asked, None, add_generation_prompt=False)
                after = self.render(asked, None, add_generation_prompt=True)
        # Some templates end with EOS what nothing follows, and some begin an answer without a word.
        before = before.removesuffix(self.tokenizer.eos_token)
        return after.removeprefix(before) or after.partition(MARK)[2]

    @functools.cached_property
    def openings(self) -> tuple[str, ...]:
        """What the template writes before a first message, of a user or of the system."""
        openings = []
        for role in ("user", "system"):
            messages = [{"role": role, "content": MARK}, {"role": "user", "content": ""}]
            messages = messages[: 1 if role == "user" else 2]
            # Some templates take no system message.
            with contextlib.suppress(BadRow):
                text = self.render(messages, None, add_generation_prompt=False)
                openings.append(text.partition(MARK)[0])
        return tuple(opening for opening in openings if opening.strip())

    def is_rendered(self, text: str) -> bool:
        """Return True for a text that begins as only a chat template writes it."""
        if self.tokenizer.chat_template is None:
            return False
        return text.startswith(self.special_tokens) or text.startswith(self.openings)

    def render(
        self, messages: Sequence[Message], tools: list | None, *, add_generation_prompt: bool
    ) -> str:
        """Return the text that the chat template makes of messages, of which it must leave nothing out."""
        options = self.template_kwargs | {"add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = tools
            if not self._writes_tools(messages, options):
                reason = "the row has tools, but the chat template does not read them"
                raise BadRow(reason, "remove the column")
        write = functools.partial(self.tokenizer.apply_chat_template, tokenize=False, **options)
        problem: BadRow | None = None
        for spelled in spellings(messages, in_parts=self.wants_parts):
            try:
                text = write(spelled)
            # Templates raise of their own, such as "roles must alternate", and so does Jinja.
            except Exception as error:
                roles = ", ".join(message["role"] for message in messages[:8])
                reason = f"the chat template does not accept these messages ({roles})"
                remedy = "use a template that accepts them, or remove the row"
                problem = problem or BadRow(reason, remedy, came=in_a_line(error))
                continue
            lost = left_out(write, spelled, text)
            if lost is None:
                return text
            problem = BadRow(lost, "use another chat template, or remove the row")
        assert problem is not None
        raise problem

    def _writes_tools(self, messages: Sequence[Message], options: dict) -> bool:
        """Return True if the template writes the tools among its options; each set of tools is tried once.

        A template may write them only with a system message, or only without one.
        """
        begins = messages[:1] if messages[0]["role"] == "system" else []
        key = json.dumps([len(begins), options["tools"]], sort_keys=True, default=str)
        if key not in self._tools_written:
            write = functools.partial(self.tokenizer.apply_chat_template, tokenize=False)
            asked = [*begins, {"role": "user", "content": MARK}]
            texts = []
            for given in (options, {name: options[name] for name in options if name != "tools"}):
                # A template that refuses the messages says so when the row itself is written.
                with contextlib.suppress(Exception):
                    texts.append(write(asked, **given))
            self._tools_written[key] = len(texts) < 2 or texts[0] != texts[1]
        return self._tools_written[key]

    def _is_raw(self, messages: list[Message]) -> bool:
        """Return True for a prompt that goes to the model as it is: one text, without a template or written by it."""
        return not self.chat or any(RENDERED in message for message in messages[:1])

    def _prompt(
        self, messages: list[Message], tools: list | None, rendered: str | None = None
    ) -> list[int]:
        last = messages[-1] if messages else None
        if last is None or (last["role"] == "user" and not last["content"]):
            ids = []  # a template may write a token all the same
        elif not self._is_raw(messages):
            if rendered is None:
                rendered = self.render(messages, tools, add_generation_prompt=True)
            ids = self.ids(rendered)
        elif tools and not self.chat:
            reason = "the row has tools, but there is no chat template to write them"
            raise BadRow(reason, "remove the column, or give a model with a chat template")
        elif len(messages) > 1 and self.chat:
            reason = "messages follow a prompt that a chat template has written"
            raise BadRow(reason, "give all of the conversation as messages")
        elif len(messages) > 1:
            reason = "the prompt has several messages, but there is no chat template to write them"
            raise BadRow(reason, "give text, or a model with a chat template")
        else:
            ids = self._begun(last["content"])
        if not ids:
            raise BadRow("the prompt is empty", FIX)
        return ids

    def _begun(self, text: str) -> list[int]:
        """Return the token ids of a text with the tokenizer's own beginning, unless the text spells one."""
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        if bos is not None and text.startswith(bos):
            return self.ids(text)
        if self.is_rendered(text):
            # A template's BOS may have been taken off, because a tokenizer would add a second one.
            begins = [bos is not None and opening.startswith(bos) for opening in self.openings]
            has_bos = bool(begins) and all(begins)
            return [self.tokenizer.bos_token_id] * has_bos + self.ids(text)
        ids = self._tokenized(text)
        # What goes on has not ended, so an EOS that the tokenizer adds is taken off.
        adds_eos = len(ids) > 1 and ids[-1] == eos != self.tokenizer.bos_token_id
        return ids[:-1] if adds_eos and not text.endswith(self.tokenizer.eos_token) else ids

    def _tokenized(self, text: str, **options) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start].encode("unicode_escape").decode()
            reason = "the text has half of a character, as if an emoji had been cut in two"
            raise BadRow(reason, FIX, came=half) from error
        return self.tokenizer(text, **options).input_ids

    def _ended(self, ids: list[int]) -> list[int]:
        """Return a response up to the first token that ends it; what a template writes behind is not sampled."""
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        return [*ids, self.tokenizer.eos_token_id] if end is None else ids[: end + 1]

    def _closed(self, ids: list[int]) -> list[int]:
        """Return a text with one token that ends it; white space and further ends behind are left out."""
        end = len(ids)
        for i in reversed(range(len(ids))):
            if ids[i] in self.stop_ids:
                end = i
            elif self.tokenizer.decode(ids[i]).strip():
                break
        return [*ids, self.tokenizer.eos_token_id] if end == len(ids) else ids[: end + 1]

    def _behind(self, prompt: list[int], response: str, ids: list[int]) -> list[int]:
        """Return the token ids of a response, given those of prompt and response as one text."""
        # A tokenizer may merge characters across the border, where a sampler would begin a token.
        follows = ids[: len(prompt)] == prompt
        return ids[len(prompt) :] if follows else self._continued(response)

    def _continued(self, text: str) -> list[int]:
        """Return the token ids of a text that follows others, without the space that some tokenizers begin with."""
        ahead, ids = self.ids("\n"), self.ids(f"\n{text}")
        return ids[len(ahead) :] if ids[: len(ahead)] == ahead else self.ids(text)

    def _without_end(self, turn: Message) -> tuple[Message, int]:
        """Return the assistant's turn without a token that ends it, and that token's id or EOS."""
        turn, end = self._split_end(turn)
        content = turn["content"]
        # The template writes the head of the turn itself.
        head = self.generation_prompt
        if content and head.strip():
            content = content.removeprefix(head)
            turn = turn | {"content": content}
        says = any(turn.get(name) for name in (*REASONING, *CALLS))
        if not says and not (content or "").strip():
            raise empty_completion()
        # What follows such a token would never be trained on.
        for token in self.stop_tokens:
            if token in str(turn):
                reason = f"the completion contains {token!r}, the token that ends a response"
                raise BadRow(reason, FIX)
        return turn, end

    def _split_end(self, message: Message) -> tuple[Message, int]:
        """Return a message without the token that ends an assistant's turn, and that token's id or EOS."""
        content = (message["content"] or "").rstrip()
        if message["role"] == "assistant":
            for token, i in self.stop_tokens.items():
                if content.endswith(token):
                    return message | {"content": content.removesuffix(token)}, i
        return message, self.tokenizer.eos_token_id

    def _check_said(self, turn: Message, before: str, response: str) -> None:
        """Refuse a response that lacks what its turn says, which a template may leave out without a word."""
        opened = before[before.rfind(OPEN) :] if opens_reasoning(before) else ""
        said = self.stop_pattern.split(response)[0]
        name = missing(turn, opened + said)
        if name is None:
            return
        if missing(turn, opened + response) is None:
            does = "writes it after a token that ends a response"
        elif name == "content" and not any(turn.get(key) for key in CALLS):
            reason = "the chat template rewrites the assistant's turn"
            raise BadRow(reason, READ_AS_IT_IS, came=difference(turn["content"], response))
        else:
            does = "leaves it out"
        reason = f"the assistant's turn has {name}, but the chat template {does}"
        into = "put it into the content, " if name in REASONING else ""
        raise BadRow(reason, f"{into}use a template that writes it, or remove the row")

    def _not_continued(self, before: str, whole: str) -> BadRow:
        """Return the error of a conversation whose text does not begin with what generation would see."""
        reason = "the chat template does not continue its own generation prompt"
        # It has closed the reasoning that the row goes on with, or begun some that the row does not have.
        reasons = str(before.rstrip().endswith(CLOSED)).lower()
        remedy = self._switch(dict.fromkeys(BEGINS_REASONING, reasons))
        if not opens_reasoning(before):
            remedy = None
        return BadRow(reason, remedy or READ_AS_IT_IS, came=difference(before, whole))

    def _switch(self, values: dict[str, str]) -> str | None:
        """Return the option that sets the first of these words that the template reads, or None."""
        template = self.tokenizer.get_chat_template()
        return next(
            (
                f"give --chat_template_kwargs '{{{name}: {value}}}'"
                for name, value in values.items()
                if reads(template, name)
            ),
            None,
        )


def fit(sequences: Iterable[Encoded], max_prompt_length: int, max_length: int) -> bool:
    """Return True if no prompt, and no prompt with its response, has more tokens than that."""
    lengths = [(len(prompt), len(prompt) + len(response)) for prompt, response in sequences]
    return all(prompt <= max_prompt_length and both <= max_length for prompt, both in lengths)


def as_turns(response: Prompt) -> list[Message]:
    """Return a response as messages: a text is the assistant's."""
    return [{"role": "assistant", "content": response}] if isinstance(response, str) else response


def empty_completion() -> BadRow:
    """Return the error of a row that would only teach to end."""
    return BadRow(
        "the completion is empty, and would only teach the model to stop", "remove the row"
    )


def difference(expected: str, came: str) -> str:
    """Return two texts in a line, both from shortly before they differ."""
    start = max(len(os.path.commonprefix([expected, came])) - 20, 0)
    return f"expected {expected[start:][:60]!r}, but it wrote {came[start:][:60]!r}"
