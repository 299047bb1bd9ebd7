"""Runs of options that nobody has put together: drawn, and each the same divided over processes, and resumed.

Others, and more of them, are drawn by `make test-drawn SEED=7 COUNT=300`. A failure shows what was drawn.
"""

import os
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fused_rl.trainers.base import engine
from fused_rl.trainers.base.text import InputError
from tests.drawn import SEED
from tests.marks import release, slow
from tests.trainers import divided, runs

OWN = {"sampler": None}  # the policy draws: another rounding, another response
TOLD = {"sampler": "tests.trainers.divided:telling"}
TWO = ["tests.trainers.tiny:odd_characters", "tests.trainers.tiny:first_is_odd"]
ANY = [
    {"lora_rank": 4, "save_merged": True},
    {"lr_schedule": "cosine", "warmup_steps": 1},
    {"lr_schedule": "tests.trainers.test_hooks:falling"},
    {"weight_decay": 0.1, "adam_beta2": 0.9, "tf_adam": True},
    {"max_grad_norm": 0.0},
    {"order": "file", "seed": 3},
    {"raw_prompt": True},
    {"dtype": "bfloat16"},
    {"on_step": f"{__name__}:counted"},
]
SAMPLED = [
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    OWN | {"min_p": 0.01, "rollout_batch_size": 3},
    TOLD | {"lag": 1},
    OWN | {"lag": 2},
]
POLICY = SAMPLED + [
    TOLD | {"rollout_correction": "token-truncate"},
    TOLD | {"rollout_correction": "sequence-mask", "rollout_gate": "k3"},
    {"kl_in": "loss", "kl_estimator": "k3", "entropy_coef": 0.01},
    {"kl_in": "reward"},
    {"minibatches": 2, "epochs": 2},
    {"epochs": 2},
    {"mask_truncated": True},
    {"top_entropy": 0.5},
    {"loss_agg": "seq-mean-token-sum-norm", "clip_high": 0.28},
]
OPTIONS = {
    "grpo": [
        {"ref_sync_every": 1, "ref_mixup_alpha": 0.6},
        {"zero_variance": "refill", "verifiers": "tests.trainers.tiny:first_is_odd"},
        {"preset": "rloo", "old_logprobs": "sampler"} | TOLD,
        {"advantage": "gdpo", "verifiers": TWO},
        {"preset": "gspo"},
        {"preset": "scalerl"},
        {"preset": "dapo", "overlong_buffer": 4},
        {"advantage": "batch-std"},
        {"zero_variance": "drop"},
        {"share_prompts": False},
        {"kl_every": 2},
        {"kl_every": 0, "kl_coef": 0.0},
    ]
    + POLICY,
    "ppo": [
        {"kl_target": 0.05, "kl_horizon": 50},
        {"critic_lr": 2e-3, "critic_warmup_steps": 2},
        {"epochs": 3, "target_kl": 1e-4},
        {"gamma": 0.9, "gae_lambda": 0.8, "value_gae_lambda": 1.0},
        {"whiten_rewards": True, "value_clip": 0.1},
        {"missing_eos_penalty": 0.5, "delta": 1.5},
        {"critic_only": 3},
    ]
    + POLICY,
    "distill": [
        {"direction": "jensen-shannon", "jsd_beta": 0.3},
        {"direction": "forward", "distill_temperature": 0.7},
        {"on_policy": 0.0},
        {"packing": True},
        {"verifiers": "tests.trainers.tiny:odd_characters"},
    ]
    + SAMPLED,
    "sft": [{"packing": True}, {"packing": False}, {"max_length": 28}, {"text_column": "answer"}],
    "reward": [
        {"centering": 0.01, "label_smoothing": 0.05},
        {"share_prompts": False},
        {"normalize_pairs": 0},
        {"max_response_length": 4, "too_long": "truncate"},
    ],
    "dpo": [
        {"loss_type": "simpo", "margin": 0.2},
        {"loss_type": "orpo"},
        {"loss_type": "ipo", "label_smoothing": 0.1},
        {"loss_type": "apo-zero"},
        {"beta": 0.5, "nll_coef": 0.1},
    ],
    "kto": [{"desirable_weight": 1.5, "undesirable_weight": 0.5}, {"beta": 0.5}],
}
TRAINERS = ("grpo", "ppo", "sft", "grpo", "dpo", "distill", "ppo", "reward", "grpo", "kto")
# What changes no result: processes, and options.
DIVISIONS = [
    (1, {"zero_stage": 0, "micro_batch_size": 1}),
    (1, {"zero_stage": 2, "micro_batch_size": 8}),
    (1, {"zero_stage": 2, "offload": True}),
    (1, {"micro_batch_size": None, "micro_batch_tokens": 90}),
    (2, {"zero_stage": 0, "micro_batch_size": 1}),
    (2, {"zero_stage": 2, "micro_batch_size": 8}),
    (2, {"zero_stage": 2, "offload": True}),
    (2, {"zero_stage": 3}),
    (2, {"zero_stage": 3, "micro_batch_size": None, "micro_batch_tokens": 90}),
    (2, {"sequence_parallel": 2}),
    (2, {"sequence_parallel": 2, "zero_stage": 3}),
    (4, {"sequence_parallel": 2, "micro_batch_size": None, "micro_batch_tokens": 60}),
]
SAME = [
    {},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "checkpoint_activations_on": "cpu"},
    {"loss_from": "logits"},
    {"packing": False},
    {"share_prompts": False},
]


