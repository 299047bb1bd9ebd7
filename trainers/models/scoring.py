"""One pass over sequences: every rank scores a share of them, by length, and every rank gets the scores of all."""

from collections.abc import Callable, Sequence

import torch

from ..base import ranks
from ..base.screen import bar
from ..data.batch import make_batch
from ..data.encode import Encoded
from ..data.micro_batches import Padding, by_tokens
from ..options import RunConfig
from .language_model import LanguageModel, load_lm
from .packing import Costs, tokens_by, unpad, unpadded_costs


def load_to_score(config: RunConfig, device: torch.device) -> LanguageModel:
    """Return the model of a run on whole rows, which it does not pad where its attention allows it."""
    lm = load_lm(config, device)
    lm.unpadded_costs = unpadded_costs(lm.base, config.longest_sequence)
    return lm


def by_length(
    indices: Sequence[int],
    lengths: Sequence[int],
    size: int | None,
    tokens: int | None = None,
    costs: Costs | None = None,
) -> list[list[int]]:
    """Return the indices in micro-batches of at most `size`, or of at most so many `tokens` with their pads, whose
    sequences have similar `lengths`: fewer pads.
    """
    if tokens is not None:
        return by_tokens([[i] for i in indices], tokens_by(lengths, costs), tokens)
    assert size is not None  # resolved
    ordered = sorted(indices, key=lambda i: lengths[i])
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def score_all(
    lengths: Sequence[int],
    size: int,
    score: Callable[[list[int]], torch.Tensor],
    progress: str | None = None,
    *,
    tokens: int | None = None,
    costs: Costs | None = None,
) -> torch.Tensor:
    """Return a score of each of N items, computed by all ranks together.

    Args:
        lengths: of the N items, in tokens.
        size: items per micro-batch.
        tokens: instead, the tokens of a micro-batch, pads included.
        costs: those of rows without padding, if there is none.
        score: returns the scores (n, ...) of the items at n indices, on any device; it may run backward.
        progress: says in a bar what is scored; None shows none.

    Returns:
        (N, ...) fp64 on the CPU, the same on every rank.
    """
    micro_batches = by_length(ranks.share_of_rank(len(lengths)), lengths, size, tokens, costs)
    steps = micro_batches if progress is None else bar(micro_batches, progress)
    values = [score(indices).detach() for indices in steps]
    # From the device at once: each copy would wait for what it is still computing.
    return ranks.gather_share(torch.cat(values), sum(micro_batches, []), len(lengths))


def logprobs_of(
    model,
    rows: Sequence[Sequence[Encoded]],
    size: int,
    loss: Callable[[torch.Tensor, list[int]], torch.Tensor] | None = None,
    progress: str | None = None,
    *,
    tokens: int | None = None,
    padding: Padding | None = None,
) -> torch.Tensor:
    """Return log pi of each response after its prompt, and with a `loss` also run backward.

    Args:
        model: the engine around a `LanguageModel`.
        rows: N rows of S pairs (prompt ids, response ids) each, of which a row goes through the model at once. After
            an empty prompt the response is scored from its second token on.
        size: rows per micro-batch.
        loss: of log pi (n, S) and the n indices of its rows: a scalar, as a share of the loss of all ranks' rows.
        progress, tokens: as of `score_all`.
        padding: counts the tokens of what runs backward.

    Returns:
        (N, S) fp64 on the CPU, in nats, the same on every rank.
    """
    device = next(model.parameters()).device
    costs = model.module.unpadded_costs
    # Gradient checkpointing saves memory in training mode alone.
    model.train(loss is not None)

    def score(indices: list[int]) -> torch.Tensor:
        pairs = [pair for i in indices for pair in rows[i]]
        # Nothing predicts the first token of a conversation without a prompt.
        prompts = [prompt or response[:1] for prompt, response in pairs]
        responses = [response if prompt else response[1:] for prompt, response in pairs]
        batch = make_batch(prompts, responses, 0, device)
        with torch.set_grad_enabled(loss is not None):
            packed = None if costs is None else unpad(batch, costs)
            logprobs = model(**batch.inputs(packed)).logprobs.sum(1).view(len(indices), -1)
        if loss is not None:
            if padding is not None:
                padding.add(packed or batch)
            # Engines average over ranks, and the loss is a share of the sum.
            model.backward(loss(logprobs, indices) * ranks.processes())
        return logprobs

    lengths = []
    for row in rows:
        sequence_lengths = [len(prompt) + len(response) for prompt, response in row]
        # The sequences of a row are padded to the same length.
        is_padded = tokens is not None and costs is None
        lengths.append(len(row) * max(sequence_lengths) if is_padded else sum(sequence_lengths))
    return score_all(lengths, size, score, progress, tokens=tokens, costs=costs)


def chosen_is_higher(scores: torch.Tensor) -> torch.Tensor:
    """Return (N,): 1 where the first of a pair's scores, (N, 2), is higher, 1/2 for a tie, else 0."""
    chosen, rejected = scores.unbind(1)
    return torch.heaviside(chosen - rejected, scores.new_full((), 0.5))
