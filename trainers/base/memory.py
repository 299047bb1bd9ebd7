"""The memory of a run on one device, on paper: what `--dry_run` prints, and how large a micro-batch is."""

import os
from typing import NamedTuple

import torch

from fused_rl.trainers.base import ranks


class Sizes(NamedTuple):
    """A causal language model, counted without its weights."""

    weights: int
    adapters: int  # weights that a rank of 1 adds to the linear layers
    saved: int  # elements of a token that a layer saves for its backward pass, but for norms in 16 bits
    layers: int
    hidden: int


def sizes_of(model: str, revision: str | None) -> Sizes | None:
    """Return the sizes of a local folder or Hub name; None where its config cannot be read."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(model, revision=revision)
        with torch.device("meta"):
            lm = transformers.AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        hidden = text.hidden_size
        head = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
        pasts = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        # Queries, keys, values, attention, the norms' inputs, and the MLP's four products.
        saved = 4 * inner + 6 * hidden + 2 * (text.num_attention_heads * head + pasts)
    except (OSError, ValueError, AttributeError):  # of adapters, or a model of another kind
        return None
    linear = (
        m
        for m in lm.modules()
        if isinstance(m, torch.nn.Linear) and m is not lm.get_output_embeddings()
    )
    adapters = sum(m.in_features + m.out_features for m in linear)
    return Sizes(
        sum(p.numel() for p in lm.parameters()), adapters, saved, text.num_hidden_layers, hidden
    )


def parts(config, sizes: Sizes, world: int) -> dict[str, float]:
    """Return bytes per process, by what they hold, of steps whose sequences are as long as they may be."""
    low = config.dtype == "bfloat16" or (
        config.dtype == "auto" and torch.cuda.is_available() and config.zero_stage > 0
    )
    element, trained = (2 if low else 4), sizes.adapters * config.lora_rank or sizes.weights
    models = 1 + (config.command == "ppo")  # with its critic
    masters = 4 if low or (config.zero_stage and torch.cuda.is_available()) else 0
    frozen = (
        not config.lora_rank
        and max(getattr(config, "kl_coef", 0), getattr(config, "kl_every", 0)) > 0
    )
    split = [world if config.zero_stage >= stage else 1 for stage in range(4)]

    # The most tokens of a micro-batch; the responses of a group share their prompt.
    size = config.micro_batch_size
    response = getattr(config, "max_new_tokens", getattr(config, "max_response_length", 0))
    copies = (
        getattr(config, "group_size", 1)
        if getattr(config, "share_prompts", False) is not False
        else 1
    )
    tokens = size * response + -(-size // copies) * config.max_prompt_length
    if hasattr(config, "max_length"):
        tokens = size * config.max_length

    # What all layers save, and the gradients of one in passing; with checkpoints one layer again, and all inputs.
    of_layer = element * sizes.saved + (4 * sizes.hidden if low else 0)
    checkpoints = 5 * of_layer + sizes.layers * element * sizes.hidden
    of_token = checkpoints if config.gradient_checkpointing else (sizes.layers + 2) * of_layer
    return {
        "weights": models
        * element
        * (sizes.weights + trained * (trained != sizes.weights))
        / split[3],
        "gradients": models * element * trained / split[2],
        "optimizer": models * (8 + masters) * trained / split[1],
        "reference": frozen * element * sizes.weights / split[3],
        "activations": tokens * of_token,
    }


def fitting(config) -> int:
    """Return the sequences of a micro-batch: 8 on a CPU, on a GPU the power of two up to 256 that fills 3/4 of it,
    whatever is free at the moment, so that a resumed run adds in the same order.
    """
    sizes = sizes_of(config.model, config.revision) if torch.cuda.is_available() else None
    if sizes is None:
        return 8
    held = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory
    counts = (1 << i for i in range(8, 0, -1))
    needed = {
        n: sum(parts(config.replace(micro_batch_size=n), sizes, ranks.processes()).values())
        for n in counts
    }
    return next((n for n, size in needed.items() if size <= 0.75 * held), 1)


def described(config, world: int) -> str | None:
    """Return the line of `--dry_run`; None where the model's config cannot be read."""
    sizes = sizes_of(config.model, config.revision)
    if sizes is None:
        return None
    found = {name: size / 2**30 for name, size in parts(config, sizes, world).items()}
    listed = ", ".join(f"{name} {size:.2f}" for name, size in found.items() if size)
    more = "tiles of logits and the teacher" if hasattr(config, "teacher") else "tiles of logits"
    return (
        f"{sum(found.values()):.2f} GiB on paper at the longest sequences: {listed}; without {more}"
    )
