"""The checkpoints of a run: it continues from one bit for bit, and an interruption at any moment leaves it complete.

checkpoints/latest              the name of one
checkpoints/step-4/manifest.json    size and checksum of every file below
                   state.json       the step, the trainer's state, what the run was
                   config.yaml      its options
                   rng-0.pt         the generators of each rank, and what else it keeps for itself
                   policy/          what DeepSpeed writes of each engine
"""

import json
import os
import random
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
import yaml

from fused_rl.trainers.base import engine, ranks, written
from fused_rl.trainers.base.files import (
    Fingerprint,
    delete,
    files_below,
    fingerprint,
    storing,
    sync,
    sync_folders,
    write_atomically,
)
from fused_rl.trainers.base.ranks import barrier, rank, world_size
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data import fingerprints
from fused_rl.trainers.options import resume
from fused_rl.trainers.options.config import InputError, RunConfig, to_yaml

OF_A_RUN = "# fused-rl "  # how the config.yaml of a run begins
NOTHING: Mapping[str, "Kept"] = MappingProxyType({})


class Kept(Protocol):
    """What each rank keeps for itself over a resume; its state holds tensors, numbers, text, lists and dicts alone."""

    def state_dict(self) -> dict:
        """What goes on from here."""

    def load_state_dict(self, state: dict) -> None:
        """Go on from there."""


