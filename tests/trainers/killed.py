"""Runs in processes of their own that get a signal at a chosen file operation, so that a moment can be repeated.

Processes fork from one that has imported everything: a run takes a second and not ten.
"""

import importlib
import os
import signal
import socket
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

from fused_rl.trainers import cli
from tests.distributed import PRELOADED, PROCESSES
from tests.trainers import figures

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.listdir")
# What a command imports, so that a process which is forked has it.
OF_COMMANDS = ["datasets", "matplotlib.figure", "torch.utils.tensorboard", "sympy", "peft"]
OF_COMMANDS += ["pydantic", "transformers.models.qwen2.modeling_qwen2"]
OF_COMMANDS += ["transformers.models.auto.modeling_auto"]
OF_COMMANDS += ["torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor"]
MODULES = [listed.module for listed in cli.COMMANDS.values()]
PROCESSES.set_forkserver_preload([*PRELOADED, *OF_COMMANDS, *MODULES])
ROOT = Path(__file__).parents[2]
NEVER = -1


class Moment(NamedTuple):
    """When a process gets a signal: some time after its nth file operation in `run` on a path that has `at` in it."""

    nth: int = NEVER
    at: str = ""
    delay: float = 0.0
    """Seconds: into what C code writes, or between two operations."""
    signal: int = signal.SIGKILL
    rank: int = 0


UNDISTURBED = Moment()


def start(
    command: str,
    argv: list[str],
    folder: Path,
    moment: Moment = UNDISTURBED,
    *,
    ranks: int = 1,
    judge: Path | None = None,
):
    """The processes of a run, one for each rank, with `folder` as the current one; what they print is in `log`.

    `judge` stands in for math-verify. The operations of each rank are counted in `operations-<rank>`.
    """
    here = Path.cwd()
    os.chdir(ROOT)  # from where the server, if this is its start, imports what is tested
    forkserver.ensure_running()
    os.chdir(here)
    # A port that is free now, for ranks to meet at.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    # A process of each rank, of which one gets the signal.
    processes = []
    for rank in range(ranks):
        launch = {**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        its_own = moment if rank == moment.rank else UNDISTURBED
        arguments = (command, argv, folder, its_own, launch, judge)
        # A daemon may not have children, which judge.
        processes.append(PROCESSES.Process(target=_run, args=arguments, daemon=judge is None))
        processes[-1].start()
    return processes


def words_of(config, **others) -> list[str]:
    """The command line of a config, of whose options some have other values, None for those that are not given."""
    words = []
    given = {name: getattr(config, name) for name in config.model_fields_set}
    for name, value in (given | others).items():
        if value is not None:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def run(*args, **options) -> list[int]:
    """The exit statuses of a run that has ended, by rank."""
    processes = start(*args, **options)
    for process in processes:
        process.join(300)
        process.kill()  # one that hangs is a failure, and must not outlive the test
        process.join()
    return [process.exitcode for process in processes]


def _run(command: str, argv: list[str], folder: Path, moment: Moment, env, judge) -> None:
    """In the new process."""
    os.setsid()  # a terminal's Ctrl-C goes to a whole group
    os.chdir(folder)
    sys.path.append(str(folder))
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Of a run that was there when the server started.
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    os.environ.update(env, TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
    figures.leave_out()
    if judge is not None:
        from fused_rl import judging

        sys.path.append(str(judge.parent))
        pool, stand_in = judging.Pool, importlib.import_module(judge.stem).judge
        judging.Pool = lambda _, timeout: pool(stand_in, timeout)
    count = _watch(moment)
    try:
        importlib.import_module(cli.COMMANDS[command].module).main(argv)
    finally:
        Path(f"operations-{env.get('RANK', 0)}").write_text(str(count()))


def _watch(moment: Moment):
    """Have the signal sent at its moment; returns what counts the operations so far."""
    seen, matching = 0, 0

    def strike():
        if moment.signal == signal.SIGINT:
            os.killpg(0, signal.SIGINT)
        else:
            os.kill(os.getpid(), moment.signal)

    def hook(event, args):
        nonlocal seen, matching
        if event not in OPERATIONS or not args or not isinstance(args[0], (str, os.PathLike)):
            return
        path = os.fspath(args[0])
        if isinstance(path, bytes) or not f"/{path}".partition("/run/")[1]:
            return
        seen, matching = seen + 1, matching + (moment.at in path)
        if matching == moment.nth and moment.at in path:
            threading.Timer(moment.delay, strike).start() if moment.delay else strike()

    sys.addaudithook(hook)
    return lambda: seen
