"""Packing: (batch, seqlen, ...) to the (total, ...) rows under a mask, and back."""

import torch
from einops import rearrange

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def index_first_axis(rows, indices):
    return rows[indices]


def unpad_input(padded, attention_mask):
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return padded.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), lengths


def pad_input(rows, indices, batch, seqlen):
    padded = rows.new_zeros(batch * seqlen, *rows.shape[1:])
    return padded.index_copy(0, indices, rows).view(batch, seqlen, *rows.shape[1:])
