"""The `main` of every command: options, errors in one line, the exit status of an interruption."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from fused_rl.trainers.base import memory, ranks
from fused_rl.trainers.base.screen import print_line
from fused_rl.trainers.base.text import InputError, escaped
from fused_rl.trainers.data.encode import Encoder, load_tokenizer
from fused_rl.trainers.data.order import in_steps
from fused_rl.trainers.data.rows import load_train_eval
from fused_rl.trainers.options import RunConfig, to_yaml
from fused_rl.trainers.run.loop import Arithmetic, Stopped
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.run.store import RunFolder, unlock

LOST = "what was done since the last checkpoint is lost"
INTERRUPTED = 130  # the usual status of a command that Ctrl-C ended


def run(
    config_class: type[RunConfig],
    arithmetic: Arithmetic,
    train: Callable[..., str],
    argv: list[str] | None = None,
) -> None:
    """Parse `argv`, or the process's command line, then either describe the run or train."""
    argv = sys.argv[1:] if argv is None else argv
    with around(f"fused-rl {config_class.command}", LOST):
        # Both describe and train get the same config, so a dry run refuses what the run would.
        config = parse(config_class, argv)
        if config.dry_run:
            print_line(describe(config, arithmetic), as_is=True)
            return
        try:
            train(config)
        finally:
            unlock()
        # A process that exits while another is still in a collective makes that one abort.
        ranks.barrier()


@contextlib.contextmanager
def around(prog: str, lost: str = "nothing was written") -> Iterator[None]:
    """Make an InputError of a whole command one line; Ctrl-C has its usual status and says what is lost."""
    try:
        yield
    except InputError as error:
        sys.exit(f"{prog}: error: {escaped(error)}")
    except Stopped:
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        print_line(f"{prog}: stopped at once; {lost}", to_errors=True)
        sys.exit(INTERRUPTED)


def describe(config: RunConfig, arithmetic: Arithmetic) -> str:
    """Return the resolved config as YAML that `--config` reads back, with the batch arithmetic as comments."""
    # What reading the rows prints goes to stderr, because stdout is the YAML that --config reads back.
    with contextlib.redirect_stdout(sys.stderr):
        RunFolder(config).check()
        config.resolve()
        tokenizer = load_tokenizer(config.model, config.revision)
        rows, _ = load_train_eval(config)
        config.check_first_row(Encoder.of(config, tokenizer), rows)

        # Rows that become several examples are counted when all are encoded, which a dry run does not do.
        counted = config if config.splits_rows else in_steps(config, len(rows))
        needed = memory_line(counted)
    lines = [f"# {key}: {value}" for key, value in arithmetic(counted, ranks.processes()).items()]
    lines += [] if needed is None else [f"# memory per process: {needed}"]
    return "\n".join([to_yaml(config), "# batch arithmetic", *lines])


def memory_line(config: RunConfig) -> str | None:
    """Return the estimate of a step's memory in words; None where the model's config cannot be read."""
    sizes = memory.sizes_of(config.model, config.revision)
    if sizes is None or config.micro_batch_size is None:
        return None
    needed = memory.bytes_per_process(sizes, config.footprint(), config.micro_batch_size)
    return memory.in_words(needed, left_out=config.outside_footprint)
