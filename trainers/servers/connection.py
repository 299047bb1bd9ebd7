"""JSON calls to a server over HTTP: time-outs, what is asked again, and errors that say server, call and what came.

Asked again is what had no answer or HTTP 5xx, and never what was refused (4xx), nor a call that changes something. A
server that is paused is waited for, and never resumed: the pause is somebody else's.
"""

import http.client
import json
import socket
import ssl
import time
from urllib.parse import urlsplit

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.options.text import in_a_line

SHOWN = 300  # characters of somebody else's answer in an error
PASSING = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # a connection that was cut, under TLS
QUESTION = 10.0  # seconds for an answer that needs no model


class NoAnswer(InputError):
    """Nothing came, or HTTP 5xx, as often as it was asked."""

    status: int = 0
    """None of HTTP where nothing came."""
    may_be_paused: bool = False
    """HTTP 503, or silence."""
    silent: bool = False
    """It had the whole time-out: two of the tries, so that other ranks, which wait for half an hour, hear of it."""


class Refused(InputError):
    """HTTP 4xx, or what is no answer to the question: asking again would change nothing."""

    status: int = 0


class Connection:
    """One server, of which every call is a connection of its own, so that any number of threads may call.

    Args:
        url: `http://host:port` or `https://…`, whose certificate is verified.
        timeout: seconds that a call may be silent.
        tries: of a call that may be asked again; silence counts for two.
        between: seconds between these, and between questions whether a server is still paused.
        patience: seconds that a paused server is waited for.

    Raises:
        InputError: the URL is none.
    """

    def __init__(
        self, url: str, *, timeout: float = 600.0, tries: int = 3, between: float = 1.0, patience: float = 600.0
    ):
        expected = "expected http://host:port or https://host:port"
        try:
            parts = urlsplit(url)
            self.host, self.port = parts.hostname, parts.port
        except ValueError as error:  # a port that is no number, a host in half a bracket
            raise InputError(f"--server {url!r}: {error}; {expected}") from error
        if parts.scheme not in ("http", "https") or not self.host or parts.query or parts.fragment or parts.username:
            raise InputError(f"--server {url!r} is no URL of a server; {expected}")
        self.url, self.prefix = url.rstrip("/"), parts.path.rstrip("/")
        self.secure = ssl.create_default_context() if parts.scheme == "https" else None
        self.timeout, self.tries, self.between, self.patience = timeout, tries, between, patience

    def get(self, path: str):
        """The answer to a question that needs no model."""
        return self._again("GET", path, None, min(QUESTION, self.timeout))

    def ask(self, path: str, body: dict):
        """The answer to a question that may be asked again; a paused server is waited for."""
        return self._again("POST", path, body, self.timeout)

    def check_health(self) -> None:
        """Ask once whether it is there and ready; NoAnswer where it is not."""
        self._once("GET", "/health", None, min(QUESTION, self.timeout))

    def tell(self, path: str, body: dict | None = None):
        """The answer to what changes the server: asked once."""
        return self._once("POST", path, body, self.timeout)

    def is_paused(self) -> bool:
        """Whether it says so; a server that knows no such question never does."""
        try:
            answer = self._once("GET", "/is_paused", None, min(QUESTION, self.timeout))
        except (Refused, NoAnswer):
            return False
        return isinstance(answer, dict) and answer.get("is_paused") is True

    def until_resumed(self) -> None:
        """Wait until it is not paused.

        Raises:
            InputError: nobody resumed it in time.
        """
        end = time.monotonic() + self.patience
        while self.is_paused():
            if time.monotonic() > end:
                raise InputError(
                    f"server {self.url} is paused, and nobody resumed it within {self.patience:g} s; this run has not "
                    f"paused it: once nobody updates its weights, resume it (curl -X POST {self.url}/resume)"
                )
            time.sleep(self.between)

    def _again(self, method: str, path: str, body: dict | None, timeout: float):
        left = self.tries
        while True:
            try:
                return self._once(method, path, body, timeout)
            except NoAnswer as error:
                paused = error.may_be_paused and method == "POST" and self.is_paused()
                left -= 0 if paused else 2 if error.silent else 1
                if left <= 0:
                    raise
            if paused:
                self.until_resumed()
            else:
                time.sleep(self.between)

    def _once(self, method: str, path: str, body: dict | None, timeout: float):
        """One request; the parsed answer, None where it is empty."""
        place = f"server {self.url}, {method} {path}"
        try:
            status, text = self._exchange(method, path, body, timeout)
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message or in_a_line(error)
            raise Refused(
                f"{place}: its certificate is not trusted ({reason}); mend it, or name the authority that signed it in "
                "the environment variable SSL_CERT_FILE"
            ) from error
        except PASSING as error:
            raise NoAnswer(f"{place}: no answer: {in_a_line(error)}; is the server up?") from error
        except (ssl.SSLError, socket.gaierror) as error:  # no TLS there, no such name
            kind = NoAnswer if error.errno == socket.EAI_AGAIN and isinstance(error, socket.gaierror) else Refused
            raise kind(f"{place}: {in_a_line(error)}; is the URL right?") from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # refused, cut short, no such name
            silent = isinstance(error, TimeoutError)
            what = f"nothing for {timeout:g} s" if silent else in_a_line(error)
            longer = ""
            if silent and method == "POST":
                longer = " (where a response takes longer, lower max_new_tokens or give more servers)"
            failure = NoAnswer(f"{place}: no answer: {what}; is the server up?{longer}")
            failure.may_be_paused = failure.silent = silent
            raise failure from error

        # What came.
        if status != 200:
            kind = NoAnswer if status >= 500 else Refused
            failure = kind(f"{place}: HTTP {status}: {_shortened(text)}")
            failure.status, failure.may_be_paused = status, status == 503
            raise failure
        try:
            return json.loads(text) if text.strip() else None
        except ValueError as error:
            raise Refused(f"{place}: the answer is no JSON: {_shortened(text)}") from error

    def _exchange(self, method: str, path: str, body: dict | None, timeout: float) -> tuple[int, bytes]:
        """Status and text of an answer."""
        if self.secure is None:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=self.secure)
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, self.prefix + path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def _shortened(text: bytes) -> str:
    """Somebody else's answer in a line."""
    words = " ".join(text.decode(errors="replace").split())
    return words[:SHOWN] or "nothing"
