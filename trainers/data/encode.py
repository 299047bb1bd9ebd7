"""Rows as token ids, through the chat template where the tokenizer has one; what it does not read is refused.

A prompt has the ids that generation will see, and a completion those that follow it, up to the token that ends a turn.
"""

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..base.files import adapter_config, base_of_adapters, check_exists, hash_of
from ..base.text import InputError, in_a_line
from ..options import PromptConfig
from .forms import FIX, Message, Prompt, RowReader, conversation
from .rows import BadRow
from .templates import (
    BEGINS_REASONING,
    CLOSED,
    MARK,
    OPEN,
    REASONING,
    continuation,
    mentions,
    opens_reasoning,
    reasoning_apart,
    spellings,
    unwritten,
    wants_parts,
)

Encoded: TypeAlias = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""
READ_AS_IT_IS = "give the prompt as the exact text that the model reads, with --raw_prompt"
# The pieces of texts whose ids are remembered, such as a template's own system prompt.
MOST_PIECES = 10_000


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
            folder = Path(adapters).parent
            saved = adapter_config(folder)
            if base := saved.get("base_model_name_or_path"):
                revision = saved.get("revision")
                name = base_of_adapters(folder, base, revision)
    # transformers looks in both as well, in this order.
    for file in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError):
            config = GenerationConfig.from_pretrained(
                name, config_file_name=file, revision=revision or "main"
            )
            return stop_ids(tokenizer, config)
    return [tokenizer.eos_token_id]


class Demonstration(NamedTuple):
    """Token ids of a prompt and of what follows it."""

    prompt: list[int]
    response: list[int]
    trained: list[bool] | None = None
    """Which tokens of the response are the assistant's, where others speak in it too; None if all are."""


