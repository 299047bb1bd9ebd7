"""The memory of a run on one device, on paper.

    WORLD_SIZE=4 python -m bench memory grpo --config run.yaml --micro_batch_size 4

The name of the trainer may be left out for the config.yaml of a run, whose first line has it. A run itself measures
what fits (trainers/run/fitting.py).
"""

import functools
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fused_rl.ops import tiles
from fused_rl.trainers import cli
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.policy.teacher import is_url
from fused_rl.trainers.run.command import around
from fused_rl.trainers.run.parse import parse

# Elements that DeepSpeed's ZeRO 3 keeps gathered at most (stage3_max_live_parameters).
MOST_GATHERED = 1_000_000_000
# Elements of its buffer for gradients on their way to other processes (reduce_bucket_size).
BUCKET = 500_000_000
BYTES_OF_4_BITS = 0.516  # of a weight with its scales, quantised twice


class Sizes(NamedTuple):
    """Counts of elements of a causal language model."""

    weights: int
    """Without its head, unless that is tied to the embedding."""
    embedding: int
    """Of `weights`, those of the embedding."""
    head: int
    """Weights of the head alone; 0 if it is tied to the embedding."""
    adapters: int
    """Weights that a rank of 1 adds to the linear layers."""
    saved: int
    """Elements of a token that a layer saves for its backward pass, without the norms' fp32 inputs."""
    repeated: int
    """Elements of a token by which keys and values grow where attention has a mask of its own: one head per query."""
    inner: int
    """Width of the MLP."""
    past: int
    """Elements of a token that a layer keeps while sampling: its key and its value."""
    layers: int
    hidden: int
    vocab: int
    """Rows of the head."""


class Held(NamedTuple):
    """A model that each process of a run holds, whole or its part."""

    model: str
    """A local folder or a Hub name."""
    revision: str | None = None
    is_trained: bool = False
    scores: bool = False
    """A critic or a reward model, with a head of one row."""
    in_4bit: bool = False
    keeps_head: bool = False
    """A whole copy of its head stands beside its partitioned weights."""


class Footprint(NamedTuple):
    """The models that a run holds on each device, and how long its sequences are."""

    models: dict[str, Held]
    """By what they are: the policy first."""
    zero_stage: int
    processes: int
    """Processes that ZeRO divides over."""
    sixteen_bits: bool
    """Weights and activations of 2 bytes."""
    has_masters: bool
    """The optimizer keeps fp32 weights of its own."""
    checkpointing: bool
    """Activations are computed again in the backward pass."""
    widens_sums: bool
    """Gradients of 2 bytes are added up in 4, and divided from ZeRO 1 on."""
    checkpoints_on_cpu: bool
    """The layers' inputs wait in CPU memory until they are computed again."""
    prompt_tokens: int
    """Most tokens of a prompt; 0 where `response_tokens` counts them, too."""
    response_tokens: int = 0
    """Most tokens of a response."""
    responses_per_prompt: int = 1
    """Responses in a row that share their prompt."""
    samples: bool = False
    """Responses are sampled, and may become as long as the options allow."""
    sampled_together: int = 0
    """Responses that this process samples at once; 0 if another does, or if that is chosen by its memory."""
    lora_rank: int = 0
    bucket: int = 0
    """Elements that each engine sets aside for gradients on their way to other processes."""
    sequence_parallel: int = 1
    """Processes that each have a part of every sequence."""
    offload: bool = False
    """The optimizer's state and gradients wait in CPU memory, and under ZeRO 3 the weights, too."""
    whole_logits: bool = False
    """The loss takes the logits of all tokens of a micro-batch (loss_from=logits)."""

    def holding(self, **models: Held) -> "Footprint":
        """Return the same with more models, by what they are."""
        return self._replace(models=self.models | models)


