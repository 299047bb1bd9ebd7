"""HTTP calls to inference servers, and what all kinds of them (kinds.py) have in common; ids go in and come out."""

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx2

from fused_rl import TokenSupport

from ..base.screen import print_line
from ..base.text import InputError, in_a_line
from ..rollouts.sampling import Sampling
from ..rollouts.types import Response, one_line

TRIES = 3  # of a call that had no answer, or HTTP 5xx
IDLE = 3.0  # seconds that an idle connection is kept; servers close theirs after 5


class HttpError(InputError):
    """A call that a server did not answer as it should, with its HTTP status; 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0):  # one argument is enough to unpickle it
        super().__init__(message)
        self.status = status


class Http:
    """Calls to servers by one thread with an event loop; any thread may wait for them with `run`.

    `timeout` in seconds is of one call, and of a server that is loading or paused; `concurrency` is the number of calls
    at the same time; `key` is sent as a bearer token, and never part of an error.
    """

    def __init__(self, timeout: float = 600.0, concurrency: int = 256, key: str | None = None):
        self.timeout = timeout
        self.key = key
        self.pause = 1.0  # seconds between two tries
        self.waited_for: set[str] = set()  # URLs that answered 503, which is printed once
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
        """Return the results of calls, in order; the first failure cancels the others, and is raised when all ended."""

        async def gather_all() -> list:
            tasks = [asyncio.ensure_future(one) for one in work]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(
                    *tasks, return_exceptions=True
                )  # a server whose update is cancelled is resumed

        return asyncio.run_coroutine_threadsafe(gather_all(), self.loop).result()

    def ask(self, method: str, url: str, body: dict | None = None, **options) -> Any:
        """Return what one `call` returns."""
        return self.run([self.call(method, url, body, **options)])[0]

    async def call(self, method: str, url: str, body: dict | None = None, *, tries: float = TRIES):
        """Return the JSON of an answer; None if it is empty. After HTTP 503 repeat until `timeout` has passed."""
        async with self.slots:
            end = time.monotonic() + self.timeout
            while True:
                status, text = 0, ""
                try:
                    answer = await self.client.request(method, url, json=body)
                    status = answer.status_code
                    text = " ".join(answer.text.split()) or "nothing"
                    problem = f"HTTP {status}: {text}"
                    if status == 200:
                        return answer.json() if answer.content else None
                except httpx2.HTTPError as error:
                    remedy = f"is the server up, not paused, and the URL right? (--server_timeout {self.timeout:g})"
                    problem = f"no answer: {in_a_line(error)}; {remedy}"
                except ValueError:
                    problem = f"the answer is not JSON: {text}"

                # 503 is a server that still loads, which is waited for. Other answers below 500 stay the same however
                # often they are asked for.
                tries -= status != 503
                if 0 < status < 500 or tries <= 0 or time.monotonic() >= end:
                    problem = problem if self.key is None else problem.replace(self.key, "***")
                    raise HttpError(f"{method} {url}: {problem[:400]}", status)
                if status == 503 and url not in self.waited_for:
                    self.waited_for.add(url)
                    until = f"it is loading or paused; trying again for {self.timeout:g} s"
                    print_line(f"{method} {url}: {problem[:200]}; {until}")
                await asyncio.sleep(self.pause)


class Server:
    """An inference server; `room` is the number of tokens for a prompt and its response together.

    A kind of server defines the names below, and `request`, `parse` and `update`, which call nothing.
    """

    kind: ClassVar[str]
    margin: ClassVar[int] = 0  # tokens of its context that no response gets
    ready: ClassVar[str]  # the path that answers 200 when it can sample
    resume: ClassVar[str]  # the path that ends a pause
    is_paused: ClassVar[str | None] = None  # the path that tells of a pause, if there is one
    wake: ClassVar[str | None] = None  # the path that ends sleep
    sleep: ClassVar[str | None] = None  # the path that frees its memory
    flags: ClassVar[str]  # how to start it, at the end of every error
    without_cache: ClassVar[str]

    def __init__(self, http: Http, url: str, card: dict):
        self.http = http
        self.url = url
        self.name = f"server {url} ({self.kind} with {card.get('root') or card['id']})"
        self.model = str(card["id"])
        self.asleep = False
        self.room = int(card["max_model_len"]) - self.margin

    def request(
        self, prompt_ids: list[int], sampling: Sampling, seed: int | None
    ) -> tuple[str, dict]:
        """Return path and body of the request for one response."""
        raise NotImplementedError

    def parse(self, answer: Any, sampling: Sampling) -> tuple:
        """Return an answer's ids, log-probabilities, kept sets or None, and finish reason."""
        raise NotImplementedError

    def update(self, weights: Path | dict) -> list[tuple[str, dict | None]]:
        """Return paths and bodies that pause the server, load the weights as in `push` and empty its cache."""
        raise NotImplementedError

    async def sample(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> Response:
        """Return the response to one request; a request for several would give them related or equal seeds."""
        # A later turn may be requested with what is left to a shorter response.
        most = min(sampling.max_new_tokens, self.room - len(prompt_ids))
        sampling = replace(sampling, max_new_tokens=most)
        # Whatever an answer lacks or has otherwise, the server is another release than those that are known.
        path, body = self.request(prompt_ids, sampling, seed)
        try:
            answer = await self.http.call("POST", self.url + path, body)
        except HttpError as error:
            if error.status not in (400, 403, 404):
                raise
            remedy = f"{self.name} must serve the model that is trained; {self.flags}"
            raise InputError(f"{error}; {remedy}") from error
        try:
            ids, logprobs, sets, finish = self.parse(answer, sampling)
            scores: list[float | None] = [float(value) for value in logprobs]
            support = None if sets is None else TokenSupport.from_lists(sets)
        except Exception as error:
            problem = f"an answer of an unknown form ({in_a_line(error)})"
            raise InputError(f"{self.name}: {problem}: {one_line(answer)}") from error
        # The id decides: a stop token in the last place may be called "stop" or "length".
        stopped = bool(ids) and ids[-1] in sampling.stop_ids
        if not stopped and len(ids) != sampling.max_new_tokens:
            raise InputError(
                f"{self.name}: a response ended by {finish!r} after {len(ids)} of {sampling.max_new_tokens} tokens, at "
                f"no stop token; it was aborted, or has no room; {self.flags}"
            )
        if sampling.truncates and support is None:
            raise InputError(
                f"{self.name}: no kept sets, which top_p, top_k and min_p need; {self.flags}"
            )
        return Response(ids, "stop" if stopped else "length", scores, support)

    async def push(self, weights: Path | dict) -> None:
        """Load the weights of a folder that the server sees too, or for vLLM those behind `ipc.update_info`.

        A call that fails is not repeated.
        """
        calls = [*self.update(weights), (self.resume, {})]
        try:
            for path, body in calls:
                answer = await self.http.call("POST", self.url + path, body, tries=1)
                if isinstance(answer, dict) and answer.get("success") is False:
                    raise InputError(f"POST {self.url}{path}: {one_line(answer)}")
        except BaseException as error:
            # A call that was cancelled comes here too. The first error is the one that is shown, and a server without
            # its weights stays asleep.
            if not self.asleep:
                with contextlib.suppress(InputError):
                    await self.http.call("POST", self.url + self.resume, {}, tries=1)
            if not isinstance(error, InputError):
                raise
            place = (
                f"see {weights} (--published_dir)"
                if isinstance(weights, Path)
                else "be on a trainer's GPU"
            )
            raise InputError(
                f"{error}; {self.name} did not load the weights: it must {place}, serve this run alone, and have room "
                f"on its GPU to wake (--gpu-memory-utilization); {self.flags}"
            ) from error
        self.asleep = False

    async def rest(self) -> None:
        """Free the memory of weights and cache, until the next weights are loaded."""
        try:
            await self.http.call("POST", f"{self.url}{self.sleep}", {}, tries=1)
        except InputError as error:
            remedy = "its log says why; start it again, or leave out --server_sleeps"
            raise InputError(f"{error}; {self.name} did not fall asleep: {remedy}") from error
        self.asleep = True
