"""What the functions that integrations replace are to return, in plain PyTorch and in the dtype that it is given."""

import math

import torch


def scores(hidden, weight, bias, temperature, softcap, scale):
    """(N, H), (V, H), (V,) | None -> the logits that a softmax gets, (N, V)."""
    logits = hidden @ weight.t()
    logits = logits if bias is None else logits + bias
    logits = logits * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits / temperature


def entropy(logp):
    """(..., V) log-probabilities -> (...); a banned token adds nothing, to the gradient neither."""
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)


def row_outputs(x, targets):
    """TRL's five outputs of scores (N, V)."""
    logp = x.log_softmax(-1)
    found = logp.gather(-1, targets[:, None])[:, 0]
    return found, entropy(logp), (2 * logp).logsumexp(-1), x.mean(-1), x.argmax(-1) == targets


def divergence(x, y, beta):
    """(N, V) scores of student and teacher -> TRL's generalized Jensen-Shannon divergence and the student's entropy."""
    student, teacher = x.log_softmax(-1), y.log_softmax(-1)
    if beta == 0:
        return kl(teacher, student), entropy(student)
    if beta == 1:
        return kl(student, teacher), entropy(student)
    mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture), entropy(student)


def kl(logp, logq):
    return (logp.exp() * (logp - logq)).sum(-1)
