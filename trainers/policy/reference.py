"""The reference that a policy is compared with: the model that the run begins with, frozen."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fused_rl.trainers.base import engine
from fused_rl.trainers.models.language_model import Scored, without_engine
from fused_rl.trainers.models.logits import ReferenceStates

SEQUENCES = ("input_ids", "mask", "packed", "places")  # the inputs that states depend on


@dataclass
class Reference:
    """A frozen model beside the policy; under ZeRO 3 `model` is an engine around it."""

    model: Any

    def score(self, inputs: dict) -> Scored:
        """Return the scores of what the policy scored from the same `inputs`."""
        return self.model(**inputs)

    @contextlib.contextmanager
    def beside(self, inputs: dict) -> Iterator[ReferenceStates]:
        """Yield what the policy is compared with in its pass over the same `inputs`, inside of the block."""
        lm = without_engine(self.model)
        states = self._states(inputs)
        # Under ZeRO 3 the policy's pass gathers its own head alone.
        with engine.whole(*lm.head.parameters(recurse=False)):
            yield ReferenceStates(lm, states)

    @torch.no_grad()
    def _states(self, inputs: dict):
        sequences = {name: inputs[name] for name in SEQUENCES}
        return self.model(**sequences, under_head=lambda states, _: states)


class PolicyWithoutAdapters(Reference):
    """With LoRA, the engine of the policy while its adapters are off: no second model is held."""

    def score(self, inputs: dict) -> Scored:
        """Return the scores of what the policy scored from the same `inputs`."""
        # Training changes the adapters alone, so the weights under them are the reference's own.
        with self.model.module.lm.disable_adapter():
            return self.model(**inputs)

    @contextlib.contextmanager
    def beside(self, inputs: dict) -> Iterator[ReferenceStates]:
        """Yield what the policy is compared with in its pass over the same `inputs`, inside of the block."""
        with self.model.module.lm.disable_adapter():
            states = self._states(inputs)
        # Its head is the policy's, which is whole in the policy's pass.
        yield ReferenceStates(self.model.module, states)
