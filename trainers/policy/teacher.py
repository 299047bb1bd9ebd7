"""The teacher of a distillation: a frozen model, and the divergence of the student from it at every token."""

from typing import NamedTuple

import torch
from torch.nn.functional import linear

import fused_rl
from fused_rl.linear_jsd import linear_token_jsd
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.batch import Batch, on_device
from fused_rl.trainers.models import language_model
from fused_rl.trainers.options import InputError
from fused_rl.trainers.policy.policy import Policy

ROWS = 256  # whose logits exist at once to find the likeliest token
COMPARED = 8  # in training the likeliest tokens are compared at every eighth token of a response


class Teacher(NamedTuple):
    """A frozen `LanguageModel`, and weight (V, H) and bias (V,) or None of its head, whole under ZeRO 3 too."""

    model: object
    head: tuple[torch.Tensor, torch.Tensor | None]


def load_teacher(config, policy: Policy) -> Teacher:
    """Return the teacher; refuse one of other tokens than the student's."""
    tokens = set(policy.tokenizer.get_vocab().items())
    others = set(encode.load_tokenizer(config.teacher).get_vocab().items())
    if differing := sorted({token for token, _ in tokens ^ others}):
        what = f"teacher={config.teacher} has {len(others)} tokens and model={config.model} {len(tokens)}"
        some = ", ".join(map(repr, differing[:4]))
        raise InputError(f"{what}, and {len(differing)} differ: {some}; choose a teacher with the student's tokenizer")
    reading = {"dtype": engine.torch_dtype(config), "attn_implementation": config.attn_implementation}
    lm = language_model.load_to_sample(config.teacher, device=policy.device, **reading).requires_grad_(False)
    teacher = language_model.LanguageModel(lm, "linear")

    # One of the heads may be padded to more rows. ZeRO 3 partitions the parameters, and these tensors stay whole.
    vocab = policy.model.module.base.config.get_text_config().vocab_size
    bias = None if teacher.head.bias is None else teacher.head.bias.detach()
    head = _first(vocab, teacher.head.weight.detach(), bias)
    return Teacher(engine.initialize_frozen(teacher, config), head)


def corrected(policy: Policy, teacher: Teacher, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence at the part's N tokens that count, (N,) fp32 in nats, and at n of them whether student and
    teacher have the same likeliest token, (n,) bool.
    """
    row, column = part.response_tokens()
    every = COMPARED if torch.is_grad_enabled() else 1
    at = on_device(((column + 1 - part.prompt_lengths[row]) % every == 0).nonzero()[:, 0], policy.device)
    inputs = {"input_ids": part.input_ids, "mask": part.response_mask, "places": part.places()}
    with torch.no_grad():
        ref_hidden = teacher.model(**inputs, through=lambda hidden, _: hidden)

    def meet(hidden, student):
        """In the student's forward pass, where its head is whole."""
        head = _first(len(teacher.head[0]), student.head.weight, student.head.bias)
        agrees = _likeliest(hidden[at], *head) == _likeliest(ref_hidden[at], *teacher.head)
        return _divergence(policy.config, student, (hidden, *head), (ref_hidden, *teacher.head)), agrees

    return policy.model(**inputs, through=meet)


def _first(vocab: int, weight, bias):
    """Return the first rows of a head; itself where it has no more, as the gradient of a slice is a copy."""
    return (weight, bias) if len(weight) <= vocab else (weight[:vocab], None if bias is None else bias[:vocab])


@torch.no_grad()
def _likeliest(hidden, weight, bias) -> torch.Tensor:
    """Return the likeliest token of each hidden state, (n,)."""
    return torch.cat([linear(rows, weight, bias).argmax(-1) for rows in hidden.split(ROWS)])


def _divergence(config, student, own, others) -> torch.Tensor:
    """Return the divergence of each token, (N,), from hidden states, weight and bias of both."""
    operands, biases = (*own[:2], *others[:2]), {"bias": own[2], "ref_bias": others[2]}
    options = {"temperature": config.distill_temperature, "softcap": student.softcap} | biases
    if config.direction == "jensen-shannon" and config.jsd_beta != 0.5:
        return linear_token_jsd(*operands, beta=config.jsd_beta, **options)
    options |= {"direction": config.direction, "logits_dtype": student.head_dtype}
    return fused_rl.linear_token_kl(*operands, **options)
