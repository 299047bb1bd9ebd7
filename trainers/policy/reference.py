"""The reference that a policy is compared with: the model that the run begins with, frozen."""

from dataclasses import dataclass
from typing import Any

from fused_rl.trainers.models.language_model import Scored


@dataclass
class Reference:
    """A frozen model beside the policy; under ZeRO 3 `model` is an engine around it."""

    model: Any

    def score(self, inputs: dict, **requests) -> Scored:
        """Return the scores of what the policy scored from the same `inputs`."""
        return self.model(**inputs, **requests)


class PolicyWithoutAdapters(Reference):
    """With LoRA, the engine of the policy while its adapters are off: no second model is held."""

    def score(self, inputs: dict, **requests) -> Scored:
        """Return the scores of what the policy scored from the same `inputs`."""
        # Training changes the adapters alone, so the weights under them are the reference's own.
        with self.model.module.lm.disable_adapter():
            return self.model(**inputs, **requests)
