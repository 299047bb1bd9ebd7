"""Rows from a local JSONL or Parquet file or a Hub dataset, as token ids, in an order with a state, in batches.

Text is tokenised once, when it is loaded; from there on only token ids travel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fused_rl import TokenSupport
from fused_rl.trainers.base.engine import rank
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data.chat import SAID, check_template_kwargs, check_text, tools_of, without_nulls
from fused_rl.trainers.data.rows import FILES, check_readable, read_dataset, read_jsonl, read_parquet
from fused_rl.trainers.options.config import DataConfig, InputError, in_a_line

PROMPT_COLUMNS = ("prompt", "messages", "question")


@dataclass
class Rows:
    """Rows as dictionaries, each knowing where it came from, so that an error can say so."""

    rows: list[dict]
    source: str
    first: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, i: int) -> str:
        """`file.jsonl, line 3` or `openai/gsm8k, row 3`, counted from 1."""
        unit = "line" if self.source.endswith(".jsonl") else "row"
        return f"{self.source}, {unit} {self.rows[i].get('__line__', self.first + i + 1)}"

    def get(self, i: int, column: str, option: str | None = None):
        """One cell; an error names file, line, column, and the option that names another column."""
        row = self.rows[i]
        if row.get(column) is None:
            remedy = f"; name the right column with --{option}" if option else ""
            present = sorted(key for key in row if key != "__line__")
            if column in present:
                raise InputError(f"{self.where(i)}: column {column!r} is null; mend or remove the row")
            raise InputError(f"{self.where(i)}: column {column!r} is missing; the row has {present}{remedy}")
        return row[column]

    def split(self, last: int) -> tuple["Rows", "Rows"]:
        """All but the last rows, and the last ones."""
        cut = len(self) - last
        if cut <= 0:
            raise InputError(f"eval_size={last} leaves nothing to train on: {self.source} has {len(self)} rows")
        before = Rows(self.rows[:cut], self.source, self.first)
        return before, Rows(self.rows[cut:], self.source, self.first + cut)


def load_rows(name: str, config_name: str | None = None, split: str = "train") -> Rows:
    """Rows of a .jsonl or .parquet file, or of a Hub dataset; an error names what cannot be read."""
    path = Path(name)
    if path.suffix in FILES:
        if not path.is_file():
            raise InputError(f"dataset file {name} does not exist, or is a folder")
        check_readable(path)
        rows = read_jsonl(path) if path.suffix == ".jsonl" else read_parquet(path)
    elif path.is_file():
        raise InputError(f"dataset file {name}: only .jsonl and .parquet files are read")
    else:
        rows = read_dataset(name, config_name, split)
    if not rows:
        raise InputError(f"dataset {name} has no rows")
    return Rows(rows, name)


def load_train_eval(config: DataConfig) -> tuple[Rows, Rows]:
    """The rows to train on and the held-out rows that a run config names."""
    train = load_rows(config.dataset, config.dataset_config, config.dataset_split)
    if not config.eval_size:
        return train, Rows([], config.dataset)
    if config.eval_dataset is None:
        return train.split(config.eval_size)
    configuration = config.eval_dataset_config
    if configuration is None and config.eval_dataset == config.dataset:
        configuration = config.dataset_config
    held_out = load_rows(config.eval_dataset, configuration, config.eval_split)
    if len(held_out) < config.eval_size and rank() == 0:
        tell(f"eval_size={config.eval_size}, but {held_out.source} has {len(held_out)} rows: all are used")
    return train, Rows(held_out.rows[: config.eval_size], held_out.source)


def tell_dropped(rows: Rows, kept: int, reason: str) -> None:
    """Say how many rows are left out, and why; refuse to leave out all of them."""
    if len(rows) and not kept:
        raise InputError(f"{rows.source}: all {len(rows)} rows are {reason}")
    if kept < len(rows) and rank() == 0:
        tell(f"{rows.source}: dropped {len(rows) - kept} of {len(rows)} rows {reason}")


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
        self.chat = tokenizer.chat_template is not None and not raw_prompt
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
        """Token ids of row i's prompt and of the completion, which ends in EOS.

        With messages whose last one is the assistant's, that is the completion, with all that it says (`chat.SAID`);
        else the completion is a column.
        """
        messages, tools, where = self._messages(rows, i, column), self._tools(rows, i), rows.where(i)
        if messages[-1]["role"] == "assistant":
            messages, turn = messages[:-1], messages[-1]
        else:
            text = rows.get(i, completion_column, "completion_column")
            if not isinstance(text, str):
                raise InputError(f"{where}: column {completion_column!r} must be text, got {type(text).__name__}")
            turn = {"role": "assistant", "content": text}
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
        if isinstance(prompt, str):
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
        return [without_nulls(message) for message in prompt]

    def _encode_prompt(self, messages: list[dict], tools: list | None, where: str) -> list[int]:
        if self.chat:
            ids = self._template(messages, tools, where, add_generation_prompt=True)
        else:
            ids = self._raw(messages[-1]["content"])
        if not ids:
            raise InputError(f"{where}: the prompt is empty, and a model needs a token to begin with")
        return ids

    def _raw(self, text: str) -> list[int]:
        """A prompt's tokens without a chat template."""
        ids = self.tokenizer(text).input_ids
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:  # the text spelled out the token that the tokenizer also adds
            ids = ids[1:]
        return ids[:-1] if len(ids) > 1 and ids[-1] == eos and bos != eos else ids  # a prompt has not ended

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


