"""The memory of a run on one device, estimated: what `--dry_run` prints, and how large a micro-batch is."""

import os
from typing import NamedTuple

import torch

DEFAULT_MICRO_BATCH = 8  # on a CPU, and where the model's config cannot be read
LARGEST_MICRO_BATCH = 256
USED = 0.75  # of a GPU's memory: the estimate leaves out tiles of logits and fragments


class Sizes(NamedTuple):
    """A causal language model, counted without its weights."""

    weights: int
    adapters: int
    """Weights that a rank of 1 adds to the linear layers."""
    saved: int
    """Elements of a token that a layer saves for its backward pass, without the norms' fp32 inputs."""
    layers: int
    hidden: int


class Footprint(NamedTuple):
    """What a run keeps on each device beside the model's sizes, and how long its sequences are."""

    zero_stage: int
    processes: int
    """Processes that ZeRO divides over."""
    sixteen_bits: bool
    """Weights and activations of 2 bytes."""
    has_masters: bool
    """The optimizer keeps fp32 weights of its own."""
    checkpointing: bool
    """Activations are computed again in the backward pass."""
    prompt_tokens: int
    """Most tokens of a prompt."""
    response_tokens: int = 0
    """Most tokens of a response."""
    responses_per_prompt: int = 1
    """Responses in a row that share their prompt."""
    lora_rank: int = 0
    sequence_parallel: int = 1
    """Processes that each have a part of every sequence."""
    trained_models: int = 1
    """Models with an optimizer: 2 with a critic."""
    frozen_models: int = 0
    """Models of the same size that are only read: 1 with a reference."""


def sizes_of(model: str, revision: str | None) -> Sizes | None:
    """Return the sizes of a local folder or Hub name; None where its config cannot be read."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(model, revision=revision)
        with torch.device("meta"):
            lm = transformers.AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        hidden = text.hidden_size
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or hidden // heads
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        layers = text.num_hidden_layers
    except (OSError, ValueError, AttributeError):  # of adapters, or a model of another kind
        return None

    # Queries, keys, values, attention, the norms' inputs, and the MLP's four products.
    saved = 4 * inner + 6 * hidden + 2 * width * (heads + key_heads)

    # LoRA adapts every linear layer but the head.
    head = lm.get_output_embeddings()
    adapters = 0
    for module in lm.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            adapters += module.in_features + module.out_features
    weights = sum(p.numel() for p in lm.parameters())
    return Sizes(weights, adapters, saved, layers, hidden)


def bytes_per_process(
    sizes: Sizes, run: Footprint, micro_batch_size: int, micro_batch_tokens: int | None = None
) -> dict[str, float]:
    """Return bytes per process, by what they hold, of steps whose sequences are as long as they may be.

    A micro-batch has `micro_batch_tokens`, if they are given, or one sequence that is longer.
    """
    element = 2 if run.sixteen_bits else 4
    trained = sizes.adapters * run.lora_rank or sizes.weights
    beside = trained if run.lora_rank else 0  # adapters stand beside the weights
    moments_and_masters = 8 + (4 if run.has_masters else 0)

    # ZeRO 1 divides the optimizer's state over the processes, ZeRO 2 gradients, too, and ZeRO 3 all weights.
    weights = element * (sizes.weights + beside) / _divisor(run, 3)
    gradients = element * trained / _divisor(run, 2)
    optimizer = moments_and_masters * trained / _divisor(run, 1)
    reference = element * sizes.weights / _divisor(run, 3)

    tokens = tokens_of(run, micro_batch_size)
    if micro_batch_tokens is not None:
        tokens = max(micro_batch_tokens, tokens_of(run, 1))
    tokens /= run.sequence_parallel

    # What all layers save, and the gradients of one in passing; with checkpoints one layer again, and all inputs.
    of_layer = element * sizes.saved + (4 * sizes.hidden if run.sixteen_bits else 0)
    of_token = (sizes.layers + 2) * of_layer
    if run.checkpointing:
        of_token = 5 * of_layer + sizes.layers * element * sizes.hidden
    return {
        "weights": run.trained_models * weights,
        "gradients": run.trained_models * gradients,
        "optimizer": run.trained_models * optimizer,
        "reference": run.frozen_models * reference,
        "activations": tokens * of_token,
    }


def tokens_of(run: Footprint, micro_batch_size: int) -> int:
    """Return the tokens of a micro-batch of so many sequences that are as long as they may be."""
    # Responses of a group share their prompt.
    prompts = -(-micro_batch_size // run.responses_per_prompt)
    return micro_batch_size * run.response_tokens + prompts * run.prompt_tokens


def _divisor(run: Footprint, from_stage: int) -> int:
    """Return how many processes share what ZeRO divides from a stage on."""
    return run.processes if run.zero_stage >= from_stage else 1


def fitting_micro_batch(model: str, revision: str | None, run: Footprint) -> int:
    """Return the sequences of a micro-batch: 8 on a CPU, on a GPU the power of two up to 256 that fills 3/4 of it.

    What is free at the moment does not count, so a resumed run adds in the same order.
    """
    if not torch.cuda.is_available():
        return DEFAULT_MICRO_BATCH
    sizes = sizes_of(model, revision)
    if sizes is None:
        return DEFAULT_MICRO_BATCH
    device = int(os.environ.get("LOCAL_RANK", "0"))
    usable = USED * torch.cuda.get_device_properties(device).total_memory
    size = LARGEST_MICRO_BATCH
    while size > 1 and sum(bytes_per_process(sizes, run, size).values()) > usable:
        size //= 2
    return size


def in_words(needed: dict[str, float], left_out: str) -> str:
    """Return the line of `--dry_run` for bytes by what they hold; `left_out` names what is not in them."""
    gib = {name: size / 2**30 for name, size in needed.items()}
    listed = ", ".join(f"{name} {size:.2f}" for name, size in gib.items() if size)
    total = sum(gib.values())
    return f"{total:.2f} GiB on paper at the longest sequences: {listed}; without {left_out}"
