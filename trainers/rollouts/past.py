"""A cache of keys and values that is written in place; transformers' own copies it for every token.

It imports transformers, so import it where something is sampled.
"""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Tokens by which a buffer grows when it is full. The whole past is copied then, and a step of fixed shapes is captured
# anew, so larger blocks do both less often and leave more memory unused.
BLOCK = 256


class _Layer(DynamicLayer):
    """Keys and values of a layer, each (b, heads, columns, ·): `buffers`, whose last columns are free."""

    def __init__(self, layer: Any, past: "Past", following: "_Layer | None"):
        super().__init__()
        self.following = following
        self.is_initialized = True
        self.is_sliding = layer.is_sliding
        self.past = past
        self.buffers = [layer.keys, layer.values]
        self.first = past.width - layer.keys.shape[2]  # tokens before the first column
        # Past tokens that the next one sees.
        self.window = layer.sliding_window - 1 if layer.is_sliding else past.max_tokens
        self.add_columns()

    @property
    def num_seen(self) -> int:
        """Return how many of the past tokens the next one sees."""
        return min(self.past.width - self.first, self.window)

    @property
    def is_compileable(self) -> bool:
        """Return True if transformers shall make masks without looking at what they hide, for which it would wait."""
        return self.past.is_fixed or self.past.is_maskable

    def get_seq_length(self):
        """Return the number of past tokens: where steps have fixed shapes, on the device."""
        return self.past.column if self.past.is_fixed else self.past.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that a mask is for, and how many tokens are before them."""
        if self.past.is_fixed:
            return self.columns, self.first
        return self.num_seen + 1, self.past.width - self.num_seen

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write keys and values (b, heads, 1, ·) of the next token; return views of what it sees, with itself."""
        column = self.past.column
        if self.first:
            column = column - self.first
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.index_copy_(2, column, states)
        length, first = self.get_mask_sizes(1)
        keys, values = (buffer.narrow(2, first - self.first, length) for buffer in self.buffers)
        return keys, values

    def add_columns(self) -> None:
        """Let the next buffers have a block of free columns, or as many as there will be tokens."""
        self.columns = self.num_seen + min(BLOCK, self.past.max_tokens - self.past.width)

    def batch_select_indices(self, indices: torch.Tensor | None = None) -> None:
        """Copy what the next token sees into other buffers, for the rows at `indices` alone if given."""
        # A copy begins with the first token that is still seen.
        seen, spare = self.num_seen, self.past.spare
        start = self.past.width - self.first - seen
        for i, buffer in enumerate(self.buffers):
            states = buffer.narrow(2, start, seen)
            count = len(buffer) if indices is None else len(indices)
            shape = (buffer.shape[1], self.columns, buffer.shape[3])
            # Memory that another layer has left is used again, if it has enough rows.
            new = spare.pop(shape, None)
            if new is None or len(new) < count:
                new = buffer.new_empty(count, *shape)
            self.buffers[i] = new[:count]
            filled, free = self.buffers[i].tensor_split([seen], 2)
            if indices is None:
                filled.copy_(states)
            else:
                torch.index_select(states, 0, indices, out=filled)
                spare[tuple(buffer.shape[1:])] = buffer
            # What a mask hides is multiplied by 0, which NaN would survive.
            free.zero_()
        self.first = self.past.width - seen


class WritableCache(Cache):
    """A cache whose layers are updated in turn: compiled layers share a graph if none depends on its number."""

    layers: list[Any]
    turn: Any

    def update(self, *args, **kwargs):
        """Write keys and values (b, heads, 1, ·) into the layer whose turn it is; return what the next token sees."""
        layer = self.turn
        self.turn = layer.following
        return layer.update(*args, **kwargs)


class Past:
    """What the layers of a cache share; it does not know them, or only the garbage collector would free their memory.

    Args:
        width: tokens of the prompts, with padding.
        max_tokens: tokens that come in all, with those of the prompts.
        is_maskable: masks are made in any case, without a look at whether they are needed.
        device: of the model.
    """

    def __init__(self, width: int, max_tokens: int, *, is_maskable: bool, device: torch.device):
        self.width = width
        self.column = torch.full((1,), width, device=device)  # of the next token, which is `width`
        self.max_tokens = max_tokens
        # If True, the next step has the shapes and addresses of the one before it, as a CUDA graph needs it, unless a
        # layer moves in between: it sees all columns, and masks hide those that are free.
        self.is_fixed = False
        self.is_maskable = is_maskable
        # Memory that a layer has left, by its shape: on a CPU fresh memory costs more than a copy.
        self.spare: dict[tuple[int, ...], torch.Tensor] = {}

    def take_over(self, cache: WritableCache, row: torch.Tensor) -> _Layer | None:
        """Let a cache of prompts go on as that of responses (b,) to the prompts at `row`; return its first layer."""
        following = None
        for number, layer in reversed([*enumerate(cache.layers)]):
            # A layer without keys of its own reads those of another one.
            if layer.is_initialized:
                following = cache.layers[number] = _Layer(layer, self, following)
                following.batch_select_indices(row)
        return following

    def make_room(self, cache: WritableCache) -> bool:
        """Continue in larger buffers where the next token has no column; return True if any layer does."""
        full = [
            layer
            for layer in cache.layers
            if layer.is_initialized and self.width - layer.first == layer.columns
        ]
        if full:
            # Spare memory has too few columns from now on.
            self.spare.clear()
        for layer in full:
            layer.add_columns()
            layer.batch_select_indices()
        return bool(full)


def is_writable(cache: Cache) -> bool:
    """Return True if all layers of a new cache are keys and values of the past, or of its last tokens."""
    return {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
