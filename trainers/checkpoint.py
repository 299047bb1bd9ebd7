"""Checkpoints from which a run continues bit for bit, and which an interruption at any moment leaves complete."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import torch

from fused_rl.trainers.cli import InputError
from fused_rl.trainers.engine import barrier, global_sum, rank, world_size


def open_run(config) -> Path:
    """The output folder, ready for a new run or to be resumed."""
    folder = Path(config.output_dir)
    started = (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()
    if config.resume and not (folder / "checkpoints" / "latest").exists():
        raise InputError(f"resume: there is no checkpoint in {folder / 'checkpoints'}")
    if started and not config.resume and not config.overwrite:
        raise InputError(
            f"output_dir={folder} already holds a run; continue it with --resume or replace it: --overwrite"
        )
    if rank() == 0 and not config.resume:
        for name in ("checkpoints", "tensorboard", "model"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("metrics.jsonl", "samples.jsonl", "curves.png"):
            (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    barrier()
    return folder


def save(engine, folder: Path, step: int, state: dict, keep: int) -> None:
    """Write checkpoint `step`: all files first, under another name, then the rename, then `latest`.

    Args:
        engine: the DeepSpeed engine (weights, optimizer, schedule).
        folder: the run's output folder.
        step: how many steps are done.
        state: what else the trainer needs to continue, JSON.
        keep: how many checkpoints stay.
    """
    folder = folder / "checkpoints"
    tag, unfinished = f"step-{step}", folder / f"step-{step}.tmp"
    if rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    barrier()
    engine.save_checkpoint(str(folder), tag=unfinished.name, save_latest=False)
    # DeepSpeed keeps the client state of rank 0 only (ZeRO 0 to 2), so each rank writes its generators itself.
    torch.save(_generators(), unfinished / f"rng-{rank()}.pt")
    if rank() == 0:
        (unfinished / "state.json").write_text(json.dumps({"step": step, "world_size": world_size(), **state}))
    barrier()
    if rank() == 0:
        shutil.rmtree(folder / tag, ignore_errors=True)
        os.rename(unfinished, folder / tag)
        write_atomically(folder / "latest", tag)
        steps = sorted(int(p.name[5:]) for p in folder.glob("step-*") if p.name[5:].isdigit())
        for old in steps[: -max(keep, 1)]:
            shutil.rmtree(folder / f"step-{old}")
    barrier()


def load(engine, folder: Path) -> dict:
    """Restore the latest checkpoint into `engine` and this rank's generators; returns `step` and the saved state."""
    folder = folder / "checkpoints"
    tag = (folder / "latest").read_text().strip()
    state = json.loads((folder / tag / "state.json").read_text())
    if state["world_size"] != world_size():
        raise InputError(
            f"checkpoint {folder / tag} is of {state['world_size']} processes, this run has {world_size()}"
        )
    engine.load_checkpoint(str(folder), tag=tag)
    _restore_generators(torch.load(folder / tag / f"rng-{rank()}.pt", weights_only=False))
    return state


def resume(engine, folder: Path, sampler) -> int:
    """Continue from the latest checkpoint: engine, generators and data position; returns how many steps are done."""
    state = load(engine, folder)
    sampler.position = state["position"]
    return state["step"]


class Saver:
    """Saves on schedule, and when the run is told to stop; `seconds` is what the last checkpoint took."""

    def __init__(self, engine, folder: Path, config, sampler, state=dict):
        """state: a function that returns what else the trainer needs to continue, JSON."""
        self.engine, self.folder, self.config, self.sampler, self.seconds = engine, folder, config, sampler, 0.0
        self.state = state

    def after(self, step: int, interruption: "Interruption") -> bool:
        """Call at the end of each step; True when the run must stop now."""
        stop = interruption.on_any_rank() and step < self.config.steps
        if stop or (self.config.save_every and (step % self.config.save_every == 0 or step == self.config.steps)):
            began = time.monotonic()
            state = {"position": self.sampler.position, **self.state()}
            save(self.engine, self.folder, step, state, self.config.keep_checkpoints)
            self.seconds = time.monotonic() - began
        if stop and rank() == 0:
            print(f"stopped after step {step}; continue with --resume", flush=True)
        return stop


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, so that no reader ever sees half of it."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _generators() -> dict:
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _restore_generators(state: dict) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


class Interruption:
    """Within this context the first Ctrl-C or SIGTERM lets the step end and be saved; the second one stops at once."""

    def __enter__(self):
        self.received = False
        self.previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number, _frame):
        self.received = True
        signal.signal(number, self.previous[number])

    def on_any_rank(self) -> bool:
        """Whether any process was told to stop; every rank gets the same answer."""
        return bool(global_sum(torch.tensor(float(self.received))))
