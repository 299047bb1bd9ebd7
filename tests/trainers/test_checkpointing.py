"""Checkpoints of activations on the CPU: the same bits, and only the layers' inputs go there."""

import pytest
import torch

from fused_rl.trainers.base.text import InputError
from tests.trainers import tiny


def gradients_of(folder, where):
    """Through a language model."""
    torch.manual_seed(0)
    given = {"gradient_checkpointing": True, "checkpoint_activations_on": where}
    model = tiny.load_lm(tiny.config_of("sft", folder, **given))
    model.train()(torch.arange(8, 40).view(2, 16), torch.ones(2, 15) > 0).logprobs.sum().backward()
    return [p.grad for p in model.parameters()]


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


def test_a_model_saves_its_layers_inputs_alone_and_has_the_same_bits(folder, monkeypatch):
    expected = gradients_of(folder, "device")
    shapes = moved(monkeypatch)
    found = gradients_of(folder, "cpu")
    assert [shape for shape in shapes if len(shape) > 1] == [(2, 16, 16)] * 2
    assert all(map(torch.equal, found, expected)) and len(expected) == len(found)


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_without_checkpoints_it_has_no_meaning(where):
    with pytest.raises(InputError, match="without --gradient_checkpointing true"):
        tiny.config_of("sft", checkpoint_activations_on=where).check()
