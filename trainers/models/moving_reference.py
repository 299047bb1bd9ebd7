"""A reference that moves to the policy, wholly or by a fraction (arXiv:2404.09656), and is part of checkpoints."""

from pathlib import Path

import torch

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.models import language_model
from fused_rl.trainers.options import InputError


@torch.no_grad()
def sync(reference, policy, alpha: float) -> None:
    """reference = alpha * policy + (1 - alpha) * reference, weight by weight, in fp32; for all ranks at once.

    Args:
        reference: a `LanguageModel`, or the engine around it.
        policy: the engine around the other.
        alpha: 1 is a copy, bit for bit.
    """
    weights = dict(_language_model(policy).named_parameters())
    for name, mixed in _language_model(reference).named_parameters():
        with engine.whole(weights[name]), engine.whole(mixed, written=True):
            mixed.copy_(torch.lerp(mixed.float(), weights[name].float(), alpha))


def _language_model(model):
    """Without the engine around it, which a frozen model has under ZeRO 3 alone."""
    return model if isinstance(model, language_model.LanguageModel) else model.module


class SavedReference:
    """A reference as a part of checkpoints, beside the engines, with the two methods of theirs."""

    last_step = None  # nothing optimises it

    def __init__(self, model):
        if model is None:
            raise InputError(
                "ref_sync_every needs a reference of its own, but model holds adapters, and the reference is the model "
                "without them; merge them first, or drop --ref_sync_every"
            )
        self.model = _language_model(model)

    @torch.no_grad()
    def save_checkpoint(self, folder: str, *, tag: str, save_latest: bool) -> None:
        """Write `folder/tag/reference.safetensors`, whatever the ZeRO stage; for all ranks at once."""
        from safetensors.torch import save_file

        weights = {}
        for name, parameter in self.model.named_parameters():
            with engine.whole(parameter):
                if ranks.rank() == 0:
                    weights[name] = parameter.cpu().clone()
        if ranks.rank() == 0:
            path = Path(folder) / tag / "reference.safetensors"
            path.parent.mkdir()
            save_file(weights, path)

    @torch.no_grad()
    def load_checkpoint(self, folder: str, *, tag: str) -> None:
        """Restore what was written; for all ranks at once."""
        from safetensors import safe_open

        with safe_open(Path(folder) / tag / "reference.safetensors", framework="pt") as weights:
            for name, parameter in self.model.named_parameters():
                with engine.whole(parameter, written=True):
                    parameter.copy_(weights.get_tensor(name))