@functools.cache
def sizes_of(model: str, revision: str | None = None) -> Sizes | None:
    """Return the sizes of a local folder or Hub name; None where its config cannot be read."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(model, revision=revision)
        with torch.device("meta"):
            lm: Any = transformers.AutoModelForCausalLM.from_config(config)
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
    embedding = lm.get_input_embeddings().weight
    adapters = 0
    for module in lm.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            adapters += module.in_features + module.out_features
    weights = sum(p.numel() for p in lm.parameters())
    of_head = 0 if head.weight is embedding else head.weight.numel()
    return Sizes(
        weights=weights - of_head,
        embedding=embedding.numel(),
        head=of_head,
        adapters=adapters,
        saved=saved,
        repeated=2 * width * (heads - key_heads),
        inner=inner,
        past=2 * width * key_heads,
        layers=layers,
        hidden=hidden,
        vocab=len(head.weight),
    )


def bytes_per_process(
    run: Footprint, micro_batch_size: int, micro_batch_tokens: int | None = None
) -> dict[str, float] | None:
    """Return bytes per process, by what they hold, of steps whose sequences are as long as they may be.

    A micro-batch has `micro_batch_tokens`, if they are given, or one sequence that is longer. None where the config of
    the policy cannot be read.
    """
    policy = run.models["policy"]
    sizes = sizes_of(policy.model, policy.revision)
    if sizes is None:
        return None
    # Prompts are shared where that is cheaper, so not in rows whose mask of pairs would be the largest part.
    in_row = min(run.responses_per_prompt, micro_batch_size)
    if run.prompt_tokens + in_row * run.response_tokens > sizes.saved // 4:
        in_row = 1
    run = run._replace(responses_per_prompt=in_row)
    tokens = tokens_of(run, micro_batch_size)
    if micro_batch_tokens is not None:
        tokens = max(micro_batch_tokens, tokens_of(run, 1))
    tokens /= run.sequence_parallel

    # What is there all the time. A model whose config cannot be read is taken to be as large as the policy.
    kept = {"weights": 0.0, "optimizer": 0.0}
    step = {"gradients": 0.0, "activations": 0.0, "logits": 0.0, "buckets": 0.0}
    for what, held in run.models.items():
        of_model = sizes_of(held.model, held.revision) or sizes
        if not held.is_trained:
            kept[what] = _weights(of_model, held, run)
            continue
        trained = of_model.adapters * run.lora_rank or _elements(of_model, held)
        kept["weights"] += _weights(of_model, held, run)
        kept["optimizer"] += _optimizer(trained, run)
        step["gradients"] += _gradients(trained, run)
        step["activations"] += tokens * _saved_per_token(of_model, run)
        # ZeRO 3 keeps its bucket; the others free theirs after each backward pass.
        if run.zero_stage == 3 or what == "policy":
            is_wide = run.widens_sums and run.zero_stage == 3
            step["buckets"] += (4 if is_wide else _element(run)) * run.bucket
    # Beside what is saved there is a tile of logits, or what a layer computes in its backward pass.
    logits = 0.0 if policy.scores else _logits(sizes, run, tokens)
    passing = tokens * _passing_per_token(sizes, run)
    step["logits" if logits > passing else "activations"] += max(logits, passing)

    # A step trains, or samples: what it needs more for.
    sampling = {"sampling": _sampling(sizes, run)}
    return kept | max(step, sampling, key=lambda needed: sum(needed.values()))


def _elements(sizes: Sizes, held: Held) -> int:
    """Return the number of weights of a model."""
    return sizes.weights + (sizes.hidden if held.scores else sizes.head)


def _weights(sizes: Sizes, held: Held, run: Footprint) -> float:
    """Return the bytes of a model's weights, adapters beside them."""
    element = _element(run)
    elements = _elements(sizes, held)
    size = element * elements
    if held.in_4bit:
        whole = sizes.embedding + sizes.head
        size = element * whole + BYTES_OF_4_BITS * (elements - whole)
    if held.is_trained:
        size += element * sizes.adapters * run.lora_rank
    size /= _divisor(run, 3)
    if run.offload and run.zero_stage == 3:
        size = 0.0
    # ZeRO 3 gathers layers ahead, and keeps those that come again soon.
    if run.zero_stage == 3 and held.is_trained and run.processes > 1:
        size += element * min(elements, MOST_GATHERED)
    if held.keeps_head and run.zero_stage == 3:
        size += element * (sizes.head or sizes.embedding)
    return size


