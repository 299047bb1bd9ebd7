"""TRL's chunked primitives from full logits in fp64: what a run is measured against.

Results are fp64 in a run in fp64, and rounded to fp32, which is what TRL returns, in any other.
"""

import math

import torch


def _logits(hidden, weight, bias, scale, softcap, temperature):
    """(N, V) logits in fp64."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def _rounded(hidden, *outputs):
    if hidden.dtype == torch.float64:
        return outputs
    return tuple(value.float() if value is not None and value.is_floating_point() else value for value in outputs)


def _entropy(log_probs):
    return -(log_probs.exp() * log_probs).sum(-1)


class _ChunkedLogProbFunction:
    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=()):
        logits = _logits(hidden, weight, bias, scale, softcap, temperature)
        log_probs = logits.log_softmax(-1)
        fixed = log_probs.detach()
        made = {
            "entropy": _entropy(log_probs),
            "log_sum_sq_probs": (2 * fixed).logsumexp(-1),
            "mean_logits": logits.detach().mean(-1),
            "is_top1": logits.argmax(-1) == targets,
        }
        selected = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        asked = [value if name in outputs else None for name, value in made.items()]
        return _rounded(hidden, selected, *asked)


class ChunkedDivergenceFunction:
    @staticmethod
    def apply(
        student_hidden,
        student_weight,
        student_bias,
        teacher_hidden,
        teacher_weight,
        teacher_bias,
        beta,
        temperature=1.0,
        student_scale=1.0,
        student_softcap=None,
        teacher_scale=1.0,
        teacher_softcap=None,
    ):
        student = _logits(
            student_hidden,
            student_weight,
            student_bias,
            student_scale,
            student_softcap,
            temperature,
        )
        teacher = _logits(
            teacher_hidden,
            teacher_weight,
            teacher_bias,
            teacher_scale,
            teacher_softcap,
            temperature,
        )
        student = student.log_softmax(-1)
        teacher = teacher.detach().log_softmax(-1)
        if beta == 0:
            divergence = _kl(teacher, student)
        elif beta == 1:
            divergence = _kl(student, teacher)
        else:
            mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
            divergence = beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
        return _rounded(student_hidden, divergence, _entropy(student.detach()))


def _kl(p, q):
    """KL(p || q) of rows of log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)
