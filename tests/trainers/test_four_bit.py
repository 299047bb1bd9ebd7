"""Weights of 4 bits under adapters. What needs bitsandbytes runs where it is installed: it has kernels for a CPU."""

import importlib.util

import pytest
import torch

from fused_rl.trainers import sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.models import lora
from tests.trainers import runs, tiny

CPU = torch.device("cpu")
IDS = torch.tensor([[7, 8, 9, 10, 11, 12]])
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def sft_config(files, output_dir, **options) -> sft.SFTConfig:
    defaults = {"lr": 1e-2, "save_every": 2, "lora_rank": 2, "load_in_4bit": True}
    return runs.sft_config(files, output_dir, **defaults | options)


def test_bitsandbytes_is_named_where_it_is_missing(files, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"load_in_4bit needs bitsandbytes.* pip install"):
        tiny.load_lm(sft_config(files, tmp_path))


def gradients(lm) -> dict[str, torch.Tensor]:
    """Of the adapters of the first layer, through all 4-bit weights after it."""
    lm.zero_grad()
    lm.train()
    lm.lm(input_ids=IDS).logits.square().sum().backward()
    weights = lm.named_parameters()
    return {k: w.grad.clone() for k, w in weights if "layers.0." in k and "lora_" in k}


@needs_bitsandbytes
def test_logits_and_gradients_are_those_of_the_weights_that_4_bits_stand_for(files, tmp_path):
    import bitsandbytes
    from bitsandbytes.functional import dequantize_4bit

    small = tiny.load_lm(sft_config(files, tmp_path))
    plain = tiny.load_lm(sft_config(files, tmp_path, load_in_4bit=False))
    found, quantized = dict(small.named_parameters()), 0
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            module = small.get_submodule(name.rpartition(".")[0])
            if isinstance(module, bitsandbytes.nn.Linear4bit) and name.endswith(".weight"):
                quantized += 1
                weight.copy_(dequantize_4bit(module.weight.data, module.weight.quant_state))
            elif "lora_" in name:
                found[name].copy_(weight.normal_(std=0.1))
    assert quantized == 14
    # The losses read the head's weight.
    assert type(small.base.get_output_embeddings()) is torch.nn.Linear

    # Before and after an evaluation, which must not change how the weights are laid out.
    for _ in range(2):
        expected, found = gradients(plain), gradients(small)
        for name, gradient in expected.items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(found[name], gradient, atol=1e-5 * scale, rtol=0, msg=name)
        with torch.no_grad():
            logits = [lm.eval().lm(input_ids=IDS).logits for lm in (plain, small)]
        torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=0)


@needs_bitsandbytes
@pytest.mark.parametrize("options", [{"zero_stage": 0}, {"zero_stage": 2}])
def test_a_run_in_4_bits_learns_and_saves_adapters(options, files, tmp_path):
    folder = sft.train(sft_config(files, tmp_path, **options))
    metrics = tiny.read_metrics(tmp_path)
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"]
    assert lora.find(folder).base_model_name_or_path == files[0]
