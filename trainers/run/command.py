"""The `main` of every command: it reads options, prints errors in one line, and sets the exit status.

`run` is that of the trainers, with `describe` for their `--dry_run`; `around` handles the errors of every command.
"""

import asyncio
import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import print_line, print_rank0
from fused_rl.trainers.base.text import InputError, UnknownOptions, check_installed, escaped
from fused_rl.trainers.data.encode import Encoded, Encoder, load_tokenizer
from fused_rl.trainers.data.order import RowOrder, in_steps
from fused_rl.trainers.data.reading import BadRows, Reading, load_train_eval
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import FOUR_BIT_PACKAGE, RunConfig, to_yaml
from fused_rl.trainers.run.loop import Arithmetic, Stopped, check_start
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.run.store import RunFolder, note_error, unlock

LOST = "what was done since the last checkpoint is lost"
INTERRUPTED = 130  # the usual status of a command that Ctrl-C ended
# The modules that call functions of the user's own.
CALLERS = {
    str(Path(__file__).parents[1] / name)
    for name in ("scorers/functions.py", "rollouts/returned.py", "run/hooks.py")
}
# How far rank 0 may be behind the other ranks when all of them read rows.
SECONDS_TO_PRINT = 3
# A dry run encodes all rows up to this number, and a sample of them above it.
MOST_ROWS = 100_000
# A dry run prints only the first and the last tokens of a sequence that is longer than this.
MOST_TOKENS = 200


class Encodable(Protocol):
    """What a trainer makes of a row: token sequences that know where they come from."""

    @property
    def where(self) -> str:
        """The file and line of the row."""
        ...

    def sequences(self) -> dict[str, Encoded]:
        """Return the token ids of prompt and response of each sequence, by the name of the sequence."""
        ...


Check = Callable[[Any, Encoder, Sequence[Any], Rows], None]
"""(config, encoder, the examples of all rows, held-out rows) -> None; raises what else the run would raise."""
ReadRows = Callable[[Any, Rows, Encoder], Sequence[Encodable]]
"""(config, rows, encoder) -> the trainer's examples of the rows that can be used."""


def run(
    config_class: type[RunConfig],
    arithmetic: Arithmetic,
    train: Callable[..., str],
    read: ReadRows,
    check: Check,
    argv: list[str] | None = None,
) -> None:
    """Parse `argv`, or the process's command line, and then either describe the run or train.

    Args:
        config_class: the options of the trainer.
        arithmetic: returns how the batch divides over the processes.
        train: runs the training of a config.
        read: returns the trainer's examples of rows.
        check: raises for what else the run would refuse.
    """
    argv = sys.argv[1:] if argv is None else argv
    with around(f"fused-rl {config_class.command}", LOST):
        # Describing and training use the same config, so a dry run refuses whatever the run would.
        config = parse(config_class, argv)
        if config.dry_run:
            print_line(describe(config, arithmetic, read, check), as_is=True)
            return
        # Before and after the steps, SIGTERM must end the process like an error, which removes what the run keeps
        # outside of its folder. During the steps `Run` handles it.
        before = signal.signal(signal.SIGTERM, _end)
        try:
            train(config)
        except Exception as error:
            note_error(error)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
            unlock()
        # A process that exits while another is still in a collective makes that one abort.
        ranks.barrier()


def _end(number: int, _frame) -> None:
    """End the process with the usual exit status of a signal."""
    sys.exit(128 + number)


