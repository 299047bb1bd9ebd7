"""The options of sampling: what a token is sampled from, and by which sampler."""

import re
from typing import ClassVar

import pydantic

from fused_rl.trainers.options import (
    InputError,
    Needs,
    NonNegativeInt,
    Options,
    Positive,
    PositiveFraction,
    PositiveInt,
    Temperature,
    Unit,
    names_of,
)
from fused_rl.trainers.rollouts.sampling import Sampling

ROLLOUT_BATCH_SIZE = 64


class SamplingConfig(Options):
    """The distribution that each token of a response is sampled from."""

    temperature: Temperature = 1.0
    """Of the distribution drawn from, and of every log-probability in a loss."""
    top_p: PositiveFraction = 1.0
    """Draw from as few of the likeliest tokens as have this much of the probability together; 1 draws from all. Where
    this, top_k or min_p leaves tokens out, every log-probability, entropy and KL is over what was left."""
    top_k: NonNegativeInt = 0
    """Draw from so many of the likeliest tokens; 0 draws from all."""
    min_p: Unit = 0.0
    """Draw from tokens with at least this fraction of the likeliest one's probability; 0 draws from all."""

    def sampling(self, max_new_tokens: int, stop_ids: tuple[int, ...]) -> Sampling:
        """Return the options as a sampler takes them."""
        chosen = {name: getattr(self, name) for name in names_of(SamplingConfig)}
        return Sampling(max_new_tokens=max_new_tokens, stop_ids=stop_ids, **chosen)


class SamplerConfig(SamplingConfig):
    """The sampler of responses."""

    rollout_batch_size: PositiveInt | None = None
    """Responses generated together. By default 64 on a CPU, and on a GPU as many as its memory surely holds."""
    server: str | list[str] | None = None
    """Inference servers that sample in place of this process: one URL or several."""
    server_api_key_env: str | None = None
    """The environment variable that holds the servers' API key. The key itself is never printed or saved."""
    server_timeout: Positive = 600.0
    """Seconds for one call to a server, and for a server that is still loading."""
    server_concurrency: PositiveInt = 256
    """Requests to the servers at the same time, by each process."""
    sampler: str | None = None
    """A function of yours, my_module:function, of the sampler that the other options make and of the tokenizer: the
    sampler that it returns draws in place of the first, of a conversation for example (docs/rollouts.md)."""
    lag: NonNegativeInt = 0
    """Draw the responses of a step with the weights of so many steps earlier, while those in between are trained on;
    what that changes is corrected by rollout_correction (docs/rollouts.md)."""

    needs: ClassVar = tuple(
        Needs(option, lambda config: config.server is not None, "means nothing without --server")
        for option in ("server_api_key_env", "server_timeout", "server_concurrency")
    )

    @pydantic.field_validator("server")
    @classmethod
    def _urls(cls, value: str | list[str] | None) -> list[str] | None:
        """Refuse what is no URL of a server; one that may hold a password is not repeated."""
        urls = [url.strip() for url in value.split(",")] if isinstance(value, str) else value
        expected = "expected a URL such as http://127.0.0.1:8000"
        for url in urls or []:
            if "@" in url:
                raise InputError(f"server: {expected}, without a user or password; see --server_api_key_env")
            if not re.fullmatch(r"https?://[^/?#\s]+[^?#\s]*", url):
                raise InputError(f"server={url!r}: {expected}")
        return urls
