"""What is read from whole rows of logits, of which a tile exists at a time: the likeliest tokens and the exact KL.

Each `lm` is a `LanguageModel` with its head whole.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fused_rl
from fused_rl.ops import tiles


class ReferenceStates(NamedTuple):
    """What a reference computed for the tokens that a policy is scored at."""

    lm: Any
    """The reference, with its head whole."""
    states: torch.Tensor
    """(N, ·), as `LanguageModel.compute_under_head` hands them out."""


class Scored(NamedTuple):
    """The scores of tokens, (N,) each, or (B, T - 1) and 0 where masked, in nats."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    loss: torch.Tensor | None = None
    """() the sum of `token_loss`; beside it the two above have no gradient."""
    ref_logprobs: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    """The exact divergence from the reference that was given."""
    likeliest: torch.Tensor | None = None
    """int64 token ids."""


class Tiles:
    """The products of a model's states (N, ·) with its head: `step` rows at most at a time, always in the same memory.

    They are not yet scaled and capped. As in `fused_rl.ops.tiles.Logits`, what all logits of a row have in common may
    be missing.
    """

    def __init__(self, lm: Any, states: torch.Tensor, copies: int = 1):
        """copies: tiles of this size that exist at once."""
        self.states = states
        # A model whose logits are read has scaled and capped them itself, and all are there.
        self.softcap = lm.softcap
        self.head_temperature = lm.head_temperature
        self.formed = None
        self.step = max(1, len(states))
        if lm.loss_from == "linear":
            weight, bias = lm.head.weight, lm.head.bias
            vocab = len(weight)
            budget = tiles.budget(None, states, vocab, False, lm.head_dtype)
            self.step = tiles.tile_rows(
                states, vocab * copies * budget.dtype.itemsize, budget.bytes
            )
            self.formed = tiles.Logits(weight, bias, self.step * vocab, budget, lm.softcap)

    def at(self, rows: slice) -> torch.Tensor:
        """Return the logits (n, V) of some rows."""
        states = self.states[rows]
        return states if self.formed is None else self.formed.tile(states)

    def statistics(self, logits: torch.Tensor, targets: torch.Tensor, temperature: float):
        """Return log-probability and entropy of each row of a tile."""
        temperature = temperature * self.head_temperature
        options = {"temperature": temperature, "softcap": self.softcap}
        return fused_rl.token_logprobs(logits, targets, **options)[:2]

    def kept(self, logits: torch.Tensor, support: fused_rl.TokenSupport | None) -> torch.Tensor:
        """Return the logits of a tile with the cap, in a copy, and -inf outside of the kept sets, in its memory."""
        if self.softcap is not None:
            logits = logits.div(self.softcap).tanh_().mul_(self.softcap)
        if self.formed is None and support is not None:
            logits = logits.clone()  # a loss needs them as they are
        keep_only(logits, support)
        return logits


@torch.no_grad()
def read_likeliest(
    lm: Any, states: torch.Tensor, targets: torch.Tensor, temperature: float
) -> Scored:
    """Return log-probabilities of `targets` (N,) at states (N, ·), and the likeliest tokens."""
    formed = Tiles(lm, states)
    logprobs, entropy = states.new_zeros(2, len(states), dtype=torch.float32)
    likeliest = torch.zeros_like(targets)
    for rows in tiles.blocks(len(states), formed.step):
        logits = formed.at(rows)
        logprobs[rows], entropy[rows] = formed.statistics(logits, targets[rows], temperature)
        likeliest[rows] = logits.argmax(-1)
    return Scored(logprobs, entropy, likeliest=likeliest)


@torch.no_grad()
def compare(
    lm: Any,
    states: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    support: fused_rl.TokenSupport | None,
    reference: ReferenceStates,
) -> tuple[dict[str, Any], Callable | None]:
    """Return what a reference says of tokens: `ref_logprobs` and `kl`, as in `Scored`.

    Over whole vocabularies both are still 0 then. The function that is returned with them fills them in, tile by tile,
    from the policy's logits that its own scores are read from: it is the `visit` of `fused_rl.linear_token_logprobs`.

    Args:
        lm: the policy, with its head whole.
        states: (N, ·) of the policy.
        targets: (N,) int64.
        temperature: of both softmaxes.
        support: the set that each token was sampled from; the softmaxes are over these sets.
        reference: what it computed for the same tokens.
    """
    # There may be two tiles at once, and under a soft cap a copy of each.
    formed = Tiles(reference.lm, reference.states, 4)
    ref_logprobs, kl = states.new_zeros(2, len(states), dtype=torch.float32)

    def visit(rows, logits, kept=None):
        # A tile of the policy may have more rows than one of the reference.
        for some in tiles.blocks(len(logits), formed.step):
            here = slice(rows.start + some.start, rows.start + some.stop)
            ref_logits = formed.at(here)
            if support is None:
                ref_logprobs[here] = formed.statistics(ref_logits, targets[here], temperature)[0]
            pair = (formed.kept(x, kept) for x in (logits[some], ref_logits))
            # Both are of one architecture.
            kl[here] = fused_rl.token_kl(*pair, temperature=temperature * formed.head_temperature)

    if support is None:
        return {"ref_logprobs": ref_logprobs, "kl": kl}, visit
    # Of sets, training reads the kept rows of the head alone.
    ref_logprobs = reference.lm.rows_of(reference.states, targets, temperature, support)[0]
    own = Tiles(lm, states, 4)
    blocks = list(tiles.blocks(len(states), min(own.step, formed.step)))
    # The split waits for the device, and one tile needs none.
    sizes = [rows.stop - rows.start for rows in blocks]
    sets = [support] if len(blocks) == 1 else support.split(sizes)
    for rows, kept in zip(blocks, sets, strict=True):
        visit(rows, own.at(rows), kept)
    return {"ref_logprobs": ref_logprobs, "kl": kl}, None


def keep_only(logits: torch.Tensor, support: fused_rl.TokenSupport | None) -> None:
    """Set logits (N, V) outside of the kept sets to -inf, in place: a softmax is then one over the sets."""
    if support is None:
        return
    lengths = support.offsets.diff()
    # `output_size` is known here, and spares a wait for the device.
    row = torch.repeat_interleave(lengths, output_size=len(support.ids))
    kept = logits[row, support.ids]
    # An empty range keeps the whole vocabulary.
    logits[lengths > 0] = -torch.inf
    logits[row, support.ids] = kept
