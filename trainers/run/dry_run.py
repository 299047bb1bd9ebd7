"""What `--dry_run` prints: the resolved config as YAML, and as comments the batch arithmetic and one example.

A dry run is the run itself up to its first pass, with models that have no weights. `--config` reads the text back.
"""

import contextlib
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..base import engine, ranks
from ..base.engine import torch_dtype
from ..base.text import escaped
from ..data.examples import Examples
from ..options import RunConfig, to_yaml

# Only the first and the last tokens of a sequence that is longer than this are printed.
MOST_TOKENS = 200


# DeepSpeed's defaults, in elements: of its buffer for gradients on their way to other processes (reduce_bucket_size),
# and of what ZeRO 3 keeps gathered at most (stage3_max_live_parameters).
BUCKET = 500_000_000
MOST_GATHERED = 1_000_000_000


def on_paper(config: Any, engines: Sequence[Any]) -> dict[str, float]:
    """Return the bytes of a process, by what they hold, whose sequences have the largest length.

    Counted are the weights of all models that were read, what ZeRO keeps of those that are trained, and what layers
    save of a micro-batch, or the keys and values of what is sampled together; this last is left out where layers are of
    another kind than a Llama's. Loading takes no more. Not counted is the workspace of the loss, which is chosen by
    what is free; weights in 4 bits count as whole ones.
    """
    stage, count = engine.effective_zero_stage(config), ranks.processes()
    part = 0 if config.offload else 1 / count
    share = [part if stage >= divides_from else 1 for divides_from in range(4)]
    element = torch_dtype(config).itemsize
    gc.collect()  # models of an earlier run
    elements = sum(p.numel() for model in engine.models_on_paper for p in model.parameters())
    trained = 0
    for model in engines:
        trained += sum(p.numel() for p in model.module.parameters() if p.requires_grad)

    has_copy = hasattr(config, "prompts_per_step") and config.server is None and config.lag > 0
    elements += trained * has_copy  # the sampler's
    gathered = min(elements, MOST_GATHERED) * (stage == 3 and count > 1)
    gradient = 4 * share[1] if engine.widens_sums(config) else element * share[2]
    needed = {
        "weights": element * (elements * share[3] + gathered),
        "optimizer": trained * (gradient + (12 if stage else 8) * share[1]),
        "buckets": 4 * BUCKET * (stage > 0),
    }
    # A model without attention, or whose layers differ, has no such sizes.
    with contextlib.suppress(AttributeError, TypeError, RuntimeError):
        needed["passes"] = passes(config, engines)
    return needed


def passes(config: Any, engines: Sequence[Any]) -> float:
    """Return the bytes that a micro-batch or a rollout takes in layers of a Llama's kind."""
    element, longest = torch_dtype(config).itemsize, config.longest_sequence
    # Bytes of a token: of its key and value in a layer, and what the layer saves, in which norms are in fp32.
    text = engines[0].module.base.config.get_text_config()
    hidden, heads = text.hidden_size, text.num_attention_heads
    width = element * (getattr(text, "head_dim", None) or hidden // heads)
    past = 2 * width * (getattr(text, "num_key_value_heads", None) or heads)
    inner = element * (getattr(text, "intermediate_size", None) or 4 * hidden)
    layer = 4 * inner + (4 * element + 8) * hidden + 2 * width * heads + past
    saved, passing = layer, 2 * inner
    if config.gradient_checkpointing:
        # A layer that is computed again has its gradients beside it.
        saved = element * hidden * (config.checkpoint_activations_on != "cpu")
        passing += 2 * layer
    layers = text.num_hidden_layers
    tokens = max(config.micro_batch_tokens or (config.micro_batch_size or 1) * longest, longest)
    trains = (layers * saved * len(engines) + passing) * tokens / config.sequence_parallel
    if not hasattr(config, "prompts_per_step") or config.server is not None:
        return trains
    responses = config.prompts_per_step * config.group_size // ranks.world_size()
    rows = min(config.rollout_batch_size or 256, responses)  # its default on a GPU
    return max(trains, rows * longest * layers * past)


def described(
    config: RunConfig,
    batch_plan: Mapping[str, object],
    examples: Examples,
    tokenizer: Any,
    scorers_read: Mapping[str, object],
    needed: Mapping[str, float],
) -> str:
    """Return what a dry run prints: the `batch_plan` by title, the bytes `needed`, and the first example."""
    listed = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needed.items())
    if "passes" not in needed:
        listed += "; passes not counted, as the layers are no Llama's"
    total = f"{sum(needed.values()) / 2**30:.1f} GiB a process on paper for {ranks.processes()}"
    batch_plan = {**batch_plan, "memory": f"{total} processes in {torch_dtype(config)}: {listed}"}
    if config.sequence_parallel > 1:
        together = f"groups of {config.sequence_parallel}, each of which counts as one below"
        batch_plan["processes"] = f"{ranks.processes()}, in {batch_plan['processes']} {together}"
    lines = [f"# {key}: {value}" for key, value in batch_plan.items()]
    lines += ["#", *example_lines(examples, tokenizer)]
    for name, value in scorers_read.items():
        lines.append(f"# {name}, which scorers read: {escaped(value):.200}")
    everything = config.dry_run == "all"
    title = "# the options that were given or follow from others; --dry_run all prints all of them"
    options = to_yaml(config, everything=everything)
    return "\n".join([*([] if everything else [title]), options, "# batch arithmetic", *lines])


def example_lines(examples: Examples, tokenizer: Any) -> list[str]:
    """Return the first example as comment lines, with the tokens of its prompts and those that are trained.

    On a terminal the two have different colours.
    """
    colors = {"prompt": "\x1b[36m", "trained": "\x1b[32m"} if sys.stdout.isatty() else {}
    lines = [f"# one example: {examples.where(0)}, its tokens between bars"]
    record = examples.record(0)
    ids_of_example, other_content = record["ids"], json.loads(record["beside"])
    if isinstance(other_content, int | float):
        lines.append(f"# beside its tokens: {other_content}")
    names = ["chosen, ", "rejected, "] if len(ids_of_example) > 3 else [""]
    labels = [name + kind for name in names for kind in ("prompt", "trained")]
    # Of several turns in one sequence only some tokens are trained.
    flags = ids_of_example[2] if len(ids_of_example) == 3 else []
    for label, ids in zip(labels, ids_of_example, strict=False):
        if not ids:
            continue
        texts = [escaped(tokenizer.decode(i)) for i in ids]
        count = str(len(ids))
        if flags and label == "trained":
            texts = [text if flag else f"({text})" for text, flag in zip(texts, flags, strict=True)]
            count = f"{sum(flags)} of {count}"
        if len(texts) > MOST_TOKENS:
            left_out = len(texts) - MOST_TOKENS
            half = MOST_TOKENS // 2
            texts = [*texts[:half], f"… {left_out} more …", *texts[-half:]]
        color = colors.get(label.split()[-1], "")
        end = "\x1b[0m" if color else ""
        lines.append(f"# {label} ({count} tokens): {color}{'|'.join(texts)}{end}")
    return lines
