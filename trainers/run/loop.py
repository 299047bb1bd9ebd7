"""What a run is for every trainer: how it begins and resumes, and when it evaluates, logs, saves and stops.

    run = Run(config, batch_plan)                      # the processes meet and lock the folder
    config = run.read(config, encoded)                 # tokenizer and rows, compared with those of the other processes
    model = run.load(load_lm)                          # and its engine; a dry run ends here
    run.start({"policy": model}, evaluate=evaluate)    # from a checkpoint if it is resumed
    for step, indices in run:
        run.log(train_step(indices))                   # evaluates when that is due
    return run.finish(save)

The `for` loop and the algorithm stay in the trainer.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
from torch.utils.data import ConcatDataset

from ..base import engine, optim, ranks
from ..base.files import (
    hash_of,
    hash_of_model,
    io_errors_in_a_line,
    write_rows,
)
from ..base.screen import phase, print_line, print_rank0
from ..base.text import InputError, check_installed, import_name_of, users_function
from ..data.encode import Encoder, load_tokenizer
from ..data.examples import Examples
from ..data.order import RowOrder, in_steps
from ..data.reading import RowReport, RowsLike, load_train_eval
from ..data.rows import Rows, load_rows
from ..options import RunConfig
from . import hooks
from .logger import Logger
from .metrics import EMPTY, Evaluation
from .positions import check_fits
from .store import RunFolder, steps_in, unlock

BatchPlan = Callable[[Any, int], dict[str, object]]
"""(config, number of processes) -> how the batch divides, in lines by title; raises `InputError` if it does not."""
Config = TypeVar("Config", bound=RunConfig)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The handlers of these signals before a run of this process replaced them.
_handlers: dict[int, Any] = {}


class Stopped(KeyboardInterrupt):
    """The run was stopped by a signal, or by an error of `on_step`, after the same step on every process.

    If the step was one of training, it has a checkpoint.
    """


class DryRun(Exception):
    """Ends a dry run with what it prints."""


def restore_signals() -> None:
    """Give SIGINT and SIGTERM the handlers that they had before a run of this process."""
    for number in SIGNALS:
        if number in _handlers:
            signal.signal(number, _handlers.pop(number))


def kept() -> str:
    """Return what an error leaves of the run of this process, to follow a message; "" before its steps."""
    if Run.current is None:
        return ""
    steps = steps_in(Run.current.store.checkpoints)
    remedy = f"--resume continues after step {steps[-1]}" if steps else "it has no checkpoint yet"
    return f"; the run ended in step {Run.current.step}, and {remedy} (--save_every)"


def check_start(config: RunConfig, batch_plan: BatchPlan) -> None:
    """Check the options before anything is read, as a dry run does too.

    Raises:
        InputError: options contradict each other, or need a package or function that is not there.
    """
    config.check()  # once more, because Python code may have set options since the config was made
    engine.silence_libraries()  # what follows imports DeepSpeed
    config.resolve()
    optim.schedule_function(config.lr_schedule)
    batch_plan(config, ranks.planned_ranks(config.sequence_parallel))
    # What a run needs at its end is imported now.
    for module in ("peft", "torch.utils.tensorboard", "matplotlib.backends.backend_agg"):
        check_installed(f"fused-rl {config.command}", module, "'fused-rl[train]'")
    if config.wandb_project is not None:
        check_installed("wandb_project", "wandb", "wandb")


class Run:
    """A run of a trainer, and an iterator over (step, indices of the step's rows)."""

    current: "ClassVar[Run | None]" = None
    """The run of this process that is among its steps."""

    def __init__(
        self, config: RunConfig, batch_plan: BatchPlan, on_step: hooks.OnStep | None = None
    ):
        """Check the options, meet the other processes, and lock the folder.

        Args:
            config: the options of the run.
            batch_plan: returns how the batch divides over the processes.
            on_step: a function to call after each step, as `--on_step` names one.
        """
        ranks.planned = config.processes
        # Errors that need no other process are raised before this one waits for them.
        check_start(config, batch_plan)
        self.batch_plan = batch_plan
        self.on_step = users_function("on_step", config.on_step, on_step, "step")
        self.hook_name = None if self.on_step is None else import_name_of(self.on_step)

        # From here on all ranks act together. A rank with other options would wait in another collective or train
        # something else, so the options are compared.
        self.device = engine.setup(config.seed, sequence_parallel=config.sequence_parallel)
        # The models of a dry run have no weights.
        if config.dry_run:
            self.device = torch.device("meta")
        self.store = RunFolder(config)
        passed = {"deepspeed": self.store.deepspeed_options}
        ranks.check_equal({"command": config.command, **config.to_dict(), **passed})
        # A token that may not write must fail now, and not after hours of training.
        if config.push_to_hub and not config.dry_run:
            from . import hub

            ranks.on_first_rank(lambda: hub.make_repository(config))
        self.store.open()
        self.step = 0
        self.last_evaluation = Evaluation()
        self.save_seconds = 0.0
        self.signalled = False
        # on_step has ended the run: on this process, and on all.
        self.hook_asked_to_end = self.hook_ended = False
        self.hook_error: BaseException | None = None

    def check_inputs(
        self,
        config: Config,
        tokenizer,
        models: Mapping[str, str],
        *,
        rows: Examples,
        held_out: Examples,
        scorers_read: Mapping[str, object] = {},
        **other_rows: list[str],
    ) -> Config:
        """Compare the inputs with those of the other processes and of the run that is resumed, by their hashes.

        Args:
            config: the options, which are returned with the steps that `num_train_epochs` comes to.
            tokenizer: the tokenizer, whose chat template is one of the inputs.
            models: the further models that the run reads, by the option that names them.
            rows: the examples to train on.
            held_out: the held-out examples, which may differ from those of the run that is resumed.
            scorers_read: what scorers read in the first row beside the prompt, by its name; a dry run shows it.
            other_rows: the digests of further examples, by name.

        Raises:
            InputError: a row does not fit into the model, the inputs of two processes differ, or those of a resumed run
                do without `--accept_changes`.
        """
        check_fits(config, tokenizer, [rows, held_out], config.sampled_tokens)
        self.tokenizer, self.scorers_read = tokenizer, scorers_read
        self.rows, self.held_out = rows, held_out
        # The number of rows in an epoch is known now, and with it the number of steps.
        self.order = RowOrder.of(config, rows)
        self.config = self.store.config = config = in_steps(config, self.order.size)
        # A dry run has nothing to compare them with, unless it resumes, and models take a second per GB.
        if config.dry_run and not config.resume:
            return config
        with phase("hashed models and rows"):
            self.inputs = {"model": hash_of_model(config.model, config.revision)}
            self.inputs |= {option: hash_of_model(name) for option, name in models.items()}
            self.inputs |= {
                name: hash_of(of) for name, of in {"rows": rows.digests, **other_rows}.items()
            }
            self.inputs["chat_template"] = hash_of(tokenizer.chat_template)

        # Processes on two machines may have read different versions of a file.
        ranks.check_equal(self.inputs | {"held_out": hash_of(held_out.digests)})
        changed = self.store.check_inputs(self.inputs) if config.resume else []
        if changed:
            print_rank0(f"resume: continues with other inputs: {', '.join(changed)}")
        return config

    def read(
        self,
        config: Config,
        encoded: Callable[[Config, Rows, Encoder], Examples],
        dataset: RowsLike = None,
        eval_dataset: RowsLike = None,
        **others: str | None,
    ) -> Config:
        """Read tokenizer, training rows, held-out rows and other datasets by name, and compare them as `check_inputs`.

        They are then `tokenizer`, `rows`, `held_out` and `others`.
        """
        with phase("read tokenizer and rows"), RowReport(config.bad_rows) as reading:
            tokenizer = load_tokenizer(config.model, config.revision)
            encoder = Encoder.of(config, tokenizer)
            splits = load_train_eval(config, dataset, eval_dataset, reading)
            rows, held_out = (encoded(config, split, encoder) for split in splits)
            self.others = {}
            for name, source in others.items():
                if source is not None:
                    other = reading.add(load_rows(source, bad_rows=reading.bad))
                    self.others[name] = encoded(config, other, encoder)
        digests = {name: examples.digests for name, examples in self.others.items()}
        return self.check_inputs(config, tokenizer, {}, rows=rows, held_out=held_out, **digests)

    def load(self, load: Callable[[Any, torch.device], Any]) -> Any:
        """Return the engine of the model that `load(config, device)` returns, with micro-batches that fit."""
        config = self.config
        with phase("loaded the model"):
            model = engine.initialize(load(config, self.device), config, config.total_steps)
            self.fit_micro_batches(model)
        return model

    def measure_reference(
        self, measure: Callable[[list], torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return (n, 2) of all rows that the run comes to, and of the held-out ones behind them, before training.

        `measure` returns (n, 2) of examples with the model as it is now, before a checkpoint replaces its weights.
        """
        # Held-out rows are measured as an evaluation does, so that each score is exactly 0 before training, and not a
        # rounding error.
        rows = cast(Any, ConcatDataset)([self.rows, self.held_out])  # which takes any sequences
        reference = torch.zeros(len(rows), 2, dtype=dtype)
        held_out = range(len(self.rows), len(rows))
        with phase("measured the reference"):
            for indices in filter(len, (self.order.first(self.config.total_steps), held_out)):
                reference[indices] = measure([rows[i] for i in indices])
        return reference

    def fit_micro_batches(self, *engines: Any) -> None:
        """Choose the micro-batches, if no option has, by what passes of the models that are trained together need.

        Raises:
            DryRun: the run is a dry one, which ends here, where all is read.
            InputError: the run would move away what it has read.
        """
        config = self.config
        self.store.check_read_stays()
        if config.dry_run:
            from .dry_run import described, on_paper

            plan = self.batch_plan(config, ranks.world_size())
            needed = on_paper(config, engines)
            text = described(config, plan, self.rows, self.tokenizer, self.scorers_read, needed)
            # Whatever this process does next has its own number of processes.
            ranks.planned = None
            ranks.set_sequence_parallel(1)
            raise DryRun(text)
        if config.micro_batch_size is not None:
            return
        from .fitting import fitting_tokens

        longest = int(self.rows.column("tokens").max()) + config.sampled_tokens
        config.micro_batch_tokens = fitting_tokens(engines, longest)
        config.micro_batch_size = max(1, config.micro_batch_tokens // longest)
        print_rank0(
            f"micro-batches of {config.micro_batch_tokens} tokens fit (--micro_batch_tokens)"
        )

    def start(
        self,
        engines: Mapping,
        state: Callable[[], dict] = dict,
        rank_state: Mapping = EMPTY,
        *,
        evaluate: Callable[[], Evaluation],
    ) -> dict:
        """Restore the checkpoint if the run is resumed, and open its logs.

        Args:
            engines: the DeepSpeed engines that checkpoints hold, by name.
            state: returns what else the trainer needs to continue, as a dict that JSON can hold.
            rank_state: objects with `state_dict` and `load_state_dict` that each rank saves for itself, by name.
            evaluate: measures the held-out rows, before training and after the steps that evaluate.

        Returns:
            The checkpoint's state, with what `state` had returned; {} for a new run.
        """
        self.engines, self.state, self.rank_state, self.evaluate = (
            engines,
            state,
            rank_state,
            evaluate,
        )
        restored = {}
        if self.config.resume:
            restored = self.store.load(engines, rank_state)
            self.step, self.order.position = restored["step"], restored["position"]
            # A run that was ended by its hook is complete; with another hook it continues.
            self.hook_ended = (
                self.on_step is not None and restored.get("ended_by") == self.hook_name
            )

        # What was written after the checkpoint may be moved away only once the checkpoint has been read.
        self.logger = None
        ranks.on_first_rank(self._open_logs)
        return restored

    def _open_logs(self) -> None:
        with io_errors_in_a_line("the run", self.store.path):
            self.store.move_old_content()
            if self.rows.rows.bad:
                write_rows(self.store.path / "bad_rows.jsonl", [*map(vars, self.rows.rows.bad)])
            self.logger = Logger(self.config, self.step)

    @property
    def is_start(self) -> bool:
        """Return True if nothing has been trained yet, which is the time for the evaluation before training."""
        return self.step == 0

    @property
    def evaluates(self) -> bool:
        """Return True if an evaluation follows this step."""
        every = self.config.eval_every
        return self.is_last_step or (every > 0 and self.step % every == 0)

    @property
    def is_last_step(self) -> bool:
        """Return True if this step is the last one."""
        return self.hook_ended or self.step >= self.config.total_steps

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each step's number and the indices of its rows, and save a checkpoint after steps that need one."""
        # The first evaluation is of the model before training, and says what was gained.
        if self.is_start and self.held_out:
            self.log({})
        # An earlier run of this process that failed may have left its handlers, because its traceback keeps it alive.
        restore_signals()
        _handlers.update(
            {number: signal.signal(number, self._stop_after_step) for number in SIGNALS}
        )
        Run.current = self
        try:
            # The run may be stopped after the evaluation before training, when there is nothing to save yet.
            if self._stops():
                self._stop()
            while not self.is_last_step:
                self.step += 1
                self.began = time.monotonic()
                yield self.step, next(self.order)

                # Save a checkpoint on schedule, before the run stops, and at the end, because the model is saved later.
                stop = self._stops()
                every = self.config.save_every
                if stop or self.is_last_step or (every and self.step % every == 0):
                    began = time.monotonic()
                    state = {"position": self.order.position, "inputs": self.inputs, **self.state()}
                    state |= {"ended_by": self.hook_name} if self.hook_ended else {}
                    self.store.save(self.engines, self.step, state, self.rank_state)
                    self.save_seconds = time.monotonic() - began
                if stop:
                    self._stop()
        # After the last step the handlers stay until the model is saved; `finish` restores the earlier ones.
        except BaseException:
            restore_signals()
            raise

    def _stops(self) -> bool:
        """Return True, on all processes, if the run must stop here; note if `on_step` makes this the last step."""
        # A signal may have reached only some of the processes, and a hook runs on one of them, so they decide together.
        requests = (self.signalled, self.hook_asked_to_end, self.hook_error is not None)
        signalled, asked_to_end, failures = zip(*ranks.gather_processes(requests), strict=True)
        if any(asked_to_end) and not self.is_last_step:
            self.hook_ended = True
            print_rank0(f"on_step has ended the run after step {self.step}")
        return any(failures) or (any(signalled) and not self.is_last_step)

    def _stop(self) -> NoReturn:
        """Close the logs, unlock the folder, and raise the hook's error on its process, and else `Stopped`."""
        if self.logger is not None:
            self.logger.close()
        unlock()
        Run.current = None
        remedy = "continue with --resume" if self.step else "nothing was trained"
        cause = "" if self.hook_error is None else ", because on_step raised an error"
        print_rank0(f"stopped after step {self.step}{cause}; {remedy}")
        ranks.barrier()  # because a process that exits while others are in a collective makes them abort
        raise self.hook_error or Stopped

    def last_metrics(self) -> Mapping[str, float]:
        """Return the held-out figures of the last step, measured again if a resumed run had no step left."""
        if not self.last_evaluation.metrics and self.held_out:
            self.last_evaluation = self.evaluate()
        return self.last_evaluation.metrics

    def end(self) -> None:
        """End the run after this step on all processes, with checkpoint and model; one process may call this alone."""
        self.hook_asked_to_end = True

    def _stop_after_step(self, _number, _frame) -> None:
        """Note the first signal, and leave the next one to the earlier handler, which stops the process at once."""
        self.signalled = True
        restore_signals()
        # With os.write, because the signal may have interrupted a print, whose buffer must not be entered again.
        if ranks.process_index() == 0:
            with contextlib.suppress(OSError):
                os.write(
                    1, b"\nstopping after this step, with a checkpoint; again to stop at once\n"
                )

    def log(self, metrics: dict[str, float], tokens: float | None = None) -> None:
        """Evaluate if that is due, write the metrics, show responses, and call `on_step`. All ranks must call this.

        After an evaluation it also draws the curves.

        Args:
            metrics: the step's metrics by their keys in metrics.jsonl.
            tokens: those that the step has trained on, by which its speed is measured.
        """
        if tokens is not None:
            metrics["time/train"] = time.monotonic() - self.began
            metrics["perf/tokens_per_second"] = tokens / metrics["time/train"]
        is_due = self.is_start or self.evaluates
        evaluation = self.evaluate() if is_due and self.held_out else Evaluation()
        evaluated, samples, by_row = self.last_evaluation = evaluation
        metrics = metrics | evaluated
        if self.logger is None:
            return
        if not self.is_start:
            metrics = metrics | {"time/save": self.save_seconds}
        if self.on_step is not None:
            added = self._call_hook(self.on_step, metrics, samples, self.logger.history)
            metrics = metrics | added
        with io_errors_in_a_line("metrics", self.store.path):
            self.logger.log(self.step, metrics, by_row)
            self.logger.samples(self.step, samples)
            # After the last step `finish` draws the curves.
            if self.evaluates and not self.is_start and not self.is_last_step:
                self.logger.draw_curves()

    def _call_hook(
        self,
        on_step: hooks.OnStep,
        metrics: dict[str, float],
        samples: Sequence[dict],
        earlier: list[dict],
    ) -> dict[str, float]:
        """Return what `on_step` adds to the metrics; its error is kept, to be raised when the step has a checkpoint."""
        entry = {name: float(value) for name, value in metrics.items()}
        step = hooks.Step(
            number=self.step,
            metrics=entry,
            samples=samples,
            history=[*earlier, {"step": self.step, **entry}],
            tokenizer=self.tokenizer,
            stop=self.end,
            get_model=self._undivided_model,
        )
        try:
            with hooks.kept_as_it_is(self._trained_model()):
                return hooks.call(on_step, step)
        # SystemExit too, because a `sys.exit` on this process alone would leave the others waiting.
        except (Exception, SystemExit) as error:
            self.hook_error = error
            return {}

    def _trained_model(self) -> Any:
        """Return the transformers model in the first engine, which is that of the policy."""
        return next(iter(self.engines.values())).module.base

    def _undivided_model(self) -> Any:
        """Return the trained model for one process to run; raise `InputError` if it is divided over processes."""
        if self.config.zero_stage == 3 or self.config.sequence_parallel > 1:
            raise InputError(
                "on_step: step.model needs a model that is whole on process 0; choose --zero_stage 2, and leave "
                "--sequence_parallel out"
            )
        return self._trained_model()

    def finish(self, save: Callable[[Path], None]) -> str:
        """Save the trained model, draw the curves, push it if requested, and return its folder.

        `save(folder)` writes the model into a folder; all ranks call it.
        """
        model = self.store.path / "model"
        try:
            with io_errors_in_a_line("model", self.store.path), phase("saved the model"):
                save(model)
                if self.logger is not None:
                    self.logger.close()
            # Without a schedule of checkpoints, that of the last step is needed only until the model is saved.
            if not self.config.save_every:
                self.store.remove_checkpoints()
        finally:
            restore_signals()
            unlock()
        Run.current = None

        # Print whether the run learned, where everything is, and what to look at next.
        if self.logger is not None:
            watch, folder = self.logger.watch, Path(self.config.output_dir)
            kept = ""
            if self.store.checkpoints.exists():
                kept = f", checkpoints: {folder / 'checkpoints'}"
            concluded = [f"finding: {finding}" for finding in watch.conclude()]
            print_line(
                watch.learned(),
                *concluded,
                f"model: {folder / 'model'}, curves: {folder / 'curves.png'}{kept}",
            )
            findings = ", ".join(watch.findings) or "no problems found"
            print_line(
                f"next: fused-rl doctor {folder} ({findings}), or tensorboard --logdir {folder}"
            )
        if self.config.push_to_hub:
            from . import hub

            message = f"fused-rl {self.config.command}, step {self.step}"
            ranks.on_first_rank(lambda: hub.push(self.config, model, message))
        return str(model)
