"""The memory of a run on paper: what a layer saves beside what autograd keeps, and what whole steps allocate."""

import pytest
import torch
import yaml

from bench import memory
from fused_rl.trainers import cli
from fused_rl.trainers.base import engine
from fused_rl.trainers.run.loop import Run
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


def on_paper(trainer: str, tmp_path, **options) -> dict[str, float]:
    """Return the forecast for a small Llama."""
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "dataset": "rows.jsonl", "output_dir": "run"}
    config = cli.TRAINERS[trainer].config_class()(**given, **options)
    needed = memory.bytes_per_process(memory.footprint_of(config), 4)
    assert needed is not None
    return needed


def test_what_is_offloaded_leaves_the_device(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = {"dtype": "bfloat16"}
    for stage in (2, 3):
        kept = on_paper("sft", tmp_path, zero_stage=stage, **options)
        offloaded = on_paper("sft", tmp_path, zero_stage=stage, offload=True, **options)
        assert kept["optimizer"] > 0 == offloaded["optimizer"] == offloaded["gradients"]
        assert (offloaded["weights"] < kept["weights"]) == (stage == 3)
        assert offloaded["activations"] == kept["activations"]


def test_checkpoints_leave_the_device(tmp_path):
    where = ({}, {"checkpoint_activations_on": "cpu"})
    options = {"gradient_checkpointing": True, "max_length": 32}
    kept, moved_away = (on_paper("sft", tmp_path, **options, **one) for one in where)
    layers, hidden = 2, SHAPE["hidden_size"]
    assert kept["activations"] - moved_away["activations"] == 4 * 32 * layers * hidden * 4


@pytest.mark.parametrize("command", cli.TRAINERS)
def test_every_trainer_has_a_forecast_which_the_command_prints(command, tmp_path, capsys):
    transformers.LlamaConfig(**SHAPE, num_hidden_layers=2).save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "dataset": "rows.jsonl", "output_dir": "run"}
    given |= {"teacher": str(tmp_path)} if command == "distill" else {}
    (tmp_path / "config.yaml").write_text(
        f"# fused-rl {command} --config <this file>\n{yaml.safe_dump(given)}"
    )
    assert memory.command("memory", ["--config", str(tmp_path / "config.yaml")]) == 0
    printed = capsys.readouterr().out
    models = {"ppo": "reference 0.00", "distill": "teacher 0.00"}
    assert "GiB on paper at the longest sequences: weights" in printed
    assert models.get(command, "") in printed


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
    rows_read = []
    check_inputs = Run.check_inputs

    def noting(*arguments, **read):
        rows_read.append(read["rows"])
        return check_inputs(*arguments, **read)

    monkeypatch.setattr(Run, "check_inputs", noting)
    peak = peak_of(config)

    # The rows have one length.
    prompt, response, *_ = rows_read[0].record(0)["ids"]
    footprint = memory.footprint_of(config)
    lengths = {"prompt_tokens": len(prompt) * bool(footprint.prompt_tokens)}
    if not footprint.samples:
        whole = len(response) if footprint.prompt_tokens else len(prompt) + len(response)
        lengths["response_tokens"] = whole
    needed = memory.bytes_per_process(footprint._replace(**lengths), 8)
    assert 0.9 * peak <= sum(needed.values()) <= 1.1 * peak, (peak, needed)
