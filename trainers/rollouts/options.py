"""The options of sampling: what a token is sampled from, and by which sampler."""

import os
import re
from typing import Any, ClassVar

import pydantic

from ..base.options import (
    NonNegativeInt,
    Options,
    Positive,
    PositiveFraction,
    PositiveInt,
    Requirement,
    Temperature,
    Unit,
    may_change,
)
from ..base.text import InputError
from .sampling import Sampling

NO_TOP_K = (
    "with servers needs --top_k, the most ids that they return of the set of a token: give one, such as --top_k 100, "
    "or leave it out"
)
# Responses sampled together on a CPU; a GPU takes four times as many, a step of the default size.
ROLLOUT_BATCH_SIZE = 64


def check_url(option: str, url: str) -> None:
    """Refuse what is no URL of a server; one that may hold a secret is not repeated."""
    expected = "expected a URL such as http://127.0.0.1:8000"
    if "@" in url or "?" in url:
        without = "without a user, password or query; see --server_api_key_env"
        raise InputError(f"{option}: {expected}, {without}")
    if not re.fullmatch(r"https?://[^/?#\s]+[^?#\s]*", url):
        raise InputError(f"{option}={url!r}: {expected}")


class SamplingConfig(Options):
    """The distribution that each token of a response is sampled from."""

    temperature: Temperature = 1.0
    """Sampling temperature, also of every log-probability in the loss."""
    top_p: PositiveFraction = 1.0
    """Sample from the smallest set of most likely tokens that together have this probability; 1 keeps all. If top_p,
    top_k or min_p leaves tokens out, every log-probability, entropy and KL is over the rest."""
    top_k: NonNegativeInt = 0
    """Sample from this number of most likely tokens; 0 keeps all."""
    min_p: Unit = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability; 0 keeps all."""

    def sampling(self, max_new_tokens: int, stop_ids: tuple[int, ...]) -> Sampling:
        """Return the options as a sampler takes them."""
        chosen = {name: getattr(self, name) for name in SamplingConfig.model_fields}
        return Sampling(max_new_tokens=max_new_tokens, stop_ids=stop_ids, **chosen)


class ToolConfig(Options):
    """The functions that the policy may call."""

    tools: str | None = None
    """Functions that the policy may call, my_module:f,my_module:g, as for TRL (docs/tools.md)."""
    environment: str | None = None
    """A class with which each response plays, my_module:Class: its public methods are tools (docs/tools.md)."""
    max_tool_calling_iterations: PositiveInt | None = None
    """Turns of a response after which its calls are no longer answered; None bounds them by max_new_tokens alone."""
    tool_timeout: Positive = may_change(60.0)
    """Seconds that a call may take."""


class SamplerConfig(ToolConfig, SamplingConfig):
    """The sampler of responses."""

    rollout_batch_size: PositiveInt | None = may_change(None)
    """Responses generated together. The default is 64 on a CPU and 256 on a GPU."""
    server: str | list[str] | None = may_change(None)
    """URL or URLs of inference servers that sample instead of this process."""
    server_api_key_env: str | None = may_change(None)
    """Environment variable with the servers' API key, which is never printed or saved."""
    server_timeout: Positive = may_change(600.0)
    """Seconds that one call to a server may take, and that the run waits for a server that is still loading."""
    server_sleeps: bool = may_change(False)
    """Send vLLM servers to sleep during training, if they share the trainers' GPU (--enable-sleep-mode)."""
    published_dir: str | None = may_change(None)
    """Folder for the weights that servers read, which they must see. The default is /dev/shm if all servers are on this
    machine and it has room, and otherwise published/ in output_dir."""
    sampler: str | None = None
    """Your own sampler, my_module:name, called with the sampler of the other options and the tokenizer; it may hold a
    conversation, for example (docs/rollouts.md)."""
    lag: NonNegativeInt = 0
    """Sample the responses of a step with the weights of this many steps earlier, during the steps in between;
    rollout_correction corrects for the difference (docs/rollouts.md)."""

    needs: ClassVar = (
        *(
            Requirement(
                option,
                lambda config: config.server or config.served,
                "means nothing without --server",
            )
            for option in ("server_api_key_env", "server_timeout", "server_sleeps", "published_dir")
        ),
        # Servers report the kept set of a token only up to a given number of ids; min_p=0 asks for none.
        Requirement(
            "top_p", lambda config: not config.server or config.top_k or config.top_p == 1, NO_TOP_K
        ),
        Requirement("min_p", lambda config: not config.server or config.top_k, NO_TOP_K),
        Requirement(
            "server_sleeps",
            lambda config: config.lag == 0,
            "has no meaning with lag, which samples while the policy is trained; drop one of them",
        ),
    )

    @pydantic.field_validator("server_api_key_env", mode="before")
    @classmethod
    def _names_a_variable(cls, value: Any) -> Any:
        # It names a variable, because options are printed and saved. Who gives the key itself must not see it there.
        if value is not None and not os.environ.get(str(value), "").strip():
            problem = "server_api_key_env: no environment variable of this name holds a key"
            raise InputError(f"{problem}; export it, and give its name, not the key")
        return value

    @property
    def served(self) -> bool:
        """Return True if a model that only gives log-probabilities is behind a server."""
        return False

    @pydantic.field_validator("server")
    @classmethod
    def _urls(cls, value: str | list[str] | None) -> list[str] | None:
        """Refuse what is no URL of a server; one that may hold a password is not repeated."""
        # On the command line several are joined by commas; a path is allowed, as behind a proxy, and a query is not.
        urls = [url.strip() for url in value.split(",")] if isinstance(value, str) else value
        for url in urls or []:
            check_url("server", url)
        return urls
