"""A real vLLM, one at a time: `make test-server` starts it, and it must be gone at the end."""

import contextlib
from pathlib import Path

import pytest

from bench import vllm_server
from fused_rl.trainers.servers.inference import Server
from tests.server import models
from tests.trainers import served, tiny
from tests.trainers.fixtures import cpu_path, no_figures  # noqa: F401


class Servers:
    """Called with flags it is the server with these: the one that runs, where it has them, else a new one in its place.

    Two at once are too much for a small machine. It may hold other weights than those that it was started with.
    """

    def __init__(self, model: str, logs: Path):
        self.model, self.logs = model, logs
        self.flags, self.serving, self.running = None, None, contextlib.ExitStack()

    def __call__(self, *flags: str) -> vllm_server.Serving:
        if self.flags != flags:
            self.stop()
            name = "_".join(flags).replace("/", "_") or "plain"
            log = self.logs / f"{name}.log"
            self.serving = self.running.enter_context(vllm_server.serving(self.model, log, *flags))
            self.flags = flags
        return self.serving

    def holding(self, folder: str, *flags: str) -> Server:
        """The server with these flags, once it has the weights of a folder."""
        found = served.connected(self(*flags))
        found.http.run([found.push(Path(folder))])
        return found

    def stop(self) -> None:
        """End it; nothing of it may be left."""
        self.running.close()
        if self.flags is not None:
            assert vllm_server.members(self.serving.group) == []
        self.flags = None


@pytest.fixture(scope="session")
def problems() -> list[dict]:
    return models.problems()


@pytest.fixture(scope="session")
def folders(problems, tmp_path_factory) -> list[str]:
    """Two models that differ in every weight, with one tokenizer."""
    made = tmp_path_factory.mktemp("models")
    return [models.model_folder(made / str(seed), problems, seed) for seed in (1, 2)]


@pytest.fixture(scope="session")
def rows(problems, tmp_path_factory) -> str:
    """A file of prompts."""
    return tiny.jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", problems[:64])


@pytest.fixture(scope="session")
def servers(folders, tmp_path_factory):
    made = Servers(folders[0], tmp_path_factory.mktemp("logs"))
    yield made
    made.stop()