def counted(step):
    """A hook that draws numbers, and returns a figure of all steps so far."""
    torch.rand(3), random.random()
    return {"own/steps": len(step.history)}


class Drawn(NamedTuple):
    trainer: str
    options: dict
    processes: int
    division: dict
    step: int  # after which the run is resumed

    @property
    def divides(self) -> bool:
        """True if one process and several have the same responses, in the same updates, but for rounding."""
        differs = OWN, {"minibatches": 2}, {"zero_variance": "refill"}, {"dtype": "bfloat16"}
        return not any(part.items() <= self.options.items() for part in differs)


# A gradient of rounding size moves no weight by a whole learning rate.
COMMON = {"steps": 3, "keep_checkpoints": 3, "adam_eps": 1e-4}
# What took many draws to find, run every time.
FOUND = Drawn("grpo", COMMON | {"kl_every": 2}, 2, {"zero_stage": 3, "save_every": 1}, 1)


def draw(number: int, files, most: int) -> Drawn:
    """The draw of a number, on at most so many processes."""
    source = random.Random(f"{SEED}{number}")
    trainer = TRAINERS[number % len(TRAINERS)]
    rows = OPTIONS[trainer] + ANY
    # Each row comes in its turn, beside one or two others; what is always refused is passed over.
    attempt = 20 * (TRAINERS * (1 + number // len(TRAINERS)))[:number].count(trainer)
    while True:
        options = {**COMMON}
        first = rows[attempt // 20 % len(rows)]
        attempt += 1
        for chosen in (first, *source.sample(rows, source.choice([1, 2]))):
            options |= chosen
        processes, division = source.choice([one for one in DIVISIONS if one[0] <= most])
        step = source.choice([1, 2])
        division = division | source.choice(SAME) | {"save_every": step}
        try:
            for world, changed in ((1, {}), (processes, division)):
                config = divided.config_of(trainer, files, "o", **options | changed)
                config.resolve()
                engine.torch_dtype(config)
                divided.module_of(trainer).batch_plan(config, world // config.sequence_parallel)
        except InputError:
            continue
        return Drawn(trainer, options, processes, division, step)


def train(rank, world, files, folders: list[tuple[Path, Drawn]]) -> None:
    """Each draw divided, and continued from a step."""
    for folder, drawn in folders:
        options = drawn.options | drawn.division
        try:
            divided.train_all(rank, world, files, [(str(folder / "whole"), drawn.trainer, options)])
            runs.forget_after(folder / "whole", folder / "resumed", drawn.step)
            options = options | {"resume_from": f"step-{drawn.step}"}
            run = str(folder / "resumed"), drawn.trainer, options
            divided.train_all(rank, world, files, [run])
        except BaseException as error:
            raise AssertionError(str(drawn)) from error


def held_out(folder: Path) -> list[float]:
    """All numbers of the rows of all evaluations."""
    numbers = re.findall(r"[\[ ](-?\d[\d.e-]*)", (folder / "held_out.jsonl").read_text())
    return [*map(float, numbers)]


COUNT = int(os.environ.get("FUSED_RL_COUNT", 300))


# In parts, so that two workers share them.
PARTS = [
    (0, 12, 1),
    *(slow(first, first + 25, 4) for first in (0, 25, 50, 75)),
    release(0, COUNT, 4),
]


@pytest.mark.parametrize(("first", "end", "most"), PARTS)
def test_a_run_is_the_same_divided_and_resumed(first, end, most, tmp_path):
    files = divided.make_files(tmp_path)
    draws = {tmp_path / str(number): draw(number, files, most) for number in range(first, end)}
    if most > 1 and first == 0:
        draws[tmp_path / "found"] = FOUND
    for processes in (1, 2, 4)[:most]:
        several = [item for item in draws.items() if item[1].processes == processes]
        runs.on_ranks(train, processes, files, several, timeout=3000)
    for folder, drawn in draws.items():
        print("drawn:", drawn)  # shown if it fails
        runs.assert_equal_runs(folder / "whole", folder / "resumed")
        assert held_out(folder / "whole") == held_out(folder / "resumed")
        if drawn.divides:
            alone = str(folder / "alone"), drawn.trainer, drawn.options
            divided.train_all(0, 1, files, [alone])
            runs.assert_same_metrics(folder / "alone", folder / "whole", 1e-5)
            runs.assert_same_weights(folder / "alone", folder / "whole", 1e-5)
            # They have six digits.
            expected = pytest.approx(held_out(folder / "alone"), rel=2e-5, abs=1e-5)
            assert held_out(folder / "whole") == expected