def _gradients(trained: int, run: Footprint) -> float:
    """Return the bytes of the gradients of trained weights, which ZeRO 2 divides over the processes."""
    if run.offload:
        return 0.0  # they leave through the buckets
    if run.widens_sums:
        return 4 * trained / _divisor(run, 1)
    return _element(run) * trained / _divisor(run, 2)


def _optimizer(trained: int, run: Footprint) -> float:
    """Return the bytes of moments and masters of trained weights, which ZeRO 1 divides over the processes."""
    return 0.0 if run.offload else (8 + (4 if run.has_masters else 0)) * trained / _divisor(run, 1)


def _saved_per_token(sizes: Sizes, run: Footprint) -> float:
    """Return the bytes that the layers save of a token for their backward pass."""
    of_layer = sizes.hidden * _element(run) if run.checkpointing else _layer_per_token(sizes, run)
    if run.checkpoints_on_cpu:
        of_layer = 0
    # Before the first layer and after the last one there are the embedding and the last norm.
    return sizes.layers * of_layer + 3 * sizes.hidden * _element(run)


def _passing_per_token(sizes: Sizes, run: Footprint) -> float:
    """Return the bytes of a token that exist for a layer at a time: its gradients, and what is computed again."""
    passing = 2 * sizes.inner * _element(run)
    if run.checkpointing:
        # Of 16 bits there are fp32 copies on the way.
        copies = 2 if run.sixteen_bits else 1
        passing += copies * _layer_per_token(sizes, run)
    return passing


def _layer_per_token(sizes: Sizes, run: Footprint) -> float:
    """Return the bytes that a layer saves of a token."""
    saved = sizes.saved
    # A norm whose weight is frozen does not save what the weight multiplies.
    if run.lora_rank:
        saved -= 2 * sizes.hidden
    if run.responses_per_prompt > 1:
        # Rows that hold several responses have a mask of pairs of tokens, which every layer saves.
        row = run.prompt_tokens + run.responses_per_prompt * run.response_tokens
        saved += sizes.repeated + row
    # Norms compute in fp32.
    return _element(run) * saved + (4 * sizes.hidden if run.sixteen_bits else 0)


def _logits(sizes: Sizes, run: Footprint, tokens: float) -> float:
    """Return the bytes of logits that exist at once in the loss, and of the head's gradient beside them."""
    element = _element(run)
    dtype = torch.bfloat16 if run.sixteen_bits else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    per_logit = tiles.Budget(0, tiles.default_logits_dtype(dtype, device)).per_logit(dtype)
    every = tokens * sizes.vocab * per_logit
    if run.whole_logits:
        return 2 * every
    of_head = 0 if run.lora_rank else element * sizes.vocab * sizes.hidden
    most = tiles.CPU_WORKSPACE_MB << 20
    if device.type == "cuda":
        # A part of what is free, which is not known here, or what one pass of the loss needs.
        free = _memory_of_gpu() // 4
        most = tiles.default_workspace(free, sizes.hidden, sizes.vocab, dtype, torch.float32)
    return min(every, most) + of_head


def _sampling(sizes: Sizes, run: Footprint) -> float:
    """Return the bytes of the keys and values of responses that are sampled at once, and of their next tokens."""
    tokens = run.prompt_tokens + run.response_tokens
    past = _element(run) * sizes.layers * sizes.past * tokens
    return run.sampled_together * (past + 16 * sizes.vocab)


def _element(run: Footprint) -> int:
    """Return the bytes of a weight."""
    return 2 if run.sixteen_bits else 4


