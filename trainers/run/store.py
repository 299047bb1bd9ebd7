"""The folder of a run and its checkpoints.

    runs/a/config.yaml, metrics.jsonl, curves.png, model/, …
    runs/a/checkpoints/step-4/manifest.json   size and checksum of every file below
                              state.json      the step, the options, the hashes of the inputs, the position in the data
                              rank-0.pt       the random generators of each rank, and the states of its own objects
                              policy/         the files that DeepSpeed writes for each engine

A run writes into an empty folder or continues the run that is there. `--overwrite` moves the old content to
runs/a/earlier-1, and a resumed run moves what it will write again: renames within a folder work on volumes, too. A run
deletes its own older checkpoints and nothing else. A checkpoint gets its name only when all its files are on the disk,
so the one with the most steps is the latest complete one.
"""

import contextlib
import functools
import json
import operator
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.util import Finalize
from pathlib import Path

import filelock
import torch

from ..base import engine, ranks
from ..base.files import (
    UNFINISHED,
    atomic_folder,
    delete,
    fingerprint,
    io_errors_in_a_line,
    names_read,
    remove,
    unfinished,
    write_atomically,
)
from ..base.options import changeable
from ..base.ranks import barrier, process_index, processes
from ..base.screen import print_line, print_rank0
from ..base.text import InputError
from ..options import ACTIONS, RunConfig, to_yaml
from .logger import read_metrics

LOCK = ".fused-rl.lock"
SAVED_AT_THE_END = ("model", "critic")
EARLIER = "earlier-"  # and a number: the folder in output_dir for what was in it before
# What a run has written before its first step.
BEFORE_A_STEP = ("config.yaml", "metrics.jsonl", "held_out.jsonl", "samples.jsonl", "tensorboard")
BEFORE_A_STEP += ("bad_rows.jsonl",)
# In a folder that counts as empty: our lock, earlier content that was moved, and a volume's lost+found.
STAYING_NAMES = re.compile(f"{re.escape(LOCK)}|{EARLIER}[0-9]+|lost\\+found")
_lock: filelock.FileLock | None = None  # of this process, which runs one training at a time
_outside: Path | None = None  # the folder that its run keeps outside of output_dir


def remove_at_end(folder: Path) -> None:
    """Remove a folder outside of output_dir when the run ends, in any way but a kill."""
    global _outside
    _outside = folder
    # `unlock` removes it, but an error in a notebook, for example, does not unlock. It is no `atexit` function, because
    # a child process of `multiprocessing` ends without calling those.
    Finalize(None, _remove_outside, exitpriority=0)


def _remove_outside() -> None:
    """Remove the folder that `remove_at_end` was given, once."""
    global _outside
    if _outside is not None:
        shutil.rmtree(_outside, ignore_errors=True)
        _outside = None


