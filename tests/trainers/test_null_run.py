"""At learning rate 0 a run in this process has no noise at all: each ratio is exactly 1, whatever its batches are."""

import pytest

from bench.repro import null_run
from tests.marks import slow
from tests.trainers import runs

GRPO = {
    "verifiers": runs.VERIFIER,
    "prompts_per_step": 4,
    "group_size": 4,
    "minibatches": 2,
    "max_new_tokens": 6,
}
GRPO |= {
    "zero_stage": 0,
    "temperature": 0.8,
    "kl_coef": 0.01,
    "lr": 0.5,
    "warmup_steps": 2,
    "overwrite": True,
}
PPO = GRPO | {"group_size": 2, "epochs": 2, "target_kl": 0.1, "critic_lr": 0.5}
CASES = [
    ("grpo", {"micro_batch_size": 3, "share_prompts": False}),  # which do not divide
    slow(("ppo", {"micro_batch_size": 3})),
    slow(("grpo", {"dtype": "bfloat16", "zero_stage": 1})),
    slow(("grpo", {"lag": 1})),
]


def options_of(files, trainer, **options):
    return {"model": files[0], "dataset": files[1]} | (GRPO if trainer == "grpo" else PPO) | options


@pytest.mark.parametrize("case", CASES)
def test_in_process_there_is_no_noise_at_all(case, files):
    trainer, options = case
    history = null_run.measured(trainer, options_of(files, trainer, **options))
    assert len(history) == null_run.STEPS and null_run.STILL.keys() <= history[0].keys()
    assert null_run.noise(history) == {}
