"""topk_kl, the divergence of K tokens and a tail, against its reference in fp64."""

import pytest
import torch

from fused_rl import reference, topk_kl
from fused_rl.ops.kl import DIRECTIONS
from tests.logits import FLOATS


def distributions(n, vocab, dtype=torch.float64, seed=0, distance=1.0):
    """Log-probabilities of two distributions over the vocabulary, likeliest of the second first."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, vocab, dtype=torch.float64, generator=generator)
    ref = logits + distance * torch.randn(n, vocab, dtype=torch.float64, generator=generator)
    ref, order = ref.sort(-1, descending=True)
    return [log_softmax(x).to(dtype) for x in (logits.gather(-1, order), ref)]


def log_softmax(x):
    """With the digits of log-probabilities near 0, which torch's rounds to those of the logits."""
    every = torch.arange(x.shape[-1]).expand(x.shape)
    return reference.token_logprobs(x, every).logprobs


def test_a_tail_keeps_its_digits():
    """Down to 1e-30: 1 - p of one token near certainty is not 1 - exp(log p)."""
    small = torch.tensor([1e-3, 1e-6, 1e-9, 1e-30], dtype=torch.float64)
    p = torch.log1p(-small)
    q = torch.log1p(-torch.tensor(0.3, dtype=torch.float64)).expand(4)
    p[3] = -1e-30
    logp, logq = (x.float()[:, None].requires_grad_() for x in (p, q))
    value = topk_kl(logp, logq, direction="forward")
    wide = logp.detach().double()[:, 0], logq.detach().double()[:, 0]
    tails = [-x.expm1() for x in wide]
    expected = wide[1].exp() * (wide[1] - wide[0]) + tails[1] * (tails[1] / tails[0]).log()
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
    slope = torch.autograd.grad(value.sum(), logp)[0][:, 0].double()
    exact_slope = -wide[1].exp() + wide[0].exp() * tails[1] / tails[0]
    torch.testing.assert_close(slope, exact_slope, rtol=1e-5, atol=0)


def test_a_tail_that_rounds_to_nothing():
    """On both sides it adds 0; on one, value and gradient stay finite, and below the exact KL."""
    logits = torch.tensor([[30.0, 2, 1, -1, 0], [2, 1.5, 1, 1, 0.5]], dtype=torch.float64)
    exact = torch.log_softmax(logits, -1)
    certain, vague = exact.float()[:, :2]
    certain[0] = 0.0  # as a plain fp32 log-softmax rounds it
    for pair, full in (((certain, vague), exact), ((vague, certain), exact.flip(0))):
        for direction in DIRECTIONS:
            leaves = [x.clone().requires_grad_() for x in pair]
            value = topk_kl(*leaves, direction=direction)
            assert 0 < value <= reference.token_kl(*full, direction=direction) * (1 + 1e-6)
            assert all(d.isfinite().all() for d in torch.autograd.grad(value, leaves))
    near = torch.tensor([0.0, -20.0]), torch.tensor([-1e-7, -18.0])
    for direction in DIRECTIONS:
        assert topk_kl(certain, certain, direction=direction) == 0
        assert topk_kl(*near, direction=direction) < 2e-7


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_above_one_by_rounding_pass(dtype):
    """Every token, rounded to the dtype; a hundredth of a nat above is refused in fp32."""
    logp, logq = (x.to(dtype) for x in distributions(50, 200))
    assert (logp.double().exp().sum(-1) > 1).any()
    assert topk_kl(logp, logq, direction="reverse").isfinite().all()
    if dtype == torch.float32:
        with pytest.raises(ValueError, match="0.01 above 1|0.0101 above 1"):
            topk_kl(logp + 0.01, logq, direction="reverse")


def test_without_a_look_at_values_a_bad_row_is_nan(monkeypatch):
    """As on a GPU, and under torch.compile."""
    monkeypatch.setattr("fused_rl.ops.topk.values_are_checked", lambda device: False)
    even = torch.log_softmax(torch.zeros(2, 3, 5), -1)[..., :4]
    bad = even.clone()
    bad[0, 0], bad[1, 1, 3] = 0.0, torch.nan
    value = topk_kl(bad, even, direction="jensen-shannon")
    assert value.isnan().nonzero().tolist() == [[0, 0], [1, 1]]


def test_an_id_that_comes_twice_is_refused():
    """Not where it adds nothing: what is masked, and what has probability 0 on both sides, as padding has."""
    logp, logq = (x[:, :5].clone() for x in distributions(4, 20))
    ids = torch.arange(5).flip(0).repeat(4, 1)
    expected = topk_kl(logp, logq)
    assert torch.equal(topk_kl(logp, logq, ids=ids.int()), expected)
    ids[2, 1] = ids[2, 3]
    with pytest.raises(ValueError, match=r"ids\[2\] has 1 twice.* 1 of 4 rows"):
        topk_kl(logp, logq, ids=ids)
    with pytest.raises(ValueError, match="ids must be an integer tensor"):
        topk_kl(logp, logq, ids=logp)
    mask = torch.arange(4) != 2
    assert torch.equal(topk_kl(logp, logq, ids=ids, mask=mask)[mask], expected[mask])
    logp[2, 1] = logq[2, 1] = -torch.inf
    topk_kl(logp, logq, ids=ids - 6)  # negative ones are ids, too
