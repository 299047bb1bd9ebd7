"""TRL's primitives, and a step of its GRPO and SFT trainers: lost digits, memory, time.

The logits of the hard cases are exact: a head of width 1, hidden states of 1.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from bench import plain
from bench.repro.integrations.turns import both, cost
from fused_rl import reference

VOCABULARY = 32000
GAPS = (10, 15, 20, 24, 26, 27, 28, 30, 35)
OFFSETS = (0, 10, 30, 100, 300)
DISTANCES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
BASES = tuple(range(100, 230, 4))  # of the other tokens' logits; softmax does not see it
TEMPERATURE = 0.9
FIRST = torch.zeros(1, dtype=torch.long)  # a target, where none matters
SHAPE = (512, 1024, 32000)  # tokens, width, vocabulary: of a CPU's patience
ROWS, TOKENS, PROMPT = 2, 256, 32  # of a trainer's step
WIDTH, LAYERS = 256, 2


class Side(NamedTuple):
    """The primitives of one of the two."""

    head: Callable
    divergence: Callable
    logprobs: Callable
    entropy: Callable

    def of_head(self, hidden, weight, targets):
        """log-probabilities and entropies."""
        outputs = ("log_probs", "entropy", "is_top1")
        return self.head(hidden, weight, None, targets, 1.0, VOCABULARY, None, 1.0, outputs)[:2]


def sides() -> dict[str, Side]:
    """TRL's own, and ours."""
    from trl.kernels import chunked_divergence, chunked_logprob
    from trl.trainer import utils

    from fused_rl.integrations import trl as ours

    def side(heads, divergences, functions):
        head = heads.ChunkedLogProbFunction.apply
        divergence = divergences.ChunkedDivergenceFunction.apply
        return Side(head, divergence, functions.selective_log_softmax, functions.entropy_from_logits)

    return {"TRL": side(chunked_logprob, chunked_divergence, utils), "patched": side(ours, ours, ours)}


# The hard cases.


