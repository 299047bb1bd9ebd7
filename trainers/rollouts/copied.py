"""A sampler in this process beside the policy's training: it draws from a copy, which the policy does not change."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch

from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.generate import TransformersSampler, keeps_keys_and_values
from fused_rl.trainers.rollouts.lag import digest
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Response


class CopySampler(TransformersSampler):
    """Draws from a copy of the policy, which is trained meanwhile, and tells log-probabilities: they are not its own.

    Weights that are not trained are shared: with adapters, these alone are copied.
    """

    tells_logprobs = True
    has_versions = True

    def __init__(self, policy, *, pad_id: int, batch_size: int):
        if not keeps_keys_and_values(policy):
            raise InputError(
                f"lag: {type(policy).__name__} keeps its past in another form than keys and values, and transformers "
                "would draw for it from the process's own generator, in a thread; give --server, or drop --lag"
            )
        super().__init__(policy, pad_id=pad_id, batch_size=batch_size)
        self.policy = policy

    @torch.no_grad()
    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Copy the policy's weights."""
        if self.lm is self.policy:
            self.lm = _copied(self.policy)
        else:
            for copied, own in zip(_tensors(self.lm), _tensors(self.policy), strict=True):
                if copied is not own:
                    copied.copy_(own)
        super().publish(step, save)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """As the policy would, on its device: a thread begins on the first one."""
        if self.lm.device.type == "cuda":
            torch.cuda.set_device(self.lm.device)
        return super().sample(prompts, sampling)

    def generator(self, prompts: list[list[int]], sampling: Sampling) -> torch.Generator | None:
        """One of its own, where there are seeds: a thread must not draw from the process's.

        The prompts have a part in it: each turn of a conversation draws other numbers, though its seeds are the same.
        """
        if sampling.seeds is None:
            return None
        seed = int(digest([list(sampling.seeds), *prompts])[:15], 16)
        return torch.Generator(self.lm.device).manual_seed(seed)


def _tensors(lm) -> list[torch.Tensor]:
    return [*lm.parameters(), *lm.buffers()]


def _copied(lm):
    """A copy to sample from, which shares the weights that are frozen."""
    frozen = {id(weight): weight for weight in lm.parameters() if not weight.requires_grad}
    return copy.deepcopy(lm, frozen).requires_grad_(False).eval()
