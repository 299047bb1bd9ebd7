"""What an inference server is to the trainer, whoever made it: four calls, and what its answers must hold.

    server.wait() -> longest prompt and response    server.sample(prompt, n, sampling, seeds) -> responses
    server.push(folder, version)                    server.version() -> version

Token ids in, token ids out. What a server calls its fields is in vllm.py and sglang.py; nothing of either is imported.
"""

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from fused_rl import TokenSupport
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.options.text import in_a_line
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Response, shortened
from fused_rl.trainers.servers.connection import Connection, NoAnswer, Refused

STARTS_WITHIN = 600.0  # seconds, of a server that loads its model
UNKNOWN = (404, 405)  # HTTP statuses of what a server has no answer to


class Flags(NamedTuple):
    """With what a server of a kind is started, as errors name it."""

    logprobs: str
    """Log-probabilities of the distribution drawn from."""
    seeds: str
    """The same response to the same seed."""
    sets: str
    """The ids that each token was drawn from."""
    push: str
    """Weights from a folder."""
    dtype: str
    head: str
    """Logits in fp32."""
    no_cache: str
    """Nothing kept of a prompt."""
    length: str
    tokenizer: str


class Answer(NamedTuple):
    """One response as a server told it: nothing of it is believed yet."""

    ids: object
    logprobs: object
    finish: object
    sets: object = None
    version: str | None = None


