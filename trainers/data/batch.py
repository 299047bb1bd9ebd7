"""Sequences as one padded batch; lengths stay on the CPU, so that making a part of it waits for no device."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_rl import TokenSupport


def pad(
    sequences: list[list[int]],
    value: int,
    *,
    left: bool = False,
    width: int = 0,
) -> torch.Tensor:
    """Return ragged token ids as (B, T) int64, padded on one side with `value`, at least `width` wide."""
    longest = max(map(len, sequences))
    width = max(width, longest)
    rows = []
    for sequence in sequences:
        padding = [value] * (width - len(sequence))
        rows.append(padding + sequence if left else sequence + padding)
    return torch.tensor(rows)


def on_device(tensor: torch.Tensor, device) -> torch.Tensor:
    """Move a CPU tensor to a device; the host does not wait for what the device is still computing."""
    return tensor.to(device, non_blocking=True)


@dataclass
class Batch:
    """B sequences `prompt + response`, padded on the right to T tokens; per-token tensors are (B, T - 1).

    Row t of a per-token tensor belongs to token t + 1, the one that position t predicts.
    """

    input_ids: torch.Tensor
    """(B, T) int64."""
    response_mask: torch.Tensor
    """(B, T - 1) bool, True where token t + 1 counts: it is of the response, its EOS included, and of no other turn."""
    where: tuple[str, ...]
    """The file and line, or the like, that each sequence came from: for errors."""
    prompts: torch.Tensor
    """(B,) int64 on the CPU: a number for each prompt; neighbours of one number have the same prompt."""
    prompt_lengths: torch.Tensor
    """(B,) int64 on the CPU: tokens before the response."""
    response_lengths: torch.Tensor
    """(B,) int64 on the CPU: tokens of the response that are predicted, whether they count or not."""
    support: TokenSupport | None = None
    """The set that each token that counts was sampled from, on the CPU; None for the whole vocabulary."""
    included: torch.Tensor | None = None
    """`response_mask` on the CPU where some token of a response does not count; None where all do."""

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences, without pads."""
        prompts = self.prompt_lengths.clamp(max=self.input_ids.shape[1])
        return int((prompts + self.response_lengths).sum())

    @property
    def token_counts(self) -> torch.Tensor:
        """(B,) int64 on the CPU: the number of tokens of each response that count."""
        return self.response_lengths if self.included is None else self.included.sum(1)

    def rows(self, index: torch.Tensor) -> "Batch":
        """Return the sequences at `index` (b,), padded no wider than they need."""
        # The lengths are on the CPU, so the width is known without waiting for the device. A
        # sequence whose response has no token may be cut: nothing of it is predicted.
        index = index.cpu()
        device = self.input_ids.device
        prompts = self.prompt_lengths[index]
        responses = self.response_lengths[index]
        ends = prompts.clamp(min=1) + responses
        width = max(2, int(torch.where(responses > 0, ends, 0).max()))
        where = tuple(self.where[i] for i in index.tolist())
        included = None
        if self.included is not None:
            included = self.included[index, : width - 1]

        # The tokens of all sequences have their sets one after the other: where those of each
        # sequence begin.
        support = self.support
        if support is not None:
            counts = self.token_counts
            tokens = counts[index]
            begins = (counts.cumsum(0) - counts)[index]
            begins_here = tokens.cumsum(0) - tokens
            shift = (begins - begins_here).repeat_interleave(tokens)
            support = support.select(shift + torch.arange(len(shift)))
            ids = on_device(support.ids, device)
            support = TokenSupport(ids, on_device(support.offsets, device))

        # The index travels without a wait, and the device cuts its own rows; the lengths stay here.
        rows = on_device(index, device)
        input_ids = self.input_ids[rows, :width]
        mask = self.response_mask[rows, : width - 1]
        numbers = self.prompts[index]
        return Batch(input_ids, mask, where, numbers, prompts, responses, support, included)

    def inputs(self, packed: Any = None) -> dict[str, Any]:
        """Return the inputs with which a model reads the sequences, `packed` if they are given in fewer tokens."""
        inputs = {"input_ids": self.input_ids, "mask": self.response_mask}
        return inputs | {"packed": packed, "places": self.places()}

    def response_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows and columns, (N,) int64 each on the CPU, of the True places of `response_mask` in order."""
        mask = self.included
        if mask is None:
            # Nothing predicts the first token of a sequence, so a response without a prompt begins
            # with its second.
            end = self.prompt_lengths.clamp(min=1) + self.response_lengths
            mask = mask_of(self.prompt_lengths, end, self.input_ids.shape[1])
        row, column = mask.nonzero(as_tuple=True)
        return row, column

    def places(self) -> torch.Tensor:
        """Return the True places of the flattened mask, (N,) int64."""
        row, column = self.response_tokens()
        return on_device(row * self.response_mask.shape[1] + column, self.input_ids.device)


def mask_of(start: torch.Tensor, end: torch.Tensor, width: int) -> torch.Tensor:
    """Return (B, width - 1) bool, True from the token at `start` (B,) to the one before `end` (B,)."""
    # Column 0 stands for token 1, the first one that another token predicts.
    position = torch.arange(1, width)
    start = start[:, None]
    return (position >= start) & (position < end[:, None])


def make_batch(
    prompts: list[list[int]],
    responses: list[list[int]],
    pad_id: int,
    device,
    *,
    where: Sequence[str] = (),
    width: int = 0,
    trained: Sequence[list[bool] | None] = (),
) -> Batch:
    """Return prompts and responses as one `Batch`; `trained` says which tokens of a response count, None means all."""
    sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    # Two columns at least: without a token that predicts another one the per-token tensors would
    # have no column.
    input_ids = pad(sequences, pad_id, width=max(width, 2))
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = torch.tensor([len(sequence) for sequence in sequences])
    mask = mask_of(lengths, ends, input_ids.shape[1])
    response_lengths = mask.sum(1)

    # Which tokens of the responses count: those of a tool or an environment do not.
    included = None
    if any(flags is not None for flags in trained):
        rows = []
        for prompt, response, flags in zip(prompts, responses, trained, strict=True):
            flags = [True] * len(response) if flags is None else flags
            rows.append([0] * len(prompt) + list(map(int, flags)))
        mask = included = mask & pad(rows, 0, width=input_ids.shape[1])[:, 1:].bool()

    # A number for each prompt; neighbours of one number can share it.
    changes = [0]
    for before, prompt in itertools.pairwise(prompts):
        changes.append(int(prompt != before))
    return Batch(
        input_ids=on_device(input_ids, device),
        response_mask=on_device(mask, device),
        where=tuple(where) or ("a row",) * len(prompts),
        prompts=torch.tensor(changes).cumsum(0),
        prompt_lengths=lengths,
        response_lengths=response_lengths,
        included=included,
    )
