"""Adapters: which layers get them, saved apart or merged, and trained on from the folder that holds them."""

import json
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import grpo, ppo, sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import encode
from fused_rl.trainers.models.reward_model import RewardModel
from fused_rl.trainers.options import ModelConfig
from tests.trainers import runs, tiny

IDS = torch.tensor([[7, 8, 9, 10, 11, 12]])


def sft_config(files, output_dir, **options) -> sft.SFTConfig:
    return runs.sft_config(
        files, output_dir, **{"eval_size": 0, "lr": 1e-2, "steps": 2, "lora_rank": 2} | options
    )


@pytest.fixture(scope="module")
def adapters(files, tmp_path_factory) -> str:
    """What a run with adapters leaves: their folder."""
    folder = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        return sft.train(sft_config(files, folder, lora_targets="q_proj, down_proj", steps=4))


def logits(lm) -> torch.Tensor:
    with torch.no_grad():
        return lm.eval()(input_ids=IDS).logits


def with_peft(base: str, adapters: str) -> torch.Tensor:
    """Logits of the base with the saved adapters, as peft reads them."""
    import peft
    import transformers

    return logits(
        peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base), adapters
        )
    )


def stock(folder: str) -> torch.Tensor:
    import transformers

    return logits(transformers.AutoModelForCausalLM.from_pretrained(folder))


# Which layers.


def adapted_layers(module) -> set[str]:
    """The last names of the layers that have adapters."""
    names = [
        name.partition(".lora_A")[0] for name, _ in module.named_parameters() if ".lora_A" in name
    ]
    return {name.rpartition(".")[2] for name in names}


ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("targets", "layers"),
    [("q_proj", {"q_proj"}), ("v_proj, up_proj", {"v_proj", "up_proj"}), ("all-linear", ALL)],
)
def test_the_layers_that_are_named_get_adapters_and_no_others(targets, layers, files, tmp_path):
    config = sft_config(files, tmp_path, lora_targets=targets)
    assert adapted_layers(tiny.load_lm(config)) == layers
    assert adapted_layers(RewardModel.from_pretrained(files[0], adapters=config)) == layers
    engine.setup(1)
    config = ppo.PPOConfig(
        model=files[0], dataset="d", output_dir="o", zero_stage=0, lora_rank=2, lora_targets=targets
    )
    critic = ppo.load_critic(config, encode.load_tokenizer(files[0]), torch.device("cpu"), 1)
    assert adapted_layers(critic.module) == layers


@pytest.mark.parametrize(
    "targets", ["q_proj,q_prj", "lm_head", "embed_tokens", "mlp", "", "q_proj,"]
)
def test_a_layer_that_there_is_not_is_named_with_those_that_there_are(targets, files, tmp_path):
    known = "choose from down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(
        InputError, match=f"lora_targets: Qwen2ForCausalLM has no linear layer '.*{known}"
    ):
        tiny.load_lm(sft_config(files, tmp_path, lora_targets=targets))
    with pytest.raises(
        InputError, match=f"lora_targets: Qwen2ForSequenceClassification has no .*{known}"
    ):
        adapters = ModelConfig(
            model="m", lora_rank=2, lora_targets=targets.replace("lm_head", "score")
        )
        RewardModel.from_pretrained(files[0], adapters=adapters)


# What is saved.


def test_adapters_are_saved_apart_from_the_weights(files, adapters):
    assert not (Path(adapters) / "model.safetensors").exists()
    assert (with_peft(files[0], adapters) - stock(files[0])).abs().max() > 1e-2
    assert (
        "q_proj"
        in json.loads((Path(adapters) / "adapter_config.json").read_text())["target_modules"]
    )


@pytest.mark.parametrize(
    "options", [{"zero_stage": 0}, pytest.param({"zero_stage": 3}, marks=pytest.mark.slow)]
)
def test_merged_weights_are_those_of_the_model_with_its_adapters(
    options, files, adapters, tmp_path
):
    targets = {"lora_targets": "q_proj, down_proj", "steps": 4}
    folder = sft.train(sft_config(files, tmp_path, save_merged=True, **targets, **options))
    assert not (Path(folder) / "adapter_config.json").exists()
    torch.testing.assert_close(stock(folder), with_peft(files[0], adapters), atol=2e-5, rtol=0)
    assert encode.load_tokenizer(folder).chat_template == tiny.CHAT_TEMPLATE


# A folder of adapters as the model.


@pytest.mark.slow
def test_saved_adapters_are_trained_on_and_measured_against_the_weights_below_them(
    files, adapters, tmp_path
):
    config = runs.grpo_config((adapters, files[1]), tmp_path, lr=0.0, steps=1, eval_size=0)
    lm = tiny.load_lm(config)
    torch.testing.assert_close(logits(lm.lm), with_peft(files[0], adapters), atol=1e-6, rtol=0)
    with lm.lm.disable_adapter():
        torch.testing.assert_close(logits(lm.lm), stock(files[0]), atol=1e-6, rtol=0)
    assert all("lora_" in name for name, weight in lm.named_parameters() if weight.requires_grad)

    # With a learning rate of 0 the KL is that of the adapters as they were saved, and they are saved again.
    folder = grpo.train(config)
    assert tiny.read_metrics(tmp_path)[0]["objective/kl_exact"] > 1e-3
    torch.testing.assert_close(
        with_peft(files[0], folder), with_peft(files[0], adapters), atol=1e-6, rtol=0
    )
    trained = sft.train(sft_config((adapters, files[1]), tmp_path / "on", lora_rank=0))
    assert (with_peft(files[0], trained) - with_peft(files[0], adapters)).abs().max() > 1e-3


def test_the_options_of_the_adapters_that_are_read_may_be_repeated_and_not_changed(
    files, adapters, tmp_path
):
    tiny.load_lm(sft_config((adapters, files[1]), tmp_path, lora_rank=2))
    for options in ({"lora_rank": 3}, {"lora_alpha": 16.0}, {"lora_targets": "k_proj"}):
        (option,) = options
        with pytest.raises(
            InputError, match=f"{option}=.* is not that of the adapters in .*: leave it out"
        ):
            tiny.load_lm(sft_config((adapters, files[1]), tmp_path, **options))
