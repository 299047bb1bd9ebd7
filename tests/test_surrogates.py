"""Surrogates against their papers; those of one's own in both passes, and refused where they are none."""

import math
import statistics
import typing

import pytest
import torch

import fused_rl
from fused_rl.objectives import surrogates
from fused_rl.objectives.presets import RolloutCorrection
from tests.papers import F64, B, T, batch

pytestmark = pytest.mark.usefixtures("cpu", "seeded")


def needs_lengths(log_ratio, advantages, logprobs, sequences, options):
    means = sequences.mean(log_ratio)
    return -sequences.expand(means) * advantages


def test_a_surrogate_of_ones_own_in_one_pass():
    """One that needs sequences is refused at once if it declares it, else when it reaches for them."""
    mask, _, advantages, _, drift = batch("partial")

    def tanh_surrogate(log_ratio, advantages, logprobs, sequences, options):
        return -torch.tanh(log_ratio.exp() - 1) * advantages

    def by_token(surrogate):
        given = drift[0], advantages, mask
        token_loss, per_token = fused_rl.policy_token_loss(*given, surrogate=surrogate)
        return token_loss(drift[1][mask], None, *(x[mask] for x in per_token)).sum()

    want, _ = fused_rl.policy_loss(drift[1], drift[0], advantages, mask, surrogate=tanh_surrogate)
    torch.testing.assert_close(by_token(tanh_surrogate), want, rtol=1e-5, atol=1e-6)
    said = "uses sequences.mean, but .* single tokens: use linear_token_logprobs and pol"
    with pytest.raises(ValueError, match=said):
        by_token(needs_lengths)
    declared = surrogates.needs_sequences(lambda *arguments: needs_lengths(*arguments))
    with pytest.raises(ValueError, match="needs more than one token"):
        fused_rl.policy_token_loss(drift[0], advantages, mask, surrogate=declared)
    fused_rl.policy_loss(drift[1], drift[0], advantages, mask, surrogate=declared)


BAD_SURROGATES = {
    "a sum": lambda r, a, lp, s, o: -(r.exp() * a).sum(),
    "another dtype": lambda r, a, lp, s, o: -(r.exp() * a).bfloat16(),
    "nothing": lambda r, a, lp, s, o: None,
}


