"""Errors against fp64: the truths are right, and the forms go wrong where the docs say."""

import pytest
import torch

import fused_rl.reference
from bench import numerics
from bench.repro import entropy, head_precision


def test_entropy_stays_right_where_common_forms_do_not():
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    rows = list(entropy.sweep(dtypes, gaps=(0, 10, 40), offsets=(0, 1000, -1000)))
    ours = [r for r in rows if r["form"] == "fused_rl"]
    assert all(r["smallest"] >= 0 for r in ours)
    assert max(r["error"] / max(1e-4, 1e-5 * r["exact"]) for r in ours) < 1
    worst = {f: max(r["error"] for r in rows if r["form"] == f) for f in entropy.FORMS}
    assert min(r["smallest"] for r in rows if r["form"] == "lse - sum(p x), logits' dtype") <= -0.5
    assert worst["lse - sum(p x), logits' dtype"] > 1
    assert worst["lse - sum(p x), fp32"] > 1e-3


@pytest.mark.slow
def test_an_exact_head_beside_others():
    """3e-6 with fp32 logits, thousandths without; what is not installed says so."""
    rows = {row["form"]: row for row in head_precision.measured((16, 64, 2000))}
    assert rows.keys() == head_precision.FORMS.keys()
    errors = {}
    for name, row in rows.items():
        errors[name] = [value for title, value in row.items() if title not in ("form", "not run")]
        assert len(errors[name]) == 2 * len(head_precision.CASES)
        assert (errors[name][0] is None) == bool(row["not run"])
    assert max(errors["fused_rl, logits_dtype=float32"]) <= 3.05e-6
    plain = errors["fp32 head, log_softmax"]
    assert max(plain) >= 0.95e-5 and plain[0] <= 1.05e-5
    for name in ("fused_rl, logits_dtype=bfloat16", "TRL chunked head"):
        assert errors[name][0] >= 0.95e-3
    (row,) = head_precision.costs(((16, 64, 4096),), rounds=1)
    assert row["shape"] == "16x64x4096" and len(row) == 6


def test_exact_numerics_agree_with_autograd_and_keep_what_it_loses():
    x, targets = numerics.logits("normal", 0, torch.float32, "cpu")
    up = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    logprobs, h, gradient = numerics.exact(x, targets, *up)
    leaf = x.double().requires_grad_()
    expected = fused_rl.reference.token_logprobs(leaf, targets)
    (given,) = torch.autograd.grad(expected[:2], leaf, up)
    torch.testing.assert_close(logprobs, expected.logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(h, expected.entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, given, rtol=1e-9, atol=1e-14)
    # One token 60 above the other: 1 - p = e^-60 of which plain fp64 keeps nothing.
    certain = torch.tensor([[60.0, 0.0]])
    _, h, gradient = numerics.exact(certain, torch.tensor([0]), torch.ones(1), None)
    rest = torch.exp(torch.tensor(-60.0, dtype=torch.float64))
    torch.testing.assert_close(h[0], rest * 61, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient[0], torch.stack([rest, -rest]), rtol=1e-12, atol=0)
