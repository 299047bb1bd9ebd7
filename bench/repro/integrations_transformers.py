"""A training step of a causal LM: transformers' own loss, ours from logits, and ours from hidden states and LM head.

    python bench/repro/integrations_transformers.py

A random Qwen2 with a large vocabulary and a small body, as `Trainer` runs it in bf16 (autocast). Memory is the peak of
a process of its own above what it held before the step. Time is CPU seconds, the ways interleaved in one process,
beside the stock step of the same round. Error is that of the LM head's gradient against fp64, each from the same
rounded hidden states, of a head whose rows are peaked and stand at an offset of 100 (bf16 logits).
"""

import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench.results import table
from fused_rl.integrations.transformers import UnformedLogits, causal_lm_loss, patch

WAYS = ("stock", "compute_loss_func", "patch")
TOKENS, VOCABULARY, HIDDEN, WORKSPACE_MB = (4, 512), 65536, 256, 64
ROUNDS = 7


def make_model(way: str):
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**shape, **heads))
    if way == "patch":
        patch(model, workspace_mb=WORKSPACE_MB)
    return model


def make_batch() -> dict[str, torch.Tensor]:
    """The first half of each row is a prompt, whose labels do not count."""
    ids = torch.randint(VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : TOKENS[1] // 2] = -100
    return {"input_ids": ids, "labels": labels}


def step(model, batch, way: str) -> None:
    count = (batch["labels"] != -100).sum()
    with torch.autocast("cpu", torch.bfloat16):
        if way == "compute_loss_func":
            # Trainer has accelerate cast the outputs to fp32 before it calls the function; a loop of one's own need not
            loss = causal_lm_loss(model(input_ids=batch["input_ids"]), batch["labels"], count)
        else:
            loss = model(**batch, num_items_in_batch=count).loss
    loss.backward()


def peak_mb(way: str, results) -> None:
    """Of this process: the most that a step holds beyond model and gradients."""
    model, batch = make_model(way), make_batch()
    small = {key: value[:1, -4:] for key, value in batch.items()}
    step(model, small, way)  # makes the gradients and loads what is loaded late
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(model, batch, way)
    results.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def in_a_process(target, way: str) -> float:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=target, args=(way, results))
    process.start()
    found = results.get()
    process.join()
    return found


def ratios() -> dict[str, float]:
    """CPU seconds beside the stock step's of the same round, the median of the rounds."""
    models, batch = {way: make_model(way) for way in WAYS}, make_batch()
    seconds = {way: [] for way in WAYS}
    for _ in range(ROUNDS + 1):
        for way, model in models.items():
            begin = time.process_time()
            step(model, batch, way)
            seconds[way].append(time.process_time() - begin)
    rounds = {way: [a / b for a, b in zip(taken, seconds["stock"], strict=True)][1:] for way, taken in seconds.items()}
    return {way: statistics.median(found) for way, found in rounds.items()}


def gradient_errors() -> dict[str, float]:
    """Relative error of the head's gradient where each row's target has nearly all the probability."""
    import transformers

    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 64, 128, generator=generator)
    weight = 0.2 * torch.randn(2000, 128, generator=generator)
    labels = torch.randint(2000, (1, 64), generator=generator)
    weight[labels[0, 1:]] += hidden[0, :-1] * 0.1
    hidden[..., 0], weight[:, 0] = 10.0, 10.0  # the offset
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    stock = transformers.loss.loss_utils.ForCausalLMLoss

    def gradient(way, dtype=torch.bfloat16):
        head = torch.nn.Linear(128, 2000, bias=False, dtype=dtype)
        head.weight.data = weight.to(dtype)
        states = hidden.to(dtype)
        if way == "patch":
            targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            logits = UnformedLogits(head, states)
            loss = logits.negative_logprobs(targets, targets >= 0, torch.tensor(1 / 63), WORKSPACE_MB)
        elif way == "stock":
            loss = stock(head(states), labels, 2000)
        else:
            loss = causal_lm_loss((head(states),), labels)
        loss.backward()
        return head.weight.grad.double()

    exact = gradient("compute_loss_func", torch.float64)
    return {way: ((gradient(way) - exact).norm() / exact.norm()).item() for way in WAYS}


def rows() -> list[list[str]]:
    """The table's rows: way, peak memory in MB, CPU seconds beside stock."""
    memory = {way: in_a_process(peak_mb, way) for way in WAYS}
    taken = ratios()
    errors = gradient_errors()
    return [[way, f"{memory[way]:.0f}", f"{taken[way]:.2f}", f"{errors[way]:.2g}"] for way in WAYS]


if __name__ == "__main__":
    print(table(["loss", "peak MB of a step", "CPU seconds / stock's", "gradient error"], rows()))
