"""A real vLLM on this CPU, in an environment and in processes of its own: started from .venv-vllm, stopped whole.

`make .venv-vllm/installed` makes the environment. Nothing of vLLM is imported here; all calls are HTTP. A
start takes 32 CPU seconds over three processes, 1 to 3 minutes where others use the machine too, and 3 GiB.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench import machine

PYTHON = machine.ROOT / ".venv-vllm" / "bin" / "python"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the calls that take weights
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for half a minute
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
FLAGS = {
    "--host": "127.0.0.1",
    "--served-model-name": "policy",
    "--dtype": "float32",
    "--max-model-len": "512",
    "--max-num-seqs": "256",
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
    "--seed": "0",
}
START, STOP = 600, 60  # seconds


class Serving(NamedTuple):
    """A server that answers."""

    url: str
    group: int
    """The process group of all its processes."""
    log: Path


@contextlib.contextmanager
def serving(model: str | Path, log: Path, *flags: str) -> Iterator[Serving]:
    """vLLM with the model of a folder, until the end of the block.

    Args:
        model: a folder in the Hub format, whose heads have a size that vLLM has on a CPU: 32, 64, …
        log: what it prints.
        flags: more of them, which win where `FLAGS` says otherwise.

    Raises:
        RuntimeError: there is no .venv-vllm; it ended, or did not answer within `START` seconds; or, at the end, some
            process of it was still there `STOP` seconds after its SIGTERM, and was killed.
    """
    if not PYTHON.exists():
        raise RuntimeError(
            f"no {PYTHON.relative_to(machine.ROOT)}: run `make .venv-vllm/installed` first"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [word for flag in FLAGS.items() for word in flag]
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--port",
        str(port),
    ]
    command += ["--enforce-eager", *given, *flags]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    server = Serving(f"http://127.0.0.1:{port}", process.pid, log)
    try:
        _wait(process, server)
        yield server
    finally:
        _stop(process)


def members(group: int) -> list[str]:
    """`pid name` of every process of a process group that still runs."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pgid=,pid=,stat=,comm="], capture_output=True, text=True, check=True
    )
    found = []
    for line in listed.stdout.splitlines():
        of_group, pid, state, name = line.split(maxsplit=3)
        if int(of_group) == group and not state.startswith("Z"):
            found.append(f"{pid} {name}")
    return found


def _wait(process: subprocess.Popen, server: Serving) -> None:
    """Until it answers."""
    ends = time.monotonic() + START
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {process.returncode}:\n{tail(server.log)}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{server.url}/health", timeout=5),
        ):
            return
        time.sleep(1)
    raise RuntimeError(f"vLLM did not answer within {START} seconds:\n{tail(server.log)}")


def _stop(process: subprocess.Popen) -> None:
    """SIGTERM to all of its processes, and a look whether one stays."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    ends = time.monotonic() + STOP
    while time.monotonic() < ends:
        process.poll()
        if not (left := members(process.pid)):
            return
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    raise RuntimeError(
        f"processes of vLLM outlived its SIGTERM by {STOP} seconds: {', '.join(left)}"
    )


def tail(log: Path, lines: int = 40) -> str:
    """The last lines of what it printed."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
