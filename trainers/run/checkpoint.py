"""The folder of a run, and its checkpoints: a run continues from one bit for bit, and an interruption at any moment
leaves it complete.

    checkpoints/latest              the name of one
    checkpoints/step-4/manifest.json    size and checksum of every file below
                       state.json       the step, the trainer's state, what the run was
                       config.yaml      its options
                       rng-0.pt         the generators of each rank
                       policy/          what DeepSpeed writes of each engine

A run opens its folder (`open_run`), which changes nothing in it; when all that it reads is read, `claim` does.
"""

import json
import os
import random
import re
import shutil
import zlib
from pathlib import Path

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
from fused_rl.trainers.data import fingerprints, sources
from fused_rl.trainers.data.fingerprints import Fingerprints
from fused_rl.trainers.options.config import InputError, RunConfig, to_yaml
from fused_rl.trainers.run import hub, lock, resume
from fused_rl.trainers.run.logger import require_trackers

OF_A_RUN = "# fused-rl "  # how the config.yaml of a run begins

# The folder of a run.


def open_run(config: RunConfig) -> Path:
    """The output folder, locked for this run and fit for it; nothing in it has changed yet.

    Raises:
        InputError: accept_changes names nothing, the folder cannot be written, another run lives in it or has left
            files, the run would delete what it reads, there is nothing whole to resume from, or what the run will tell
            of itself has nowhere to go.
    """
    unknown = [name for name in config.accept_changes or [] if name not in fingerprints.NAMES]
    if unknown:
        raise InputError(f"accept_changes: {', '.join(unknown)!r} is none of {', '.join(fingerprints.NAMES)}")
    require_trackers(config)
    hub.check(config)
    folder = Path(config.output_dir)
    ranks.on_first_rank(lambda: _check_folder(config, folder))
    if config.resume:
        _check_resume(config, folder)
    return folder


def _check_folder(config: RunConfig, folder: Path) -> None:
    if config.resume and config.overwrite:
        raise InputError(
            "resume continues the run in output_dir and overwrite deletes it: give one of them; --overwrite false "
            "takes back what a config file says"
        )
    if config.resume and not (folder / "checkpoints").exists():
        done = f"; its trained model is {folder / 'model'}" if (folder / "model").exists() else ""
        raise InputError(f"resume: there is no checkpoint in {folder / 'checkpoints'}{done}")
    lock.release()  # of a run before this one in the process: releasing may remove the folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.take(folder)
    except OSError as error:
        raise InputError(f"output_dir={folder} cannot be used: {error.strerror}; choose another folder") from error
    if config.resume:
        # What the run will put others in the place of; a run of an earlier version has no list.
        models = [name for name in ("model", "critic") if os.path.lexists(folder / name)]
        if models and written.has_list(folder):
            written.check(folder, models, "move it elsewhere, or resume in a copy of the folder without it")
        return
    found = written.there(folder)
    if found and not config.overwrite:
        raise InputError(
            f"output_dir={folder} already holds a run ({', '.join(found)}); continue it with --resume or replace it: "
            "--overwrite"
        )
    if found:
        check_overwrite(config, folder, found)


def check_overwrite(config: RunConfig, folder: Path, names: list[str]) -> None:
    """Refuse to delete what stands under `names` where the run reads of it, or where no run wrote it."""
    sources.refuse_to_delete(config, [folder / name for name in names])
    written.check(folder, names, "move it elsewhere or delete it yourself, or choose another folder")


def check_config_files(config: RunConfig, files: list[Path]) -> None:
    """Refuse to overwrite a run in whose folder the config file lies that says so; its own is written anew."""
    folder = Path(config.output_dir)
    for path in files if config.overwrite else []:
        if path.resolve() == (folder / "config.yaml").resolve() and _wrote(path):
            continue
        sources.refuse_if_inside(path, f"--config {path}", [folder / name for name in written.there(folder)])


def claim(config: RunConfig, folder: Path, step: int) -> None:
    """Make an opened folder this run's: what lies beyond `step` goes, and all of another run; the config is kept."""
    ranks.on_first_rank(lambda: _claim(config, folder, step))


def _claim(config: RunConfig, folder: Path, step: int) -> None:
    with storing("config.yaml", folder):
        if config.resume:
            if not written.has_list(folder):
                written.adopt(folder)
            _forget_after(folder / "checkpoints", step)
        else:
            found = written.there(folder)
            if found:  # looked at again: reading models takes its time
                check_overwrite(config, folder, found)
                written.remove(folder)
            written.begin(folder)
        write_atomically(folder / "config.yaml", _described(config))


