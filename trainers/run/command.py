"""What the `main` of every command does around its work: options, errors in one line, the status of an interruption."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.base.text import shown
from fused_rl.trainers.data.encode import load_tokenizer
from fused_rl.trainers.data.order import foresee
from fused_rl.trainers.options import InputError, Options, RunConfig, to_yaml
from fused_rl.trainers.run import there
from fused_rl.trainers.run.beginning import Arithmetic
from fused_rl.trainers.run.loop import Stopped
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.run.store import RunFolder, release

LOST = "what was done since the last checkpoint is lost"
INTERRUPTED = 130  # the usual status of a command that Ctrl-C ended


def run(
    config_class: type[RunConfig],
    arithmetic: Arithmetic,
    train: Callable[[RunConfig], str],
    argv: list[str] | None = None,
) -> None:
    """`main` of every trainer: parse `argv`, or the process's command line, then either describe the run or train."""
    argv = sys.argv[1:] if argv is None else argv
    with around(f"fused-rl {config_class.command}", LOST):
        config = parse(config_class, argv)
        if config.dry_run:
            counted, steps = foresee(config, config)
            tell(describe(config, arithmetic(counted, ranks.processes()) | steps), as_is=True)
            there.check(config.model, config.revision, [config.dataset, config.eval_dataset])
            RunFolder(config).check()
            load_tokenizer(config.model, config.revision)  # a folder may be there, and be no model's
            return
        try:
            train(config)
        finally:
            release()
        ranks.barrier()  # else two processes can abort at exit


@contextlib.contextmanager
def around(prog: str, lost: str = "nothing was written") -> Iterator[None]:
    """Around a whole command: an InputError is one line, and Ctrl-C has its usual status and says what is lost."""
    try:
        yield
    except InputError as error:
        sys.exit(f"{prog}: error: {shown(error)}")
    except Stopped:
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        tell(f"{prog}: stopped at once; {lost}", to_errors=True)
        sys.exit(INTERRUPTED)


def describe(config: Options, arithmetic: dict[str, object]) -> str:
    """The resolved configuration and, as comments, the batch arithmetic: YAML that `--config` reads back."""
    lines = [f"# {key}: {value}" for key, value in arithmetic.items()]
    return "\n".join([to_yaml(config), "# batch arithmetic", *lines])
