"""Checkpoints from which a run continues bit for bit, and which an interruption at any moment leaves complete."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import torch

from fused_rl.trainers.config import InputError, RunConfig
from fused_rl.trainers.engine import barrier, global_sum, rank, world_size
from fused_rl.trainers.files import write_atomically

LEFT_BY_A_RUN = (
    "checkpoints",
    "tensorboard",
    "model",
    "critic",
    "metrics.jsonl",
    "samples.jsonl",
    "curves.png",
    "evaluation.json",
    "scores.png",
)


def open_run(config: RunConfig) -> Path:
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
        for name in LEFT_BY_A_RUN:
            _delete(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    barrier()
    return folder


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def save(engines: dict[str, object], folder: Path, step: int, state: dict, keep: int) -> None:
    """Write checkpoint `step`: all files first, under another name, then the rename, then `latest`.

    Args:
        engines: DeepSpeed engines by name (weights, optimizer, schedule of each): a folder each.
        folder: the run's output folder.
        step: how many steps are done.
        state: what else the trainer needs to continue, JSON.
        keep: how many checkpoints stay.
    """
    folder = folder / "checkpoints"
    tag, unfinished = f"step-{step}", folder / f"step-{step}.tmp"
    if rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier()
    for name, engine in engines.items():
        engine.save_checkpoint(str(unfinished), tag=name, save_latest=False)
    # DeepSpeed keeps the client state of rank 0 only (ZeRO 0 to 2), so each rank writes its generators itself.
    torch.save(_generators(), unfinished / f"rng-{rank()}.pt")
    if rank() == 0:
        about = {"step": step, "world_size": world_size(), "engines": sorted(engines), **state}
        (unfinished / "state.json").write_text(json.dumps(about))
    barrier()
    if rank() == 0:
        shutil.rmtree(folder / tag, ignore_errors=True)
        os.rename(unfinished, folder / tag)
        write_atomically(folder / "latest", tag)
        steps = sorted(int(p.name[5:]) for p in folder.glob("step-*") if p.name[5:].isdigit())
        for old in steps[: -max(keep, 1)]:
            shutil.rmtree(folder / f"step-{old}")
    barrier()


def load(engines: dict[str, object], folder: Path) -> dict:
    """Restore the latest checkpoint into `engines` and this rank's generators; returns `step` and the saved state."""
    folder = folder / "checkpoints"
    tag = (folder / "latest").read_text().strip()
    state = json.loads((folder / tag / "state.json").read_text())
    if state["world_size"] != world_size():
        raise InputError(
            f"checkpoint {folder / tag} is of {state['world_size']} processes, this run has {world_size()}"
        )
    if state["engines"] != sorted(engines):
        raise InputError(f"checkpoint {folder / tag} holds {state['engines']}, this run trains {sorted(engines)}")
    for name, engine in engines.items():
        engine.load_checkpoint(str(folder / tag), tag=name)
    _restore_generators(torch.load(folder / tag / f"rng-{rank()}.pt", weights_only=True))
    return state


def _generators() -> dict:
    version, words, gauss = random.getstate()
    return {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _restore_generators(state: dict) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


class Interruption:
    """From `begin` to `end` the first Ctrl-C or SIGTERM is only noted; the second one stops at once."""

    def __init__(self):
        self.received, self.previous = False, {}

    def begin(self) -> None:
        """Take over the signals."""
        self.previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}

    def end(self) -> None:
        """Give the signals back."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}

    def _handle(self, number, _frame):
        self.received = True
        signal.signal(number, self.previous[number])
        if rank() == 0:  # os.write: a print could interrupt another one
            os.write(1, b"\nstopping after this step, with a checkpoint; again to stop at once\n")

    def on_any_rank(self) -> bool:
        """Whether any process was told to stop; every rank gets the same answer."""
        return bool(global_sum(torch.tensor(float(self.received))))
