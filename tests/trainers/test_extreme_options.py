"""Every numeric option at the ends of its range: refused in a line at the start, or taken without a traceback."""

import shutil
import typing
from pathlib import Path

import pytest

from fused_rl.trainers.options.config import kinds_of
from tests.trainers.test_faults import GOOD, answer, folder, good  # noqa: F401
from tests.trainers.test_options import COMMANDS, TRAINERS

EXTREMES = {
    int: ("1", "2147483647", "9223372036854775808", "1" + "0" * 30),
    float: ("5e-324", "1e-30", "1e30", "1.7e308"),
}
# What another option must say, so that this one means something.
BESIDE = {
    "max_refills": "--zero_variance refill",
    "overlong_factor": "--overlong_buffer 2",
    "ref_mixup_alpha": "--ref_sync_every 1",
    "kl_horizon": "--kl_target 1",
    "keep_checkpoints": "--save_every 1",
    "stage3_param_persistence_threshold": "--zero_stage 3",
    "num_train_epochs": "--steps null",
    **dict.fromkeys(("eval_every", "eval_samples", "show_samples"), "--eval_size 2"),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), "--surrogate sapo"),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "--surrogate vespo"),
    "lora_alpha": "--lora_rank 1",
    "max_new_tokens": "--overlong_buffer 0",
    "delta": "--clip_high 0.1",
    **dict.fromkeys(("rollout_low", "rollout_high"), "--rollout_correction token-mask"),
}
# How much there is to do: that of which there is no end ends by nobody's fault.
WORK = {"steps", "num_train_epochs", "epochs", "critic_only", "samples", "eval_samples", "group_size", "max_refills"}


def numeric(command):
    """The numeric options of a command, and int or float."""
    for name, kind in kinds_of(COMMANDS[command]).items():
        ranged = [one for one in (kind, *typing.get_args(kind)) if typing.get_origin(one) is typing.Annotated]
        if ranged:
            yield name, typing.get_args(ranged[0])[0]


def cases():
    for command in COMMANDS:
        for name, kind in numeric(command):
            for value in EXTREMES[kind]:
                if name not in WORK:
                    yield command, name, value


def words(command, name, value):
    return [*GOOD[command], *BESIDE.get(name, "").split(), f"--{name}", value]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name", "value"), cases())
def test_an_extreme_value_is_refused_in_a_line_or_taken(command, name, value, folder, capfd):  # noqa: F811
    shutil.rmtree(Path("run"))
    argv = words(command, name, value)
    if command in TRAINERS:
        status, told, _ = answer(command, [*argv, "--dry_run"], capfd)
        refused = status not in (0, None)
        assert not refused or (told.startswith(f"fused-rl {command}: error: ") and "\n" not in told), told
        if refused:
            return
    status, told, out = answer(command, argv, capfd)
    assert status in (0, None) or (told.startswith(f"fused-rl {command}: error: ") and "\n" not in told), told or out
