"""Checkpoints of activations on the CPU: the same bits, and only the layers' inputs go there."""

import functools

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


def of_lm(folder, where, **options):
    """The gradients of a language model, and the shapes of what went to the CPU."""
    model = tiny.load_lm(config_of(folder, where, **options))
    model.train()
    ids = torch.arange(8, 40).view(2, 16)
    loss = model(ids, torch.ones(2, 15, dtype=torch.bool)).logprobs.sum()
    return gradients(model, loss)


def of_reward_model(folder, where):
    model = load_reward_model(config_of(folder, where), torch.device("cpu"))
    model.train()
    return gradients(model, model(*model_inputs()).sum())


def model_inputs():
    ids = torch.arange(8, 40).view(2, 16)
    return ids, torch.ones_like(ids)


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


@pytest.mark.parametrize("where", WHERE)
def test_without_checkpoints_it_has_no_meaning(folder, where):
    with pytest.raises(InputError, match="without --gradient_checkpointing true"):
        config_of(folder, where).replace(gradient_checkpointing=False).check()


@pytest.mark.parametrize("of", [of_lm, functools.partial(of_lm, lora_rank=2), of_reward_model])
def test_a_model_saves_its_layers_inputs_alone_and_has_the_same_bits(folder, monkeypatch, of):
    torch.manual_seed(0)
    expected = of(folder, "device")
    shapes = moved(monkeypatch)
    torch.manual_seed(0)
    found = of(folder, "cpu")
    assert [shape for shape in shapes if len(shape) > 1] == [(2, 16, 16)] * LAYERS
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