class Checkpoints:
    """Those of a run, in its folder."""

    def __init__(self, config: RunConfig):
        self.config, self.folder = config, Path(config.output_dir) / "checkpoints"

    def config_file(self) -> str:
        """The config.yaml of the run; its second line tells what dtype auto is here."""
        begun = f"{OF_A_RUN}{self.config.command} --config <this file>\n# precision: {self._facts()['precision']}\n"
        return begun + to_yaml(self.config)

    # Writing.

    def save(self, engines: dict[str, object], step: int, state: dict, own: Mapping[str, Kept] = NOTHING) -> None:
        """Write checkpoint `step`: all files first, under another name, then the rename, then `latest`.

        Of each DeepSpeed engine weights, optimizer and schedule go into a folder of its name; `state` is JSON, `own` is
        what each rank keeps for itself.

        Raises:
            InputError: the disk is full or refuses; nothing of the checkpoint is left, and those before it are.
        """
        tag, unfinished = f"step-{step}", self.folder / f"step-{step}.tmp"
        with storing(f"checkpoint {tag}", self.folder):
            # All files, on the disk.
            try:
                self._write(engines, unfinished, {"step": step, **state}, own)
                _seal(unfinished)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise

            # Their names.
            if rank() == 0:
                names = [f"checkpoints/{tag}/{name}" for name in written.names_below(unfinished)]
                written.add(self.folder.parent, names)
                os.rename(unfinished, self.folder / tag)
                sync(self.folder)
                write_atomically(self.folder / "latest", tag)
                self._prune(step)
        barrier()

    def _write(self, engines: dict[str, object], folder: Path, state: dict, own: Mapping[str, Kept]) -> None:
        """All files of a checkpoint but its manifest."""
        if rank() == 0:
            self._sweep()
            folder.mkdir(parents=True)
        barrier()
        for name, trained in engines.items():
            trained.save_checkpoint(str(folder), tag=name, save_latest=False)
        # DeepSpeed keeps the client state of rank 0 only (ZeRO 0 to 2), so each rank writes its generators itself.
        kept = {name: mine.state_dict() for name, mine in own.items()}
        torch.save(_generators() | {"own": kept}, folder / f"rng-{rank()}.pt")
        if rank() == 0:
            about = {"engines": sorted(engines), "facts": self._facts(), "scheduled": bool(self.config.save_every)}
            (folder / "state.json").write_text(json.dumps(about | state))
            (folder / "config.yaml").write_text(self.config_file(), encoding="utf-8")
        barrier()

    def _facts(self) -> dict[str, object]:
        """What a run is beside its options."""
        precision = str(engine.torch_dtype(self.config)).removeprefix("torch.")
        return {"command": self.config.command, "processes": world_size(), "precision": precision}

    # Deleting, on the first rank.

    def _steps(self) -> list[int]:
        return steps_in(self.folder)

    def _sweep(self) -> None:
        """Delete what a killed run had half written or half deleted."""
        for leftover in self.folder.glob("*.tmp"):
            delete(leftover)

    def _drop(self, steps: list[int]) -> None:
        for step in steps:
            delete(self.folder / f"step-{step}")

    def _prune(self, step: int) -> None:
        """Leave `keep_checkpoints`: first those beyond `step` go, of which a run knew that was resumed before them.

        A run without a schedule deletes none that a schedule wrote.
        """
        self._drop([s for s in self._steps() if s > step])
        older = [s for s in self._steps() if s < step]
        if not self.config.save_every:
            older = [s for s in older if not self._is_scheduled(s)]
        self._drop(older[: max(0, len(older) + 1 - self.config.keep_checkpoints)])

    def _is_scheduled(self, step: int) -> bool:
        """Whether a schedule wrote it; one that does not say so (of an earlier version, damaged) is kept as if so."""
        try:
            return json.loads((self.folder / f"step-{step}" / "state.json").read_bytes()).get("scheduled", True)
        except (OSError, ValueError, AttributeError, RecursionError):
            return True

    def forget_after(self, step: int) -> None:
        """Make checkpoint `step` the latest, whatever `latest` was, and delete those beyond it."""
        if (self.folder / "latest").is_dir():
            delete(self.folder / "latest")
        write_atomically(self.folder / "latest", f"step-{step}")
        self._sweep()
        self._drop([s for s in self._steps() if s > step])

    def remove_unscheduled(self) -> None:
        """Delete those that a run without a schedule wrote: they were to be there until its model was."""
        if rank() == 0:
            self._drop([s for s in self._steps() if not self._is_scheduled(s)])
            left = self._steps()
            if left:
                write_atomically(self.folder / "latest", f"step-{left[-1]}")
            else:
                delete(self.folder)
        barrier()

    # Reading.

    def check(self) -> None:
        """The checkpoint to resume from is whole and of a run like this one; says which it is, and what changes."""
        chosen = self._chosen()
        problem = damage(chosen)
        if problem is not None:
            raise InputError(f"resume: {problem}{self._offer(besides=chosen)}")
        state = json.loads((chosen / "state.json").read_text())
        recorded = self.recorded() | state["facts"]
        changed = resume.changes(self.config, self._facts(), recorded, chosen)
        if self.config.steps is not None:
            self._refuse_fewer_steps(state["step"])
        if rank() == 0:
            tell(*(f"resume: {line}" for line in (f"from {chosen}, which is whole", *changed)))

    def recorded(self) -> dict[str, object]:
        """The options of the run that wrote the checkpoint."""
        return yaml.safe_load((self._chosen() / "config.yaml").read_text(encoding="utf-8"))

    def check_inputs(self, inputs: Mapping[str, str]) -> list[str]:
        """Return the inputs that are not those of the checkpoint, if the run accepts such changes."""
        chosen = self._chosen()
        recorded = json.loads((chosen / "state.json").read_text())["inputs"]
        return fingerprints.check_resumed(inputs, recorded, self.config.accept_changes, chosen)

    def load(self, engines: dict[str, object], own: Mapping[str, Kept] = NOTHING) -> dict:
        """Restore the checkpoint into `engines`, this rank's generators and its `own`; returns the saved state.

        What the checkpoint does not have, one of an earlier version, stays as it is made when a run begins.

        The optimizers' options (learning rate, betas, weight decay, schedule) stay those of this run.
        """
        chosen = self._chosen()
        state = json.loads((chosen / "state.json").read_text())
        if state["engines"] != sorted(engines):
            raise InputError(f"checkpoint {chosen} holds {state['engines']}, this run trains {sorted(engines)}")
        for name, trained in engines.items():
            engine.load_engine(trained, chosen, name)
        kept = torch.load(chosen / f"rng-{rank()}.pt", weights_only=True)
        _restore_generators(kept)
        for name, state_of_rank in kept.get("own", {}).items():
            own[name].load_state_dict(state_of_rank)
        self._refuse_fewer_steps(state["step"])
        return state

    def _refuse_fewer_steps(self, done: int) -> None:
        """Refuse to resume towards fewer steps than are done."""
        steps, epochs = self.config.steps, self.config.num_train_epochs
        if done > steps:
            of = "" if epochs is None else f" (num_train_epochs={epochs:g})"
            raise InputError(f"resume: steps={steps}{of}, but {self.folder / f'step-{done}'} has done {done} already")

    def _chosen(self) -> Path:
        """The checkpoint to resume from: the one asked for, else the one that `latest` names. For all ranks at once."""
        asked, problem, latest = self.config.resume_from, None, self.folder / "latest"
        if asked is not None:
            if not self._holds(asked):
                there = ", ".join(f"step-{s}" for s in self._steps()) or "none"
                raise InputError(f"resume_from={asked!r} is not in {self.folder}: there is {there}")
            return self.folder / asked
        try:
            tag = latest.read_bytes().decode().strip()
            if not self._holds(tag):
                problem = f"names {tag[:80]!r}, which is not there" if tag else "is empty"
        except UnicodeDecodeError:
            problem = "is not text"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        if problem is not None:
            raise InputError(f"resume: {latest} {problem}{self._offer()}")
        return self.folder / tag

    def _holds(self, tag: str) -> bool:
        return re.fullmatch(r"step-\d+", tag) is not None and (self.folder / tag).is_dir()

    def _offer(self, besides: Path | None = None) -> str:
        """What a user can do about a checkpoint that cannot be used, as the end of a sentence. For all ranks."""
        for checkpoint in (self.folder / f"step-{step}" for step in reversed(self._steps())):
            if checkpoint != besides and damage(checkpoint) is None:
                tag = checkpoint.name
                return f"; the newest whole checkpoint is {tag}: continue from it with --resume_from {tag}"
        return "; no other checkpoint is whole: start anew with --overwrite"


