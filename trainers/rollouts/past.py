"""The past of responses that are drawn token by token, written in place; transformers' own copies it for every token.

Imports transformers: to be imported where something is sampled.
"""

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

BLOCK = 128  # tokens: when the room is full, the past is copied to room for so many more


class _InPlace:
    """Keys and values of a layer, each (b, heads, tokens, ·): those that can be seen of the columns of `room`."""

    reach = None  # past tokens that the next one sees; None is all

    def hold(self, layer: DynamicLayer, row: torch.Tensor, most: int, maskable: bool) -> "_InPlace":
        """What `layer` has of prompts, for responses (b,) to the prompts at `row`; `most` tokens come in all."""
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self.is_compileable = maskable
        self.to_come = most - layer.get_seq_length()
        self._move(layer.keys, layer.values, row)
        return self

    def _move(self, keys: torch.Tensor, values: torch.Tensor, row: torch.Tensor | None = None) -> None:
        """These to new room, in its first columns; of some rows, where they are named."""
        self.first, self.end = 0, keys.shape[2]
        self.columns = self.end + max(1, min(BLOCK, self.to_come))
        self.room = [self._roomier(states, row) for states in (keys, values)]
        self._show()

    def _roomier(self, states: torch.Tensor, row: torch.Tensor | None) -> torch.Tensor:
        count, heads, length, width = states.shape
        count = count if row is None else len(row)
        room = states.new_empty(count, heads, self.columns, width)
        if row is None:
            room[:, :, :length] = states
        else:
            torch.index_select(states, 0, row, out=room[:, :, :length])
        return room

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (states.narrow(2, self.first, self.end - self.first) for states in self.room)
        return self.keys, self.values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Keys and values of t new tokens (b, heads, t, ·) after those that they see: views of both together."""
        count = key_states.shape[2]
        if self.end + count > self.columns:
            self._move(self.keys, self.values)
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room.narrow(2, self.end, count).copy_(states)
        self.end += count
        self.to_come -= count
        self.cumulative_length += count
        seen = self._show()
        if self.reach is not None and self.end - self.first > self.reach:
            self.first = self.end - self.reach
            self._show()
        return seen

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """These rows alone go on: a copy of theirs."""
        self._move(self.keys, self.values, indices)


class Whole(_InPlace, DynamicLayer):
    """A layer that sees all of the past."""

    cumulative_length = 0


class Window(_InPlace, DynamicSlidingWindowLayer):
    """A layer that sees the last tokens."""

    def __init__(self, layer: DynamicSlidingWindowLayer):
        super().__init__(layer.sliding_window)
        self.cumulative_length, self.reach = layer.cumulative_length, layer.sliding_window - 1


def in_place(cache: Cache, row: torch.Tensor, most: int, *, maskable: bool) -> None:
    """Let a cache of prompts go on as that of responses, written in place.

    Args:
        cache: with the keys and values of prompts; its layers are replaced.
        row: (b,) int64 on its device: the prompt of each response.
        most: tokens of the longest response with its prompt.
        maskable: masks are made without a look at whether they hide anything, for which the host would wait.
    """
    for number, layer in enumerate(cache.layers):
        if layer.is_initialized:  # one without keys of its own reads another layer's
            made = Window(layer) if layer.is_sliding else Whole()
            cache.layers[number] = made.hold(layer, row, most, maskable)