def _are_messages(value) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and _is_message(message) for message in value)


def _is_message(message: dict) -> bool:
    """One with a role and a text, or in place of a text the calls of tools."""
    content, role = message.get("content"), message.get("role")
    says_nothing = content is None and role == "assistant" and bool(message.get("tool_calls"))
    return isinstance(role, str) and (isinstance(content, str) or says_nothing)


class RowOrder:
    """Endless batches of row indices: a fresh permutation per epoch, the same on every rank, resumable anywhere."""

    def __init__(self, size: int, batch_size: int, seed: int):
        if size < 1:
            raise InputError("no rows to train on")
        self.size, self.batch_size, self.seed, self.position = size, batch_size, seed, 0
        self.epoch, self.permutation = -1, torch.empty(0, dtype=torch.int64)

    def __next__(self) -> list[int]:
        return self.take(self.batch_size)

    def take(self, count: int) -> list[int]:
        """The next so many indices, beside those of the batches."""
        batch = []
        while len(batch) < count:
            epoch, offset = divmod(self.position, self.size)
            taken = self._permutation_of(epoch)[offset : offset + count - len(batch)].tolist()
            self.position += len(taken)
            batch += taken
        return batch

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def _permutation_of(self, epoch: int) -> torch.Tensor:
        if epoch != self.epoch:  # drawn once per epoch: of a million rows it takes 80 ms
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.epoch, self.permutation = epoch, torch.randperm(self.size, generator=generator)
        return self.permutation


def pad(sequences: list[list[int]], value: int, *, left: bool = False, width: int = 0) -> torch.Tensor:
    """Ragged token ids as (B, T) int64, padded on one side with `value`, at least `width` wide."""
    width = max(width, max(map(len, sequences)))
    fill = [[value] * (width - len(s)) for s in sequences]
    return torch.tensor([f + s if left else s + f for s, f in zip(sequences, fill, strict=True)])


@dataclass
class Batch:
    """B sequences `prompt + response`, padded on the right to T tokens; per-token tensors are (B, T - 1).

    Row t of a per-token tensor belongs to token t + 1, the one that position t predicts.
    """

    input_ids: torch.Tensor
    """(B, T) int64."""
    response_mask: torch.Tensor
    """(B, T - 1) bool, True where token t + 1 is of the response, its EOS included."""
    where: tuple[str, ...]
    """Of each sequence the file and line, or the like, that it came from: for errors."""
    prompts: torch.Tensor
    """(B,) int64: a number for each prompt; neighbours of one number have the same prompt."""
    prompt_lengths: torch.Tensor
    """(B,) int64: tokens before the response."""
    support: TokenSupport | None = None
    """What each response token was drawn from, in the order of the mask; None for the whole vocabulary."""

    def rows(self, index: torch.Tensor) -> "Batch":
        """The sequences at `index` (b,), padded no wider than they need."""
        mask = self.response_mask[index]
        width = int(mask.any(0).nonzero().max()) + 1 if mask.any() else 1
        where = tuple(self.where[i] for i in index.tolist())
        prompts, lengths, support = self.prompts[index], self.prompt_lengths[index], None
        if self.support is not None:
            number = self.response_mask.flatten().cumsum(0).view_as(self.response_mask) - 1  # of each response token
            support = self.support.select(number[index][mask])
        return Batch(self.input_ids[index, : width + 1], mask[:, :width], where, prompts, lengths, support)


def make_batch(
    prompts: list[list[int]],
    responses: list[list[int]],
    pad_id: int,
    device,
    *,
    where: Sequence[str] = (),
    width: int = 0,
) -> Batch:
    """Prompts and responses as one `Batch`; what a response is follows from lengths alone, never from token ids."""
    whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    input_ids = pad(whole, pad_id, width=max(width, 2)).to(device)
    position = torch.arange(1, input_ids.shape[1], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    start = lengths[:, None]
    end = start + torch.tensor([len(r) for r in responses], device=device)[:, None]
    mask = (position >= start) & (position < end)
    return Batch(input_ids, mask, tuple(where) or ("a row",) * len(prompts), _numbered(prompts).to(device), lengths)


def _numbered(prompts: list[list[int]]) -> torch.Tensor:
    """(B,) int64: as many numbers as there are runs of equal neighbours."""
    changes = [0, *(int(prompts[i] != prompts[i - 1]) for i in range(1, len(prompts)))]
    return torch.tensor(changes).cumsum(0)