def steps_in(folder: Path) -> list[int]:
    """The steps of which there are checkpoints in a folder of them, whole or damaged, in order."""
    names = [path.name for path in folder.glob("step-*") if path.is_dir()]
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


def _seal(folder: Path) -> None:
    """Have all files on the disk, and then a manifest of them; every rank reads its share."""
    found = {}
    for path in files_below(folder)[rank() :: world_size()]:
        sync(path)
        found[path.relative_to(folder).as_posix()] = fingerprint(path)
    parts = ranks.gather(found)
    if rank() == 0:
        files = {}
        for part in parts:
            files |= part
        write_atomically(folder / "manifest.json", json.dumps({"crc32": _crc32(files), "files": files}, indent=1))
        sync_folders(folder)


def _crc32(files: dict[str, Fingerprint]) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def damage(checkpoint: Path) -> str | None:
    """What of a checkpoint is not as written: file, expected, found; None where it is whole. For all ranks at once."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
        files = manifest["files"]
        if _crc32(files) != manifest["crc32"]:
            raise ValueError
    except FileNotFoundError:
        return f"{checkpoint / 'manifest.json'} is missing"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{checkpoint / 'manifest.json'} is not what was written"
    problems = []
    for name in sorted(files)[rank() :: world_size()]:
        problem = _difference(checkpoint / name, Fingerprint(*files[name]))
        problems += [] if problem is None else [problem]
    problems = sum(ranks.gather(problems), [])
    return min(problems, default=None)


def _difference(path: Path, expected: Fingerprint) -> str | None:
    try:
        found = fingerprint(path)
    except OSError as error:
        return f"{path}: expected {expected}, but {error.strerror}"
    return None if found == expected else f"{path} is damaged: expected {expected}, found {found}"


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