class Encoder:
    """Encodes prompts and completions; raises a BadRow for a row that it cannot encode."""

    def __init__(
        self,
        tokenizer,
        *,
        raw_prompt=False,
        system_prompt=None,
        chat_template_kwargs=None,
        stop_ids: Collection[int] = (),
    ):
        """Take the options of `RowsConfig` by name, and the ids that end a response beside the tokenizer's EOS."""
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
                if not mentions(template, name) or name in ("messages", "add_generation_prompt"):
                    raise InputError(
                        f"chat_template_kwargs: the tokenizer's chat template does not read {name!r}"
                    )

        # The tokens that end a response, by their text; and those with which no text of a user begins.
        self.stop_ids = {tokenizer.eos_token_id, *stop_ids}
        special = {i: t for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        contents = {i: token.content for i, token in special.items()}
        contents[tokenizer.eos_token_id] = tokenizer.eos_token
        self.stop_tokens = {contents[i]: i for i in sorted(self.stop_ids) if i in contents}
        self.stop_pattern = re.compile("|".join(map(re.escape, self.stop_tokens)))
        self._special_tokens = tuple(contents.values())

        # A text is tokenized in pieces that begin with a special token, which nothing before it changes.
        begins = [t.content for t in special.values() if not (t.normalized or t.lstrip)]
        begins = sorted(filter(None, begins), key=len, reverse=True)
        self._pieces = re.compile("|".join(map(re.escape, begins)) or r"(?!)")

    @classmethod
    def of(cls, config: PromptConfig, tokenizer) -> "Encoder":
        """Return the encoder that a config describes, by its model and the options of its rows."""
        return cls(
            tokenizer,
            raw_prompt=config.raw_prompt,
            system_prompt=config.system_prompt,
            chat_template_kwargs=config.chat_template_kwargs,
            stop_ids=saved_stop_ids(config.model, config.revision, tokenizer),
        )

    @functools.cached_property
    def key(self) -> str:
        """The hash of all that decides which ids a row has."""
        tokenizer = self.tokenizer
        vocabulary = (
            tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
        )
        options = [self.chat, self.system_prompt, self.template_kwargs, sorted(self.stop_ids)]
        return hash_of([vocabulary, tokenizer.chat_template, tokenizer.special_tokens_map, options])

    # Rows.

    def prompt(self, reader: RowReader, column: str | None) -> tuple[Prompt | None, list[int]]:
        """Return a row's prompt, text or messages, and its token ids up to where the response begins."""
        content = reader.prompt(column)
        return content.prompt, self.prompt_ids(self.messages(content.prompt), content.tools)

    def demonstrations(
        self,
        reader: RowReader,
        column: str | None,
        completion_column: str,
        turns: str = "last",
        text_column: str | None = None,
        *,
        joined: bool = True,
    ) -> list[Demonstration]:
        """Return what a row trains, with the token that ends each turn.

        Of a conversation the assistant's last turn is trained, or with turns="all" each of its turns after the first
        message; of a completion in messages each of its turns. A text alone is trained after its first token. Turns
        that are `joined` are one sequence where the prompt of each begins with the ids of those before it.
        """
        content = reader.completion(column, completion_column, text_column)
        if content.prompt is None:
            self._check_no_system_prompt("a text")
            ids = self.text_ids(content.responses[0])
            return [Demonstration(ids[:1], ids[1:])]
        messages = self.messages(content.prompt)
        # A first message of the assistant answers nothing, so it is not trained.
        answers = range(1, len(messages))
        for completion in content.responses:
            messages = messages + completion
            answers, turns = range(answers.stop, len(messages)), "all"
        trained = [i for i in answers if messages[i]["role"] == "assistant"]
        trained = [i for i in trained if "weight" not in messages[i]]
        if not trained:
            reason = "no turn of the assistant can be trained: each has weight 0, or nothing comes before it"
            raise BadRow(reason, "remove the row")
        ends = trained if turns == "all" else trained[-1:]
        demonstrations: list[Demonstration] = []
        for end in ends:
            prompt, response = self.pair(messages[: end + 1], content.tools)
            flags: list[bool] | None = None
            if demonstrations and joined:
                first, earlier, flags_before = demonstrations[-1]
                between = prompt[len(first + earlier) :]
                if prompt == first + earlier + between:
                    flags = flags_before or [True] * len(earlier)
                    flags = flags + [False] * len(between) + [True] * len(response)
                    prompt, response = first, earlier + between + response
                    demonstrations.pop()
            demonstrations.append(Demonstration(prompt, response, flags))
        return demonstrations

    def messages(self, prompt: Prompt | None) -> list[Message]:
        """Return a prompt as messages, with the run's system prompt before a text."""
        messages = conversation(prompt)
        if isinstance(prompt, list):
            self._check_no_system_prompt("a prompt of messages")
        elif self.system_prompt is not None:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        for message in messages if self.chat else []:
            text = message["content"] or ""
            if message["role"] == "user" and text.startswith(self._heads):
                reason = "a user's message begins as only a chat template writes it"
                raise BadRow(reason, READ_AS_IT_IS, got=f"got {text!r:.80}")
        return messages

    @functools.cached_property
    def _heads(self) -> tuple[str, ...]:
        """Special tokens, and what the template writes before a user's first message."""
        head = ""
        # Some templates want more than a user's message.
        with contextlib.suppress(BadRow):
            turns = [{"role": "user", "content": MARK}]
            head = self.render(turns, None, add_generation_prompt=False).partition(MARK)[0].strip()
        return (*self._special_tokens, *filter(None, [head]))

    def _check_no_system_prompt(self, kind_of_row: str) -> None:
        """Refuse a row in which the run's system prompt has no place."""
        if self.system_prompt is not None:
            remedy = "begin the row with a message of role system, or leave the option out"
            raise BadRow(f"system_prompt has no meaning for {kind_of_row}", remedy)

    def pair_of_texts(self, texts: Sequence[str]) -> list[Encoded]:
        """Return two texts as their prompt, the tokens that both begin with, and the rest of each."""
        self._check_no_system_prompt("a pair of whole texts")
        sides = [self.text_ids(text) for text in texts]
        # Each has a token left besides its end, even if one text is the beginning of the other.
        max_shared = max(0, min(map(len, sides)) - 2)
        shared = len(os.path.commonprefix([ids[:max_shared] for ids in sides]))
        for ids in sides:
            if not self.tokenizer.decode(ids[shared:-1]).strip():
                raise empty_completion()
        return [(ids[:shared], ids[shared:]) for ids in sides]

    # One sequence.

    def pair(
        self, messages: list[Message], tools: list | None, start: int | None = None
    ) -> Encoded:
        """Return the token ids of the messages before `start`, and of the others, of which the last is the assistant's.

        `start` is by default the last message's place.
        """
        *earlier, last = messages
        # The template writes the ends of earlier turns itself.
        earlier = [self._without_stop(message)[0] for message in earlier]
        turn, end = self._without_stop(last)
        self._check_turn(turn)
        if not self.chat:
            return self.prompt_ids(earlier, tools), [*self.ids(turn["content"]), end]

        # The response is what the template adds to the text that generation would see.
        before = self.render(earlier, tools, add_generation_prompt=True)
        rendered = self.render([*earlier, turn], tools, add_generation_prompt=False)
        if opens_reasoning(before) and rendered.count(OPEN) > before.count(OPEN):
            # The template writes the reasoning of a field, and takes that in a content for the answer.
            turn = reasoning_apart(turn)
            rendered = self.render([*earlier, turn], tools, add_generation_prompt=False)
        response = continuation(before, rendered, turn)
        if response is None:
            raise self._not_continued(before, rendered)
        opened = before[before.rfind(OPEN) :] if opens_reasoning(before) else ""
        turn_text = opened + self.stop_pattern.split(response)[0]
        if problem := unwritten([turn], None, turn_text, with_reasoning=True):
            raise problem
        prompt = self.prompt_ids(earlier, tools, before)
        ids = self.ids(before + response)
        # A tokenizer may merge characters across the border, where a sampler would begin a token.
        follows = ids[: len(prompt)] == prompt
        completion = ids[len(prompt) :] if follows else self._continuation_ids(response)
        completion = self._cut_after_stop(completion)
        if start is None or start == len(earlier):
            return prompt, completion

        # Several turns have the same ids, cut where the first of them begins.
        ids = prompt + completion
        prompt = self.prompt_ids(messages[:start], tools)
        follows = ids[: len(prompt)] == prompt
        if not follows or unwritten(earlier[start:], None, rendered, with_reasoning=True):
            reason = "the chat template rewrites earlier turns, so several turns do not continue their prompt"
            raise BadRow(reason, "give responses of one turn")
        return prompt, ids[len(prompt) :]

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text with one token that begins it and one that ends it."""
        # Without a token of its own it would only teach to end at once.
        if not self.stop_pattern.sub("", text).strip():
            raise BadRow("the text is empty", "remove the row")
        if text.rstrip().endswith((*self.stop_tokens,)):
            text = text.rstrip()
        ids = self._with_bos(text)
        return ids if ids[-1] in self.stop_ids else [*ids, self.tokenizer.eos_token_id]

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text without any that the tokenizer would add."""
        starts = [0, *(match.start() for match in self._pieces.finditer(text)), len(text)]
        pieces = (text[start:end] for start, end in itertools.pairwise(starts))
        return [*itertools.chain.from_iterable(map(self._ids_of_piece, pieces))]

    @functools.lru_cache(MOST_PIECES)  # noqa: B019 (a process has few encoders)
    def _ids_of_piece(self, piece: str) -> list[int]:
        return self._tokenized(piece, add_special_tokens=False)

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """True if the template writes a content only as a list of parts."""
        write = functools.partial(self.tokenizer.apply_chat_template, tokenize=False)
        return wants_parts(functools.partial(write, **self.template_kwargs))

    def render(
        self, messages: Sequence[Message], tools: list | None, *, add_generation_prompt: bool
    ) -> str:
        """Return the text that the chat template makes of messages, of which it must leave nothing out."""
        options = self.template_kwargs | {"add_generation_prompt": add_generation_prompt}
        tools = tools or self.template_kwargs.get("tools")
        if tools:
            options["tools"] = tools
        write = functools.partial(self.tokenizer.apply_chat_template, tokenize=False, **options)
        problem: BadRow | None = None
        for spelled in spellings(messages, in_parts=self._wants_parts):
            try:
                text = write(spelled)
            # Templates raise of their own, such as "roles must alternate", and so does Jinja.
            except Exception as error:
                roles = ", ".join(message["role"] for message in messages[:8])
                reason = f"the chat template does not accept these messages ({roles})"
                remedy = "use a template that accepts them, or remove the row"
                problem = problem or BadRow(reason, remedy, got=in_a_line(error))
                continue
            problem = unwritten(messages, tools, text)
            if problem is None:
                return text
        assert problem is not None
        raise problem

    def prompt_ids(
        self, messages: list[Message], tools: list | None, rendered: str | None = None
    ) -> list[int]:
        """Return the token ids of messages up to where the response begins; `rendered` is their text if it is known."""
        last = messages[-1] if messages else None
        if last is None or (last["role"] == "user" and not last["content"]):
            ids = []  # a template may write a token all the same
        elif self.chat:
            if rendered is None:
                rendered = self.render(messages, tools, add_generation_prompt=True)
            ids = self.ids(rendered)
        else:
            needless = {"tools": tools, "several messages": len(messages) > 1}
            for content in filter(needless.get, needless):
                reason = f"the row has {content}, but there is no chat template to write them"
                raise BadRow(reason, "give text, or a model with a chat template")
            ids = self._with_bos(last["content"])
        if not ids:
            raise BadRow("the prompt is empty", FIX)
        return ids

    def _with_bos(self, text: str) -> list[int]:
        """Return the token ids of a text with the tokenizer's own beginning, unless the text spells one."""
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        if bos is not None and text.startswith(bos):
            return self.ids(text)
        ids = self._tokenized(text)
        # What goes on has not ended, so an EOS that the tokenizer adds is taken off.
        adds_eos = len(ids) > 1 and ids[-1] == eos != self.tokenizer.bos_token_id
        return ids[:-1] if adds_eos and not text.endswith(self.tokenizer.eos_token) else ids

    def _tokenized(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start].encode("unicode_escape").decode()
            reason = "the text has half of a character, as if an emoji had been cut in two"
            raise BadRow(reason, FIX, got=half) from error
        if not self.tokenizer.is_fast:
            return self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        # As transformers calls it, but without the places of tokens in the text, a third of the time.
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation or backend.padding:
            backend.no_truncation()
            backend.no_padding()
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _cut_after_stop(self, ids: list[int]) -> list[int]:
        """Return a response up to the first token that ends it; what a template writes behind is not sampled."""
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        return [*ids, self.tokenizer.eos_token_id] if end is None else ids[: end + 1]

    def _continuation_ids(self, text: str) -> list[int]:
        """Return the token ids of a text that follows others, without the space that some tokenizers begin with."""
        ahead, ids = self.ids("\n"), self.ids(f"\n{text}")
        return ids[len(ahead) :] if ids[: len(ahead)] == ahead else self.ids(text)

    def _without_stop(self, message: Message) -> tuple[Message, int]:
        """Return a message without the token that ends an assistant's turn, and that token's id or EOS."""
        content = (message["content"] or "").rstrip()
        if message["role"] == "assistant":
            for token, i in self.stop_tokens.items():
                if content.endswith(token):
                    return message | {"content": content.removesuffix(token)}, i
        return message, self.tokenizer.eos_token_id

    def _check_turn(self, turn: Message) -> None:
        """Refuse a turn of the assistant that says nothing, or that contains the token that ends it."""
        other_fields = [name for name in (*REASONING, "tool_calls") if turn.get(name)]
        if not other_fields and not (turn["content"] or "").strip():
            raise empty_completion()
        if other_fields and not self.chat:
            reason = f"the assistant's turn has {other_fields[0]}, but there is no chat template to write it"
            raise BadRow(reason, "give text, or a model with a chat template")
        # What follows such a token would never be trained on.
        for token in self.stop_tokens:
            if token in str(turn):
                reason = f"the completion contains {token!r}, the token that ends a response"
                raise BadRow(reason, FIX)

    def _not_continued(self, before: str, rendered: str) -> BadRow:
        """Return the error of a conversation whose text does not begin with what generation would see."""
        reason = "the chat template does not continue its own generation prompt"
        remedy = READ_AS_IT_IS
        template = self.tokenizer.get_chat_template()
        names = [name for name in BEGINS_REASONING if mentions(template, name)]
        if names and opens_reasoning(before):
            # It has closed the reasoning that the row goes on with, or begun some that the row does not have.
            value = str(before.rstrip().endswith(CLOSED)).lower()
            remedy = f"give --chat_template_kwargs '{{{names[0]}: {value}}}'"
        start = max(len(os.path.commonprefix([before, rendered])) - 20, 0)
        got = f"expected {before[start:][:60]!r}, but it wrote {rendered[start:][:60]!r}"
        return BadRow(reason, remedy, got=got)


def empty_completion() -> BadRow:
    """Return the error of a row that would only teach to end."""
    return BadRow(
        "the completion is empty, and would only teach the model to stop", "remove the row"
    )
