"""Adapters: which layers get them, saved apart or merged, and trained on from the folder that holds them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import sft
from fused_rl.trainers.base.files import base_of_adapters, hash_of_model
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.models import language_model, lora
from fused_rl.trainers.models.adapters import with_new_adapters
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

    lm = transformers.AutoModelForCausalLM.from_pretrained(base)
    return logits(peft.PeftModel.from_pretrained(lm, adapters))


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
    config = sft_config(files, tmp_path, lora_targets=targets, lora_alpha=6.0)
    lm = tiny.load_lm(config)
    assert adapted_layers(lm) == layers
    scales = {part.scaling["default"] for part in lm.modules() if hasattr(part, "lora_A")}
    assert scales == {6.0 / config.lora_rank}
    assert adapted_layers(RewardModel.from_pretrained(files[0], adapters=config)) == layers


LATENT = {"kv_lora_rank": 4, "q_lora_rank": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
MIXTURES = {
    "gpt_oss": {},
    "granitemoe": {},
    # Its dense layer and shared experts have names that peft takes for those of experts.
    "deepseek_v3": LATENT
    | {"v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    # A router that is a linear layer, and returns a tuple.
    "llama4_text": {},
}


@pytest.mark.parametrize("family", MIXTURES)
def test_every_matrix_of_a_mixture_is_adapted(family):
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 32, "pad_token_id": 0, "num_experts_per_tok": 2}
    sizes |= dict.fromkeys(("num_local_experts", "n_routed_experts"), 4) | MIXTURES[family]
    config = transformers.AutoConfig.for_model(family, **sizes)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    before = {name: weight.clone() for name, weight in lm.named_parameters()}
    adapted = with_new_adapters(lm, ModelConfig(model="m", lora_rank=2))
    weights = {name: weight for name, weight in adapted.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for weight in weights.values():
            weight.normal_(std=0.2)
    out = adapted(input_ids=IDS).logits
    out[..., 1].sum().backward()
    assert all(weight.grad.any() for weight in weights.values())
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=IDS).logits, out, atol=1e-5, rtol=0)
    same = [name for name, weight in merged.named_parameters() if torch.equal(weight, before[name])]
    assert not [
        name for name in same if not re.search("norm|bias|embed_tokens|lm_head|sinks", name)
    ]


# What is saved.


def model_of(family: str, folder: Path) -> str:
    """A model whose layers peft wraps in another way: experts as parameters, or matrices that stand transposed."""
    import transformers

    tokenizer = tiny.tokenizer()
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 1}
    sizes |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"initializer_range": 0.2}
    if family == "gpt2":
        config = transformers.GPT2Config(**sizes)
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        config = transformers.Qwen3MoeConfig(
            num_key_value_heads=1, intermediate_size=32, head_dim=8, **experts, **sizes
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(config)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"zero_stage": 0}),
        ("gpt2", {"zero_stage": 0}),
        pytest.param("qwen3_moe", {"zero_stage": 2, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"zero_stage": 3}, marks=pytest.mark.slow),
    ],
)
def test_adapters_on_every_layer_are_merged_and_read_as_peft_reads_them(
    family, options, files, tmp_path
):
    base = model_of(family, tmp_path / "base")
    adapters, merged = (
        sft.train(
            sft_config((base, files[1]), tmp_path / str(merges), save_merged=merges, **options)
        )
        for merges in (False, True)
    )
    trained = with_peft(base, adapters)
    moved = (trained - stock(base)).abs().max()
    rounding = 2e-5 if "dtype" not in options else moved / 10
    assert moved > 1e-2
    assert tiny.weights(tmp_path / "True/model").keys() == tiny.weights(Path(base)).keys()
    torch.testing.assert_close(stock(merged).float(), trained, atol=rounding, rtol=0)

    # A run, a teacher and `eval` read the adapters as well.
    again = tiny.load_lm(sft_config((adapters, files[1]), tmp_path / "again", lora_rank=0))
    torch.testing.assert_close(logits(again.lm), trained, atol=2e-5, rtol=0)
    sampled = language_model.load_to_sample(
        adapters, device=torch.device("cpu"), dtype=torch.float32
    )
    torch.testing.assert_close(logits(sampled), trained, atol=2e-5, rtol=0)


# A folder of adapters as the model.


def test_the_options_of_the_adapters_that_are_read_may_be_repeated_and_not_changed(
    files, adapters, tmp_path
):
    tiny.load_lm(sft_config((adapters, files[1]), tmp_path, lora_rank=2))
    for option, value in (("lora_rank", 3), ("lora_alpha", 16.0), ("lora_targets", "k_proj")):
        with pytest.raises(InputError, match=f"{option}=.* is not that of the adapters in .*: lea"):
            tiny.load_lm(sft_config((adapters, files[1]), tmp_path, **{option: value}))


# Adapters that somebody else made.


def made_with_peft(base: str, folder: Path, *, more_tokens: int = 0, **options) -> str:
    """A folder with random adapters to a model, and its tokenizer, as a user of peft has it."""
    import peft
    import transformers

    lm = transformers.AutoModelForCausalLM.from_pretrained(base)
    if more_tokens:
        lm.resize_token_embeddings(lm.config.vocab_size + more_tokens)
    given = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options
    adapted = peft.get_peft_model(lm, peft.LoraConfig(**given))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.1)
    # Under another vocabulary peft looks for the model's config, which it does not find offline without this.
    adapted.save_pretrained(folder, save_embedding_layers=bool(more_tokens) or "auto")
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


PATTERNS = {
    "target_modules": "all-linear",
    "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 1},
    "alpha_pattern": {"k_proj": 64},
    "use_rslora": True,
}
KINDS = {
    "own rank and scale of each layer": PATTERNS,
    "some layers": {"layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> str:
    return tiny.model_folder(tmp_path_factory.mktemp("tied") / "model", tie=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", [False, True])
def test_adapters_of_peft_are_trained_on_saved_and_merged_as_peft_reads_them(
    tie, kind, files, tied, tmp_path
):
    base = tied if tie else files[0]
    made = made_with_peft(base, tmp_path / "made", **KINDS[kind])
    options = {"lora_rank": 0}
    read = tiny.load_lm(sft_config((made, files[1]), tmp_path, **options))
    torch.testing.assert_close(logits(read.lm), with_peft(base, made), atol=1e-6, rtol=0)

    adapters, merged = (
        sft.train(
            sft_config((made, files[1]), tmp_path / str(merges), save_merged=merges, **options)
        )
        for merges in (False, True)
    )
    trained = with_peft(base, adapters)
    assert (trained - with_peft(base, made)).abs().max() > 1e-3
    torch.testing.assert_close(stock(merged), trained, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"trainable_token_indices": [1, 2]}, "adapters with trainable_token_indices=.1, 2.;"),
        ({"modules_to_save": ["lm_head"]}, "adapters with modules_to_save=.'lm_head'.;"),
        ({"lora_bias": True}, "adapters with lora_bias=True;"),
        ({"bias": "all"}, "adapters with bias='all';"),
        ({"use_dora": True}, "adapters with use_dora=True;"),
        # Without a scale they would change and learn nothing.
        ({"lora_alpha": 0}, "adapters with lora_alpha=0;"),
        ({"alpha_pattern": {"q_proj": 0}}, "adapters with alpha_pattern=.'q_proj': 0.;"),
        # These change the weights below them, so that the policy without adapters is no reference.
        ({"init_lora_weights": "pissa"}, "adapters with init_lora_weights='pissa';"),
        ({"init_lora_weights": "olora"}, "adapters with init_lora_weights='olora';"),
        # Merged, those of a tied head would change the embedding, too.
        (
            {"target_modules": ["lm_head", "q_proj"]},
            "tensors .* embedding and LM head: .*lm_head.lora_A",
        ),
        ({"target_modules": ["embed_tokens"]}, "tensors .* embedding and LM head: .*embed_tokens"),
        ({"more_tokens": 5}, "tensors .* embedding and LM head: .*embed_tokens"),
    ],
)
def test_what_could_not_be_merged_again_is_refused(options, what, files, tmp_path):
    made = made_with_peft(files[0], tmp_path / "made", **options)
    with pytest.raises(InputError, match=f"{what}.*merge_and_unload"):
        tiny.load_lm(sft_config((made, files[1]), tmp_path, lora_rank=0))


# The model below adapters.


def test_a_relative_model_below_adapters_is_looked_for_in_both_places(
    files, adapters, tmp_path, monkeypatch
):
    shutil.copytree(files[0], tmp_path / "all" / "base")
    made = Path(shutil.copytree(adapters, tmp_path / "all" / "adapters"))
    config = json.loads((made / "adapter_config.json").read_text())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def found(base: str) -> str:
        described = json.dumps(config | {"base_model_name_or_path": base})
        (made / "adapter_config.json").write_text(described)
        return lora.find(str(made)).base_model_name_or_path

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert found("../base") == str(tmp_path / "all" / "base")  # of the adapters' folder
    # The current folder comes first, as a run wrote the name.
    Path("base").symlink_to(files[0])
    (made / "base").mkdir()
    assert found("base") == "base" == base_of_adapters(made, "base")
    for name, message in ((str(made), "to its own folder"), ("models/none", "neither a folder")):
        for read in (found, lambda _: hash_of_model(str(made))):
            with pytest.raises(
                InputError, match=f"{made}' holds adapters to .*{message}|{message}"
            ):
                read(name)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        # The names of another model, for which peft would begin with new adapters.
        (".layers.7.", {}, "4 tensors of layers that its adapter_config.json leaves out"),
        (".layers.1.", {"target_modules": ["q_proj"]}, "4 tensors of layers that its .*down_proj"),
        (".layers.1.", {"layers_to_transform": [0]}, "4 tensors of layers that its .* leaves out"),
        (
            ".layers.1.",
            {"target_modules": ["q_proj", "k_proj", "down_proj"]},
            "4 tensors missing: .*k_",
        ),
        (".layers.1.", {"r": 3}, "size mismatch"),
        # peft would load it into the model itself.
        (".norm.", {}, "tensors .* between embedding and LM head: .*model.norm"),
    ],
)
def test_adapters_that_are_not_those_of_their_config_are_a_line(
    name, config, message, files, adapters, tmp_path
):
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(adapters, tmp_path / "edited"))
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | config))
    saved = load_file(folder / "adapter_model.safetensors")
    if name == ".norm.":
        saved["base_model.model.model.norm.weight"] = torch.ones(16)
    saved = {key.replace(".layers.1.", name): saved[key] for key in saved}
    save_file(saved, folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match=f"{folder}' .*{message}"):
        tiny.load_lm(sft_config((str(folder), files[1]), tmp_path, lora_rank=0))
