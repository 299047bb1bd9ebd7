"""The `main` of every command: it reads options, prints errors in one line, and sets the exit status.

`run` is that of the trainers; `around` handles the errors of every command.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator

from ..base import ranks
from ..base.screen import print_line
from ..base.text import InputError, InputErrors, escaped
from ..cli import program
from ..options import RunConfig
from .loop import DryRun, Run, Stopped, kept
from .parse import HelpPrinted, parse
from .store import unlock

LOST = "what was done since the last checkpoint is lost"
INTERRUPTED = 130  # the usual status of a command that Ctrl-C ended
# How far rank 0 may be behind the other ranks when all of them read rows.
SECONDS_TO_PRINT = 3


def run(
    config_class: type[RunConfig], train: Callable[..., str], argv: list[str] | None = None
) -> None:
    """Parse `argv`, or the process's command line, and train, or print what a dry run says.

    Args:
        config_class: the options of the trainer.
        train: runs the training of a config.
        argv: the words after the command.
    """
    argv = sys.argv[1:] if argv is None else argv
    with around(program(config_class.command), LOST):
        config = parse(config_class, argv)
        # Before and after the steps, SIGTERM must end the process like an error, which removes what the run keeps
        # outside of its folder. During the steps `Run` handles it.
        before = signal.signal(signal.SIGTERM, _end)
        try:
            if config.dry_run:
                # What is printed on the way goes to stderr, because stdout is the YAML that --config reads back.
                with contextlib.redirect_stdout(sys.stderr):
                    train(config)
            train(config)
        except DryRun as done:
            if ranks.process_index() == 0:
                print(done, flush=True)  # as it is, because a program reads it
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
    Run.current = None
    try:
        yield
    except InputErrors as error:
        # All ranks fail on the same rows and words. A launcher ends the others as soon as one has ended, so they wait
        # until rank 0 has printed the whole block.
        if ranks.process_index() > 0:
            time.sleep(SECONDS_TO_PRINT)
        sys.exit(f"{prog}: error: {error}")  # its lines are escaped already
    except InputError as error:
        sys.exit(f"{prog}: error: {escaped(error)}{kept()}")
    except SystemExit as ended:
        # Of a user's function; a status of 0 would say that all is done.
        if ended.code or isinstance(ended, HelpPrinted):
            raise
        sys.exit(f"{prog}: error: a function called sys.exit; have it raise an error{kept()}")
    except Stopped:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has ended, such as head
        sys.stdout = None
        sys.exit(kept()[2:] or 141)
    except KeyboardInterrupt:
        print_line(f"{prog}: stopped at once; {lost}", to_errors=True)
        sys.exit(INTERRUPTED)
    except Exception:
        print_line(f"{prog}: an error, whose traceback follows{kept()}", to_errors=True)
        raise