@contextlib.contextmanager
def around(prog: str, lost: str = "nothing was written") -> Iterator[None]:
    """Print the user's errors of a whole command in one line, and end the process with a status.

    Ctrl-C ends it with the usual status, and the line says what is `lost`.
    """
    try:
        yield
    except (BadRows, UnknownOptions) as error:
        if ranks.process() == 0:
            sys.exit(f"{prog}: error: {error}")  # its lines are escaped already
        # All ranks fail on the same rows and words. A launcher ends the others as soon as one has ended, so they wait
        # until rank 0 has printed the whole block.
        time.sleep(SECONDS_TO_PRINT)
        title, _, _ = str(error).partition("\n")
        sys.exit(f"{prog}: error: {title}")
    except InputError as error:
        sys.exit(f"{prog}: error: {escaped(error)}")
    except Stopped:
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        print_line(f"{prog}: stopped at once; {lost}", to_errors=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        text = traceback_of_user(error)
        if text is None:
            raise
        sys.exit(text)


def traceback_of_user(error: Exception) -> str | None:
    """Return the traceback of an error in a function of the user's own, from its frames on; None for other errors."""
    frames, of_user = error.__traceback__, None
    while frames is not None:
        if frames.tb_frame.f_code.co_filename in CALLERS:
            of_user = frames.tb_next
        frames = frames.tb_next
    # Between the call and a function that is async stands the event loop.
    loop = asyncio.__path__[0]
    while of_user is not None and of_user.tb_frame.f_code.co_filename.startswith(loop):
        of_user = of_user.tb_next
    if of_user is None:
        return None
    lines = traceback.format_exception(type(error), error, of_user)
    return escaped("".join(lines).rstrip(), keep="\n")


def describe(config: RunConfig, arithmetic: Arithmetic, read: ReadRows, check: Check) -> str:
    """Return what `--dry_run` prints: the resolved config as YAML, then batch arithmetic and an example as comments.

    `--config` reads the text back. Raises whatever the run would raise before it loads the model.
    """
    # What is printed while the rows are read goes to stderr, because stdout is the YAML that --config reads back.
    with contextlib.redirect_stdout(sys.stderr):
        RunFolder(config).check()
        check_start(config, arithmetic)
        if config.load_in_4bit:  # the run notices a missing package only when it loads the model
            check_installed("load_in_4bit", *FOUR_BIT_PACKAGE)
        world = ranks.planned_ranks(config.sequence_parallel)
        tokenizer = load_tokenizer(config.model, config.revision)
        encoder = Encoder.of(config, tokenizer)
        with Reading(config.bad_rows) as reading:
            train, held_out = load_train_eval(config, reading=reading)
            sample = train.sampled(MOST_ROWS)
            examples = read(config, sample, encoder)
            evaluated = read(config.for_held_out(), held_out, encoder)
            check(config, encoder, [*examples, *evaluated], held_out)

        # A sample does not say how many examples all rows come to, so the steps of an epoch stay open.
        is_whole = len(sample) == len(train)
        if not is_whole:
            print_rank0(
                f"checked {len(sample)} of {len(train)} rows of {train.source}, evenly spaced"
            )
        counted = in_steps(config, RowOrder.of(config, examples).size) if is_whole else config
    divided = arithmetic(counted, world)
    if config.sequence_parallel > 1:
        together = f"groups of {config.sequence_parallel}, each of which counts as one below"
        divided["processes"] = f"{ranks.processes()}, in {world} {together}"
    lines = [f"# {key}: {value}" for key, value in divided.items()]
    updates = divided.get("optimizer updates in the run", divided.get("optimizer steps"))
    for name in ("warmup_steps", "critic_warmup_steps"):
        rising = getattr(config, name, None)
        if rising and isinstance(updates, int) and rising >= updates:
            lines.append(
                f"# {name}: {rising} is not below the run's {updates} updates, so the learning rate rises to the end"
            )
    lines += ["#", *example_lines(examples[0], encoder)]
    everything = config.dry_run == "all"
    title = "# the options that were given or follow from others; --dry_run all prints all of them"
    options = to_yaml(config, everything=everything)
    return "\n".join([*([] if everything else [title]), options, "# batch arithmetic", *lines])


def example_lines(example: Encodable, encoder: Encoder) -> list[str]:
    """Return an example as comment lines, with the tokens of its prompt and those that are trained.

    On a terminal the two have different colours.
    """
    colors = {"prompt": "\x1b[36m", "trained": "\x1b[32m"} if sys.stdout.isatty() else {}
    lines = [f"# one example: {example.where}, its tokens between bars"]
    for name, (prompt, response) in example.sequences().items():
        parts = {"prompt": prompt, "trained": response}
        for part, ids in parts.items():
            if not ids:
                continue
            texts = [escaped(encoder.tokenizer.decode(i)) for i in ids]
            if len(texts) > MOST_TOKENS:
                left_out = len(texts) - MOST_TOKENS
                half = MOST_TOKENS // 2
                texts = [*texts[:half], f"… {left_out} more …", *texts[-half:]]
            label = part if name == "prompt" else f"{name}, {part}"
            color = colors.get(part, "")
            end = "\x1b[0m" if color else ""
            lines.append(f"# {label} ({len(ids)} tokens): {color}{'|'.join(texts)}{end}")
    return lines
