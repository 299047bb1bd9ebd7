"""HTTP calls to inference servers, and what a kind of server must provide: vllm.py and sglang.py.

Token ids go in and token ids come out. Nothing of a server's own package is imported.
"""

import asyncio
import ssl
import threading
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import ClassVar

import httpx2

from fused_rl import TokenSupport
from fused_rl.trainers.base.text import InputError, in_a_line
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Response, shortened

TRIES = 3  # of a call that had no answer, or HTTP 5xx
IDLE = 3.0  # seconds that an idle connection is kept; servers close theirs after 5


class CallFailed(InputError):
    """A call without a usable answer; `status` is the HTTP status, 0 if there was no answer."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class Http:
    """Calls to servers by one thread with an event loop; any thread may wait for them with `run`.

    Args:
        timeout: seconds for one call, and for a server that is loading or paused.
        concurrency: calls at the same time.
        key: sent as a bearer token, and never part of an error.
    """

    def __init__(self, timeout: float = 600.0, concurrency: int = 256, key: str | None = None):
        self.timeout = timeout
        self.key = key
        self.pause = 1.0  # seconds between two tries
        self.slots = asyncio.Semaphore(concurrency)
        self.client = httpx2.AsyncClient(
            headers=None if key is None else {"Authorization": f"Bearer {key}"},
            limits=httpx2.Limits(keepalive_expiry=IDLE),
            timeout=timeout,
            verify=ssl.create_default_context(),  # which reads SSL_CERT_FILE
            trust_env=False,  # proxies and .netrc are not for servers
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Iterable[Coroutine]) -> list:
        """Return the results of calls, in order; the first failure cancels the others and is raised."""

        async def together() -> list:
            tasks = [asyncio.ensure_future(one) for one in work]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        return asyncio.run_coroutine_threadsafe(together(), self.loop).result()

    async def call(self, method: str, url: str, body: dict | None = None, *, tries: float = TRIES):
        """Return the JSON of an answer; None if it is empty.

        After HTTP 503 (the server is loading, or paused) it is repeated until `timeout` has passed.

        Raises:
            CallFailed: it was refused, or not answered after so many tries.
        """
        async with self.slots:
            end = time.monotonic() + self.timeout
            while True:
                try:
                    return await self._once(method, url, body)
                except CallFailed as error:
                    tries -= error.status != 503
                    refused = 0 < error.status < 500
                    if refused or tries <= 0 or time.monotonic() >= end:
                        raise
                await asyncio.sleep(self.pause)

    async def _once(self, method: str, url: str, body: dict | None):
        try:
            answer = await self.client.request(method, url, json=body)
        except httpx2.HTTPError as error:
            remedy = f"is the server up, not paused, and the URL right? (--server_timeout {self.timeout:g})"
            raise CallFailed(f"{method} {url}: no answer: {in_a_line(error)}; {remedy}") from error
        problem = f"HTTP {answer.status_code}"
        if answer.status_code == 200:
            try:
                return answer.json() if answer.content else None
            except ValueError:
                problem = "the answer is not JSON"
        text = " ".join(answer.text.split())
        text = text if self.key is None else text.replace(self.key, "***")
        raise CallFailed(f"{method} {url}: {problem}: {text[:300] or 'nothing'}", answer.status_code)


class Server:
    """An inference server; `room` is the number of tokens for a prompt and its response together.

    A kind of server defines the names below, and three methods without side effects:
        request(prompt_ids, sampling, seed) -> path and body of the request for one response
        parse(answer, sampling) -> ids, log-probabilities, kept sets or None, finish reason, version or None
        update(folder, version) -> paths and bodies that pause it, load the weights, empty its cache, set the version
    """

    kind: ClassVar[str]
    margin: ClassVar[int] = 0
    """Tokens of the server's context that no response gets."""
    ready: ClassVar[str]
    """The path that answers 200 when the server can sample."""
    resume: ClassVar[str]
    """The path that ends a pause."""
    flags: ClassVar[dict[str, str]]
    """How to start it, for errors: logprobs, seeds, sets, push, cache, length."""

    def __init__(self, http: Http, url: str, card: dict):
        self.http = http
        self.url = url
        self.model = str(card["id"])
        self.room = int(card["max_model_len"]) - self.margin

    def __str__(self) -> str:
        return f"server {self.url} ({self.kind})"

    async def sample(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> Response:
        """Return one response to one request: of several, vLLM samples copy k with seed + k, SGLang all with one seed.

        Raises:
            InputError: there was no answer, or it is no whole response.
        """
        path, body = self.request(prompt_ids, sampling, seed)
        answer = await self.http.call("POST", self.url + path, body)
        try:
            ids, logprobs, sets, finish, label = self.parse(answer, sampling)
            logprobs = [float(value) for value in logprobs]
            support = None if sets is None else TokenSupport.from_lists(sets)
        except Exception as error:
            problem = f"an answer of an unknown form ({in_a_line(error)})"
            raise InputError(f"{self}: {problem}: {shortened(answer)}") from error
        # The id decides: a stop token in the last place may be called "stop" or "length".
        stopped = bool(ids) and ids[-1] in sampling.stop_ids
        if not stopped and len(ids) != sampling.max_new_tokens:
            raise InputError(
                f"{self}: a response ended by {finish!r} after {len(ids)} of {sampling.max_new_tokens} tokens, at no "
                f"stop token; it was aborted, or has no room: start the server with {self.flags['length']}"
            )
        if sampling.truncates and support is None:
            raise InputError(f"{self}: no kept sets, which top_p, top_k and min_p need; start it {self.flags['sets']}")
        version = int(label) if str(label).isdecimal() else None  # at first it has a name of its own, "default"
        return Response(ids, "stop" if stopped else "length", logprobs, support, version)

    async def push(self, folder: Path, version: int) -> None:
        """Load the weights of a folder that the server sees too. A call that fails is not repeated.

        Raises:
            InputError: the server did not load them.
        """
        try:
            try:
                for path, body in self.update(folder.resolve(), version):
                    answer = await self.http.call("POST", self.url + path, body, tries=1)
                    if isinstance(answer, dict) and answer.get("success") is False:
                        raise CallFailed(f"POST {self.url}{path}: {shortened(answer)}")
            finally:
                await self.http.call("POST", self.url + self.resume, {}, tries=1)
        except CallFailed as error:
            remedy = f"start it with {self.flags['push']}, where it sees {folder}, and for this run alone"
            raise InputError(f"{error}; {self} did not load the weights: {remedy}") from error


def common_options(sampling: Sampling) -> dict:
    """Return the options that servers name alike, all of them: a model's generation config has other defaults."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.truncates else 1.0,
        "min_p": sampling.min_p if sampling.truncates else 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": [],
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # the model's own end of sequence is no stop token
    }
