"""What is measured of a rollout before it is trained on, and the micro-batches that go through the models."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..data.batch import Batch, on_device
from .policy import Policy


class MicroBatch(NamedTuple):
    """Sequences of a rollout that go through the models at once."""

    batch: Batch
    """The b sequences, padded no wider than they need."""
    rows: torch.Tensor
    """(b,) int64 on the device, the indices of these sequences among the B of the rollout."""

    @property
    def place(self) -> tuple[torch.Tensor, slice]:
        """The index of the tokens of `batch` in a tensor (B, T - 1) of the rollout."""
        return self.rows, slice(self.batch.response_mask.shape[1])

    def select(self, values: torch.Tensor | None) -> Any:
        """Return the part for `batch` of a tensor (B, T - 1) of the rollout, or None of None."""
        return None if values is None else values[self.place]


def micro_batches(batch: Batch, minibatch: list[torch.Tensor]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a minibatch, which is a list of the CPU indices (b,) of each, as in `plan`."""
    for rows in minibatch:
        yield MicroBatch(batch.rows(rows), on_device(rows, batch.input_ids.device))


@dataclass
class BeforeUpdate:
    """Measurements of a rollout before training, each (B, T - 1) fp32 in nats and 0 where masked.

    Where tokens were sampled from kept sets, all of them are for the distributions over these sets.
    """

    old_logprobs: torch.Tensor
    """The policy's log-probabilities; 0 also where the policy was not run."""
    entropy: torch.Tensor
    """The policy's entropy; 0 also where the policy was not run."""
    ref_logprobs: torch.Tensor | None
    """The reference's log-probabilities; None if no reference is needed."""
    kl: torch.Tensor | None
    """The exact KL to the reference, over the set that the token was sampled from; None if it is not measured."""

    def select(self, micro: MicroBatch) -> "BeforeUpdate":
        """Return the measurements of a micro-batch."""
        return BeforeUpdate(*(micro.select(values) for values in vars(self).values()))


@torch.no_grad()
def measure(
    policy: Policy,
    batch: Batch,
    minibatch: list[torch.Tensor],
    *,
    exact_kl: bool = True,
    skipped: int = 0,
) -> BeforeUpdate:
    """Score a batch with policy and reference before training.

    Args:
        policy: the policy.
        batch: B sequences.
        minibatch: the CPU indices of each micro-batch.
        exact_kl: True to measure the exact KL to the reference, which runs beside the policy then.
        skipped: the policy does not run on the first so many micro-batches, and neither does a reference beside it.
    """
    policy.model.module.eval()  # the mode in which responses are sampled, and which not every sampler leaves
    shape = batch.response_mask.shape
    old_logprobs, entropy, ref_logprobs, kl = (
        torch.zeros(shape, device=policy.device) for _ in range(4)
    )
    # Skipped micro-batches are trained on before any update, and that pass gives the same numbers. The reference then
    # runs beside that pass, because to keep its hidden states for a whole minibatch would take more memory.
    for number, micro in enumerate(micro_batches(batch, minibatch)):
        if exact_kl and number < skipped:
            continue
        inputs = policy.inputs(micro.batch)
        scored = None
        if exact_kl:
            assert policy.reference is not None
            # The logits of both models are compared tile by tile, so that only the hidden states are whole.
            with policy.reference.states_for(inputs) as reference:
                scored = policy.model(**inputs, reference=reference)
            kl[micro.place] = scored.kl
            ref_logprobs[micro.place] = scored.ref_logprobs
        else:
            if number >= skipped:
                scored = policy.model(**inputs)
            if policy.reference is not None:
                ref_logprobs[micro.place] = policy.reference.score(inputs).logprobs
        if scored is not None:
            old_logprobs[micro.place] = scored.logprobs
            entropy[micro.place] = scored.entropy
    return BeforeUpdate(
        old_logprobs,
        entropy,
        None if policy.reference is None else ref_logprobs,
        kl if exact_kl else None,
    )
