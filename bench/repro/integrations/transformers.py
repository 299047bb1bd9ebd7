"""A training step of a causal LM: transformers' own loss, ours from logits, and ours from hidden states and LM head.

A random Qwen2 with a large vocabulary and a small body, as `Trainer` runs it in bf16 (autocast). The error is that of
the head's gradient, relative, where each row's target has nearly all the probability and logits stand at an offset of
100: bf16 logits.
"""

import functools

import torch

from bench import plain
from bench.repro.integrations.turns import cost
from fused_rl.integrations.transformers import causal_lm_loss, patch
from fused_rl.integrations.unformed import UnformedLogits

WAYS = ("stock", "compute_loss_func", "patch")
ROWS = 4
LENGTH = 512
VOCABULARY = 65536
HIDDEN = 256
WORKSPACE_MB = 64


def make_model(way: str):
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    if way == "patch":
        patch(model, workspace_mb=WORKSPACE_MB)
    return model


def step(model, way: str) -> None:
    """On rows whose first half is a prompt, whose labels do not count."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=plain.seeded(1))
    labels = ids.clone()
    labels[:, : LENGTH // 2] = -100
    count = (labels != -100).sum()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        if way == "compute_loss_func":
            # Trainer has accelerate cast the outputs to fp32 before it calls the function; a loop of one's own need not
            loss = causal_lm_loss(model(input_ids=ids), labels, count)
        else:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=count).loss
    loss.backward()


def costs(rounds: int):
    models = {way: make_model(way) for way in WAYS}
    ways = {way: functools.partial(step, model, way) for way, model in models.items()}
    yield cost(f"{ROWS} x {LENGTH} tokens, H {HIDDEN}, V {VOCABULARY}", ways, rounds)


def errors():
    # Peaked rows: each row's target likes its hidden state, and all share an offset.
    generator = plain.seeded(2)
    hidden = torch.randn(1, 64, 128, generator=generator)
    weight = 0.2 * torch.randn(2000, 128, generator=generator)
    labels = torch.randint(2000, (1, 64), generator=generator)
    weight[labels[0, 1:]] += hidden[0, :-1] * 0.1
    hidden[..., 0], weight[:, 0] = 10.0, 10.0
    given = hidden.bfloat16(), weight.bfloat16(), labels

    exact = gradient("compute_loss_func", *given, torch.float64)
    for way in WAYS:
        off = gradient(way, *given) - exact
        yield {"loss": way, "gradient error": (off.norm() / exact.norm()).item()}


def gradient(way: str, hidden, weight, labels, dtype=torch.bfloat16) -> torch.Tensor:
    """Of the head, in fp64."""
    from transformers.loss import loss_utils

    head = torch.nn.Linear(*weight.t().shape, bias=False, dtype=dtype)
    head.weight.data = weight.to(dtype)
    states = hidden.to(dtype)
    if way == "patch":
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        logits = UnformedLogits(head, states)
        loss = logits.mean_loss(targets, workspace_mb=WORKSPACE_MB)
    elif way == "stock":
        loss = loss_utils.ForCausalLMLoss(head(states), labels, len(weight))
    else:
        loss = causal_lm_loss((head(states),), labels)
    loss.backward()
    return head.weight.grad.double()
