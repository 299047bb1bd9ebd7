"""Who draws a run's responses, made from its options: the policy in this process, a server, or a sampler of the user's.

A sampler of the user's own is a function of the one that is made without it, and of the tokenizer:

    def sampler(built, tokenizer):  # --sampler my_module:sampler
        return Conversation(built, tokenizer)
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fused_rl.trainers.base.guests import ctrl_c, load_function, raised
from fused_rl.trainers.data.encode import stop_ids
from fused_rl.trainers.options.config import InputError, OutputConfig
from fused_rl.trainers.rollouts.lag import Ahead
from fused_rl.trainers.rollouts.sampling import NoDistribution, Sampling
from fused_rl.trainers.rollouts.types import Response, Sampler, shortened
from fused_rl.trainers.samplers.copied import CopySampler
from fused_rl.trainers.samplers.generate import TransformersSampler
from fused_rl.trainers.samplers.options import SamplerConfig
from fused_rl.trainers.servers.sampler import PUBLISHED, ServerSampler, logprobs_of
from fused_rl.trainers.servers.verify import Expected

DECLARED = ("tells_logprobs", "records_support", "has_versions")  # by every sampler, as bool
CALLED = ("sample", "publish")
Make = Callable[[Sampler, object], Sampler]
"""(the sampler that the options make, the tokenizer) -> the one that draws."""


def build_sampler(
    config: SamplerConfig, output: OutputConfig, model, tokenizer, own: Make | None = None, *, longest: int
) -> Sampler:
    """Who draws; all ranks call it together.

    Args:
        config: says who, and from what.
        output: where weights are written for servers.
        model: the DeepSpeed engine around a `LanguageModel`.
        tokenizer: the policy's.
        own: a function in place of the option `sampler`.
        longest: tokens of a prompt and its response together, at most.

    Raises:
        InputError: a server is not what the policy needs; a function is none, raises, or returns something else than a
            sampler.
    """
    if config.sampler is not None and own is not None:
        raise InputError(f"sampler={config.sampler} and a sampler given to train() are two; give one of them")
    # Who the options say.
    if config.server is None:
        built = _in_process(config, model, tokenizer)
    else:
        built = _served(config, Path(output.output_dir) / PUBLISHED, model, tokenizer, longest)
    if config.sampler is not None or own is not None:
        name = config.sampler or "train(sampler=…)"
        make = own or load_function(name, "sampler")
        with _guest(name):
            made = make(built, tokenizer)
        built = OwnSampler(name, made)
    if not config.lag:
        return built
    if not built.tells_logprobs:
        raise InputError(
            f"lag={config.lag} trains on responses of earlier weights, whose log-probabilities must be known, and the "
            "sampler declares tells_logprobs = False; have it tell them, or leave lag out"
        )
    return Ahead(built, config.lag)


def _served(config: SamplerConfig, folder: Path, model, tokenizer, longest: int) -> Sampler:
    """By inference servers."""
    lm = model.module.base
    expected = Expected(
        tokenizer=tokenizer,
        vocab=lm.config.get_text_config().vocab_size,
        longest=longest,
        exact=lm.dtype == torch.float32,
        sampling=config.sampling(1, tuple(stop_ids(tokenizer, lm.saved_generation_config))),
        score=functools.partial(logprobs_of, model),
    )
    return ServerSampler(config.server, folder, expected)


def _in_process(config: SamplerConfig, model, tokenizer) -> Sampler:
    """By the policy in this process."""
    lm, options = model.module.base, {"pad_id": tokenizer.pad_token_id, "batch_size": config.rollout_batch_size}
    if config.lag:
        return CopySampler(lm, **options)
    return TransformersSampler(lm, **options, synced_gpus=model.zero_optimization_stage() == 3)


class OwnSampler:
    """A sampler of the user's: held to the protocol, and what it raises is a line with the place in the user's file."""

    def __init__(self, name: str, made: Sampler):
        missing = [member for member in (*DECLARED, *CALLED) if member not in dir(made)]
        if missing:
            raise InputError(
                f"sampler {name!r} returned {shortened(made)} ({type(made).__name__}) without {', '.join(missing)}; a "
                f"sampler has {', '.join(DECLARED)} (bool), sample(prompts, sampling) and publish(step, save)"
            )
        self.name, self.made = name, made
        self.tells_logprobs = made.tells_logprobs
        self.records_support = made.records_support
        self.has_versions = made.has_versions
        declared = (self.tells_logprobs, self.records_support, self.has_versions)
        for option, value in zip(DECLARED, declared, strict=True):
            if not isinstance(value, bool):
                raise InputError(f"sampler {name!r}: {option} is {shortened(value)}; it must be True or False")

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """As the user's; its logits that are none are those of prompts that only it knows."""
        with _guest(self.name):
            return self.made.sample(prompts, sampling)

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """As the user's."""
        with _guest(self.name):
            self.made.publish(step, save)


@contextmanager
def _guest(name: str) -> Iterator[None]:
    """Around a call of the user's; unlike a scorer it draws from the run's own generators."""
    with ctrl_c() as interrupted:
        try:
            yield
        except NoDistribution as error:
            raise InputError(str(error)) from error
        except InputError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and interrupted:
                raise
            raise InputError(f"sampler {name!r} {raised(error, __file__)}") from error


def check_own(config: SamplerConfig) -> None:
    """Refuse a name that is no function, before a model is read."""
    if config.sampler is not None:
        load_function(config.sampler, "sampler")
