"""Servers by their URLs: which kind each is, it is asked."""

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.servers import inference
from fused_rl.trainers.servers.connection import Connection, Refused
from fused_rl.trainers.servers.inference import Server, card_of, until_healthy
from fused_rl.trainers.servers.sglang import SGLang
from fused_rl.trainers.servers.vllm import VLLM

KINDS = {kind.kind.lower(): kind for kind in (VLLM, SGLang)}


def connect(url: str, *, seconds: float | None = None, **options) -> Server:
    """The server at `url`, which is waited for so many seconds where it is still being started.

    Args:
        url: `http://host:port`.
        seconds: to wait for it; None is `inference.STARTS_WITHIN`.
        **options: of `Connection`.

    Raises:
        InputError: nobody is there, or none that is known.
    """
    connection = Connection(url, **options)
    try:
        until_healthy(connection, inference.STARTS_WITHIN if seconds is None else seconds)
        model, max_model_len, owner = card_of(connection)
    except Refused as error:
        raise InputError(f"{error}; --server takes vLLM and SGLang servers") from error
    if owner not in KINDS:
        raise InputError(f"server {url} says that it is {owner!r}, which is neither vLLM nor SGLang")
    return KINDS[owner](connection, model, max_model_len)
