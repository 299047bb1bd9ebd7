"""Who draws a run's responses, made from its options: the policy in this process, a server, or a sampler of the user's.

A sampler of the user's own is a function of the one that is made without it, and of the tokenizer:

    class Conversation(Sampler):  # --sampler my_module:Conversation
        def sample(self, prompts, sampling):
            return self.built.sample(…)
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from fused_rl.trainers.base.functions import load_function
from fused_rl.trainers.options import InputError, OutputConfig
from fused_rl.trainers.rollouts.copied import CopySampler
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.lag import Ahead
from fused_rl.trainers.rollouts.options import SamplerConfig
from fused_rl.trainers.rollouts.types import Sampler
from fused_rl.trainers.servers.inference import Http
from fused_rl.trainers.servers.probe import TEXT, Probe
from fused_rl.trainers.servers.sampler import PUBLISHED, ServerSampler

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
        InputError: a server is not what the policy needs; a function returns something else than a sampler.
    """
    if config.sampler is not None and own is not None:
        raise InputError(f"sampler={config.sampler} and a sampler given to train() are two; give one of them")
    # Who the options say.
    if config.server is None:
        built = _in_process(config, model, tokenizer)
    else:
        built = _served(config, Path(output.output_dir) / PUBLISHED, model, tokenizer, longest)
    if config.sampler is not None or own is not None:
        built = (own or load_function("sampler", str(config.sampler)))(built, tokenizer)
        if not isinstance(built, Sampler):
            came = f"{config.sampler or 'the function'} returned {type(built).__name__}"
            raise InputError(f"sampler: {came}; expected a fused_rl.trainers.rollouts.types.Sampler")
    if not config.lag:
        return built
    if not built.tells_logprobs:
        raise InputError(
            f"lag={config.lag} trains on responses of earlier weights, whose log-probabilities must be known, and the "
            "sampler declares tells_logprobs = False; have it tell them, or leave lag out"
        )
    return Ahead(built, config.lag)


def _served(config: SamplerConfig, folder: Path, model, tokenizer, longest: int) -> Sampler:
    """Return a sampler of inference servers."""
    name = config.server_api_key_env
    key = None
    if name is not None:
        key = os.environ.get(name, "").strip()
        if not (key and key.isascii() and key.isprintable()):
            raise InputError(f"server_api_key_env={name}: that environment variable holds no key; export it")
    lm = model.module.base
    probe = Probe(
        model=model,
        ids=tokenizer.encode(TEXT, add_special_tokens=False),
        exact=lm.dtype == torch.float32,
        sampling=config.sampling(1, ()),
    )
    http = Http(config.server_timeout, config.server_concurrency, key)
    return ServerSampler(config.server, http, folder, probe, longest)


def _in_process(config: SamplerConfig, model, tokenizer) -> Sampler:
    """By the policy in this process."""
    lm = model.module.base
    options = {"pad_id": tokenizer.pad_token_id, "batch_size": config.rollout_batch_size}
    if config.lag:
        return CopySampler(lm, **options)
    return TransformersSampler(lm, **options, synced_gpus=model.zero_optimization_stage() == 3)


def check_own(config: SamplerConfig) -> None:
    """Refuse a name that is no function, before a model is read."""
    if config.sampler is not None:
        load_function("sampler", config.sampler)
