"""A cache of keys and values that is written in place; transformers' own copies it for every token.

It imports transformers, so import it where something is sampled.
"""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Tokens by which a buffer grows when it is full. The whole past is copied then, so larger blocks copy less often and
# leave more memory unused.
BLOCK = 128


class _InPlace:
    """Keys and values of a layer, each (b, heads, tokens, ·): columns of `buffer`, of which some are free."""

    window = None  # past tokens that the next one sees; None is all

    def take_over(
        self, layer: DynamicLayer, row: torch.Tensor, max_tokens: int, maskable: bool, spare: dict
    ) -> "_InPlace":
        """Take the prompts of `layer`, for responses (b,) to the prompts at `row`; `max_tokens` come in all."""
        self.is_initialized = True
        # With True, transformers makes masks without looking at what they hide, for which it would wait for the device.
        self.is_compileable = maskable
        self.spare = spare

        # The layer of the prompts has one row per distinct prompt; from here on there is one per response.
        assert layer.keys is not None and layer.values is not None
        self.device = layer.keys.device
        self.tokens_left = max_tokens - layer.get_seq_length()
        self.first = 0
        self.end = layer.keys.shape[2]
        self.columns = self.end + min(BLOCK, self.tokens_left)
        keys = self._filled(layer.keys, row)
        self.buffer = [keys, self._filled(layer.values, row)]
        self._show()
        return self

    def _filled(self, states: torch.Tensor, row: torch.Tensor | None) -> torch.Tensor:
        """Return a buffer whose first columns are those states, of some rows where they are named."""
        # Memory that another layer has left is used again, if it has enough rows.
        count = len(states) if row is None else len(row)
        shape = (states.shape[1], self.columns, states.shape[3])
        buffer = self.spare.pop(shape, None)
        if buffer is None or len(buffer) < count:
            buffer = states.new_empty(count, *shape)
        buffer = buffer[:count]
        filled = buffer[:, :, : self.end]
        if row is None:
            filled.copy_(states)
        else:
            torch.index_select(states, 0, row, out=filled)
        return buffer

    def batch_select_indices(self, indices: torch.Tensor | None = None) -> None:
        """Copy what the next token sees into another buffer, for the rows at `indices` alone if given."""
        # The copy begins with the first token that is still seen, so a sliding window starts at column 0 again.
        self.first, self.end = 0, self.end - self.first
        for i, states in enumerate((self.keys, self.values)):
            old_buffer = self.buffer[i]
            self.buffer[i] = self._filled(states, indices)
            if indices is not None:
                self.spare[tuple(old_buffer.shape[1:])] = old_buffer
        self._show()

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        num_seen = self.end - self.first
        keys, values = self.buffer
        self.keys = keys.narrow(2, self.first, num_seen)
        self.values = values.narrow(2, self.first, num_seen)
        return self.keys, self.values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Add keys and values of t new tokens (b, heads, t, ·); return views of what they see, with themselves."""
        # Where the buffer is full, continue in a larger one; spare memory has too few columns from then on.
        count = key_states.shape[2]
        if self.end + count > self.columns:
            room = max(count, min(BLOCK, self.tokens_left))
            self.columns = self.end - self.first + room
            self.spare.clear()
            self.batch_select_indices()
        for buffer, states in zip(self.buffer, (key_states, value_states), strict=True):
            buffer.narrow(2, self.end, count).copy_(states)
        self.end += count
        self.tokens_left -= count
        self.cumulative_length += count

        # What these tokens see still holds the whole window before the first of them; the next ones see less.
        views = self._show()
        if self.window is not None and self.end - self.first > self.window:
            self.first = self.end - self.window
            self._show()
        return views


class Whole(_InPlace, DynamicLayer):
    """A layer that sees all of the past."""

    cumulative_length = 0


class Window(_InPlace, DynamicSlidingWindowLayer):
    """A layer that sees the last tokens."""

    def __init__(self, layer: DynamicSlidingWindowLayer):
        super().__init__(layer.sliding_window)
        self.cumulative_length = layer.cumulative_length
        self.window = layer.sliding_window - 1


def is_writable(cache: Cache) -> bool:
    """Return True if all layers of a new cache are keys and values of the past, or of its last tokens."""
    return {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


def in_place(cache: Cache, row: torch.Tensor, max_tokens: int, *, maskable: bool) -> None:
    """Let a cache of prompts go on as that of responses (b,) to the prompts at `row`, of `max_tokens` in all."""
    # Memory that a layer has left, by its shape: on a CPU fresh memory costs more than a copy.
    spare: dict[tuple[int, ...], torch.Tensor] = {}
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        # A layer without keys of its own reads those of another one.
        if layer.is_initialized:
            new_layer = Window(layer) if layer.is_sliding else Whole()
            layers[number] = new_layer.take_over(layer, row, max_tokens, maskable, spare)