def _forget_after(folder: Path, step: int) -> None:
    """Make checkpoint `step` the latest, whatever `latest` was, and delete those beyond it."""
    if (folder / "latest").is_dir():
        delete(folder / "latest")
    write_atomically(folder / "latest", f"step-{step}")
    _sweep(folder)
    _drop(folder, [s for s in _steps(folder) if s > step])


def _described(config: RunConfig) -> str:
    return f"{OF_A_RUN}{config.command} --config <this file>\n{to_yaml(config)}"


def _wrote(config_file: Path) -> bool:
    return config_file.read_bytes().startswith(OF_A_RUN.encode())


# Writing.


def save(engines: dict[str, object], config: RunConfig, folder: Path, step: int, state: dict) -> None:
    """Write checkpoint `step`: all files first, under another name, then the rename, then `latest`.

    Args:
        engines: DeepSpeed engines by name (weights, optimizer, schedule of each): a folder each.
        config: of the run.
        folder: the run's output folder.
        step: how many steps are done.
        state: what else the trainer needs to continue, JSON.

    Raises:
        InputError: the disk is full or refuses; nothing of the checkpoint is left, and those before it are.
    """
    folder = folder / "checkpoints"
    tag, unfinished = f"step-{step}", folder / f"step-{step}.tmp"
    with storing(f"checkpoint {tag}", folder):
        # All files, on the disk.
        try:
            _write(engines, config, unfinished, {"step": step, **state})
            _seal(unfinished)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

        # Their names.
        if rank() == 0:
            names = [f"checkpoints/{tag}/{name}" for name in written.names_below(unfinished)]
            written.add(folder.parent, names)
            delete(folder / tag)
            os.rename(unfinished, folder / tag)
            sync(folder)
            write_atomically(folder / "latest", tag)
            _prune(folder, step, config)
    barrier()


def _write(engines: dict[str, object], config: RunConfig, folder: Path, state: dict) -> None:
    """All files of a checkpoint but its manifest."""
    if rank() == 0:
        _sweep(folder.parent)
        folder.mkdir(parents=True)
    barrier()
    for name, trained in engines.items():
        trained.save_checkpoint(str(folder), tag=name, save_latest=False)
    # DeepSpeed keeps the client state of rank 0 only (ZeRO 0 to 2), so each rank writes its generators itself.
    torch.save(_generators(), folder / f"rng-{rank()}.pt")
    if rank() == 0:
        about = {"engines": sorted(engines), "facts": facts(config), "scheduled": bool(config.save_every), **state}
        (folder / "state.json").write_text(json.dumps(about))
        (folder / "config.yaml").write_text(_described(config), encoding="utf-8")
    barrier()


def facts(config: RunConfig) -> dict[str, object]:
    """What a run is beside its options."""
    precision = str(engine.torch_dtype(config)).removeprefix("torch.")
    return {"command": config.command, "processes": world_size(), "precision": precision}


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


def _steps(folder: Path) -> list[int]:
    """The steps of which there are checkpoints, whole or damaged, in order."""
    names = [path.name for path in folder.glob("step-*") if path.is_dir()]
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


def _sweep(folder: Path) -> None:
    """Delete what a killed run had half written or half deleted."""
    for leftover in folder.glob("*.tmp"):
        delete(leftover)


def _prune(folder: Path, step: int, config: RunConfig) -> None:
    """Leave `keep_checkpoints`: first those beyond `step` go, of which a run knew that was resumed before them.

    A run without a schedule deletes none that a schedule wrote.
    """
    _drop(folder, [s for s in _steps(folder) if s > step])
    older = [s for s in _steps(folder) if s < step]
    if not config.save_every:
        older = [s for s in older if not _is_scheduled(folder / f"step-{s}")]
    _drop(folder, older[: max(0, len(older) + 1 - config.keep_checkpoints)])


def _drop(folder: Path, steps: list[int]) -> None:
    for step in steps:
        delete(folder / f"step-{step}")


def _is_scheduled(checkpoint: Path) -> bool:
    """Whether a schedule wrote it; one that does not say so (of an earlier version, damaged) is kept as if it had."""
    try:
        return json.loads((checkpoint / "state.json").read_bytes()).get("scheduled", True)
    except (OSError, ValueError, AttributeError, RecursionError):
        return True


def remove_unscheduled(folder: Path) -> None:
    """Delete the checkpoints that a run without a schedule wrote: they were to be there until its model was."""
    if rank() == 0:
        checkpoints = folder / "checkpoints"
        _drop(checkpoints, [s for s in _steps(checkpoints) if not _is_scheduled(checkpoints / f"step-{s}")])
        left = _steps(checkpoints)
        if left:
            write_atomically(checkpoints / "latest", f"step-{left[-1]}")
        else:
            delete(checkpoints)
    barrier()