@pytest.mark.parametrize("surrogate", BAD_SURROGATES.values(), ids=BAD_SURROGATES)
def test_a_surrogate_that_is_none_is_refused_in_one_line(surrogate):
    """Each would broadcast into a loss of B T times the size."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    logprobs = torch.zeros(2, 3, requires_grad=True)
    options = {"preset": "grpo", "surrogate": surrogate}
    with pytest.raises(ValueError, match=r"^the surrogate [^\n]*\(2, 3\)[^\n]*$"):
        fused_rl.policy_loss(logprobs, None, torch.ones(2), mask, **options)


# The papers' surrogates of single tokens, from probabilities in Python: (A, log p, log q, options) -> the loss of a
# token and its derivative by log p; q is the old policy's.


def _reinforce(weight, a, lp):
    return -weight * a * lp, -weight * a


def _dppo_tv(a, lp, lq, o):
    moved = math.exp(lp) - math.exp(lq)
    out = moved > o.clip_high if a > 0 else moved < -o.clip_low
    return _reinforce(0 if out else min(math.exp(lp - lq), o.dppo_cap), a, lp)


def _dppo_kl(a, lp, lq, o):
    p, q = math.exp(lp), math.exp(lq)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    out = (p > q and kl > o.clip_high) if a > 0 else (p < q and kl > o.clip_low)
    return _reinforce(0 if out else min(p / q, o.dppo_cap), a, lp)


def _ipo(a, lp, lq, o):
    p, q = math.exp(lp), math.exp(lq)
    policy = 0 if abs(p - q) > o.ipo_threshold else -a * p / q
    return policy + o.ipo_tau * (lp - lq) ** 2, policy + 2 * o.ipo_tau * (lp - lq)


def _dro(a, lp, lq, o):
    return -a * lp + o.dro_beta * (lp - lq) ** 2 / 2, -a + o.dro_beta * (lp - lq)


def _topr(a, lp, lq, o):
    return _reinforce(1 if a > 0 else min(math.exp(lp - lq), 1), a, lp)


def _outside(a, ratio, o):
    return ratio > 1 + o.clip_high if a > 0 else ratio < 1 - o.clip_low


def _cispo_masked(a, lp, lq, o):
    ratio = math.exp(lp - lq)
    weight = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
    return _reinforce(0 if _outside(a, ratio, o) else weight, a, lp)


def _aspo(a, lp, lq, o):
    ratio = math.exp(lp - lq)
    return _reinforce(
        0 if _outside(a, ratio, o) else min(1 / ratio if a > 0 else ratio, o.aspo_cap), a, lp
    )


def _over_tokens(formula):
    return lambda a, lp, lq, o: [formula(*token, o) for token in zip(a, lp, lq, strict=True)]


def _covariances(a, lp):
    a_mean, lp_mean = statistics.mean(a), statistics.mean(lp)
    return [(x - a_mean) * (y - lp_mean) for x, y in zip(a, lp, strict=True)]


def _kl_cov(a, lp, lq, o):
    covariances, found = _covariances(a, lp), []
    least = sorted(covariances)[-max(1, int(o.cov_fraction * len(a)))]
    for covariance, x, d in zip(
        covariances, a, (p - q for p, q in zip(lp, lq, strict=True)), strict=True
    ):
        paid = o.kl_cov_coef if covariance >= least else 0
        found.append(
            (-x * math.exp(d) + paid * abs(d), -x * math.exp(d) + paid * math.copysign(1, d))
        )
    return found


def _clip_cov(a, lp, lq, o):
    """With a fraction of 1: every token that may be chosen is."""
    found = []
    for covariance, x, d in zip(
        _covariances(a, lp), a, (p - q for p, q in zip(lp, lq, strict=True)), strict=True
    ):
        ratio = math.exp(d)
        clipped = -x * (1 + o.clip_high if x > 0 else 1 - o.clip_low)
        inside = (
            (0.0, 0.0)
            if o.clip_cov_low < covariance < o.clip_cov_high
            else (-x * ratio, -x * ratio)
        )
        found.append((clipped, 0.0) if _outside(x, ratio, o) else inside)
    return found


# Surrogate -> its formula, and options that leave some tokens on each side of every bound.
TRANSCRIBED = {
    "dppo-tv": (_over_tokens(_dppo_tv), {"clip_low": 0.06, "clip_high": 0.1, "dppo_cap": 1.2}),
    "dppo-kl": (_over_tokens(_dppo_kl), {"clip_low": 0.01, "clip_high": 0.02, "dppo_cap": 1.2}),
    "ipo": (_over_tokens(_ipo), {"ipo_threshold": 0.07, "ipo_tau": 0.3}),
    "dro": (_over_tokens(_dro), {"dro_beta": 0.7}),
    "topr": (_over_tokens(_topr), {}),
    "cispo-masked": (_over_tokens(_cispo_masked), {"clip_low": 0.1, "clip_high": 0.2}),
    "aspo": (_over_tokens(_aspo), {"clip_low": 0.2, "clip_high": 0.3, "aspo_cap": 1.25}),
    "kl-cov": (_kl_cov, {"cov_fraction": 0.3, "kl_cov_coef": 0.5}),
    "clip-cov": (_clip_cov, {"cov_fraction": 1.0, "clip_cov_low": 0.1, "clip_cov_high": 0.8}),
}


def test_every_surrogate_has_a_definition_in_the_tests():
    of_presets = {
        fused_rl.PolicyLossOptions(**row.options).surrogate for row in fused_rl.PRESETS.values()
    }
    assert {*TRANSCRIBED} | of_presets == {*surrogates.SURROGATES}


@pytest.mark.parametrize("kind", ["partial", "packed"])
@pytest.mark.parametrize("surrogate", TRANSCRIBED)
def test_a_surrogate_is_its_paper(surrogate, kind):
    """Value and gradient in fp64, under masks, packed, and formed token by token; the clipped share has no gradient."""
    formula, options = TRANSCRIBED[surrogate]
    mask, ids, advantages, spread, drift = batch(kind)
    counts = mask & (ids >= 0)
    logprobs = (-3 * torch.rand(B, T, dtype=F64) - 1e-3).requires_grad_()
    old = (logprobs.detach() + drift[0]).clamp(max=-1e-3)
    chosen = fused_rl.PolicyLossOptions(surrogate=surrogate, **options)
    tokens = formula(
        spread[counts].tolist(), logprobs[counts].tolist(), old[counts].tolist(), chosen
    )
    values, slopes = torch.tensor(tokens, dtype=F64).unbind(1)
    given = {"surrogate": surrogate, "sequence_ids": ids if kind == "packed" else None, **options}
    loss, metrics = fused_rl.policy_loss(logprobs, old, advantages, mask, **given)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    want = torch.zeros(B, T, dtype=F64).masked_scatter(counts, slopes / len(slopes))
    torch.testing.assert_close(loss, values.mean(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, want, rtol=1e-10, atol=1e-12)
    if surrogates.SURROGATES[surrogate].clipped is not None:
        still = slopes - (2 * 0.3 * (logprobs - old)[counts] if surrogate == "ipo" else 0)
        share = (still.abs() < 1e-12).double().mean()
        assert 0 < metrics["clipfrac"] <= share < 1
        assert surrogate == "clip-cov" or metrics["clipfrac"] == pytest.approx(share.item())

    if surrogates.SURROGATES[surrogate].needs_batch:
        pytest.raises(ValueError, fused_rl.policy_token_loss, old, advantages, mask, **given)
        return
    token_loss, per_token = fused_rl.policy_token_loss(old, advantages, mask, **given)
    by_token = token_loss(logprobs[counts], logprobs[counts], *(x[counts] for x in per_token)).sum()
    torch.testing.assert_close(by_token, loss, rtol=1e-5, atol=1e-6)  # the shares are fp32


@pytest.mark.parametrize("surrogate", surrogates.SURROGATES)
def test_a_surrogate_declares_a_gradient_where_the_advantage_is_0(surrogate):
    """GRPO leaves out the backward pass of such responses, but with a surrogate that goes beyond advantages."""
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-1.05, -1.9]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = fused_rl.policy_loss(logprobs, old, torch.zeros(1), mask, surrogate=surrogate)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.any() == surrogates.SURROGATES[surrogate].beyond_advantages


@pytest.mark.parametrize("surrogate", surrogates.SURROGATES)
def test_a_surrogate_is_finite_far_away_and_at_certainty(surrogate):
    """100 nats either way, where exp() is inf in fp32, and probabilities of exactly 1."""
    old = torch.tensor([[-1.0, -100, 0.0, 0.0]])
    logprobs = torch.tensor([[-100.0, -1, 0.0, -50]], requires_grad=True)
    mask = torch.ones(1, 4, dtype=torch.bool)
    options = {"ref_logprobs": old, "kl_coef": 0.1, "rollout_logprobs": -old}
    for advantage in (torch.ones(1), -torch.ones(1)):
        loss, metrics = fused_rl.policy_loss(
            logprobs, old, advantage, mask, surrogate=surrogate, **options
        )
        assert loss.isfinite() and torch.autograd.grad(loss, logprobs)[0].isfinite().all()
        assert all(value.isfinite() for value in metrics.values())


def test_clip_cov_drops_as_many_tokens_at_random_as_its_fraction_says():
    mask, _, advantages, _, _ = batch("none")
    logprobs = (-3 * torch.rand(B, T, dtype=F64)).requires_grad_()
    given = {"surrogate": "clip-cov", "clip_cov_low": -9.0, "clip_cov_high": 9.0}
    dropped = set()
    for _ in range(8):
        loss, _ = fused_rl.policy_loss(logprobs, None, advantages, mask, cov_fraction=0.13, **given)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        dropped.add(tuple((gradient == 0).flatten().nonzero()[:, 0].tolist()))
    assert {len(places) for places in dropped} == {3} and len(dropped) > 4  # int(0.13 * 24)


# Gates: from log-probabilities of the trainer and the sampler, token by token.
GATES = {
    "geometric": lambda p, q: math.exp(statistics.mean(x - y for x, y in zip(p, q, strict=True))),
    "k1": lambda p, q: abs(statistics.mean(x - y for x, y in zip(p, q, strict=True))),
    "k3": lambda p, q: statistics.mean(
        math.exp(x - y) - 1 - (x - y) for x, y in zip(p, q, strict=True)
    ),
    "tv": lambda p, q: statistics.mean(
        abs(math.exp(x) - math.exp(y)) for x, y in zip(p, q, strict=True)
    ),
}


# Kept just so, or not.
CORRECTIONS = [(None, -1e-5), *((name, 1e-5) for name in typing.get_args(RolloutCorrection))]


@pytest.mark.parametrize(("correction", "beside"), CORRECTIONS)
@pytest.mark.parametrize("gate", surrogates.ROLLOUT_GATES)
def test_a_gate_drops_sequences_by_their_mean_and_not_by_their_length(gate, correction, beside):
    mask, _, advantages, spread, drift = batch("partial")
    logprobs = -3 * torch.rand(B, T, dtype=F64) - 1
    old = logprobs + drift[0]
    rollout = old + drift[1] * torch.tensor([0.1, 1.0, 2.0, 0.5])[:, None]
    found = [GATES[gate](old[i][mask[i]].tolist(), rollout[i][mask[i]].tolist()) for i in range(B)]
    low, high = (sorted(found)[1] - 1e-5 if gate == "geometric" else 0.0), sorted(found)[2] + beside
    kept = torch.tensor([low <= value <= high for value in found])
    assert 0 < kept.sum() < B

    bounds = {"rollout_gate": gate, "rollout_gate_low": low, "rollout_gate_high": high}
    given = {"rollout_logprobs": rollout, "rollout_correction": correction}
    given |= {"clip_low": 1.0, "clip_high": math.inf} | ({"rollout_low": 0.7} if correction else {})
    weights = torch.where(mask, old - rollout, 0)
    if "sequence" in str(correction):
        weights = weights.sum(1, keepdim=True).expand(B, T)
    weights = weights.exp() if correction else torch.ones(B, T, dtype=F64)
    if "mask" in str(correction):
        weights = torch.where((weights > 2.0) | (weights < 0.7), 0, weights)
    elif correction:
        weights = weights.clamp(0.7, 2.0)
    want = (
        torch.where(mask & kept[:, None], -(logprobs - old).exp() * spread * weights, 0).sum()
        / mask.sum()
    )
    loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, **given, **bounds)
    torch.testing.assert_close(loss, want)
    token_loss, per_token = fused_rl.policy_token_loss(old, advantages, mask, **given, **bounds)
    by_token = token_loss(logprobs[mask], None, *(x[mask] for x in per_token)).sum()
    torch.testing.assert_close(by_token, want, rtol=1e-5, atol=1e-6)


def test_a_gate_needs_its_bound_and_a_bound_its_gate():
    with pytest.raises(
        ValueError, match="rollout_gate=k1 needs its upper bound, rollout_gate_high"
    ):
        fused_rl.PolicyLossOptions(rollout_gate="k1")
    with pytest.raises(
        ValueError, match="rollout_gate_high=0.1 has no meaning with rollout_gate=None"
    ):
        fused_rl.PolicyLossOptions(rollout_gate_high=0.1)


@pytest.mark.parametrize("top_entropy", [1.0, 0.37, 1e-4])
def test_entropy_masks_of_any_number_of_tokens(monkeypatch, top_entropy):
    """torch's quantile takes 2^24 values."""
    entropy = torch.rand(40, 50).square()
    for mask in (torch.rand(40, 50) < 0.7, torch.zeros(40, 50, dtype=torch.bool)):
        options = fused_rl.PolicyLossOptions(top_entropy=top_entropy)
        few = surrogates.entropy_gate(entropy, mask, options)
        with monkeypatch.context() as patch:
            patch.setattr(surrogates, "_MOST_OF_QUANTILE", 100)
            many = surrogates.entropy_gate(entropy, mask, options)
        assert torch.equal(few, many)
