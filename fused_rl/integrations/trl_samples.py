"""Small random arguments of TRL's functions by name, for the self-test of `fused_rl.integrations.trl`."""

from collections.abc import Iterator

import torch

from fused_rl.integrations.self_test import normal


def logits_samples(dtype: torch.dtype) -> Iterator[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    logits = normal(generator, dtype, 2, 3, 37, scale=3)
    index = torch.randint(37, (2, 3), generator=generator, device="cpu")
    row_mask = torch.tensor(
        [[True, False, True], [True, True, True]], dtype=torch.bool, device="cpu"
    )
    yield {
        "logits": logits,
        "index": index,
        "entropy_requires_grad": True,
        "temperature": 0.7,
        "row_mask": row_mask,
    }
    spread = _spread_logits(dtype)
    yield {"logits": spread, "index": spread.argmin(-1)}


def targets_samples(dtype: torch.dtype) -> Iterator[dict[str, object]]:
    """Those of `logits_samples`, and several targets per row."""
    yield from logits_samples(dtype)
    spread = _spread_logits(dtype)
    yield {"logits": spread, "index": torch.stack((spread.argmin(-1), spread.argmax(-1)), -1)}


def _spread_logits(dtype: torch.dtype) -> torch.Tensor:
    """Logits whose least likely tokens are at -40 nats and below."""
    generator = torch.Generator().manual_seed(0)
    return normal(generator, dtype, 2, 3, 37, scale=12)


def head_samples(dtype: torch.dtype) -> Iterator[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 8), (37, 8), (37,))
    hidden, weight, bias = (normal(generator, dtype, *shape) for shape in shapes)
    common = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "targets": torch.randint(37, (5,), generator=generator, device="cpu"),
        "temperature": 0.7,
        "chunk_size": 16,
        "outputs": ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    }
    for softcap in (None, 2.0):
        yield common | {"final_logit_softcapping": softcap, "logit_scale": 0.8}


def divergence_samples(dtype: torch.dtype) -> Iterator[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        [normal(generator, dtype, *shape) for shape in shapes]
        for shapes in (((5, 8), (37, 8), (37,)), ((5, 6), (37, 6), (37,)))
    )
    names = "hidden", "weight", "bias"
    heads: dict[str, object] = {}
    for name, of_student, of_teacher in zip(names, student, teacher, strict=True):
        heads |= {f"student_{name}": of_student, f"teacher_{name}": of_teacher.detach()}
    options = {
        "temperature": 0.7,
        "student_logit_scale": 0.8,
        "student_final_logit_softcapping": 4.0,
        "teacher_logit_scale": 1.0,
        "teacher_final_logit_softcapping": None,
    }
    for beta in (0.0, 0.3, 1.0):
        yield heads | options | {"beta": beta}
