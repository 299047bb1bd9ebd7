"""The sampler of a run, made from its options: the policy in this process, servers, or a sampler of the user's.

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
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.lag import Ahead, CopySampler
from fused_rl.trainers.rollouts.options import SamplerConfig
from fused_rl.trainers.rollouts.types import Sampler
from fused_rl.trainers.servers.inference import Http
from fused_rl.trainers.servers.probe import TEXT, Probe
from fused_rl.trainers.servers.sampler import ServerSampler

CORRECTIONS = ("rollout_correction", "rollout_low", "rollout_high")
Make = Callable[[Sampler, object], Sampler]
"""(the sampler that the options make, the tokenizer) -> the sampler of the run."""


def build_sampler(
    config: SamplerConfig, output: OutputConfig, model, tokenizer, own: Make | None = None, *, longest: int
) -> Sampler:
    """Return the run's sampler; all ranks call it together.

    Args:
        config: the options of sampling.
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
    # The policy in this process, or servers.
    lm = model.module.base
    options = {"pad_id": tokenizer.pad_token_id, "batch_size": config.rollout_batch_size}
    if config.server is not None:
        built = _served(config, Path(output.output_dir) / "published", model, tokenizer, longest)
    elif config.lag:
        built = CopySampler(lm, **options)
    else:
        built = TransformersSampler(lm, **options, synced_gpus=model.zero_optimization_stage() == 3)
    # The user's own, around it.
    if config.sampler is not None or own is not None:
        built = (own or load_function("sampler", config.sampler))(built, tokenizer)
        if not isinstance(built, Sampler):
            came = f"{config.sampler or 'the function'} returned {type(built).__name__}"
            raise InputError(f"sampler: {came}; expected a fused_rl.trainers.rollouts.types.Sampler")
    # What it does not record or report, and the options need.
    if config.sampling(1, ()).truncates and not built.records_support:
        raise InputError(
            f"top_p={config.top_p:g} top_k={config.top_k} min_p={config.min_p:g} with a sampler that reports no kept "
            f"sets ({type(built).__name__}): every log-probability would be off by -ln(kept mass); drop the option, or "
            "have the sampler record the sets"
        )
    given = [name for name in CORRECTIONS if getattr(config, name) is not None]
    if given and not built.tells_logprobs:
        raise InputError(
            f"{', '.join(given)} corrects for a sampler that differs from the policy, but here the policy itself is "
            "sampled; leave it out"
        )
    if config.lag and not built.tells_logprobs:
        raise InputError(
            f"lag={config.lag} trains on responses of earlier weights, whose log-probabilities must be known, and the "
            "sampler declares tells_logprobs = False; have it report them, or leave lag out"
        )
    return Ahead(built, config.lag) if config.lag else built


def _served(config: SamplerConfig, folder: Path, model, tokenizer, longest: int) -> Sampler:
    """Return a sampler of inference servers."""
    key = None
    if config.server_api_key_env is not None:
        key = os.environ.get(config.server_api_key_env, "").strip()
        if not key:
            raise InputError(f"server_api_key_env={config.server_api_key_env}: that variable holds no key; export it")
    exact = model.module.base.dtype == torch.float32
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    probe = Probe(model, ids, exact, config.sampling(1, ()))
    http = Http(config.server_timeout, config.server_concurrency, key)
    return ServerSampler(config.server, http, folder, probe, longest)


def check_own(config: SamplerConfig) -> None:
    """Refuse a name that is no function, before a model is read."""
    if config.sampler is not None:
        load_function("sampler", config.sampler)
