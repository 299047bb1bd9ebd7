"""A reference that moves to the policy, wholly or by a fraction (arXiv:2404.09656), and is part of checkpoints."""

from pathlib import Path

import torch

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.models import language_model
from fused_rl.trainers.options import InputError


@torch.no_grad()
def sync(reference, policy, alpha: float) -> None:
    """Set reference = alpha * policy + (1 - alpha) * reference, in fp32; alpha=1 copies. Call on all ranks."""
    weights = dict(_language_model(policy).named_parameters())
    for name, mixed in _language_model(reference).named_parameters():
        with engine.whole(weights[name]), engine.whole(mixed, written=True):
            mixed.copy_(torch.lerp(mixed.float(), weights[name].float(), alpha))


def _language_model(model):
    """Return the model without the engine around it, which a frozen model has under ZeRO 3 alone."""
    return model if isinstance(model, language_model.LanguageModel) else model.module


class SavedReference:
    """A reference as a part of checkpoints: it saves and loads as an engine does."""

    last_step = None  # nothing optimises it

    def __init__(self, model):
        if model is None:
            what = "ref_sync_every needs a reference of its own, but model holds adapters"
            raise InputError(f"{what}; merge them first, or drop --ref_sync_every")
        self.model = _language_model(model)

    @torch.no_grad()
    def save_checkpoint(self, folder: str, *, tag: str, save_latest: bool) -> None:
        """Write `folder/tag/reference.safetensors`, whatever the ZeRO stage. Call on all ranks."""
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
        """Restore what was written. Call on all ranks."""
        from safetensors import safe_open

        with safe_open(Path(folder) / tag / "reference.safetensors", framework="pt") as weights:
            for name, parameter in self.model.named_parameters():
                with engine.whole(parameter, written=True):
                    parameter.copy_(weights.get_tensor(name))
