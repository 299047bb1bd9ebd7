"""A sampler behind inference servers: weights go through a folder, `step-7`, that all of them see, or by CUDA IPC."""

import math
import shutil
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import torch

from ..base import ranks
from ..base.files import io_errors_in_a_line
from ..base.screen import print_line, print_rank0
from ..base.text import InputError
from ..rollouts.sampling import Sampling
from ..rollouts.types import Response, Sampler, one_line
from . import ipc
from .inference import Http, HttpError, Server
from .kinds import VLLM, SGLang
from .probe import Probe


def connect(http: Http, url: str, *, sleeps: bool = False) -> Server:
    """Wait until a server can sample, and return it as its kind; refuse one of no known kind, and one that is paused.

    A server that `sleeps` during training may be asleep: it wakes at the first publication.
    """
    url = url.rstrip("/")
    answer = http.ask("GET", f"{url}/v1/models", tries=math.inf)
    try:
        card = answer["data"][0]
        kind = {"vllm": VLLM, "sglang": SGLang}[card["owned_by"]]
        server = kind(http, url, card)
    except Exception as error:
        came = f"GET /v1/models answered {one_line(answer)}"
        raise InputError(f"server {url} is neither vLLM nor SGLang: {came}") from error
    http.ask("GET", url + server.ready, tries=math.inf)
    if server.is_paused is None:
        return server
    try:
        state = http.ask("GET", url + server.is_paused)
    except HttpError as error:
        if error.status != 404:
            raise
        raise InputError(
            f"{server.name} has none of the calls that load weights ({error}); {server.flags}"
        ) from error
    server.asleep = state["is_paused"]
    if server.asleep and not sleeps:
        raise InputError(
            f"{server.name} is paused or asleep. A run that was killed may have left it so: curl -X POST "
            f"{url}{server.wake}; or another run uses it: give each run servers of its own"
        )
    return server


def check_sleeps(server: Server) -> None:
    """Refuse a server that cannot free its memory."""
    if server.sleep is None:
        raise InputError(
            f"server_sleeps=True is for vLLM, and {server.name} is another server; leave it out"
        )
    config = vllm_config(server)
    # vLLM on a CPU takes no such flag: it falls asleep without it, and frees nothing.
    enabled = config["model_config"].get("enable_sleep_mode", True)
    if not enabled and config["device_config"].get("device") != "cpu":
        raise InputError(f"server_sleeps=True: start {server.name} with --enable-sleep-mode")


def vllm_config(server: Server) -> dict:
    """Return how a vLLM server was started. A release that says nothing of a part may do anything there."""
    answer = server.http.ask("GET", f"{server.url}/server_info?config_format=json")
    empty: dict = {"model_config": {}, "device_config": {}, "weight_transfer_config": None}
    return empty | answer.get("vllm_config", {})


def takes_handles(server: Server) -> bool:
    """Return True if a server was started to take weights by CUDA IPC."""
    if not isinstance(server, VLLM):
        return False
    transfer = vllm_config(server)["weight_transfer_config"]
    return transfer is not None and transfer["backend"] == "ipc"


class ServerSampler(Sampler):
    """Samples from the servers at `urls`, whose weights are those of the last `publish`, which `probe` verifies.

    Weights are written to `folder`, unless all servers take them by CUDA IPC; prompt and response together have at most
    `longest` tokens. Servers that `sleep` do so from `rest` to `publish`.
    """

    reports_logprobs = True
    records_support = True

    def __init__(
        self,
        urls: Sequence[str],
        http: Http,
        folder: Path,
        probe: Probe,
        longest: int,
        *,
        sleeps: bool = False,
    ):
        self.http = http
        self.folder = folder
        self.probe = probe
        self.sleeps = sleeps
        self.exports: dict[int, tuple] = {}
        print_rank0(f"waiting at most {http.timeout:g} s for {', '.join(urls)}")
        self.servers = [connect(http, url, sleeps=sleeps) for url in urls]
        for server in self.servers:
            if server.room < longest:
                raise InputError(
                    f"{server.name} has room for {server.room} tokens, but max_prompt_length and max_new_tokens are "
                    f"{longest} together; give it a length of {longest + server.margin}; {server.flags}"
                )
        self.by_ipc = ipc.is_possible(probe.model) and all(map(takes_handles, self.servers))
        # Beside what servers refuse: cache entries of the weights before the first update, for the probe after it not
        # to find them.
        ranks.on_first_rank(self._prepare_servers)

    def _prepare_servers(self) -> None:
        """See on the first rank how the servers must be treated, and sample from those that are awake."""
        for server in self.servers:
            if self.sleeps:
                check_sleeps(server)
        way = "CUDA IPC" if self.by_ipc else f"files in {self.folder}"
        print_line(f"weights go to the servers by {way}")
        awake = [server for server in self.servers if not server.asleep]
        self.http.run(self.probe.sample(server, 0) for server in awake)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Return one response per prompt, in their order; its place decides a prompt's server, so a run repeats."""
        servers: list[Server] = []
        for place, (_, copies) in enumerate(groupby(prompts), ranks.process_index()):
            servers += [self.servers[place % len(self.servers)] for _ in copies]
        calls = zip(servers, prompts, sampling.seeds or [None] * len(prompts), strict=True)
        return self.http.run(
            server.sample(prompt, sampling, seed) for server, prompt, seed in calls
        )

    def rest(self) -> None:
        """Send servers that sleep during training to sleep, when no rank samples any more; `publish` wakes them."""
        if self.sleeps:
            ranks.barrier()
            ranks.on_first_rank(lambda: self.http.run(server.rest() for server in self.servers))

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Have all servers load the weights, and verify that they did; all ranks call this together."""
        folder = self.folder / f"step-{step}"
        is_trial = self.by_ipc and not self.exports
        if self.by_ipc:
            weights = ipc.update_info(self.probe.model.module.base, self.exports)
        else:
            weights = folder.resolve()
            with io_errors_in_a_line("the weights for the servers", self.folder):
                if ranks.process_index() == 0:
                    shutil.rmtree(folder, ignore_errors=True)  # of the same step, before a resume
                save(folder)
        if self.sleeps:
            # What the allocator keeps for later is no room for a server; every process may be on its GPU.
            torch.cuda.empty_cache()
            ranks.barrier()

        def push() -> list[list[Response]]:
            self.http.run(server.push(weights) for server in self.servers)
            for other in self.folder.glob(
                "step-*"
            ):  # the one before stays until all servers have the new one
                if other != folder:
                    shutil.rmtree(other)
            # A server that has sampled has read the weights, which may change from then on.
            return self.http.run(self.probe.sample(server, step) for server in self.servers)

        # The first rank calls the servers; all ranks score, as each may have a part of the weights.
        try:
            probed = ranks.on_first_rank(push)
        except InputError as error:
            if not is_trial:
                raise
            # A server on other GPUs, for example.
            self.by_ipc = False
            print_rank0(f"by CUDA IPC: {str(error)[:300]}; so by files in {self.folder}")
            self.publish(step, save)
            return
        for server, responses in zip(self.servers, probed, strict=True):
            self.probe.judge(server, step, responses, self.probe.differences(server, responses))
