"""Sequences as one padded batch, in which every row knows where it came from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fused_rl import TokenSupport


def pad(sequences: list[list[int]], value: int, *, left: bool = False, width: int = 0) -> torch.Tensor:
    """Ragged token ids as (B, T) int64, padded on one side with `value`, at least `width` wide."""
    width = max(width, max(map(len, sequences)))
    fill = [[value] * (width - len(s)) for s in sequences]
    return torch.tensor([f + s if left else s + f for s, f in zip(sequences, fill, strict=True)])


def on_device(tensor: torch.Tensor, device) -> torch.Tensor:
    """A tensor of the CPU on a device; the host does not wait for what the device is still computing."""
    return tensor.to(device, non_blocking=True)


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
    changes = [0, *(int(prompts[i] != prompts[i - 1]) for i in range(1, len(prompts)))]
    numbers = torch.tensor(changes).cumsum(0).to(device)
    return Batch(input_ids, mask, tuple(where) or ("a row",) * len(prompts), numbers, lengths)
