"""The callback for TRL's trainers: each sign of trouble once, and what a run came to."""

import inspect
import math

import pytest

from fused_rl.integrations.trl_watch import FINDINGS, MISMATCH, WINDOW, Watch
from tests.lazy import transformers

HEALTHY = {
    MISMATCH: 0.01,
    "entropy": 2.0,
    "kl": 0.1,
    "frac_reward_zero_std": 0.3,
    "completions/clipped_ratio": 0.2,
}
HEALTHY |= {"clip_ratio/region_mean": 0.1, "grad_norm": 0.5, "reward": 0.4}
TROUBLE = {
    MISMATCH: 0.3,
    "entropy": 0.01,
    "kl": 2.5,
    "frac_reward_zero_std": 0.9,
    "completions/clipped_ratio": 0.8,
}
TROUBLE |= {"clip_ratio/region_mean": 0.7, "grad_norm": math.nan}


def logged(logs, *, main=True):
    """The lines of a run that logs these, one after the other, with an empty log between (as of an evaluation)."""
    lines = []
    watch = Watch(lines.append)
    state = transformers.TrainerState(is_world_process_zero=main)
    for state.global_step, entry in enumerate(logs, 1):
        watch.on_log(None, state, None, logs=entry)
        watch.on_log(None, state, None, logs={"eval_loss": 1.0, "kl": None})
    return lines, lambda: watch.on_train_end(None, state, None) or lines


@pytest.mark.parametrize("key", FINDINGS)
def test_each_sign_is_said_once_and_a_healthy_run_is_quiet(key):
    healthy = [HEALTHY] * 20
    assert logged(healthy)[0] == []
    assert logged([HEALTHY | {key: TROUBLE[key]}] * (WINDOW - 1))[0] == []  # too few to tell
    lines, _ = logged([*healthy, *[HEALTHY | {key: TROUBLE[key]}] * 15])
    (line,) = lines
    assert f": {key} is " in line and line.endswith(FINDINGS[key][1]) and "\n" not in line
    assert logged([*healthy, *[HEALTHY | {key: TROUBLE[key]}] * 15], main=False)[0] == []


def test_the_end_sums_up_what_was_logged():
    _, end = logged([{"entropy": 2.0 - 0.01 * i, "kl": 0.001 * i} for i in range(30)])
    assert end() == [
        "entropy: 1.96 at first, 1.75 at the end",
        "kl: 0.0045 at first, 0.0245 at the end",
    ]
    _, end = logged([HEALTHY], main=False)
    assert end() == []


def test_these_are_the_names_that_trl_logs():
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    source = inspect.getsource(grpo_trainer) + inspect.getsource(transformers.trainer)
    assert [key for key in FINDINGS if f'"{key}"' not in source] == []
