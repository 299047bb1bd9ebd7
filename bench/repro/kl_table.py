"""Which KL estimator holds a policy: value and gradient of each as a loss, exactly, by enumerating a small vocabulary.

    python bench/repro/kl_table.py

Over 5 tokens every expectation is a sum, so there is no sampling noise: what the table says of an estimator is what a
run of it converges to. On-policy the tokens come from the policy; off-policy from another one, the behaviour policy.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import fused_rl
from bench.measure import table

POLICY = [0.5, -0.3, 0.8, -1.0, 0.2]
REFERENCE = [0.1, 0.4, -0.2, 0.3, -0.6]
BEHAVIOUR = [0.3, -0.1, 0.5, -0.6, 0.0]
ESTIMATORS = ("k1", "k2", "k3", "k4", "rk3", "k1+", "k3+")


def exact(direction):
    """KL(policy || reference), or the forward KL(reference || policy), and its gradient on the logits, fp64."""
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    logp, ref = logits.log_softmax(0), torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(0)
    first, second = (logp, ref) if direction == "reverse" else (ref, logp)
    kl = (first.exp() * (first - second)).sum()
    return kl.item(), torch.autograd.grad(kl, logits)[0]


def expected(estimator, on_policy):
    """E[value] and E[gradient of the loss] of one estimator, the tokens drawn on- or off-policy, fp64."""
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    logp, ref = logits.log_softmax(0), torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(0)
    old = logp.detach() if on_policy else torch.tensor(BEHAVIOUR, dtype=torch.float64).log_softmax(0)
    value = fused_rl.kl_estimate(logp, ref, estimator, old_logprobs=old)
    loss = (old.exp() * value).sum()
    return loss.item(), torch.autograd.grad(loss, logits)[0]


def verdict(gradient):
    """What a gradient is, in words."""
    if gradient.abs().max() < 1e-12:
        return "all zero"
    for name, direction in (("the KL's", "reverse"), ("that of KL(ref||policy)", "forward")):
        if (gradient - exact(direction)[1]).abs().max() < 1e-9:
            return name
    return f"cosine with the KL's {torch.cosine_similarity(gradient, exact('reverse')[1], 0):+.3f}"


def rows():
    """One row per estimator: E[value] and what E[gradient] is, on-policy and off-policy."""
    for estimator in ESTIMATORS:
        (on, on_gradient), (off, off_gradient) = expected(estimator, True), expected(estimator, False)
        yield [estimator, f"{on:.6f}", verdict(on_gradient), f"{off:.6f}", verdict(off_gradient)]


def main():
    for name, direction in (("KL(policy||ref)", "reverse"), ("KL(ref||policy)", "forward")):
        value, gradient = exact(direction)
        print(f"{name} = {value:.6f}, gradient [{', '.join(f'{g:.6f}' for g in gradient.tolist())}]")
    print()
    print(
        table(
            ["as a loss", "E on-policy", "E[gradient] on-policy", "E off-policy", "E[gradient] off-policy"],
            list(rows()),
        )
    )


if __name__ == "__main__":
    main()