def as_head(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(V,) -> hidden (1, 1) and weight (V, 1) that give exactly these logits."""
    return torch.ones(1, 1, dtype=logits.dtype), logits[:, None].clone()


def peaked(gap: float, base: float = 0.0) -> torch.Tensor:
    """A token that stands `gap` above the others, which differ a little."""
    logits = base + 0.1 * plain.normal(0, VOCABULARY)
    logits[7] = base + gap
    return logits


def exact_entropy(logits: torch.Tensor) -> float:
    rows = logits.double()[None]
    return reference.token_logprobs(rows, FIRST).entropy.item()


def head_entropy(side: Side, logits: torch.Tensor) -> float:
    _, entropy = side.of_head(*as_head(logits), FIRST)
    return entropy.item()


def worst_entropy(side: Side, gap: float) -> float:
    """Of all BASES, the entropy that is furthest from the truth."""
    rows = [peaked(gap, base) for base in BASES]
    found = [(head_entropy(side, row), exact_entropy(row)) for row in rows]
    return max(found, key=lambda pair: abs(pair[0] - pair[1]))[0]


def largest_error(side: Side, offset: float) -> float:
    """Of log-probabilities of bf16 logits at a temperature, in nats."""
    logits = (offset + 3 * plain.normal(1, 256, 1000)).bfloat16()
    index = torch.arange(len(logits))
    exact = plain.chosen((logits.double() / TEMPERATURE).log_softmax(-1), index)
    return plain.largest(side.logprobs(logits, index, TEMPERATURE), exact)


def close_pair(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits, noise = plain.normal(2, 2, VOCABULARY)
    return 3 * logits, 3 * logits + distance * noise


def head_kl(side: Side, distance: float) -> float:
    """beta = 0: KL(teacher || student)."""
    student, teacher = close_pair(distance)
    return side.divergence(*as_head(student), None, *as_head(teacher), None, 0.0)[0].item()


def exact_kl(distance: float) -> float:
    student, teacher = close_pair(distance)
    rows = teacher.double()[None], student.double()[None]
    return reference.token_kl(*rows).item()


def hard_cases() -> Iterator[dict]:
    """A row per case: what it is, the truth, and the values of both."""

    def row(case, exact, value):
        found = {"case": case, "exact": exact}
        for name, side in sides().items():
            found[name] = value(side)
        return found

    for gap in GAPS:
        exact = exact_entropy(peaked(gap))
        yield row(f"fp32 head, entropy, peak of {gap} nats", exact, lambda side, gap=gap: worst_entropy(side, gap))
    for offset in OFFSETS:
        yield row(f"bf16 logits at {offset}, log-prob's error", 0.0, lambda side, at=offset: largest_error(side, at))
    banned = peaked(5)
    banned[::3] = -torch.inf
    exact = exact_entropy(banned)
    yield row("fp32 head, entropy, -inf columns", exact, lambda side: head_entropy(side, banned))
    yield row("fp32 logits, entropy, -inf columns", exact, lambda side: side.entropy(banned[None]).item())
    for distance in DISTANCES:
        exact = exact_kl(distance)
        yield row(f"fp32 heads {distance:g} apart, KL", exact, lambda side, at=distance: head_kl(side, at))


# What the functions and a step cost.


def costs(rounds: int) -> Iterator[dict]:
    """Forward and backward at SHAPE; memory is beside inputs and gradients."""
    tokens, width, vocab = SHAPE
    targets = torch.randint(vocab, (tokens,), generator=plain.seeded(0))
    for dtype in (torch.bfloat16, torch.float32):
        sizes = ((tokens, width), (vocab, width)) * 2
        # The student's hidden states and head, whose gradients are wanted, and the teacher's.
        tensors = []
        for seed, size in enumerate(sizes):
            scaled = plain.normal(seed, *size).mul_(width**-0.25)
            tensors.append(scaled.to(dtype))
        leaves = (tensors[0].requires_grad_(), tensors[1].requires_grad_())
        teacher = tensors[2:]

        def logprobs(side, hidden, weight):
            found, entropy = side.of_head(hidden, weight, targets)
            (found.sum() + 0.01 * entropy.sum()).backward()

        def kl(side, hidden, weight, beta=0.0, teacher=teacher):
            found = side.divergence(hidden, weight, None, *teacher, None, beta)[0]
            found.sum().backward()

        def jensen_shannon(side, hidden, weight, kl=kl):
            kl(side, hidden, weight, 0.5)

        calls = {"log-probabilities and entropy": logprobs, "KL": kl, "Jensen-Shannon": jensen_shannon}
        for name, call in calls.items():

            def run(side, call=call, leaves=leaves):
                for leaf in leaves:
                    leaf.grad = None
                call(side, *leaves)

            ways = {of: functools.partial(run, side) for of, side in sides().items()}
            yield cost(f"{name}, {str(dtype).removeprefix('torch.')}", ways, rounds)


def step_costs(rounds: int) -> Iterator[dict]:
    """A step of each trainer; generation is no part of it: responses are random ids."""
    # TRL's default runs a model of fp32 weights in bf16 autocast.
    for kind, make in (("GRPO", grpo_trainer), ("SFT", sft_trainer)):
        for precision, bf16 in (("fp32", False), ("bf16 autocast", True)):
            with tempfile.TemporaryDirectory() as folder:
                yield step_cost(f"{kind}, {precision}", make(folder, bf16), rounds)


def step_cost(what: str, trainer, rounds: int) -> dict:
    """Of its first step, again and again, before it goes on with that."""
    from fused_rl.integrations import trl as integration

    step, rows = trainer.training_step, []

    def measured(model, *args, **kwargs):
        def run():
            step(model, *args, **kwargs)
            model.zero_grad()  # afterwards, so that memory counts the gradients

        rows.append(cost(what, both("TRL", integration, run), rounds))
        return step(model, *args, **kwargs)

    trainer.training_step = measured
    trainer.train()
    return rows[0]


def model_and_tokenizer() -> dict:
    """A Qwen2 of random weights with a head of its own, and what the trainers ask for; no text is looked at."""
    import tokenizers
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        num_key_value_heads=WIDTH // 64,
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=0,
    )

    # Four words, whatever the model's vocabulary.
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "a": 3}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)
    return {"model": transformers.Qwen2ForCausalLM(config), "processing_class": tokenizer}


def options(folder: str, bf16: bool) -> dict:
    """Of both trainers' configs: one step."""
    return {
        "output_dir": folder,
        "bf16": bf16,
        "use_cpu": True,
        "max_steps": 1,
        "per_device_train_batch_size": ROWS,
        "optim": "sgd",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def sft_trainer(folder: str, bf16: bool):
    import datasets
    import trl

    ids = torch.randint(10, VOCABULARY, (8 * ROWS, TOKENS)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
    config = trl.SFTConfig(**options(folder, bf16), max_length=TOKENS)
    return trl.SFTTrainer(args=config, train_dataset=data, **model_and_tokenizer())


def grpo_trainer(folder: str, bf16: bool):
    import datasets
    import trl

    def reward(completion_ids, **_):
        return [ids[0] % 7 for ids in completion_ids]

    def respond(prompt_ids, *_, **__):
        shape = (len(prompt_ids), TOKENS - PROMPT)
        return torch.randint(10, VOCABULARY, shape).tolist(), None

    data = datasets.Dataset.from_dict({"prompt": ["a " * PROMPT] * 8})
    config = trl.GRPOConfig(**options(folder, bf16), num_generations=ROWS, max_completion_length=TOKENS - PROMPT)
    trainer = trl.GRPOTrainer(args=config, train_dataset=data, reward_funcs=reward, **model_and_tokenizer())
    trainer._generate_single_turn = respond
    return trainer
