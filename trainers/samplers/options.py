"""What a run is told about its responses: who draws them, and from what."""

import pydantic

from fused_rl.trainers.options.config import (
    InputError,
    NonNegativeInt,
    Options,
    PositiveFraction,
    PositiveInt,
    Temperature,
    Unit,
    names_of,
)
from fused_rl.trainers.rollouts.sampling import Sampling


class SamplingConfig(Options):
    """What each token of a response is drawn from."""

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
        """As a sampler takes it."""
        chosen = {name: getattr(self, name) for name in names_of(SamplingConfig)}
        return Sampling(max_new_tokens=max_new_tokens, stop_ids=stop_ids, **chosen)


class SamplerConfig(SamplingConfig):
    """Who draws responses."""

    rollout_batch_size: PositiveInt = 64
    """Responses generated together."""
    server: str | list[str] | None = None
    """Inference servers that draw in place of this process: URLs, several of them one after the other."""
    sampler: str | None = None
    """A function of yours, my_module:function, of the sampler that the other options make and of the tokenizer: the
    sampler that it returns draws in place of the first, of a conversation for example (docs/rollouts.md)."""
    lag: NonNegativeInt = 0
    """Draw the responses of a step with the weights of so many steps earlier, while those in between are trained on;
    what that changes is corrected by rollout_correction (docs/rollouts.md)."""

    @pydantic.field_validator("server")
    @classmethod
    def _urls(cls, value: str | list[str] | None) -> list[str] | None:
        urls = [url.strip() for url in value.split(",")] if isinstance(value, str) else value
        if urls is not None and not all(urls):
            raise InputError(f"server={value!r}: expected URLs, such as http://127.0.0.1:8000")
        return urls
