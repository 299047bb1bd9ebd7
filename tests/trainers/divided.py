"""Runs whose sequences are divided over processes, beside those of one process: what they are of."""

import importlib
import random
import time
from pathlib import Path

import pytest

from fused_rl.trainers import cli
from fused_rl.trainers.rollouts.types import Response
from fused_rl.trainers.run import store
from tests.trainers import tiny
from tests.trainers.runs import assert_same_weights, on_ranks


class Fixed(tiny.Sampler):
    """Responses that depend on the prompt, the step and the copy alone: those of any number of processes."""

    step = 0

    def sample(self, prompts, sampling):
        responses = []
        copies: dict[tuple, int] = {}
        for prompt in prompts:
            copy = copies[tuple(prompt)] = copies.get(tuple(prompt), -1) + 1
            drawn = random.Random(f"{prompt} {self.step} {copy} {sampling.temperature}")
            count = drawn.randint(1, sampling.max_new_tokens)
            ids = [drawn.randrange(10, 90) for _ in range(count)]
            finish = "length"
            if count < sampling.max_new_tokens:
                finish = "stop"
                ids[-1] = sampling.stop_ids[0]
            logprobs = [-4.0] * count if self.reports_logprobs else None
            responses.append(Response(ids, finish, logprobs))
        return responses

    def publish(self, step, save):
        self.step = step


def fixed(built, tokenizer):
    return Fixed()


def telling(built, tokenizer):
    """One that tells log-probabilities, as `lag` needs."""
    sampler = Fixed()
    sampler.reports_logprobs = True
    return sampler


def pairs(count: int) -> list[dict]:
    """Rows with everything that a trainer reads."""
    rows = tiny.sums(count)
    for i, row in enumerate(rows):
        rejected = f"no, {'x' * (i % 5)} {i}"
        row |= {"prompt": row["question"], "chosen": row["answer"], "rejected": rejected}
    return rows


def marked(count: int) -> list[dict]:
    """Rows of KTO."""
    rows = []
    for i, row in enumerate(tiny.sums(count)):
        rows.append({"prompt": row["question"], "completion": row["answer"], "label": i % 3 > 0})
    return rows


FIXED = "tests.trainers.divided:fixed"
# The copies of a prompt are sampled by one process: 4 prompts divide over 2 ranks of 2 processes, and over 4 processes.
SAMPLED = {
    "eval_size": 4,
    "prompts_per_step": 4,
    "group_size": 4,
    "minibatches": 1,
    "verifiers": "tests.trainers.tiny:odd_characters",
    "max_new_tokens": 13,
    "eval_samples": 2,
    "kl_coef": 0.05,
    "sampler": FIXED,
}
OPTIONS = {
    "sft": {"batch_size": 8, "completion_column": "answer"},
    "reward": {"batch_size": 8, "normalize_pairs": 4},
    "dpo": {"batch_size": 8},
    "kto": {"batch_size": 8},
    "grpo": SAMPLED,
    "ppo": SAMPLED,
    "distill": {"prompts_per_step": 8, "max_new_tokens": 13, "on_policy": 0.5}
    | {"completion_column": "answer", "sampler": FIXED},
}


# (trainer, options) by what they show.
RUNS: dict[str, tuple[str, dict]] = {
    "sft": ("sft", {}),
    "sft, ZeRO 3": ("sft", {"zero_stage": 3}),
    "grpo": ("grpo", {}),
    "grpo, no KL": ("grpo", {"kl_every": 0, "kl_coef": 0.0}),
    "grpo, ZeRO 3": ("grpo", {"zero_stage": 3}),
    "grpo, logits": ("grpo", {"loss_from": "logits"}),
    "gspo": ("grpo", {"preset": "gspo", "top_entropy": 0.5}),
    "tokens": ("grpo", {"micro_batch_tokens": 90}),
    "lora": ("grpo", {"lora_rank": 4, "save_merged": True}),
    "checkpointing": ("grpo", {"gradient_checkpointing": True}),
    "lag": ("grpo", {"lag": 1, "sampler": "tests.trainers.divided:telling"}),
    "reward": ("reward", {}),
    "dpo": ("dpo", {}),
    "kto": ("kto", {}),
    "ppo": ("ppo", {"critic": "{reward}", "verifiers": "reward_model:{reward}"}),
    "distill": ("distill", {"teacher": "{teacher}"}),
}


def train(rank: int, world: int, files: dict[str, str], output: str, trainer: str, options) -> None:
    """Run a trainer in this process."""
    common = {"eval_size": 5, "eval_every": 2, "steps": 2, "lr": 1e-3, "save_every": 0}
    common |= {"max_grad_norm": 0.5, "micro_batch_size": 3, "zero_stage": 1}
    given = {"dataset": files["marked" if trainer == "kto" else "rows"], "model": files["model"]}
    named = {"model", "critic", "verifiers", "teacher", "resume_from"}
    for name in named & options.keys():
        options = options | {name: options[name].format(**files)}
    config = tiny.config_of(
        trainer, output_dir=output, **given | common | OPTIONS[trainer] | options
    )
    importlib.import_module(cli.TRAINERS[trainer].module).train(config)


def train_all(rank: int, world: int, files: dict[str, str], runs: list[tuple]) -> list[float]:
    """Run (output folder, trainer, options) one after the other; the seconds of each."""
    seconds = []
    for output, trainer, options in runs:
        began = time.monotonic()
        try:
            train(rank, world, files, output, trainer, options)
        finally:
            store.unlock()  # its process ends without its exit functions
        seconds.append(time.monotonic() - began)
    return seconds


def make_files(folder: Path) -> dict[str, str]:
    """A model, a reward model and files of rows, by name."""
    model = tiny.model_folder(folder / "model", heads=4)
    return {
        "model": model,
        "reward": tiny.reward_folder(folder / "reward", model),
        "teacher": tiny.model_folder(folder / "teacher", heads=4, key_heads=4),
        "rows": tiny.jsonl(folder / "rows.jsonl", pairs(25)),
        "marked": tiny.jsonl(folder / "marked.jsonl", marked(25)),
    }


def compare(files: dict[str, str], folder: Path, runs: dict, world: int, **changed) -> None:
    """Metrics and weights of runs with some options on `world` processes are those of one process without them."""
    for kind, processes, options in (("alone", 1, {}), ("changed", world, changed)):
        jobs = []
        for name, (trainer, of_run) in runs.items():
            jobs.append((str(folder / f"{name}-{kind}"), trainer, of_run | options))
        on_ranks(train_all, processes, files, jobs)
    for name in runs:
        alone, together = folder / f"{name}-alone", folder / f"{name}-changed"
        metrics = [tiny.untimed(tiny.read_metrics(output)) for output in (alone, together)]
        for before, found in zip(*metrics, strict=True):
            assert found == pytest.approx(before, rel=1e-5, abs=1e-5), (name, before["step"])
        assert_same_weights(alone, together, atol=1e-5)
