"""Checkpoints of activations on the CPU: the same bits, and only the layers' inputs go there."""

import pytest
import torch

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.models.reward_model import load_reward_model
from fused_rl.trainers.sft import SFTConfig
from tests.trainers import tiny

WHERE = ("device", "cpu")
LAYERS = 2


def config_of(folder, where: str, **options) -> SFTConfig:
    given = {"model": folder, "dataset": "d", "output_dir": "o", "gradient_checkpointing": True}
    return SFTConfig(**given, checkpoint_activations_on=where, **options)


def gradients(model, loss):
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_of(folder, where, kind):
    """Through a language model, one with adapters, or a reward model."""
    torch.manual_seed(0)
    ids = torch.arange(8, 40).view(2, 16)
    if kind == "reward model":
        model = load_reward_model(config_of(folder, where), torch.device("cpu"))
        loss = model.train()(ids, torch.ones_like(ids)).sum()
    else:
        model = tiny.load_lm(config_of(folder, where, lora_rank=2 * (kind == "adapters")))
        loss = model.train()(ids, torch.ones(2, 15, dtype=torch.bool)).logprobs.sum()
    return gradients(model, loss)


def moved(monkeypatch):
    """Shapes of the tensors that were saved for the backward pass in CPU memory."""
    shapes = []
    save = torch.autograd.graph.save_on_cpu.__init__

    def note(self, *args, **options):
        save(self, *args, **options)
        pack = self.pack_hook
        self.pack_hook = lambda tensor: (shapes.append(tuple(tensor.shape)), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph.save_on_cpu, "__init__", note)
    return shapes


@pytest.mark.parametrize("kind", ["language model", "adapters", "reward model"])
def test_a_model_saves_its_layers_inputs_alone_and_has_the_same_bits(folder, monkeypatch, kind):
    expected = gradients_of(folder, "device", kind)
    shapes = moved(monkeypatch)
    found = gradients_of(folder, "cpu", kind)
    assert [shape for shape in shapes if len(shape) > 1] == [(2, 16, 16)] * LAYERS
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("where", WHERE)
def test_without_checkpoints_it_has_no_meaning(folder, where):
    with pytest.raises(InputError, match="without --gradient_checkpointing true"):
        config_of(folder, where).replace(gradient_checkpointing=False).check()
