"""What fits: rows into a model's positions, and micro-batches into the memory of a GPU.

Two trial passes measure what a token takes, and so how many tokens fit. The loss of a trial is multiplied by 0, so that
it adds gradients of 0 and nothing has to be undone.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import weights_below
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.examples import Examples

USED = 0.75  # of a GPU's memory: fragments, and what libraries hold, are not measured
MOST_SEQUENCES = 256  # of a micro-batch
# Options of the length of a sequence.
LIMITS = ("max_new_tokens", "max_length", "max_prompt_length", "max_response_length")


def check_fits(config: Any, tokenizer, parts: Sequence[Examples], sampled: int = 0) -> None:
    """Refuse token ids without an embedding, and sequences that are longer than the model's positions.

    It reads the model's config alone, so that a run ends before weights are read.

    Args:
        config: the options, with the name of the model.
        tokenizer: the tokenizer.
        parts: the examples, of each kind.
        sampled: the most tokens that are sampled after a prompt without a response.
    """
    from transformers import AutoConfig

    try:
        base = weights_below(config.model)
        revision = config.revision if base is None else None
        text = AutoConfig.from_pretrained(base or config.model, revision=revision).get_text_config()
    except (OSError, ValueError):
        return  # loading says it better
    embedded = text.vocab_size
    limit = getattr(text, "max_position_embeddings", None) or float("inf")
    highest = max(tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size - 1)
    # On a GPU an id without an embedding is an assertion in a kernel that names nothing.
    if highest >= embedded:
        raise InputError(
            f"the tokenizer has ids up to {highest}, but the model embeds {embedded}: is tokenizer_config.json "
            "missing, or model.resize_token_embeddings forgotten?"
        )
    limits = " or ".join(name for name in LIMITS if name in type(config).model_fields)
    for examples in filter(len, parts):
        largest, tokens = examples.column("largest"), examples.column("tokens")
        # A prompt without a response has the longest one still to come.
        more = sampled * (examples.column("response") == 0)
        i, longest = int(largest.argmax()), int((tokens + more).argmax())
        if largest[i] >= embedded:
            token = tokenizer.convert_ids_to_tokens(int(largest[i]))
            raise InputError(
                f"{examples.where(i)}: token {token!r} has id {largest[i]}, but the model embeds ids below {embedded}"
            )
        if tokens[longest] + more[longest] > limit:
            text = f"{tokens[longest]} tokens"
            text += f" and up to {more[longest]} more" if more[longest] else ""
            where = examples.where(longest)
            raise InputError(
                f"{where}: {text}, but the model has {limit} positions; lower {limits}"
            )


def fitting_tokens(engines: Sequence[Any], longest: int) -> int:
    """Return the tokens of the largest micro-batch that fits into the memory of every rank. Call on all ranks.

    Args:
        engines: those of the models that are trained, which an update runs together.
        longest: the tokens of the longest sequence, which always fits: a micro-batch has one at least.
    """
    device = engines[0].device
    usable = int(USED * torch.cuda.get_device_properties(device).total_memory)
    # The optimizer without ZeRO makes its two fp32 moments in its first step.
    for engine in engines:
        if not engine.optimizer.state:
            trained = [
                p.numel() for group in engine.optimizer.param_groups for p in group["params"]
            ]
            usable -= 8 * sum(trained)
    one = _peak(engines, longest, 1)
    # A second sequence takes no more than the first: without room for it all ranks go without that pass.
    needed = 2 * one - torch.cuda.memory_allocated(device)
    if ranks.on_any_process(flag=needed > usable):
        return longest
    per_token = max(_peak(engines, longest, 2) - one, 1) / longest
    tokens = longest + int((usable - one) / per_token)
    every = ranks.gather_processes(min(tokens, MOST_SEQUENCES * longest))
    return max(longest, min(every))


def _peak(engines: Sequence[Any], length: int, sequences: int) -> int:
    """Return the most bytes that were allocated while a micro-batch went forward and backward."""
    device = engines[0].device
    torch.cuda.reset_peak_memory_stats(device)
    input_ids = torch.zeros(sequences, length, dtype=torch.long, device=device)
    outputs = [engine(**engine.module.trial_inputs(input_ids)) for engine in engines]
    for engine, output in zip(engines, outputs, strict=True):
        loss = output.sum() if isinstance(output, torch.Tensor) else output.loss
        engine.backward(loss * 0)
    return torch.cuda.max_memory_allocated(device)