def tokens_of(run: Footprint, micro_batch_size: int) -> int:
    """Return the tokens of a micro-batch of so many sequences that are as long as they may be."""
    # Responses of a group share their prompt.
    prompts = -(-micro_batch_size // run.responses_per_prompt)
    return micro_batch_size * run.response_tokens + prompts * run.prompt_tokens


def _divisor(run: Footprint, from_stage: int) -> int:
    """Return how many processes share what ZeRO divides from a stage on."""
    return run.processes if run.zero_stage >= from_stage else 1


def _memory_of_gpu() -> int:
    """Return the bytes of this process's GPU."""
    device = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.cuda.get_device_properties(device).total_memory


def in_words(needed: dict[str, float]) -> str:
    """Return a line for bytes by what they hold."""
    gib = {name: size / 2**30 for name, size in needed.items()}
    listed = ", ".join(f"{name} {size:.2f}" for name, size in gib.items() if size)
    return f"{sum(gib.values()):.2f} GiB on paper at the longest sequences: {listed}"


def footprint_of(config: Any) -> Footprint:
    """Return which models a run holds on each device, and the lengths of its sequences."""
    sixteen_bits = engine.torch_dtype(config) == torch.bfloat16
    is_deepspeeds = engine.effective_zero_stage(config) > 0
    samples = hasattr(config, "prompts_per_step")
    prompt, response = lengths_of(config)
    shares = getattr(config, "share_prompts", None) is not False and config.sequence_parallel == 1
    grouped = {"grpo": getattr(config, "group_size", 1), "reward": 2}
    run = Footprint(
        models=models_of(config),
        zero_stage=config.zero_stage,
        processes=ranks.processes(),
        sixteen_bits=sixteen_bits,
        has_masters=sixteen_bits or is_deepspeeds,
        bucket=BUCKET if is_deepspeeds else 0,
        checkpointing=config.gradient_checkpointing,
        widens_sums=engine.widens_sums(config),
        checkpoints_on_cpu=config.checkpoint_activations_on == "cpu",
        prompt_tokens=prompt,
        response_tokens=response,
        samples=samples,
        responses_per_prompt=grouped.get(config.command, 1) if shares else 1,
        lora_rank=config.lora_rank,
        sequence_parallel=config.sequence_parallel,
        offload=config.offload,
        whole_logits=config.loss_from == "logits",
    )
    # Without rollout_batch_size they are 256 on a GPU, and their memory is not counted.
    if samples and config.server is None and config.rollout_batch_size is not None:
        responses = config.prompts_per_step * config.group_size
        of_rank = responses // ranks.planned_ranks(config.sequence_parallel)
        run = run._replace(sampled_together=min(config.rollout_batch_size, of_rank))
    return run


def lengths_of(config: Any) -> tuple[int, int]:
    """Return the most tokens of a prompt and of a response; 0 for a prompt that the other counts."""
    if config.command in ("sft", "kto"):
        return 0, config.max_length
    names = ("max_new_tokens", "max_response_length")
    return config.max_prompt_length, next(
        getattr(config, name) for name in names if hasattr(config, name)
    )


def models_of(config: Any) -> dict[str, Held]:
    """Return the models of a run by what they are, the policy first."""
    command = config.command
    policy = Held(config.model, config.revision)
    models = {
        "policy": policy._replace(
            is_trained=True, in_4bit=config.load_in_4bit, scores=command == "reward"
        )
    }
    # With a lag, responses are sampled from a copy of the policy; with LoRA it is its own reference.
    if not config.lora_rank:
        if getattr(config, "lag", 0) and config.server is None:
            models["sampler"] = policy
        if command == "ppo" or (command == "grpo" and config.needs_reference):
            models["reference"] = policy
    if command == "ppo":
        start = policy if config.critic is None else Held(config.critic)
        models["critic"] = start._replace(is_trained=True, scores=True)
    for name, model in getattr(config, "teachers", {}).items():
        if not is_url(model):
            held = Held(model, in_4bit=config.teacher_in_4bit, keeps_head=True)
            models[f"teacher {name}".strip()] = held
    scorers = config.reward_models() if hasattr(config, "reward_models") else {}
    return models | {name: Held(folder, scores=True) for name, folder in scorers.items()}


def command(_: str, words: list[str]) -> int:
    """Print the forecast of a run."""
    with around("bench memory"):
        if not words or words[0].startswith("--"):
            text = Path(words[words.index("--config") + 1]).read_text(encoding="utf-8")
            words = [re.findall(r"fused-rl (\w+)", text)[0], *words]
        config = parse(cli.TRAINERS[words[0]].config_class(), words[1:])
        config.micro_batch_size = config.micro_batch_size or 8
        needed = bytes_per_process(
            footprint_of(config), config.micro_batch_size, config.micro_batch_tokens
        )
        print("the config of the model cannot be read" if needed is None else in_words(needed))
    return 0
