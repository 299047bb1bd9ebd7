"""The memory of a run on paper, which a dry run prints: what whole steps allocate, and what processes divide."""

import importlib
import types

import pytest
import torch

from fused_rl.trainers import cli, grpo
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.models.language_model import LanguageModel
from fused_rl.trainers.run import dry_run
from fused_rl.trainers.run.loop import DryRun, Run
from tests.lazy import transformers
from tests.trainers import tiny
from tests.trainers.peaks import peak_of
from tests.trainers.runs import VERIFIER

SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model whose weights, optimizer and activations all take megabytes, a reward model, and rows of one length."""
    folder = tmp_path_factory.mktemp("measured")
    config = transformers.Qwen2Config(
        **SHAPE, vocab_size=2000, num_hidden_layers=6, num_key_value_heads=2
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    tiny.reward_folder(folder / "reward", str(folder / "model"))
    tiny.jsonl(folder / "rows.jsonl", [{"question": "q" * 20, "answer": "a" * 90}] * 24)
    pair = {"prompt": "q" * 20, "chosen": "a" * 90, "rejected": "b" * 90}
    tiny.jsonl(folder / "pairs.jsonl", [pair] * 24)
    return folder


def config_of(trainer, files, tmp_path, **options):
    if trainer == "ppo":
        options["verifiers"] = f"reward_model:{files}/reward"
    rows = {"completion_column": "answer"} if trainer == "sft" else {}
    rows |= {} if "group_size" in options else {"batch_size": 16}
    return tiny.config_of(
        trainer,
        str(files / "model"),
        str(files / ("pairs.jsonl" if trainer == "reward" else "rows.jsonl")),
        str(tmp_path / "run"),
        **({"steps": 2, "eval_size": 0, "save_every": 0, "micro_batch_size": 8} | rows | options),
    )


SAMPLED = {"max_new_tokens": 80, "prompts_per_step": 4, "group_size": 4}
GRPO = SAMPLED | {"verifiers": VERIFIER, "kl_coef": 0.1, "share_prompts": False}


def needed_by(config) -> dict[str, float]:
    """Return the bytes that a dry run counts."""
    counted, count = [], dry_run.on_paper
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DryRun):
        patch.setattr(dry_run, "on_paper", lambda *given: counted.append(count(*given)) or {})
        patch.setattr(config, "dry_run", True)
        importlib.import_module(cli.TRAINERS[config.command].module).train(config)
    return counted[0]


@pytest.mark.parametrize(
    ("processes", "options", "total"),
    [
        (4, {"zero_stage": 3, "gradient_checkpointing": True}, 44.9),
        (4, {"zero_stage": 2, "gradient_checkpointing": True}, 63.4),
        (4, {"zero_stage": 3}, 89.0),
        (4, {"zero_stage": 3, "gradient_checkpointing": True, "offload": True}, 9.4),
        (8, {"zero_stage": 3, "gradient_checkpointing": True, "sequence_parallel": 2}, 24.3),
    ],
)
def test_a_run_of_7b_takes_what_its_page_says(processes, options, total, monkeypatch):
    monkeypatch.setattr(ranks, "planned", processes)
    monkeypatch.setattr(ranks, "_per_rank", options.get("sequence_parallel", 1))
    config = transformers.Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        policy, reference = (transformers.Qwen2ForCausalLM(config) for _ in range(2))
    lengths = {"max_prompt_length": 1024, "max_new_tokens": 1024, "micro_batch_size": 4}
    given = {"dtype": "bfloat16", "server": "http://127.0.0.1:9"} | lengths | options
    run = tiny.config_of("grpo", "m", "rows.jsonl", "run", **GRPO | given)
    shell = types.SimpleNamespace(module=LanguageModel(policy, "logits"))
    monkeypatch.setattr(engine, "models_on_paper", [policy, reference])
    needed = dry_run.on_paper(run, [shell])
    assert sum(needed.values()) / 2**30 == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize("kind", ["mamba", "gemma3n_text", "gemma4_text", "gpt_neo", "nemotron"])
def test_a_model_of_another_kind_has_no_count_of_passes_or_one(kind):
    config = transformers.CONFIG_MAPPING[kind]()
    base = types.SimpleNamespace(config=config)
    shell = types.SimpleNamespace(module=types.SimpleNamespace(base=base, parameters=lambda: []))
    run = tiny.config_of("sft", "m", "rows.jsonl", "run", micro_batch_size=4)
    needed = dry_run.on_paper(run, [shell])
    assert ("passes" in needed) == (kind in ("gpt_neo", "nemotron"))


def test_a_dry_run_plans_for_other_processes(files, tmp_path):
    options = GRPO | {
        "processes": 8,
        "sequence_parallel": 2,
        "prompts_per_step": 8,
        "zero_stage": 3,
    }
    with pytest.raises(InputError, match="processes=8 has no meaning without --dry_run"):
        config_of("grpo", files, tmp_path, **options)
    config = config_of("grpo", files, tmp_path, **options, dry_run=True)
    with pytest.raises(DryRun) as done:
        grpo.train(config)
    assert (ranks.processes(), ranks.world_size()) == (1, 1)
    assert "GiB a process on paper for 8 processes in torch.float32: weights 0.0" in str(done.value)
    assert "# processes: 8, in 4 groups of 2" in str(done.value)


# A run's trainer and its options. Updates have two micro-batches, so that gradients stand beside activations.
RUNS = {
    "all weights": ("sft", {}),
    "checkpointing": ("sft", {"gradient_checkpointing": True}),
    "16 bits": ("sft", {"dtype": "bfloat16", "zero_stage": 2}),
    "scores": ("reward", {"share_prompts": False, "zero_stage": 1}),
    "a reference": ("grpo", GRPO),
    "a critic, a reward model": ("ppo", SAMPLED | {"minibatches": 1}),
    "partitioned": ("sft", {"zero_stage": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "options"), RUNS.values(), ids=RUNS)
def test_what_is_counted_is_what_a_step_takes(trainer, options, files, tmp_path, monkeypatch):
    """Compare with the most that a step allocates, models and rows included."""
    # DeepSpeed's own bucket would hide everything else.
    small = 100_000
    monkeypatch.setattr(dry_run, "BUCKET", small)
    deepspeed_config = engine._deepspeed_config

    def with_small_bucket(*arguments, **keywords):
        config = deepspeed_config(*arguments, **keywords)
        config["zero_optimization"]["reduce_bucket_size"] = small
        return config

    monkeypatch.setattr(engine, "_deepspeed_config", with_small_bucket)
    config = config_of(trainer, files, tmp_path, **options)
    rows_read, check_inputs = [], Run.check_inputs

    def noting(*arguments, **read):
        rows_read.append(read["rows"])
        return check_inputs(*arguments, **read)

    monkeypatch.setattr(Run, "check_inputs", noting)
    peak = peak_of(config)

    # The rows have one length.
    prompt, response, *_ = rows_read[0].record(0)["ids"]
    sampled = getattr(config, "max_new_tokens", None)
    length = len(prompt) + (len(response) if sampled is None else sampled)
    monkeypatch.setattr(type(config), "longest_sequence", property(lambda config: length))
    needed = needed_by(config.model_copy(update={"overwrite": True}))
    assert 0.9 * peak <= sum(needed.values()) <= 1.2 * peak, (peak, needed)
