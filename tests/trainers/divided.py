"""Runs whose sequences are divided over processes, beside those of one process: what they are of."""

import importlib
import random
from pathlib import Path

from fused_rl.trainers import cli
from fused_rl.trainers.options import RunConfig
from fused_rl.trainers.rollouts.types import Response
from fused_rl.trainers.run import store
from tests.trainers import tiny


class Fixed(tiny.Sampler):
    """Responses that depend on the prompt, the step and the copy alone: those of any number of processes."""

    step, records_support = 0, True

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
            kept = [sorted({token, *range(10, 14)}) for token in ids]
            support = kept if sampling.truncates else None
            responses.append(Response(ids, finish, logprobs, support))
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
    "ppo": SAMPLED | {"critic": "{reward}", "verifiers": "reward_model:{reward}"},
    "distill": {"prompts_per_step": 8, "max_new_tokens": 13, "on_policy": 0.5}
    | {"completion_column": "answer", "sampler": FIXED, "teacher": "{teacher}"},
}


def config_of(trainer: str, files: dict[str, str], output, **options) -> RunConfig:
    """The config of a run; `{name}` in an option is one of the files."""
    common = {"eval_size": 5, "eval_every": 2, "steps": 2, "lr": 1e-3, "save_every": 0}
    common |= {"max_grad_norm": 0.5, "micro_batch_size": 3, "zero_stage": 1}
    common |= {"dataset": files["marked" if trainer == "kto" else "rows"], "model": files["model"]}
    given = common | OPTIONS[trainer] | options
    for name in ("critic", "verifiers", "teacher"):
        if isinstance(value := given.get(name), str):
            given[name] = value.format(**files)
    return tiny.config_of(trainer, output_dir=str(output), **given)


def module_of(trainer: str):
    return importlib.import_module(cli.TRAINERS[trainer].module)


def train_all(rank: int, world: int, files: dict[str, str], runs: list[tuple]) -> None:
    """Run (output folder, trainer, options) one after the other."""
    for output, trainer, options in runs:
        try:
            module_of(trainer).train(config_of(trainer, files, output, **options))
        finally:
            store.unlock()  # its process ends without its exit functions


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
