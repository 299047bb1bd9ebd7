"""HTTP calls to inference servers, and what a kind of server must provide: vllm.py and sglang.py.

Token ids go in and token ids come out. Nothing of a server's own package is imported.
"""

import asyncio
import contextlib
import json
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
IDLE = 3.0  # seconds that a connection is kept: servers close theirs after 5
LONGEST = 1 << 28  # bytes of an answer
UNREADABLE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)


class CallFailed(InputError):
    """A call without a usable answer; `status` is of HTTP, 0 if there was no answer at all."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class Http:
    """Calls to servers, made by one thread with an event loop; any thread may wait for them by `run`.

    Args:
        timeout: seconds for one call, and for a server that is loading or paused.
        concurrency: calls at the same time.
        key: sent as a bearer token, and never part of an error.
    """

    def __init__(self, timeout: float = 600.0, concurrency: int = 256, key: str | None = None):
        self.timeout, self.key, self.pause = timeout, key, 1.0  # seconds between two tries
        self.turns = asyncio.Semaphore(concurrency)
        # Answers come uncompressed, so that a limit on their size holds. Proxies and .netrc are not for servers.
        headers = {"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        limits = httpx2.Limits(keepalive_expiry=IDLE)
        context = ssl.create_default_context()
        self.client = httpx2.AsyncClient(headers=headers, timeout=None, limits=limits, verify=context, trust_env=False)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Iterable[Coroutine]) -> list:
        """Return the results of calls, in order; the first failure cancels the others and is raised."""
        return asyncio.run_coroutine_threadsafe(_all(work), self.loop).result()

    async def call(self, method: str, url: str, body: dict | None = None, *, tries: float = TRIES):
        """Return the JSON of an answer; None if it is empty.

        After HTTP 503 (the server is loading, or paused) it is repeated until `timeout` has passed.

        Raises:
            CallFailed: it was refused, or not answered after so many tries.
        """
        async with self.turns:
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
            status, text = await asyncio.wait_for(self._exchange(method, url, body), self.timeout)
        except asyncio.TimeoutError as error:
            waited = f"no answer within --server_timeout {self.timeout:g} s"
            raise CallFailed(f"{method} {url}: {waited}; is the server up, and not paused?") from error
        except (httpx2.HTTPError, OSError, UnicodeError) as error:
            remedy = "is the server up, and the URL right?"
            raise CallFailed(f"{method} {url}: no answer: {in_a_line(error)}; {remedy}") from error
        if status == 200:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(text) if text.strip() else None
        shown = " ".join(text.decode(errors="replace").split())
        shown = shown if self.key is None else shown.replace(self.key, "***")
        said = "the answer is not JSON" if status == 200 else f"HTTP {status}"
        raise CallFailed(f"{method} {url}: {said}: {shown[:300] or 'nothing'}", status)

    async def _exchange(self, method: str, url: str, body: dict | None) -> tuple[int, bytes]:
        """Return status and text of one answer."""
        text = bytearray()
        async with self.client.stream(method, url, json=body) as answer:
            async for part in answer.aiter_raw():
                text += part
                if len(text) > LONGEST:
                    raise httpx2.ReadError(f"more than {LONGEST} bytes")
        return answer.status_code, bytes(text)


async def _all(work: Iterable[Coroutine]) -> list:
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


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
            support = None if sets is None else TokenSupport.from_lists(sets)
            logprobs = [float(value) for value in logprobs]
            # The id decides: a stop token in the last place may be called "stop" or "length".
            stopped = bool(ids) and ids[-1] in sampling.stop_ids
            count = len(ids)
            version = int(label) if str(label).isdecimal() else None  # a server's own label is a word: "default"
        except UNREADABLE as error:
            raise InputError(
                f"{self}: an answer of an unknown form ({in_a_line(error)}): {shortened(answer)}"
            ) from error
        if not stopped and count != sampling.max_new_tokens:
            raise InputError(
                f"{self}: a response ended by {finish!r} after {count} of {sampling.max_new_tokens} tokens, at no stop "
                f"token; it was aborted, or the prompt leaves no room: start the server with {self.flags['length']}"
            )
        if sampling.truncates and support is None:
            raise InputError(f"{self}: no kept sets, which top_p, top_k and min_p need; start it {self.flags['sets']}")
        return Response(ids, "stop" if stopped else "length", logprobs, support, version)

    async def push(self, folder: Path, version: int) -> None:
        """Load the weights of a folder that the server sees too. A call that fails is not repeated.

        Raises:
            InputError: the server did not load them.
        """
        try:
            for path, body in [*self.update(folder.resolve(), version), (self.resume, {})]:
                answer = await self.http.call("POST", self.url + path, body, tries=1)
                if isinstance(answer, dict) and answer.get("success", True) is not True:
                    raise CallFailed(f"POST {self.url}{path}: {shortened(answer)}")
        except BaseException as error:
            with contextlib.suppress(CallFailed):
                await self.http.call("POST", self.url + self.resume, {}, tries=1)
            if not isinstance(error, CallFailed):
                raise
            remedy = f"start it with {self.flags['push']}, where it sees {folder}, and for this run alone"
            raise InputError(f"{error}; {self} did not load the weights: {remedy}") from error


def options(sampling: Sampling) -> dict:
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
    }