class Server(ABC):
    """An inference server that has been asked what it is.

    Args:
        connection: to it.
        model: what it calls its model.
        max_model_len: tokens that a prompt and its response may have together.
    """

    kind: ClassVar[str]
    flags: ClassVar[Flags]

    def __init__(self, connection: Connection, model: str, max_model_len: int):
        self.connection, self.model, self.max_model_len = connection, model, max_model_len
        self.url = connection.url

    def __str__(self) -> str:
        return f"server {self.url} ({self.kind})"

    def wait(self, seconds: float = STARTS_WITHIN) -> int:
        """Until it answers; returns the most tokens of a prompt and its response together, as it says now."""
        until_healthy(self.connection, seconds)
        self.model, self.max_model_len, _ = card_of(self.connection)
        return self.max_model_len

    def sample(
        self, prompt_ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Response]:
        """`n` responses, one after the other, each a request with its own seed: of one request's samples vLLM seeds
        number k with seed + k, and SGLang all with the same.

        Args:
            prompt_ids: token ids.
            n: how many responses.
            sampling: how they are drawn; its own seeds are not read.
            seeds: `n` of them; None where the server may draw as it likes.

        Raises:
            InputError: what was asked does not fit, no answer came, or it is not what was asked for.
        """
        whole = len(prompt_ids) + sampling.max_new_tokens
        if whole > self.max_model_len:  # it would be cut without a word
            raise InputError(
                f"{self}: a prompt of {len(prompt_ids)} tokens and max_new_tokens={sampling.max_new_tokens} are more "
                f"than its {self.max_model_len} tokens; start it with {self.flags.length} {whole} or more"
            )
        if seeds is not None and len(seeds) != n:
            raise ValueError(f"{len(seeds)} seeds for {n} responses")
        found = []
        for seed in [None] * n if seeds is None else seeds:
            answer = self._parsed(list(prompt_ids), sampling, seed)
            found.append(self._believed(answer, sampling))
        return found

    def push(self, folder: Path, version: int) -> None:
        """Have it read the weights in `folder`, in the Hub format on a disk that it sees, as this version.

        It answers nothing meanwhile. Who has paused it before is waited for; what this call paused it resumes, however
        it ends.

        Raises:
            InputError: it did not, or does not say so; which weights it has now is not known.
        """
        self.connection.until_resumed()
        with self._known_to_push():
            refused = False
            try:
                try:
                    self._pause()
                except Refused:  # what is paused now is so for somebody else
                    refused = True
                    raise
                self._load(folder.resolve(), version)
            except BaseException:  # a pause may have been heard though its answer is lost
                if not refused:
                    with contextlib.suppress(InputError):
                        self._resume()
                raise
            self._resume()
        label = self.label()
        if label != str(version):
            raise InputError(f"{self}: version {version} was pushed, but it says that its weights are of {label!r}")

    def version(self) -> int | None:
        """Of its weights; None where no push has named one."""
        label = self.label()
        return int(label) if is_version(label) else None

    @abstractmethod
    def label(self) -> str | None:
        """What it calls the version of its weights."""

    @abstractmethod
    def digests(self) -> dict[str, str] | None:
        """Of each of its tensors, by its own name for it; None where it does not tell."""

    def tokens_of(self, text: str) -> list[int] | None:
        """The ids that its tokenizer makes of a text, without special tokens around it; None where it has none."""
        return self._told_of("tokens", list, "/tokenize", self._tokenized(text))

    @abstractmethod
    def _tokenized(self, text: str) -> dict:
        """What /tokenize is asked."""

    @abstractmethod
    def why_no_sets(self, sampling: Sampling) -> str | None:
        """Why it does not tell what a token is drawn from that is drawn so; None where it does."""

    @abstractmethod
    def _answer(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> Answer:
        """One response."""

    @abstractmethod
    def _pause(self) -> None: ...

    @abstractmethod
    def _load(self, folder: Path, version: int) -> None:
        """The weights, an empty prefix cache, and the version."""

    @abstractmethod
    def _resume(self) -> None: ...

    def _told_of(self, what: str, kind: type, path: str, body: dict):
        """`what` of the answer, which is of this kind; None where the server knows no such question."""
        try:
            answer = self.connection.ask(path, body)
        except Refused as error:
            if error.status in UNKNOWN:
                return None
            raise
        told = answer.get(what) if isinstance(answer, dict) and answer.get("success", True) else None
        if not isinstance(told, kind):
            raise self._missing(what, answer)
        return told

    @contextlib.contextmanager
    def _known_to_push(self) -> Iterator[None]:
        """Say with what a server must be started that does not know how to take weights."""
        try:
            yield
        except Refused as error:
            if error.status not in UNKNOWN:
                raise
            raise InputError(f"{error}; it takes weights where it is started with {self.flags.push}") from error

    def _parsed(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> Answer:
        """One response, from whatever it answers."""
        try:
            return self._answer(prompt_ids, sampling, seed)
        except InputError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self}: an answer in a form that is not known: {in_a_line(error)}") from error

    def _believed(self, answer: Answer, sampling: Sampling) -> Response:
        """The response, if it holds what it must."""
        problem = _broken(answer, sampling)
        if problem == NO_LOGPROBS:
            problem += f"; start it with {self.flags.logprobs}"
        if problem == NO_SETS:
            problem += f"; start it with {self.flags.sets}"
        if problem is not None:
            raise InputError(f"{self}: an unusable response: {problem}")
        support = None if answer.sets is None else self._support(answer)
        version = int(answer.version) if is_version(answer.version) else None
        # SGLang says "length" of a stop token that is the last of max_new_tokens.
        ended = bool(answer.ids) and answer.ids[-1] in sampling.stop_ids
        return Response(answer.ids, "stop" if ended else "length", answer.logprobs, support, version)

    def _support(self, answer: Answer) -> TokenSupport:
        """The kept sets of a response, one for each of its tokens."""
        try:
            found = TokenSupport.from_lists(answer.sets)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{self}: kept sets that are none: {in_a_line(error)}") from error
        if len(found) != len(answer.ids):
            raise InputError(f"{self}: {len(found)} kept sets for {len(answer.ids)} tokens")
        return found

    def _missing(self, what: str, answer: object) -> InputError:
        return InputError(f"{self}: an answer without {what}: {shortened(answer)}")


NO_LOGPROBS = "no log-probabilities"
NO_SETS = "no kept sets, though the sampling truncates"


def _broken(answer: Answer, sampling: Sampling) -> str | None:
    """What is wrong with a response."""
    ids, told, most = answer.ids, answer.logprobs, sampling.max_new_tokens
    if answer.finish not in ("stop", "length"):  # abort, error, None: what came is a part of a response, or nothing
        return f"finish_reason={shortened(answer.finish)} after {_length(ids)} tokens; expected stop or length"
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        return f"no list of token ids but {shortened(ids)}"
    if answer.finish == "length" and len(ids) != most:
        return f"finish_reason='length' after {len(ids)} of max_new_tokens={most} tokens"
    if answer.finish == "stop" and (not ids or ids[-1] not in sampling.stop_ids):
        return f"finish_reason='stop', but its last token {ids[-1:]} is none of the stop tokens {sampling.stop_ids}"
    if sampling.truncates and answer.sets is None:
        return NO_SETS
    if told is None:
        return NO_LOGPROBS
    numbers = isinstance(told, list) and all(isinstance(value, (int, float)) for value in told)
    if not numbers or not all(map(math.isfinite, told)):
        return f"log-probabilities that are no finite numbers: {shortened(told)}"
    if len(told) != len(ids):
        return f"{len(told)} log-probabilities for {len(ids)} token ids"
    return None


def _length(ids: object) -> int:
    return len(ids) if isinstance(ids, list) else 0


def is_version(label: str | None) -> bool:
    """Whether a label is one that a push gave, and not a server's own, such as "default"."""
    return isinstance(label, str) and label.isdecimal()


def until_healthy(connection: Connection, seconds: float) -> None:
    """Wait for a server that is being started: nobody listens yet, or it says that it is not ready.

    Raises:
        InputError: it is not there, or not ready, after so many seconds.
    """
    end, told = time.monotonic() + seconds, False
    while True:
        try:
            connection.check_health()
            return
        except NoAnswer as error:
            if time.monotonic() >= end:
                raise InputError(f"{error}; waited for {seconds:g} s") from error
            if not told and ranks.rank() == 0:
                tell(f"waiting at most {seconds:g} s: {error}")
        told = True
        time.sleep(connection.between)


def card_of(connection: Connection) -> tuple[str, int, str]:
    """What a server says of the model that it serves: its name, the tokens that fit, and whose kind the server is.

    Raises:
        InputError: it is no inference server.
    """
    answer = connection.get("/v1/models")
    try:
        card = answer["data"][0]
        return str(card["id"]), int(card["max_model_len"]), str(card["owned_by"])
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise InputError(
            f"server {connection.url} does not say which model it serves (GET /v1/models: {shortened(answer)}): it is "
            "neither vLLM nor SGLang"
        ) from error
