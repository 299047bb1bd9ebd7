"""Checkpoints of activations on the CPU: the same bits, and only the layers' inputs go there."""

import pytest
import torch

from fused_rl.trainers.base.text import InputError
from tests.trainers import tiny


def gradients_of(folder, where, kind):
    """Through a language model, one with adapters, or a reward model."""
    torch.manual_seed(0)
    ids = torch.arange(8, 40).view(2, 16)
    given = {"gradient_checkpointing": True, "checkpoint_activations_on": where}
    config = tiny.config_of("sft", folder, lora_rank=2 * (kind == "adapters"), **given)
    if kind == "reward model":
        model = tiny.load_reward_model(config)
        model.train()(ids, torch.ones_like(ids)).sum().backward()
    else:
        model = tiny.load_lm(config)
        mask = torch.ones(2, 15, dtype=torch.bool)
        model.train()(ids, mask).logprobs.sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


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
    assert [shape for shape in shapes if len(shape) > 1] == [(2, 16, 16)] * 2
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_without_checkpoints_it_has_no_meaning(where):
    with pytest.raises(InputError, match="without --gradient_checkpointing true"):
        tiny.config_of("sft", checkpoint_activations_on=where).check()
