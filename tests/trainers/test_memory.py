"""What a layer saves for its backward pass, as `--dry_run` counts it, beside what autograd keeps."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from fused_rl.trainers import cli
from fused_rl.trainers.base import engine, memory
from fused_rl.trainers.data.encode import Encoder, load_tokenizer
from fused_rl.trainers.data.reading import load_train_eval
from fused_rl.trainers.grpo import GRPOConfig
from fused_rl.trainers.options import to_yaml
from fused_rl.trainers.run.parse import parse
from tests.lazy import transformers
from tests.trainers import tiny
from tests.trainers.peaks import peak_of
from tests.trainers.runs import VERIFIER

SHAPE = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4}


def kept(layers: int, kv_heads: int) -> float:
    """Return the elements per token that a Llama's forward pass keeps, weights left out."""
    config = transformers.LlamaConfig(
        **SHAPE, num_hidden_layers=layers, num_key_value_heads=kv_heads
    )
    lm = transformers.LlamaModel(config)
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = lm(input_ids=torch.zeros(2, 32, dtype=torch.long), use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(found.values()) / 64


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_layer_saves_what_is_counted(kv_heads, tmp_path):
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=2, num_key_value_heads=kv_heads)
    config.save_pretrained(tmp_path)
    lm = transformers.LlamaForCausalLM(config)
    sizes = memory.sizes_of(str(tmp_path), None)
    assert sizes.weights + sizes.head == sum(p.numel() for p in lm.parameters())
    assert sizes.saved == pytest.approx(kept(3, kv_heads) - kept(2, kv_heads), rel=0.05)


@pytest.mark.parametrize(("gib", "chosen"), [(4, 1), (24, 8), (80, 64), (1000, 256)])
def test_a_gpu_gets_the_micro_batch_that_it_holds(gib, chosen, tmp_path, monkeypatch):
    shape = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        **shape, vocab_size=151936, num_hidden_layers=24, tie_word_embeddings=True
    )
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gib << 30)
    )
    options = {
        "model": str(tmp_path),
        "dataset": "rows.jsonl",
        "output_dir": "run",
        "verifiers": "exact",
    }
    config = GRPOConfig(**options, dtype="bfloat16")
    assert config.micro_batch_size is None  # making a config reads no model
    config.resolve()
    assert config.micro_batch_size == chosen
    # As many tokens as so many sequences of the most tokens have, which share their prompt by eights.
    assert config.micro_batch_tokens == chosen * 256 + -(-chosen // 8) * 512
    given = GRPOConfig(**options, micro_batch_size=3)
    given.resolve()
    assert (given.micro_batch_size, given.micro_batch_tokens) == (3, None)
    given = GRPOConfig(**options, dtype="bfloat16", micro_batch_tokens=4096)
    given.resolve()
    assert given.micro_batch_tokens == 4096
    # A surrogate that reads a whole update gets micro-batches by sequences, of which there may be one.
    whole = GRPOConfig(**options, dtype="bfloat16", surrogate="kl-cov")
    whole.resolve()
    assert (whole.micro_batch_size, whole.micro_batch_tokens) == (chosen, None)
    # Fewer sequences, given beside the file of a run in which tokens were chosen, are taken.
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    parsed = parse(GRPOConfig, ["--config", str(file), "--micro_batch_size", "2"])
    assert (parsed.micro_batch_size, parsed.micro_batch_tokens) == (2, None)
    needed = memory.bytes_per_process(config.footprint(), chosen)
    assert chosen == 1 or sum(needed.values()) < 0.75 * (gib << 30)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A model whose weights, optimizer and activations all take megabytes, a reward model, and rows of one length."""
    folder = tmp_path_factory.mktemp("measured")
    sizes = SHAPE | {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 704}
    config = transformers.Qwen2Config(**sizes, num_hidden_layers=6, num_key_value_heads=2)
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    tiny.reward_folder(folder / "reward", str(folder / "model"))
    answer = "a" * 90
    row = {"question": "q" * 20, "answer": answer}
    tiny.jsonl(folder / "rows.jsonl", [row] * 24)
    pair = {"prompt": "q" * 20, "chosen": answer, "rejected": "b" * 90}
    tiny.jsonl(folder / "pairs.jsonl", [pair] * 24)
    return folder


SAMPLED = {"max_new_tokens": 80, "prompts_per_step": 4, "group_size": 4}
GRPO = SAMPLED | {"verifiers": VERIFIER, "kl_coef": 0.1}
# A run's trainer and its options. Updates have two micro-batches, so that gradients stand beside activations.
RUNS = {
    "all weights": ("sft", {}),
    "checkpointing": ("sft", {"gradient_checkpointing": True}),
    "adapters": ("sft", {"lora_rank": 8, "zero_stage": 2}),
    "16 bits": ("sft", {"dtype": "bfloat16", "zero_stage": 2}),
    "scores": ("reward", {"share_prompts": False, "zero_stage": 1}),
    "a reference, shared prompts": ("grpo", GRPO),
    "a critic, a reward model": ("ppo", SAMPLED | {"minibatches": 1}),
    "partitioned": ("sft", {"zero_stage": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "options"), RUNS.values(), ids=RUNS)
def test_what_is_counted_is_what_a_step_takes(trainer, options, measured, tmp_path, monkeypatch):
    """Within a tenth of the most that a step allocates, models and rows included."""
    # DeepSpeed's own bucket would hide everything else.
    small = 100_000
    monkeypatch.setattr(memory, "BUCKET", small)
    deepspeed_config = engine._deepspeed_config

    def with_small_bucket(*arguments, **keywords):
        config = deepspeed_config(*arguments, **keywords)
        config["zero_optimization"]["reduce_bucket_size"] = small
        return config

    monkeypatch.setattr(engine, "_deepspeed_config", with_small_bucket)
    if trainer == "ppo":
        options = options | {"verifiers": f"reward_model:{measured}/reward"}
    rows = {"sft": {"completion_column": "answer"}}.get(trainer, {})
    rows |= {} if "group_size" in options else {"batch_size": 16}
    config = tiny.config_of(
        trainer,
        str(measured / "model"),
        str(measured / ("pairs.jsonl" if trainer == "reward" else "rows.jsonl")),
        str(tmp_path / "run"),
        **({"steps": 2, "eval_size": 0, "save_every": 0, "micro_batch_size": 8} | rows | options),
    )
    peak = peak_of(config)

    module = importlib.import_module(cli.TRAINERS[trainer].module)
    _, _, _, read, *_ = module.main.args
    encoder = Encoder.of(config, load_tokenizer(config.model))
    train, _ = load_train_eval(config)
    examples = read(config, train, encoder)
    sequences = [pair for example in examples for pair in example.sequences().values()]
    needed = memory.bytes_per_process(config.footprint().for_rows(sequences), 8)
    assert 0.9 * peak <= sum(needed.values()) <= 1.1 * peak, (peak, needed)
