"""A sampler behind inference servers; weights go through `published/step-7` in the run's folder, on a shared disk."""

import math
import shutil
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import io_errors_in_a_line
from fused_rl.trainers.base.screen import print_line
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Response, Sampler, shortened
from fused_rl.trainers.servers.inference import Http, Server
from fused_rl.trainers.servers.kinds import VLLM, SGLang
from fused_rl.trainers.servers.probe import Probe


def connect(http: Http, url: str) -> Server:
    """Wait until a server can sample, and return it as its kind; refuse one of no known kind."""
    url = url.rstrip("/")
    (answer,) = http.run([http.call("GET", f"{url}/v1/models", tries=math.inf)])
    try:
        card = answer["data"][0]
        kind = {"vllm": VLLM, "sglang": SGLang}[card["owned_by"]]
        server = kind(http, url, card)
    except Exception as error:
        came = f"GET /v1/models answered {shortened(answer)}"
        raise InputError(f"server {url} is neither vLLM nor SGLang: {came}") from error
    http.run([http.call("GET", url + server.ready, tries=math.inf)])
    return server


class ServerSampler(Sampler):
    """Samples from the servers at `urls`, whose weights are those of the last `publish`, which `probe` verifies.

    Weights are written to `folder`, in the run's; prompt and response together have at most `longest` tokens.
    """

    tells_logprobs = True
    records_support = True

    def __init__(self, urls: Sequence[str], http: Http, folder: Path, probe: Probe, longest: int):
        self.http = http
        self.folder = folder
        self.probe = probe
        if ranks.process() == 0:
            print_line(f"waiting at most {http.timeout:g} s for {', '.join(urls)}")
        self.servers = [connect(http, url) for url in urls]
        for server in self.servers:
            if server.room < longest:
                raise InputError(
                    f"{server.name} has room for {server.room} tokens, but max_prompt_length and max_new_tokens are "
                    f"{longest} together; give it a length of {longest + server.margin}; {server.flags}"
                )
        # Cache entries of the weights before the first update: the probe after it must not find them.
        ranks.on_first_rank(lambda: http.run(probe.sample(server, 0) for server in self.servers))

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Return one response per prompt, in their order; its place decides a prompt's server, so a run repeats."""
        servers: list[Server] = []
        for number, (_, copies) in enumerate(groupby(prompts), ranks.process()):
            servers += [self.servers[number % len(self.servers)] for _ in copies]
        calls = zip(servers, prompts, sampling.seeds or [None] * len(prompts), strict=True)
        return self.http.run(
            server.sample(prompt, sampling, seed) for server, prompt, seed in calls
        )

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Write the weights, have all servers load them, and verify that they did; all ranks call this together."""
        folder = self.folder / f"step-{step}"
        with io_errors_in_a_line("the weights for the servers", self.folder):
            if ranks.process() == 0:
                shutil.rmtree(folder, ignore_errors=True)  # of the same step, before a resume
            save(folder)
        found: list[list[Response]] = []

        def push() -> None:
            self.http.run(server.push(folder) for server in self.servers)
            for other in self.folder.glob(
                "step-*"
            ):  # the one before stays until all servers have the new one
                if other != folder:
                    shutil.rmtree(other)
            found.extend(self.http.run(self.probe.sample(server, step) for server in self.servers))

        # The first rank calls the servers; all ranks score, as each may have a part of the weights.
        ranks.on_first_rank(push)
        for server, responses in zip(self.servers, ranks.gather_processes(found)[0], strict=True):
            self.probe.judge(server, step, responses, self.probe.differences(server, responses))