def unlock() -> None:
    """Unlock the folder that this process has locked, if any, and remove it if nothing was written into it."""
    global _lock
    _remove_outside()
    if _lock is not None:
        path = Path(_lock.lock_file)
        path.unlink(missing_ok=True)
        _lock.release()
        # rmdir removes the folder only if it is empty, so only if it was made for a run that has written nothing.
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        _lock = None
        names_read.clear()


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint in a folder of checkpoints, in ascending order."""
    names = [path.name for path in folder.glob("step-*") if path.is_dir()]
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-[0-9]+", name))


class RunFolder:
    """The output folder of a run: its lock, its old content, and its checkpoints."""

    def __init__(self, config: RunConfig):
        self.config = config
        # A function of the user's own may change the current folder.
        self.path = Path(config.output_dir).absolute()
        self.checkpoints = self.path / "checkpoints"
        # What the file holds when the run begins; a resumed run compares that, not where the file is.
        self.deepspeed_options = engine.deepspeed_options(config.deepspeed)

    # The folder.

    def check(self) -> None:
        """Raise the `InputError` that `open` would raise about the options and the folder, and change nothing."""
        config = self.config
        if config.resume and config.overwrite:
            raise InputError(
                "resume continues the run in output_dir and overwrite moves it away: give one of them; "
                "--overwrite false takes back what a config file says"
            )
        # Nothing to resume from is an error, because the run would otherwise silently start from the beginning.
        if config.resume and not steps_in(self.checkpoints):
            raise InputError(
                f"resume: there is no checkpoint in {self.checkpoints}; look at output_dir, or leave --resume out"
            )
        if config.overwrite and Path.cwd().is_relative_to(self.path.resolve()):
            problem = f"{self.path} is the current folder, or holds it, and overwrite would move all that is in it"
            raise InputError(f"output_dir={problem}; give the run a folder of its own")
        is_continued = config.resume or config.overwrite
        if self._contents() and not is_continued and not self._took_no_step():
            resume = "continue its run with --resume, " if steps_in(self.checkpoints) else ""
            remedy = f"{resume}move its content away with --overwrite, or choose another folder"
            raise InputError(f"output_dir={self.path} is not empty: {remedy}")

    def _took_no_step(self) -> bool:
        """Return True if all that is here is of a run that ended before its first step, as by an error in a scorer."""
        file = self.path / "config.yaml"
        is_of_run = file.is_file() and file.read_text(encoding="utf-8").startswith("# fused-rl ")
        if not is_of_run or any(path.name not in BEFORE_A_STEP for path in self._contents()):
            return False
        return not any(entry["step"] for entry in read_metrics(self.path / "metrics.jsonl"))

    def check_read_stays(self) -> None:
        """Refuse a run that would move away what it has read: rows, models, options, modules of the user's own.

        A resumed run would not find it, and saved adapters would name a base that is no longer there.
        """
        modules = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
        # There will be another config.yaml.
        moved = [path.resolve() for path in self._to_move() if path.name != "config.yaml"]
        for name in sorted({*names_read, *filter(None, modules)} if moved else ()):
            place = Path(name).resolve()
            if place == self.path.resolve() or any(map(place.is_relative_to, moved)):
                problem = f"{name} is read, and the run would move it away"
                raise InputError(f"output_dir={self.path}: {problem}; choose another folder")

    def _to_move(self) -> list[Path]:
        """Return what is moved before the first step: all that is there, or what a resumed run will write again."""
        old = self._contents()
        # These are the saved models, and the checkpoints after the one that it continues from, the latest first, so
        # that a kill in between leaves no gap.
        if self.config.resume:
            step = self.state()["step"]
            later = [s for s in reversed(steps_in(self.checkpoints)) if s > step]
            old = [path for path in old if path.name in SAVED_AT_THE_END]
            return [*(self.checkpoints / f"step-{s}" for s in later), *old]
        return old

    def open(self) -> None:
        """Lock the folder for this run, and check the checkpoint that it resumes from. All ranks must call this.

        Raises:
            InputError: the folder cannot be used, or the checkpoint is damaged or belongs to a run with other options.
        """
        ranks.on_first_rank(self._open)
        if not self.config.resume:
            return

        # The files: each rank reads its share of them, and all ranks then name the same problem.
        problems = []
        try:
            sums = json.loads((self.chosen / "manifest.json").read_bytes())
            if "state.json" not in sums:
                problems.append("manifest.json does not list its files")
            for name in sorted(sums)[process_index() :: processes()]:
                actual = list(fingerprint(self.chosen / name))
                if actual != sums[name]:
                    problems.append(
                        f"{name}: size and checksum should be {sums[name]}, and are {actual}"
                    )
        except (OSError, ValueError, TypeError) as error:
            problems.append(f"manifest.json or a file that it names cannot be read: {error}")
        problem = min(sum(ranks.gather_processes(problems), []), default=None)
        if problem is not None:
            remedy = "continue from an earlier one (--resume_from), or start again with --overwrite"
            raise InputError(f"resume: {self.chosen} is damaged, {problem}; {remedy}")

        # The options: those that change what is computed must be the same; others take their new value and are printed.
        before = self.state()["options"]
        # What the run has measured, it keeps.
        if self.config.micro_batch_size is None:
            for name in ("micro_batch_size", "micro_batch_tokens"):
                setattr(self.config, name, before[name])
        now = self._options()
        changed = {}
        for name in now.keys() & before.keys() - {*ACTIONS}:
            if before[name] != now[name]:
                changed[name] = f"{name} {before[name]} -> {now[name]}"
        fixed = changed.keys() - changeable(type(self.config))
        # With weight decay the optimizer has two groups of weights, without it one, and its state is saved by group.
        if not before["weight_decay"] or not now["weight_decay"]:
            fixed |= changed.keys() & {"weight_decay"}
        refused = [changed[name] for name in sorted(fixed)]
        if refused:
            raise InputError(
                f"resume: {self.chosen} was made with other options: {', '.join(refused)}; give the first value of "
                f"each again (--config {self.path / 'config.yaml'} --resume, on as many processes), or start again "
                "with --overwrite"
            )
        print_rank0(f"resume: from {self.chosen}, which is intact")
        self.changes = changed

    def _contents(self) -> list[Path]:
        """Return what is in the folder and would be moved."""
        with io_errors_in_a_line("the run", self.path):
            if not self.path.exists():
                return []
            return [path for path in self.path.iterdir() if not STAYING_NAMES.fullmatch(path.name)]

    def _open(self) -> None:
        """Check, make and lock the folder. On one rank."""
        global _lock
        unlock()
        self.check()
        if self.config.dry_run:
            # The disk is asked in the folder above, because a dry run leaves nothing behind.
            above = next(path for path in (self.path, *self.path.parents) if path.exists())
            with io_errors_in_a_line("the run", self.path), tempfile.TemporaryFile(dir=above):
                return
        with io_errors_in_a_line("the run", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.path / LOCK, blocking=False, thread_local=False)
            try:
                lock.acquire()
            except filelock.Timeout as error:
                problem = f"output_dir={self.path} is in use by another process"
                raise InputError(f"{problem}; wait for it, or choose another folder") from error
            _lock = lock

    def move_old_content(self) -> None:
        """Move the old content away and write config.yaml, when all inputs have been read. Call it on one rank."""
        old = self._to_move()
        if self.config.resume:
            # A run that was killed while it saved has left an unfinished folder.
            for leftover in self.checkpoints.glob(f"{UNFINISHED}*"):
                remove(leftover)

        # The content goes to the first of runs/a/earlier-1, runs/a/earlier-2, … that does not exist.
        number = 1
        while (earlier := self.path / f"{EARLIER}{number}").exists():
            number += 1
        for path in old:
            target = earlier / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        if earlier.exists():
            names = ", ".join(str(path.relative_to(self.path)) for path in old)
            print_line(f"moved {names} to {earlier}: this run writes its own")
        # A run that was killed after its last checkpoint got its name, but before older ones were deleted, saves no
        # other checkpoint, so they are deleted here.
        if self.config.resume:
            self._delete_older()

        precision = self._options()["precision"]
        header = (
            f"# fused-rl {self.config.command} --config <this file>\n# precision: {precision}\n"
        )
        write_atomically(self.path / "config.yaml", header + to_yaml(self.config))

    # Writing checkpoints.

    def save(self, engines: Mapping, step: int, state: dict, rank_state: Mapping) -> None:
        """Write the checkpoint of a step, and delete all but the latest `keep_checkpoints`. All ranks must call this.

        If the disk is full, nothing of this checkpoint stays behind, and the older ones are intact.

        Args:
            engines: the DeepSpeed engines by name.
            step: the number of the step, which names the checkpoint.
            state: what else is needed to continue, which is written to state.json.
            rank_state: this rank's objects with a `state_dict`, by name.
        """
        folder = self.checkpoints / f"step-{step}"
        place = unfinished(folder)
        writing = atomic_folder(folder) if process_index() == 0 else contextlib.nullcontext()
        with io_errors_in_a_line(f"checkpoint {folder.name}", self.checkpoints):
            with writing:
                # Every rank writes its files; when all are there, each rank computes the checksums of a share of them.
                barrier()
                for name, trained in engines.items():
                    trained.save_checkpoint(str(place), tag=name, save_latest=False)
                states = {name: item.state_dict() for name, item in rank_state.items()}
                cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
                generators = {
                    "python": random.getstate(),
                    "torch": torch.get_rng_state(),
                    "cuda": cuda,
                }
                torch.save(
                    {"generators": generators, "own": states}, place / f"rank-{process_index()}.pt"
                )
                if process_index() == 0:
                    saved = {
                        "step": step,
                        "engines": sorted(engines),
                        "options": self._options(),
                        **state,
                    }
                    (place / "state.json").write_text(json.dumps(saved))
                barrier()
                files = sorted(filter(Path.is_file, place.rglob("*")))
                share = files[process_index() :: processes()]
                fingerprints = ranks.gather_processes(
                    {path.relative_to(place).as_posix(): fingerprint(path) for path in share}
                )
                if process_index() == 0:
                    (place / "manifest.json").write_text(
                        json.dumps(functools.reduce(operator.or_, fingerprints), indent=1)
                    )
            if process_index() == 0:
                self._delete_older()
        barrier()

    def _delete_older(self) -> None:
        """Delete the checkpoints before the latest `keep_checkpoints`."""
        for step in steps_in(self.checkpoints)[: -self.config.keep_checkpoints]:
            delete(self.checkpoints / f"step-{step}")

    def _options(self) -> dict[str, object]:
        """Return the options of the run, and what else must be the same when it is resumed, as JSON reads them back."""
        precision = str(engine.torch_dtype(self.config)).removeprefix("torch.")
        facts = {"command": self.config.command, "processes": processes(), "precision": precision}
        facts["deepspeed"] = self.deepspeed_options
        return json.loads(json.dumps({**self.config.to_dict(), **facts}))

    def remove_checkpoints(self) -> None:
        """Delete all checkpoints of a run without a schedule, which has them only until the model is saved."""
        if process_index() == 0:
            for step in steps_in(self.checkpoints):
                delete(self.checkpoints / f"step-{step}")
            # The folder stays if the user has put something into it.
            with contextlib.suppress(OSError):
                self.checkpoints.rmdir()
        barrier()

    # Reading checkpoints.

    @property
    def chosen(self) -> Path:
        """The checkpoint to resume from: the one that `resume_from` names, or the latest."""
        names = [f"step-{step}" for step in steps_in(self.checkpoints)]
        name = self.config.resume_from or names[-1]
        if name not in names:
            raise InputError(
                f"resume_from={name!r} is not in {self.checkpoints}: there is {', '.join(names)}"
            )
        return self.checkpoints / name

    def state(self) -> dict:
        """Return the content of the state.json of the checkpoint to resume from."""
        return json.loads((self.chosen / "state.json").read_bytes())

    def check_inputs(self, inputs: Mapping[str, str]) -> list[str]:
        """Return the names of the inputs that differ from those of the checkpoint.

        Args:
            inputs: the hash of each input, by name.

        Raises:
            InputError: an input differs, and the run does not accept such changes.
        """
        recorded = self.state()["inputs"]
        changed = [name for name in recorded | inputs if recorded.get(name) != inputs.get(name)]
        if changed and not self.config.accept_changes:
            raise InputError(
                f"resume: these inputs are not those of {self.chosen}: {', '.join(changed)}; restore them, continue "
                "with the new ones (--accept_changes), or start again with --overwrite"
            )
        return changed

    def load(self, engines: Mapping, rank_state: Mapping) -> dict:
        """Restore the engines, this rank's random generators and its own objects, and return the content of state.json.

        The options of the optimizers (learning rate, betas, weight decay, schedule) stay those of this run.

        Args:
            engines: the DeepSpeed engines by name.
            rank_state: this rank's objects with a `load_state_dict`, by name.

        Raises:
            InputError: the checkpoint has more steps than the run.
        """
        chosen = self.chosen
        state = self.state()
        config = self.config
        if state["step"] > config.steps:
            raise InputError(
                f"resume: steps={config.steps}, but {chosen} has done {state['step']} already"
            )

        # No error of the user can follow, so it is safe to say that the new options hold.
        for line in self.changes.values():
            print_rank0(f"resume: {line}")

        # First the engines, with weights and optimizers, and then what this rank keeps for itself.
        for name, trained in engines.items():
            engine.load_engine(trained, chosen, name)
        kept = torch.load(chosen / f"rank-{process_index()}.pt", weights_only=True)
        generators = kept["generators"]
        random.setstate(generators["python"])
        torch.set_rng_state(generators["torch"])
        if generators["cuda"] is not None:
            torch.cuda.set_rng_state(generators["cuda"])
        for name, state_of_rank in kept["own"].items():
            rank_state[name].load_state_dict(state_of_rank)
        return state
