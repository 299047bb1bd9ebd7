"""A divergence from a teacher: what each form is worth and where its gradient leads.

    python -m bench.repro.distillation     prints three tables

First the case of verl's issue 7856, by enumeration: teacher (0.6, 0.4), student (0.9, 0.1), K = 1. Then estimators that
see one token of that student. Last, a student of 50 tokens is trained on each form of K tokens alone, from the same
start, by gradient descent on its logits; the output is the exact KL to the teacher, which steers nothing.
"""

import functools

import torch

import fused_rl
from bench import results

TEACHER = torch.tensor([0.6, 0.4], dtype=torch.float64)
STUDENT = torch.tensor([0.9, 0.1], dtype=torch.float64)
VOCAB, K, STEPS, RATE = 50, 4, 300, 1.0


def exact(logits, teacher, k):
    """KL(teacher, student) over all tokens."""
    return fused_rl.topk_kl(logits.log_softmax(-1), teacher, direction="forward")


def with_tail(logits, teacher, k):
    """The K likeliest and one more outcome, all others: `topk_kl`."""
    logprobs, ids = teacher.topk(k)
    return fused_rl.topk_kl(logits.log_softmax(-1).gather(-1, ids), logprobs, direction="forward")


def truncated(logits, teacher, k):
    """The terms of the K likeliest, added up."""
    logprobs, ids = teacher.topk(k)
    return (logprobs.exp() * (logprobs - logits.log_softmax(-1).gather(-1, ids))).sum(-1)


def clamped(logits, teacher, k):
    """The same, no less than 0."""
    return truncated(logits, teacher, k).clamp(min=0)


def renormalised(logits, teacher, k):
    """Both distributions over the K alone."""
    logprobs, ids = teacher.topk(k)
    given = logprobs.log_softmax(-1)
    return (given.exp() * (given - logits.gather(-1, ids).log_softmax(-1))).sum(-1)


FORMS = {
    "exact, all tokens": exact,
    "K and the tail (topk_kl)": with_tail,
    "sum over K": truncated,
    "sum over K, at least 0": clamped,
    "over K, renormalised": renormalised,
}


def as_advantage(logprobs, teacher):
    """k1, whose loss is that of the policy gradient: the detached log-ratio times the token's log-probability."""
    cost = (logprobs - teacher).detach()
    return cost + cost * (logprobs - logprobs.detach())


SAMPLED = {"k1 as an advantage": as_advantage}
for _name in ("k1", "k2", "k3"):
    SAMPLED[f"{_name} as a loss"] = functools.partial(fused_rl.kl_estimate, kl_estimator=_name)


def slope(form, logits, teacher, k):
    """Value and gradient by the logits."""
    leaf = logits.clone().requires_grad_()
    value = form(leaf, teacher, k)
    return value.item(), torch.autograd.grad(value, leaf)[0]


def enumerated() -> list[dict]:
    """A line per form of the two-token case; the gradient of the first token's logit."""
    lines = []
    for name, form in FORMS.items():
        value, gradient = slope(form, STUDENT.log(), TEACHER.log(), 1)
        lines.append(
            {"form": name, "value": f"{value:+.4f}", "gradient": f"{gradient[0].item():+.4f}"}
        )
    return lines


def sampled() -> list[dict]:
    """A line per estimator of KL(student, teacher); expectations are over the student's tokens."""
    logits = STUDENT.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    value = fused_rl.topk_kl(logprobs, TEACHER.log(), direction="reverse")
    found = {
        "exact, all tokens": (
            value,
            torch.autograd.grad(value, logits, retain_graph=True)[0][0].expand(2),
        )
    }
    for name, estimate in SAMPLED.items():
        values = estimate(logprobs, TEACHER.log())
        slopes = [torch.autograd.grad(value, logits, retain_graph=True)[0][0] for value in values]
        found[name] = (STUDENT @ values, torch.stack(slopes))
    lines = []
    for name, (value, slopes) in found.items():
        mean = STUDENT @ slopes
        noise = (STUDENT @ (slopes - mean).square()).sqrt()
        lines.append(
            {
                "form": name,
                "value": f"{value:+.4f}",
                "gradient": f"{mean:+.4f}",
                "deviation": f"{noise:.4f}",
            }
        )
    return lines


def trained() -> dict[str, list[float]]:
    """The exact KL over the steps of each form."""
    generator = torch.Generator().manual_seed(1)
    teacher = (2 * torch.randn(VOCAB, generator=generator).double()).log_softmax(-1)
    start = 2 * torch.randn(VOCAB, generator=generator).double()
    curves = {}
    for name, form in FORMS.items():
        logits, curve = start.clone(), []
        for _ in range(STEPS):
            curve.append(exact(logits, teacher, VOCAB).item())
            logits -= RATE * slope(form, logits, teacher, K)[1]
        curves[name] = curve
    return curves


def main() -> None:
    print("teacher (0.6, 0.4), student (0.9, 0.1), K = 1; nats\n")
    print(results.table_of(enumerated()))
    print(
        "\nfrom one token of the student: mean, mean gradient and its deviation; KL(student, teacher)\n"
    )
    print(results.table_of(sampled()))
    curves = trained()
    lines = [
        {"form": name, "before": f"{curve[0]:.4f}", "after": f"{curve[-1]:.4f}"}
        for name, curve in curves.items()
    ]
    print(f"\nexact KL of {VOCAB} tokens before and after {STEPS} steps on a form, K = {K}; nats\n")
    print(results.table_of(lines))


if __name__ == "__main__":
    main()
