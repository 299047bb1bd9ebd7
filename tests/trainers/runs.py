"""A small run of sft: its config, whether it is refused, how it goes on, and what is asked of its folder."""

import importlib
import shutil
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import cli, sft
from fused_rl.trainers.options.config import InputError, RunConfig
from fused_rl.trainers.run import lock
from tests.trainers import tiny


def run_config(files, output_dir, **options) -> sft.SFTConfig:
    model, dataset = files
    defaults = {"completion_column": "answer", "eval_size": 4, "steps": 4, "batch_size": 8, "lr": 1e-3}
    defaults |= {"save_every": 1, "keep_checkpoints": 9, "zero_stage": 0}
    return sft.SFTConfig(model=model, dataset=dataset, output_dir=str(output_dir), **tiny.settled(defaults | options))


def refused(config, message: str) -> str:
    """Training is refused in one line that matches; returns it."""
    with pytest.raises(InputError, match=message) as error:
        sft.train(config)
    lock.release()  # as the command does when it ends
    line = str(error.value)
    assert "\n" not in line
    return line


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_equal_runs(a: Path, b: Path):
    a_weights, b_weights = tiny.weights(a / "model"), tiny.weights(b / "model")
    assert all(torch.equal(a_weights[name], b_weights[name]) for name in a_weights | b_weights)
    assert tiny.untimed(tiny.read_metrics(a)) == tiny.untimed(tiny.read_metrics(b))


def resumed(files, folder: Path, whole: Path, step: int, **options) -> Path:
    """The run, continued from a step with other options."""
    shutil.copytree(whole, folder)
    sft.train(run_config(files, folder, resume_from=f"step-{step}", **options))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def trainers() -> list[type[RunConfig]]:
    """The config of every command that trains."""
    for module in cli.COMMANDS.values():
        importlib.import_module(module)
    found, classes = [], RunConfig.__subclasses__()
    while classes:
        config_class = classes.pop()
        classes += config_class.__subclasses__()
        found += [config_class] if "command" in vars(config_class) else []
    return found


def scores_of(*verifiers: str) -> set[str]:
    """The metrics of each of them."""
    return {f"rewards/{name}/mean" for name in verifiers} | {f"rewards/{name}/std" for name in verifiers}
