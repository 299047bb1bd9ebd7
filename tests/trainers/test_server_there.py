"""Who is there: URLs, servers that are starting, other programs, certificates."""

import shutil
import socket
import ssl
import subprocess

import pytest

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.servers.connection import Connection, NoAnswer, Refused
from fused_rl.trainers.servers.kinds import connect
from tests.trainers import fake_server
from tests.trainers.served import QUICK


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "--server 'localhost:8000' is no URL of a server; expected http://host:port or https://"),
        ("ftp://host:1", "is no URL of a server"),
        ("http://", "is no URL of a server"),
        ("http://user:word@host:1", "is no URL of a server"),
        ("http://host:99999", "Port out of range"),
        ("http://host:x", "could not be cast to integer"),
        ("http://no.such.host.invalid:1", "is the URL right"),
    ],
)
def test_a_url_that_is_none_is_a_line(url, message):
    with pytest.raises(InputError, match=message):
        connect(url, **QUICK)


def test_nobody_there_is_a_line(folder):
    with pytest.raises(InputError, match="/health: no answer: ConnectionRefusedError: .* is the server up.*for 0 s"):
        connect(f"http://127.0.0.1:{closed_port()}", **QUICK)


def test_a_server_that_is_still_starting_is_waited_for(fake, capsys):
    fake.script = [("/health", 503), ("/health", "close")]
    assert connect(fake.url, **QUICK | {"seconds": 60}).wait() == 128
    assert capsys.readouterr().out.count(f"waiting at most 60 s: server {fake.url}, GET /health: HTTP 503") == 1


@pytest.mark.parametrize(
    ("path", "wrong", "message"),
    [
        ("/health", 404, "GET /health: HTTP 404.*--server takes vLLM and SGLang servers"),
        ("/health", "no json", "the answer is no JSON: <html>; --server takes"),
        (
            "/v1/models",
            lambda right: {"data": []},
            "does not say which model it serves .* it is neither",
        ),
        ("/v1/models", lambda right: {"data": [{"id": "gpt"}]}, "does not say which model it serves"),
    ],
)
def test_what_is_no_inference_server_is_a_line(fake, path, wrong, message):
    fake.script = [(path, wrong)]
    with pytest.raises(InputError, match=message):
        connect(fake.url, **QUICK)


def test_a_server_of_another_kind_is_a_line(folder):
    with (
        fake_server.serving("vllm", folder, owner="llamacpp") as fake,
        pytest.raises(InputError, match="says that it is 'llamacpp', which is neither vLLM nor SGLang"),
    ):
        connect(fake.url, **QUICK)


def test_a_certificate_that_nobody_vouches_for_is_refused(fake, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    names = ["-keyout", tmp_path / "key", "-out", tmp_path / "cert", "-subj", "/CN=localhost"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *names]
    subprocess.run([*made, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    fake.listener.socket = context.wrap_socket(fake.listener.socket, server_side=True)
    secure = fake.url.replace("http:", "https:")
    with pytest.raises(InputError, match="certificate is not trusted .*self.signed.*SSL_CERT_FILE"):
        connect(secure, **QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
        assert connect(secure, **QUICK).max_model_len == 128


def test_tls_where_there_is_none_is_a_line(fake):
    with pytest.raises(InputError, match="SSLError.*is the URL right"):
        connect(fake.url.replace("http:", "https:"), **QUICK)


def test_a_path_before_all_calls_is_kept():
    connection = Connection("https://host/rollouts/")
    assert (connection.host, connection.port, connection.prefix) == ("host", None, "/rollouts")


PASSING = {
    "name service": socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    "end of file": ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
    "closed": ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed"),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_of_names_or_of_tls_is_asked_again(monkeypatch, fault):
    connection, calls = Connection("https://host", between=0), []

    def exchange(*args):
        calls.append(args)
        if len(calls) < 3:
            raise PASSING[fault]
        return 200, b"{}"

    monkeypatch.setattr(connection, "_exchange", exchange)
    assert connection.get("/model_info") == {} and len(calls) == 3
    calls.clear()
    connection.tries = 2
    with pytest.raises(NoAnswer, match="is the (server up|URL right)"):
        connection.get("/model_info")


@pytest.mark.parametrize("fault", [socket.gaierror(socket.EAI_NONAME, "unknown"), ssl.SSLError(1, "no TLS")])
def test_a_name_that_is_none_and_a_server_without_tls_are_not(monkeypatch, fault):
    connection, calls = Connection("https://host", between=0), []

    def exchange(*args):
        calls.append(args)
        raise fault

    monkeypatch.setattr(connection, "_exchange", exchange)
    with pytest.raises(Refused, match="is the URL right"):
        connection.get("/model_info")
    assert len(calls) == 1
