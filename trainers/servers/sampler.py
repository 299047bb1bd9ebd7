"""A sampler behind inference servers: every one of them has the policy's weights, and is held to what it says.

Prompts go to the servers in turn, equal neighbours to the same one, by their place in the batch: so a run repeats.
Weights go through a folder on a disk that trainer and servers share: `published/step-7` in the run's folder, whole or
not there, and the one before it stays until all servers have taken it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from queue import SimpleQueue

import torch

from fused_rl import TokenSupport
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import delete, storing
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Response, Sampler
from fused_rl.trainers.servers.digests import to_compare
from fused_rl.trainers.servers.inference import Server
from fused_rl.trainers.servers.kinds import connect
from fused_rl.trainers.servers.verify import Expected, Probe, Verifier, scored

PUBLISHED = "published"  # in the folder of a run
AT_ONCE = 256  # requests under way, of one rank


class ServerSampler(Sampler):
    """Draws from the models of inference servers, whose weights are those of the last `publish`.

    Args:
        urls: of the servers; all ranks ask all of them.
        folder: for the weights, in the output folder of a run; the servers must see it under the same path.
        expected: the policy.

    Raises:
        InputError: a server is not there, or not what the policy needs.
    """

    tells_logprobs = True
    records_support = True  # one that cannot is refused before it is asked
    has_versions = True

    def __init__(self, urls: Sequence[str], folder: Path, expected: Expected):
        self.folder, self.expected, self.step = folder, expected, None
        twice = [url for url in urls if list(urls).count(url) > 1]
        if twice:
            raise InputError(f"server={','.join(urls)} names {twice[0]} twice; give each once")
        self.servers = [connect(url) for url in urls]
        self.verifiers = [Verifier(server, expected) for server in self.servers]
        ranks.on_first_rank_at_length(lambda: _each(Verifier.before_pushes, self.verifiers))

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """One response per prompt, in their order.

        Raises:
            InputError: a server does not answer, or what it answers is not what was asked for; says which.
        """
        # Which server is asked for which response.
        runs = [len(list(run)) for _, run in groupby(prompts)]
        turns = [[ranks.rank() + number] * count for number, count in enumerate(runs)]
        servers = [self.servers[turn % len(self.servers)] for turn in chain.from_iterable(turns)]
        if sampling.seeds is not None and len(sampling.seeds) != len(prompts):
            raise ValueError(f"{len(sampling.seeds)} seeds for {len(prompts)} prompts")
        seeds = sampling.seeds or [None] * len(prompts)

        def ask(server: Server, prompt: list[int], seed: int | None) -> Response:
            return server.sample(prompt, 1, sampling, None if seed is None else [seed])[0]

        responses = _at_once(ask, list(zip(servers, prompts, seeds, strict=True)))
        self._check_ids(responses, servers)
        return self._with_versions(responses, servers)

    def _check_ids(self, responses: list[Response], servers: list[Server]) -> None:
        """Refuse ids that the policy's embedding does not have."""
        for response, server in zip(responses, servers, strict=True):
            largest = max(response.ids, default=0)
            if largest >= self.expected.vocab:
                raise InputError(f"{server} drew id {largest}, but the policy has {self.expected.vocab} ids")

    def _with_versions(self, responses: list[Response], servers: list[Server]) -> list[Response]:
        """With the versions of servers that do not tell one with each response: what they have now, they had before.

        A push gives each server's weights a version that no other weights of theirs have; one that was restarted
        meanwhile has none.
        """
        parts = list(zip(servers, responses, strict=True))
        silent = {server for server, response in parts if response.weight_version is None}
        versions = {server: server.version() for server in silent}
        lost = [server for server, version in versions.items() if version is None]
        if lost:
            raise InputError(
                f"{lost[0]} no longer has the weights of step {self.step}, but those that it began with: it was "
                "restarted; continue with --resume, which pushes them again"
            )
        return [replace(told, weight_version=versions.get(server, told.weight_version)) for server, told in parts]

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Write the weights, have all servers read them, and see that they did; for all ranks at once.

        Raises:
            InputError: there is no room for the folder, a server did not take it, or a check failed; on every rank.
        """
        folder = self.folder / f"step-{step}"
        with storing("the weights for the servers", self.folder):
            if ranks.rank() == 0 and folder.exists():  # of the same step, before a resume
                delete(folder)
            save(folder)
        # Only the first rank talks to the servers.
        probes: list[list[Probe]] = []
        ranks.on_first_rank_at_length(lambda: probes.extend(self._push(folder, step)))
        self.step = step
        self._verify(ranks.gather(probes)[0], step)

    def _push(self, folder: Path, step: int) -> list[list[Probe]]:
        """On the first rank: all servers at once, then those folders go that no server needs any more."""
        _each(lambda server: server.push(folder, step), self.servers)
        for other in self.folder.glob("step-*"):
            if other != folder:
                delete(other)
        tensors = to_compare(folder, self.verifiers[0].pushes)
        return _each(lambda verifier: verifier.after_push(folder, step, tensors), self.verifiers)

    def _verify(self, probes: list[list[Probe]], step: int) -> None:
        """Every rank scores what the first one asked; that one compares."""
        flat = list(chain.from_iterable(probes))
        own, plain = scored(flat, self.expected.score)

        def judge() -> None:
            start = 0
            for verifier, asked in zip(self.verifiers, probes, strict=True):
                part = slice(start, start + len(asked))
                verifier.judge(asked, own[part], plain[part], step)
                start += len(asked)

        ranks.on_first_rank(judge)


def _at_once(work: Callable, jobs: list[tuple]) -> list:
    """`work` of each, in their order; the first failure, whichever it is of, ends what has not begun and is raised.

    The threads are daemons: what is still under way then is waited for by nobody, at the end of the process either.
    """
    waiting, done = deque(enumerate(jobs)), SimpleQueue()

    def go_on() -> None:
        while True:
            try:
                number, job = waiting.popleft()
            except IndexError:
                return
            try:
                done.put((number, work(*job), None))
            except BaseException as error:  # of which the caller may hear late
                waiting.clear()
                done.put((number, None, error))

    for _ in range(min(AT_ONCE, len(jobs))):
        threading.Thread(target=go_on, daemon=True).start()
    found = [None] * len(jobs)
    try:
        for _ in jobs:
            number, found[number], error = done.get()
            if error is not None:
                raise error
    finally:
        waiting.clear()
    return found


def _each(work: Callable, things: Sequence) -> list:
    """`work` of each at once, in their order; the first failure is raised when all have ended."""
    with ThreadPoolExecutor(len(things)) as pool:
        return list(pool.map(work, things))


@torch.no_grad()
def logprobs_of(
    model,
    prompts: list[list[int]],
    responses: list[list[int]],
    temperature: float,
    support: TokenSupport | None = None,
) -> list[list[float]]:
    """Of each token of the responses, in nats, by a `LanguageModel` in an engine; all ranks call it together.

    Args:
        model: the engine.
        prompts, responses: token ids; no response is empty.
        temperature: of the softmax.
        support: what the responses' tokens were drawn from, a row for each; None is the whole vocabulary.
    """
    device = next(model.module.parameters()).device
    batch = make_batch(prompts, responses, 0, device)
    support = None if support is None else support.to(device)
    scored = model(batch.input_ids, batch.response_mask, temperature, support=support)
    found = scored.logprobs[batch.response_mask].split([len(ids) for ids in responses])
    return [values.tolist() for values in found]
