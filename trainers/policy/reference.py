"""The reference that a policy is compared with: a frozen copy of the model that the run begins with."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..base import engine
from ..models.language_model import Scored, without_engine
from ..models.logits import ReferenceStates

SEQUENCES = ("input_ids", "mask", "packed", "places")  # the inputs that hidden states depend on


@dataclass
class Reference:
    """A frozen model beside the policy."""

    model: Any
    """A `LanguageModel`; under ZeRO 3 an engine around it."""

    def score(self, inputs: dict) -> Scored:
        """Return the reference's scores of the sequences in `inputs`, which are those of `Policy.inputs`."""
        # ZeRO 3 expects of every pass the weights of the first, which may have been one of `states_for`.
        with engine.gathered(*without_engine(self.model).head.parameters(recurse=False)):
            return self.model(**inputs)

    @contextlib.contextmanager
    def states_for(self, inputs: dict) -> Iterator[ReferenceStates]:
        """Yield the reference's hidden states and head for the policy's pass over the same `inputs`.

        That pass must run inside of the block.
        """
        lm = without_engine(self.model)
        states = self._states(inputs)
        # Under ZeRO 3 the policy's pass gathers only the policy's head, so that of the reference is gathered here.
        with engine.gathered(*lm.head.parameters(recurse=False)):
            yield ReferenceStates(lm, states)

    @torch.no_grad()
    def _states(self, inputs: dict):
        """Return the reference's hidden states at the tokens that count."""
        sequences = {name: inputs[name] for name in SEQUENCES}
        return self.model(**sequences, under_head=lambda states, _: states)


class PolicyWithoutAdapters(Reference):
    """The reference of a policy with LoRA: the policy's engine with its adapters off, so no second model is held."""

    def score(self, inputs: dict) -> Scored:
        """Return the reference's scores of the sequences in `inputs`, which are those of `Policy.inputs`."""
        # Training changes only the adapters, so the weights under them are still those of the reference.
        with self.model.module.lm.disable_adapter():
            return self.model(**inputs)

    @contextlib.contextmanager
    def states_for(self, inputs: dict) -> Iterator[ReferenceStates]:
        """Yield the reference's hidden states and head for the policy's pass over the same `inputs`.

        That pass must run inside of the block.
        """
        with self.model.module.lm.disable_adapter():
            states = self._states(inputs)
        # The head is the policy's own, which the policy's pass gathers.
        yield ReferenceStates(self.model.module, states)
