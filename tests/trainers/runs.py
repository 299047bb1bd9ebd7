"""Small runs: their configs, whether they are refused, how they go on, and what is asked of their folders."""

import contextlib
import io
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import cli, grpo, ppo, sft
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.options import RunConfig
from fused_rl.trainers.run import store
from tests.distributed import run_distributed
from tests.trainers import figures, killed, tiny

VERIFIER = "tests.trainers.tiny:odd_characters"


OPTIONS = {
    "sft": {"completion_column": "answer", "steps": 4, "batch_size": 8},
    "grpo": {"steps": 3, "prompts_per_step": 4, "group_size": 4, "micro_batch_size": 8},
    "ppo": {"steps": 3, "prompts_per_step": 8, "micro_batch_size": 4},
}
SAMPLED = {"verifiers": VERIFIER, "max_new_tokens": 6, "eval_samples": 2}


def _config_of(trainer: str, files, output_dir, options):
    common = {"eval_size": 4, "lr": 1e-3, "save_every": 0} | OPTIONS[trainer]
    return tiny.config_of(trainer, *files, output_dir, **(common | options))


def sft_config(files, output_dir, **options) -> sft.SFTConfig:
    given = {"adam_beta2": 0.95, "weight_decay": 0.1}
    return _config_of("sft", files, output_dir, given | options)


def grpo_config(files, output_dir, **options) -> grpo.GRPOConfig:
    return _config_of("grpo", files, output_dir, SAMPLED | options)


def ppo_config(files, output_dir, **options) -> ppo.PPOConfig:
    return _config_of("ppo", files, output_dir, SAMPLED | options)


def run_config(files, output_dir, **options) -> sft.SFTConfig:
    given = {"save_every": 1, "keep_checkpoints": 9}
    return _config_of("sft", files, output_dir, given | options)


def refused(config, message: str) -> str:
    """Training is refused in one line that matches; returns it."""
    with pytest.raises(InputError, match=message) as error:
        sft.train(config)
    store.unlock()  # as the command does when it ends
    line = str(error.value)
    assert "\n" not in line
    return line


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_equal_runs(a: Path, b: Path):
    a_weights, b_weights = tiny.weights(a / "model"), tiny.weights(b / "model")
    assert all(torch.equal(a_weights[name], b_weights[name]) for name in a_weights | b_weights)
    assert tiny.untimed(tiny.read_metrics(a)) == tiny.untimed(tiny.read_metrics(b))


def assert_same_weights(a, b, atol: float = 0.0, folder: str = "model"):
    a, b = tiny.weights(Path(a) / folder), tiny.weights(Path(b) / folder)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_same_metrics(a, b, rtol: float):
    a, b = tiny.untimed(tiny.read_metrics(a)), tiny.untimed(tiny.read_metrics(b))
    assert [m.keys() for m in a] == [m.keys() for m in b]
    for x, y in zip(a, b, strict=True):
        for key in x:
            assert y[key] == pytest.approx(x[key], rel=rtol, abs=rtol), (x["step"], key)


def resumed(files, folder: Path, whole: Path, step: int, **options) -> Path:
    """The run, continued from a step with other options."""
    shutil.copytree(whole, folder)
    sft.train(run_config(files, folder, resume_from=f"step-{step}", **options))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def trainers() -> list[type[RunConfig]]:
    """The config of every command that trains."""
    return [trainer.config_class() for trainer in cli.TRAINERS.values()]


def on_ranks(function, world: int, *args, timeout: int = 500) -> list:
    """`run_distributed` of a function that trains, its figures left out; one rank is this process."""
    if world == 1:
        return [function(0, 1, *args)]
    return run_distributed(undrawn, world, function, *args, timeout=timeout)


def undrawn(rank: int, world: int, function, *args):
    figures.leave_out()
    return function(rank, world, *args)


def forget_after(whole, stopped, step: int) -> None:
    """Copy a run as it was when it was stopped after a step; of several processes the first one copies."""
    if ranks.process_index() == 0:
        shutil.copytree(whole, stopped)
        checkpoints = Path(stopped) / "checkpoints"
        later = [
            checkpoints / f"step-{other}" for other in store.steps_in(checkpoints) if other > step
        ]
        for path in [Path(stopped) / "model", Path(stopped) / "critic", *later]:
            shutil.rmtree(path, ignore_errors=True)
    ranks.barrier()
    torch.manual_seed(1234)  # what this process draws must come from the checkpoint


def stopped_after(trainer, config, step: int) -> str:
    """The trainer's command, which gets a SIGTERM in a step, says that it stops after it, and does; what it printed."""
    made, train_step, out = [], trainer.train_step, io.StringIO()

    def recorded(*args):
        made.append(args)
        if len(made) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*args)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(trainer, "train_step", recorded)
        with pytest.raises(SystemExit) as stopped:
            trainer.main(killed.words_of(config))
    assert stopped.value.code == 130 and "continue with --resume" in out.getvalue()
    return out.getvalue()
