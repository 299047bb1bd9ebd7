"""The head on a GPU, on paper: FLOP, bytes, memory and time of loss and gradients, beside the peers' ways to cut it.

    python -m bench passes

Of ours the path, the tiles and the memory are what `fused_rl.ops.tiles` decides for that much free memory. A product
takes the larger of its FLOP at the card's rate and its bytes at the copy bandwidth; kernels between products take their
bytes. Peers are counted by their sources: Liger's fused linear cross-entropy (rows of a chunk so that its logits take
no more than the hidden states), quack's chunked one (4096 rows, dweight in fp32), Apple's CCE (logits in no memory;
without its filter of small gradients), and plain torch (logits in 16 bits and in fp32 at once).
"""

import argparse
from typing import NamedTuple

import torch

from bench import results
from fused_rl.ops import tiles


class Card(NamedTuple):
    """A GPU, by its data sheet's bf16 rate less a tenth to a third, and what a copy moves."""

    flops: float
    bytes_per_s: float
    free: int


CARDS = {
    "H100, 60 GiB free": Card(650e12, 3.0e12, 60 << 30),
    "24 GB card, 16 GiB free": Card(150e12, 0.9e12, 16 << 30),
}
SHAPES = [
    (8192, 896, 151936),
    (8192, 2048, 151936),
    (8192, 4096, 128256),
    (8192, 2304, 262144),
    (16384, 2048, 32000),
]


def counted(
    shape, rows: int, card: Card, logit: int, between: int, sums: int, products: int = 3
) -> dict:
    """Return the figures of a head in chunks of `rows`.

    Args:
        shape: (N, H, V).
        logit: bytes of a logit as the product stores it.
        between: bytes per logit that the kernels between the products move.
        sums: bytes of an element of the sum of dweight; 0 without a sum.
        products: GEMMs, of which two read a gradient in 16 bits.
    """
    n, width, vocab = shape
    chunks = -(-n // rows)
    flop = 2 * n * width * vocab
    stored = [logit] * (products - 2) + [2, 2]
    seconds = between * n * vocab / card.bytes_per_s
    moved = between * n * vocab
    for size in stored:
        of_product = size * n * vocab + 2 * width * (n + chunks * vocab)
        moved += of_product
        seconds += max(flop / card.flops, of_product / card.bytes_per_s)
    # Dweight is read and written again for each chunk but the first.
    added = 2 * (chunks - 1) * sums * width * vocab
    floor = 3 * max(flop / card.flops, (2 * n * vocab + 2 * width * (n + vocab)) / card.bytes_per_s)
    return {
        "FLOP / logit": f"{2 * products} H",
        "bytes / logit": (moved + added) / (n * vocab),
        "ms": 1e3 * (seconds + added / card.bytes_per_s),
        "/ three GEMMs": (seconds + added / card.bytes_per_s) / floor,
    }


def ours(shape, card: Card, dtype: torch.dtype) -> dict:
    """Return the figures of `linear_token_loss` by its default workspace."""
    n, width, vocab = shape
    hidden = torch.empty(n, width, dtype=torch.bfloat16, device="meta")
    workspace = tiles.default_workspace(card.free, width, vocab, hidden.dtype, dtype)
    budget = tiles.Budget(workspace, dtype)
    rows = tiles.one_pass_rows(hidden, vocab, (True, True), budget)
    logit = dtype.itemsize
    figures = counted(shape, rows or n, card, logit, 2 * logit + 2, 4, 3 if rows else 4)
    taken = (rows or n) * vocab * budget.per_logit(hidden.dtype)
    taken += tiles.sum_bytes(vocab, width, 2) if rows < n else 0
    path = f"fused_rl, {8 * logit}-bit logits, {'one pass' if rows else 'recomputed'}"
    return {"path": path, **figures, "MB": min(taken, workspace) / 1e6}


def blocks(shape, card: Card) -> dict:
    """Return the figures of a forward pass in blocks of columns that keeps logits in 16 bits for the gradient alone.

    It is on paper alone: fp32 logits of about 1,024 columns stay in the L2, statistics are merged online, and logits
    are written and read once. (Kept in 32 bits they would take the time that ours take.) The rounding of |x| 2^-9
    enters p. By fp64 (128 rows, H = 896, 2048 and 4096, 16,000 columns; a bf16 gradient of the logits), dhidden and
    dweight are off by 0.23 % of their norm from fp32 logits; from kept ones by as much where logits reach 5, but by 1.0
    to 1.4 % where they reach 20, and by 3.2 to 3.5 % at 40. So 16 bits lose more than the gradient's own rounding, at
    any H, and our logits stay in fp32.
    """
    n, _, vocab = shape
    figures = counted(shape, n, card, 0, 2 + 2 + 2, 0)
    return {"path": "blocks of columns, 16-bit logits kept", **figures, "MB": 2 * n * vocab / 1e6}


def rows_of(shape, card: Card) -> list[dict]:
    """Return a row per way to form the loss and its gradients."""
    n, width, vocab = shape
    liger = min(n, 1 << (-(-n // -(-vocab // width)) - 1).bit_length())
    quack = min(n, 4096)
    peers = [
        ("quack", counted(shape, quack, card, 2, 4, 4), quack * vocab * 2 + 4 * vocab * width),
        ("Liger", counted(shape, liger, card, 2, 6, 4), liger * vocab * 2 + 2 * vocab * width),
        ("CCE", counted(shape, n, card, 0, 0, 0, 4), 4 * n),
        ("plain torch", counted(shape, n, card, 2, 32, 0), n * vocab * 14),
    ]
    found = [ours(shape, card, torch.float32), ours(shape, card, torch.bfloat16)]
    found.append(blocks(shape, card))
    return found + [{"path": name, **figures, "MB": taken / 1e6} for name, figures, taken in peers]


def command(name: str, words: list[str]) -> int:
    """Print a table for each card."""
    argparse.ArgumentParser(description=__doc__).parse_args(words)
    for card, of_card in CARDS.items():
        lines = []
        for shape in SHAPES:
            lines += [
                {"rows x hidden x vocabulary": results.sizes(shape), **row}
                for row in rows_of(shape, of_card)
            ]
        print(f"\n{card} (a model, nothing is measured)\n{results.table_of(lines)}")
    return 0