# Reading.


def check_made_of(config: RunConfig, folder: Path, made_of: Fingerprints) -> list[str]:
    """What a resumed run is made of that its checkpoint's was not, as far as that was accepted; lines to tell."""
    folder = folder / "checkpoints"
    checkpoint = folder / _chosen(config, folder)
    recorded, accepted = json.loads((checkpoint / "state.json").read_text()), config.accept_changes or []
    if "rows" not in accepted:
        _check_count(recorded["rows"], int(made_of["rows"]["count"]))
    return fingerprints.check_resumed(made_of, recorded.get("made_of"), accepted, checkpoint)


def _check_count(recorded: int, rows: int) -> None:
    if rows != recorded:
        raise InputError(
            f"resume: there are {rows} rows to train on, and the checkpoint's run had {recorded}: dataset was edited, "
            "or eval_size and eval_dataset leave other rows of it; give the same again, go on with these "
            "(--accept_changes rows), or start anew with --overwrite"
        )


def _check_resume(config: RunConfig, folder: Path) -> None:
    """The checkpoint to resume from is whole and of a run like this one; says which it is, and what changes."""
    folder = folder / "checkpoints"
    tag = _chosen(config, folder)
    problem = damage(folder / tag)
    if problem is not None:
        raise InputError(f"resume: {problem}{_offer(folder, besides=tag)}")
    state = json.loads((folder / tag / "state.json").read_text())
    recorded = yaml.safe_load((folder / tag / "config.yaml").read_text(encoding="utf-8")) | state["facts"]
    changed = resume.changes(config, facts(config), recorded, folder / tag, summed="made_of" in state)
    if config.steps is not None:
        refuse_fewer_steps(config, state["step"])
    if rank() == 0:
        tell(*(f"resume: {line}" for line in (f"from {folder / tag}, which is whole", *changed)))


def refuse_fewer_steps(config: RunConfig, done: int) -> None:
    """Refuse to resume towards fewer steps than are done."""
    if done > config.steps:
        epochs = config.num_train_epochs
        where = Path(config.output_dir) / "checkpoints" / f"step-{done}"
        of = "" if epochs is None else f" (num_train_epochs={epochs:g})"
        raise InputError(f"resume: steps={config.steps}{of}, but {where} has done {done} already")


def _chosen(config: RunConfig, folder: Path) -> str:
    """The checkpoint to resume from: the one asked for, else the one that `latest` names. For all ranks at once."""
    if config.resume_from is not None:
        if not _names_a_checkpoint(folder, config.resume_from):
            there = ", ".join(f"step-{s}" for s in _steps(folder)) or "none"
            raise InputError(f"resume_from={config.resume_from!r} is not in {folder}: there is {there}")
        return config.resume_from
    problem, latest = None, folder / "latest"
    try:
        tag = latest.read_bytes().decode().strip()
        if not _names_a_checkpoint(folder, tag):
            problem = f"names {tag[:80]!r}, which is not there" if tag else "is empty"
    except UnicodeDecodeError:
        problem = "is not text"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    if problem is not None:
        raise InputError(f"resume: {latest} {problem}{_offer(folder)}")
    return tag


def _names_a_checkpoint(folder: Path, tag: str) -> bool:
    return re.fullmatch(r"step-\d+", tag) is not None and (folder / tag).is_dir()


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


def _offer(folder: Path, besides: str = "") -> str:
    """What a user can do about a checkpoint that cannot be used, as the end of a sentence. For all ranks."""
    for step in reversed(_steps(folder)):
        tag = f"step-{step}"
        if tag != besides and damage(folder / tag) is None:
            return f"; the newest whole checkpoint is {tag}: continue from it with --resume_from {tag}"
    return "; no other checkpoint is whole: start anew with --overwrite"


def load(engines: dict[str, object], config: RunConfig, folder: Path) -> dict:
    """Restore the checkpoint of an opened run into `engines` and this rank's generators; returns the saved state.

    The optimizers' options (learning rate, betas, weight decay, schedule) stay those of this run.
    """
    folder = folder / "checkpoints"
    folder = folder / _chosen(config, folder)
    state = json.loads((folder / "state.json").read_text())
    if state["engines"] != sorted(engines):
        raise InputError(f"checkpoint {folder} holds {state['engines']}, this run trains {sorted(engines)}")
    for name, trained in engines.items():
        engine.load_engine(trained, folder, name)
    _restore_generators(torch.load(folder / f"rng-{rank()}.pt", weights_only=True))
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
