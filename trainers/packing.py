"""Several responses to one prompt in one row of a model's input, so that the prompt is computed once.

A row is a prompt and, one after the other, responses to it. A token of a response sees the prompt and what stands
before it in its own response, at the positions that it has in a row of its own: the same hidden states, from fewer
tokens. The attention mask that says so is (L, L) per row, and attention is computed over all of it, so that a row of
many long responses costs more than it saves: `responses_per_row` weighs the one against the other.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fused_rl.trainers.data import Batch

WINDOWS = ("sliding_window", "attention_chunk_size")  # of a config: attention that ends before the row does
MASKED = ("sdpa", "eager")  # attention that takes a mask of its own for every row


class Packed(NamedTuple):
    """The input of a model for b sequences in g rows of L tokens, and where their predictions are."""

    input_ids: torch.Tensor
    """(g, L) int64."""
    position_ids: torch.Tensor
    """(g, L) int64: of each token in its own sequence."""
    attention_mask: torch.Tensor
    """(g, 1, L, L) bool, True where a token (third) sees another (fourth)."""
    states: torch.Tensor
    """(N,) int64 in [0, g * L): the token that predicts each response token, in the order of the batch's mask."""


@dataclass(frozen=True)
class Costs:
    """What a forward pass of a model costs, in FLOP."""

    token: float
    """Of each token: the matrix products with the weights."""
    pair: float
    """Of each token for each token in its row: attention."""


def costs_of(lm: nn.Module) -> Costs:
    """Of a transformers causal LM without its head, from its config; before its weights are partitioned."""
    text = lm.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    inside = sum(weight.numel() for weight in lm.parameters())
    inside -= sum(weight.numel() for weight in {lm.get_input_embeddings().weight, lm.get_output_embeddings().weight})
    return Costs(token=2 * inside, pair=4 * text.num_hidden_layers * text.num_attention_heads * width)


def responses_per_row(costs: Costs, prompt: int, response: int, copies: int) -> int:
    """How many of `copies` responses to a prompt are cheapest in one row, by their lengths in tokens.

    Attention over a row is counted whole, because a mask saves none of it.
    """

    def cost(in_row: int) -> float:
        length = prompt + in_row * response
        return -(-copies // in_row) * length * (costs.token + costs.pair * length)

    return min(range(1, copies + 1), key=cost)


def pack(batch: Batch, in_row: int) -> Packed:
    """The sequences of `batch` in rows of at most `in_row` neighbours that have the same prompt."""
    # What is put where: row of each sequence, and where in the row its response begins.
    mask, device = batch.response_mask, batch.input_ids.device
    prompt = batch.prompt_lengths.clamp(max=batch.input_ids.shape[1])  # `rows` cuts prompts that have no response
    fed = (mask.sum(1) - 1).clamp(min=0)  # the last token predicts nothing that counts
    row = _rows(batch.prompts, in_row)
    before = fed.cumsum(0) - fed
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = row[1:] != row[:-1]
    start = prompt + before - before[first][row]
    width = int((start + fed).max())

    # Prompts, once per row; their segment is 0, and padding's is -1.
    shape = (int(row[-1]) + 1, width)
    input_ids = torch.zeros(shape, dtype=torch.int64, device=device)
    segments = torch.full(shape, -1, device=device)
    positions = torch.zeros(shape, dtype=torch.int64, device=device)
    column = torch.arange(width, device=device).expand(shape)
    in_prompt = column < prompt[first][:, None]
    own = torch.arange(batch.input_ids.shape[1], device=device) < prompt[first][:, None]
    input_ids[in_prompt] = batch.input_ids[first][own]
    positions[in_prompt] = column[in_prompt]
    segments[in_prompt] = 0

    # Responses, one after the other, without their last tokens.
    sequence, token = mask.nonzero(as_tuple=True)  # (N,) each; `token` is the position that predicts
    step = token - (prompt - 1)[sequence]  # 0 for a response's first token
    place = row[sequence] * width + torch.where(step == 0, prompt[sequence], start[sequence] + step) - 1
    later = step > 0
    flat = place[later]
    input_ids.view(-1)[flat] = batch.input_ids[sequence[later], token[later]]
    segments.view(-1)[flat] = sequence[later] + 1
    positions.view(-1)[flat] = token[later]

    seen = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    attention_mask = (seen & torch.ones(width, width, dtype=torch.bool, device=device).tril())[:, None]
    return Packed(input_ids, positions, attention_mask, place)


def inputs_of(lm: nn.Module, packed: Packed) -> dict[str, torch.Tensor]:
    """`packed` as the keyword arguments of a transformers model."""
    seen = packed.attention_mask
    if lm.config._attn_implementation == "eager":  # which adds the mask to the scores
        added = torch.zeros(seen.shape, dtype=lm.dtype, device=seen.device)
        seen = added.masked_fill(~seen, torch.finfo(lm.dtype).min)
    return {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "attention_mask": seen}


def _rows(prompts: torch.Tensor, in_row: int) -> torch.Tensor:
    """(b,) int64: the row of each sequence: neighbours of one prompt, `in_row` at most."""
    _, group, sizes = torch.unique_consecutive(prompts, return_inverse=True, return_counts=True)
    ends = sizes.cumsum(0)
    place = torch.arange(len(prompts), device=prompts.device) - (ends - sizes)[group]  # in its group
    rows_before = (-(-sizes // in_row)).cumsum(0) - (-(-sizes // in_row))
    return rows_before[group] + place // in_row


@torch.no_grad()
def why_not(lm: nn.Module, longest: int) -> str | None:
    """Why a model's rows cannot hold several responses: a reason to print, or None where they can.

    Args:
        lm: a transformers causal LM.
        longest: tokens of the longest sequence.
    """
    text = lm.config.get_text_config()
    if lm.config._attn_implementation not in MASKED:
        return f"attn_implementation={lm.config._attn_implementation} takes no mask of its own; {MASKED} do"
    windows = [name for name in WINDOWS if 0 < (getattr(text, name, None) or 0) < longest]
    if windows:
        return f"{windows[0]}={getattr(text, windows[0])} is shorter than a prompt with its response ({longest})"

    # Two responses to one prompt, in a row each and in one row.
    ids = torch.arange(1, 14, device=lm.device) % text.vocab_size
    sequences = torch.stack([torch.cat([ids[:5], ids[5:9]]), torch.cat([ids[:5], ids[9:13]])])
    mask = torch.arange(8, device=lm.device).expand(2, 8) >= 4
    lengths = torch.full((2,), 5, device=lm.device)
    batch = Batch(sequences, mask, ("", ""), prompts=torch.zeros_like(lengths), prompt_lengths=lengths)
    packed, training = pack(batch, 2), lm.training
    lm.eval()
    try:
        alone = lm(input_ids=sequences, use_cache=False).logits[:, :-1][mask].float()
        together = lm(**inputs_of(lm, packed), use_cache=False).logits.flatten(0, 1)[packed.states].float()
    except Exception as error:  # a model without position_ids, or with a mask of another form: each says so its own way
        return f"{type(lm).__name__} takes no mask and positions of its own ({type(error).__name__})"
    finally:
        lm.train(training)
    difference = (alone - together).abs().max() / alone.std()
    # Rounding moves a logit by less; a token that is seen or placed wrongly, far more.
    if not difference <= 0.05:
        return (
            f"{type(lm).__name__} computes other logits under a mask of its own (by {difference:.1%} of their spread)"
        )
    return None
