"""Whole sequences in rows under a mask: which of them share a row, and whether that is cheaper than padding them.

Attention over a row's mask is computed for all pairs of its tokens. Rows on a GPU need none (packing.py), but with
attn_implementation=eager.
"""

from operator import itemgetter

import torch

from ..data.batch import Batch
from .packing import Costs, InRows, input_lengths, place_in_rows

# Widths of rows that are tried, as multiples of the longest sequence.
ROOM_FACTORS = (1, 1.5, 2, 4)


def cheaper_groups(
    tokens: list[int], padded: list[list[int]], costs: Costs, max_tokens: int | None
) -> list[list[int]] | None:
    """Return micro-batches for `pack_cheapest`; None if they cost no less than the `padded` ones.

    Args:
        tokens: the length of each sequence, in ascending order.
        padded: the indices of sequences in each micro-batch, of at most `max_tokens` if that is given.
        costs: those of the model.
        max_tokens: tokens of a micro-batch, pads included.
    """
    # The last token of a sequence predicts none, so it is not fed.
    fed = [count - 1 for count in tokens]
    # Long and short ones together fill rows best.
    count = len(padded)
    groups = [list(range(begin, len(tokens), count)) for begin in range(count)]
    if max_tokens is not None:
        # An eighth of a micro-batch is left for the pads between rows.
        groups = best_fit(fed, max([max_tokens * 7 // 8, *fed]))
    packed = 0.0
    for group in groups:
        lengths = [fed[i] for i in group]
        packed += rows_cost(lengths, cheapest_rows(lengths, costs, max_tokens), costs)
    is_cheaper = packed < sum(costs.causal_flop(len(group), tokens[group[-1]]) for group in padded)
    return groups if is_cheaper else None


def pack_cheapest(batch: Batch, costs: Costs, max_tokens: int | None) -> InRows:
    """Return the sequences of `batch` in the cheapest rows, of at most `max_tokens` together if that is given."""
    rows = cheapest_rows(input_lengths(batch).tolist(), costs, max_tokens)
    return pack_sequences(batch, rows)


def cheapest_rows(
    lengths: list[int], costs: Costs, max_tokens: int | None = None
) -> list[list[int]]:
    """Return the indices of sequences of these lengths, row by row: one in each, or the cheapest `best_fit`.

    Rows of more than `max_tokens` with their pads are only taken where no others are to be had.
    """
    candidates = [[[i] for i in range(len(lengths))]]
    candidates += [best_fit(lengths, int(max(lengths) * factor)) for factor in ROOM_FACTORS]
    if max_tokens is not None:
        in_one = [list(range(len(lengths)))]
        candidates = [
            rows for rows in candidates if len(rows) * row_tokens(lengths, rows) <= max_tokens
        ] or [in_one]
    return min(candidates, key=lambda rows: rows_cost(lengths, rows, costs))


def row_tokens(lengths: list[int], rows: list[list[int]]) -> int:
    """Return the tokens of the longest of these rows."""
    return max(sum(lengths[i] for i in row) for row in rows)


def rows_cost(lengths: list[int], rows: list[list[int]], costs: Costs) -> float:
    """Return the cost of sequences of these lengths in rows of these indices."""
    return costs.flop(len(rows), row_tokens(lengths, rows))


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Return the indices of sequences row by row, the longest first, each in the fullest row that has room."""
    # (room left, indices), the last changed first.
    rows: list[tuple[int, list[int]]] = []
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in longest_first:
        # Best fit: small rests stay for short sequences.
        with_room = [row for row in rows if row[0] >= lengths[i]]
        left, indices = min(with_room, key=itemgetter(0), default=(room, []))
        if with_room:
            rows.remove((left, indices))
        rows.insert(0, (left - lengths[i], [*indices, i]))
    return [indices for _, indices in sorted(rows, key=itemgetter(0))]


def pack_sequences(batch: Batch, rows: list[list[int]]) -> InRows:
    """Return the sequences of `batch` in rows, one after the other; `rows` holds indices, as from `cheapest_rows`."""
    lengths = input_lengths(batch)
    row = torch.zeros_like(lengths)
    start = torch.zeros_like(lengths)
    for number, indices in enumerate(rows):
        index = torch.tensor(indices)
        in_row = lengths[index]
        row[index] = number
        start[index] = in_row.cumsum(0) - in_row
    nothing = torch.zeros_like(lengths)
    return place_in_rows(batch, row, torch.arange(len(row)), nothing, nothing, start)
