"""Losses: values and gradients in every cell against the papers' formulas; denominators, options, metrics."""

import collections
import functools
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

import fused_rl
from fused_rl.objectives import presets
from fused_rl.objectives.aggregation import LOSS_AGGS
from fused_rl.objectives.surrogates import RATIO_LEVELS, SURROGATES
from tests import papers
from tests.lazy import transformers
from tests.marks import diagonal
from tests.papers import F64, GROUP_LENGTHS, MASKS, PAPERS, B, T, batch

KLS = (None, "k2", "k3", "rk3")


pytestmark = pytest.mark.usefixtures("seeded")


@functools.cache
def logprobs_of(kind):
    """(B, T) in fp64, a leaf."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(B, T, generator=generator, dtype=F64).sub(3).requires_grad_()


def cell(kind, kl):
    """Arguments and options of policy_loss: old and ref logprobs near the policy's, and denominators.

    They are those of a larger step; where nothing is masked or packed, those of the batch.
    """
    mask, ids, advantages, _, drift = batch(kind)
    old, ref = (logprobs_of(kind).detach() + drift).unbind()
    options = {"num_tokens": 50, "num_sequences": 9, "max_length": 16} if kind != "none" else {}
    options["group_lengths"] = GROUP_LENGTHS.repeat_interleave(len(advantages) // B)
    options |= {"sequence_ids": ids} if kind == "packed" else {}
    if kl is not None:
        options |= {"kl_coef": 0.3, "kl_estimator": kl, "ref_logprobs": ref}
    return (old, advantages, mask), options


def expected(preset, level, loss_agg, kind, kl):
    """The plain formula: its value, and its gradient."""
    (old, _, mask), options = cell(kind, kl)
    surrogate, _, _, clip_low, clip_high = PAPERS[preset]
    options |= {"ratio_level": level, "surrogate": surrogate, "loss_agg": loss_agg}
    options |= {"clip_low": clip_low, "clip_high": clip_high, "sequence_ids": batch(kind)[1]}
    logprobs = logprobs_of(kind)
    loss = papers.policy_loss(logprobs, old, batch(kind)[3], mask, **options)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


# The cells of presets with one surrogate differ by the clip bounds alone: one preset for each.
ONE_OF_EACH = ["dapo", "cispo", "sapo", "vespo", "rloo", "gmpo"]


@pytest.mark.parametrize(("preset", "kind"), diagonal(ONE_OF_EACH, MASKS))
def test_gradient_matrix(preset, kind):
    """Every ratio level, aggregation and KL, on (B, T) and token by token."""
    reads = SURROGATES[PAPERS[preset][0]].reads
    levels = RATIO_LEVELS if "ratio_level" in reads else ["token"]
    for level, loss_agg, kl in itertools.product(levels, LOSS_AGGS, KLS):
        want, want_grad = expected(preset, level, loss_agg, kind, kl)
        (old, advantages, mask), options = cell(kind, kl)
        options |= {"preset": preset, "ratio_level": level, "loss_agg": loss_agg}
        poison = torch.where(mask, 0, torch.nan)  # what is masked reaches nothing
        if kl is not None:
            options["ref_logprobs"] = options["ref_logprobs"] + poison
        logprobs = logprobs_of(kind)
        loss, _ = fused_rl.policy_loss(logprobs + poison, old + poison, advantages, mask, **options)
        (grad,) = torch.autograd.grad(loss, logprobs)
        torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grad, want_grad, rtol=1e-9, atol=1e-12)

        if level != "token" or preset == "gmpo":
            with pytest.raises(ValueError, match="needs more than one token"):
                fused_rl.policy_token_loss(old, advantages, mask, **options)
            continue
        token_loss, per_token = fused_rl.policy_token_loss(old, advantages, mask, **options)
        counted = logprobs[mask]
        loss = token_loss(counted, counted.detach(), *(x[mask] for x in per_token)).sum()
        (grad,) = torch.autograd.grad(loss, logprobs)
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, want_grad, rtol=1e-5, atol=1e-6)


def test_one_pass_with_every_option_it_has():
    """policy_token_loss summed is policy_loss, with rollout weights, truncation, a threshold and an entropy bonus."""
    mask, _, advantages, _, drift = batch("partial")
    logprobs = (torch.randn(B, T) - 3).requires_grad_()
    entropy = torch.rand(B, T).requires_grad_()
    near = logprobs.detach() + drift[1]
    options = {"preset": "grpo", "ref_logprobs": near, "kl_coef": 0.1, "entropy_coef": 0.05}
    options |= {"truncated": torch.arange(B) == 1, "entropy_threshold": 0.3}
    sampled = {"rollout_logprobs": near, "rollout_correction": "sequence-truncate"}
    # Without old log-probabilities the ratio to the sampler is the caller's to know.
    for old, more in ((logprobs.detach() + drift[0], sampled), (None, {})):
        given = options | more
        want, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, entropy=entropy, **given)
        token_loss, per_token = fused_rl.policy_token_loss(old, advantages, mask, **given)
        loss = token_loss(logprobs[mask], entropy[mask], *(x[mask] for x in per_token)).sum()
        both = [(x, *torch.autograd.grad(x, (logprobs, entropy))) for x in (loss, want)]
        torch.testing.assert_close(*both)


# (options whose bound every token stands at, the same a little tighter)
BOUNDS = [
    ({"top_entropy": 0.3}, {"entropy_threshold": 0.5 + 1e-9}),  # all have the same entropy
    ({"entropy_threshold": 0.5}, {"entropy_threshold": 0.5 + 1e-9}),
    ({"off_policy_threshold": 0.25}, {"off_policy_threshold": 0.25 - 1e-9}),
    ({"rollout_high": 1.0}, {"rollout_high": 1 - 1e-9}),
    ({"rollout_low": 1.0, "rollout_high": 2.0}, {"rollout_low": 1 + 1e-9, "rollout_high": 2.0}),
    ({"rollout_gate": "k1", "rollout_gate_high": 0.0}, None),
]


@pytest.mark.parametrize(("at", "tighter"), BOUNDS)
def test_a_token_at_a_bound_is_inside(at, tighter):
    """As the papers' >= and <= have it: a sequence whose tokens are alike would otherwise leave the loss as a whole."""
    half = torch.full((1, 3), 0.5, dtype=F64)
    given = {"entropy": half, "rollout_logprobs": -half, "rollout_correction": "token-mask"}
    arguments = (-half - 0.25, -half, -half, torch.ones(1, 3, dtype=torch.bool))
    whole, inside, outside = (
        fused_rl.policy_loss(*arguments, **given | options)[0]
        for options in ({}, at, tighter or {"entropy_threshold": 1.0})
    )
    assert whole == inside > 0 == outside


def test_a_call_of_the_policy_loss_checks_each_tensor_once():
    """Every call of ours in Python costs as much as a small kernel: they were 235, of which 124 were checks."""
    mask, _, advantages, _, drift = batch("partial")
    logprobs, ref = -torch.rand(2, B, T)
    options = {"preset": "grpo", "kl_coef": 0.1, "ref_logprobs": ref, "rollout_logprobs": ref}
    options |= {"entropy": -logprobs, "entropy_coef": 0.1, "truncated": advantages > 0}
    calls = []

    def profile(frame, event, _):
        if event == "call" and "/fused_rl/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        fused_rl.policy_loss(logprobs, logprobs + drift[0], advantages, mask, **options)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 120, collections.Counter(calls).most_common(8)


def test_k1_as_a_loss_warns_and_says_what_to_use():
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.warns(UserWarning, match="expected gradient is zero.*rk3"):
        fused_rl.policy_loss(
            x, x, torch.ones(1), mask, ref_logprobs=x, kl_coef=0.1, kl_estimator="k1"
        )


def test_names_of_trl_and_advantages_that_are_no_numbers_are_refused():
    x, mask = torch.zeros(2, 2), torch.tensor([[True, True], [True, False]])
    for name, ours in presets.TRL_NAMES.items():
        with pytest.raises(ValueError, match=f"^{name} is TRL's name; use {ours}$"):
            fused_rl.policy_loss(x, x, torch.ones(2), mask, **{name: 0.1})
    nan = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
    assert fused_rl.policy_loss(x, x, nan, mask)[0].isfinite()  # where nothing counts it may stand
    with pytest.raises(
        ValueError, match=r"^advantages\[1, 0\] is nan, 1 of 4 are not finite; mask"
    ):
        fused_rl.policy_loss(x, x, nan[:, 1], mask)


def run_blocks(page, section="", **namespace):
    """Every Python block of a page from a heading on, one after the other, in one namespace."""
    text = (Path(__file__).parent.parent / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text[text.index(section) :], re.DOTALL)
    assert blocks
    exec("\n".join(blocks), namespace)
    return namespace


def test_the_loss_of_the_readme_runs(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    namespace = run_blocks("README.md", "## In your own training loop")
    assert namespace["logits"].grad.abs().sum() > 0


def test_the_kept_sets_of_the_documentation_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    config = transformers.LlamaConfig(
        **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "eos_token_id": None, "pad_token_id": 0},
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.max_new_tokens = 4
    hidden, prompts = torch.randn(3, 4, 16), torch.randint(50, (3, 5))
    found = run_blocks(
        "docs/rollouts.md",
        "## Truncated sampling",
        model=model,
        prompts=prompts,
        hidden=hidden,
        logits=model.lm_head(hidden),
    )
    assert found["out"].logprobs.shape == found["targets"].shape == (3, 4)
    assert (found["support"].offsets.diff() < 50).all()


def test_the_losses_of_the_documentation_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    namespace = run_blocks("docs/losses.md")
    loss, advantages, ratio = (namespace[name] for name in ("loss", "advantages", "ratio"))
    want = (torch.tanh(ratio - 1) * -advantages[:, None])[namespace["mask"]].mean()
    torch.testing.assert_close(loss, want)


def test_gspo_with_an_advantage_per_token_is_gspo_token():
    """arXiv:2507.18071, eq. 13 and 14; where all tokens of a sequence have one advantage, it is GSPO."""
    mask, ids, _, spread, drift = batch("partial")
    logprobs = logprobs_of("partial")
    old = logprobs.detach() + 1e-3 * drift[0]
    names = "surrogate", "ratio_level", "loss_agg", "clip_low", "clip_high"
    options = dict(zip(names, PAPERS["gspo"], strict=True)) | {"sequence_ids": ids}
    for advantages in (drift[1], spread):
        want = papers.policy_loss(logprobs, old, advantages, mask, **options)
        loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, preset="gspo")
        both = [(x, *torch.autograd.grad(x, logprobs)) for x in (loss, want)]
        torch.testing.assert_close(*both)


# Tokens that a policy gives no probability, and that count all the same.

SHAPE = (3, 6)
# In both policies; in the one that sampled; in the reference; for the sampler.
IMPOSSIBLE = [(0, 1), (1, 0), (2, 5), (2, 2)]


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, ref, sampler, advantages = -3 * torch.rand(5, *SHAPE, generator=generator)
    mask = torch.rand(SHAPE, generator=generator) < 0.8
    for at in IMPOSSIBLE:
        mask[at] = True
    kept = mask.clone()
    places = (logprobs, old), (old,), (ref,), (sampler,)
    for at, tensors in zip(IMPOSSIBLE, places, strict=True):
        kept[at] = False
        for tensor in tensors:
            tensor[at] = -torch.inf
    measured = {"ref_logprobs": ref, "rollout_logprobs": sampler}
    measured["rollout_correction"] = "token-truncate"
    return logprobs, old, measured, advantages + 1.5, mask, kept


OPTIONS = {
    "ppo": {"preset": "ppo"},
    "grpo": {"preset": "grpo", "kl_coef": 0.1},
    "gspo": {"preset": "gspo", "kl_coef": 0.1, "kl_estimator": "k3"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_skipped_tokens_are_as_masked_ones(options):
    """Loss, metrics and gradient; what the caller counted stays, what is counted here follows the mask."""
    logprobs, old, measured, advantages, mask, kept = inputs()
    for denominators in ({}, {"num_tokens": 40, "num_sequences": 7}):

        def run(logprobs, mask, denominators=denominators, **more):
            logprobs = logprobs.clone().requires_grad_()
            arguments = measured | options | denominators | more
            loss, metrics = fused_rl.policy_loss(logprobs, old, advantages, mask, **arguments)
            return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics

        loss, gradient, metrics = run(logprobs, mask, skip_impossible=True)
        wanted_loss, wanted_gradient, wanted_metrics = run(logprobs, kept)
        assert loss.isfinite()
        assert torch.equal(loss, wanted_loss)
        assert torch.equal(gradient, wanted_gradient)
        assert (gradient[~kept] == 0).all()
        assert metrics == wanted_metrics
        assert all(value.isfinite() for value in metrics.values())
        assert not run(logprobs, mask)[0].isfinite()  # as the docstring says


def test_skipped_tokens_of_a_token_loss():
    """The policy's own -inf is known only inside; the caller's denominator is used."""
    logprobs, old, measured, advantages, mask, kept = inputs()
    given = measured | {"kl_coef": 0.1, "num_tokens": 15}
    found = []
    for counted in (mask, kept):
        options = given | {"skip_impossible": counted is mask}
        token_loss, per_token = fused_rl.policy_token_loss(old, advantages, counted, **options)
        leaf = logprobs.clone().requires_grad_()
        loss = token_loss(leaf[counted], None, *(x[counted] for x in per_token)).sum()
        found.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    torch.testing.assert_close(*found)
    assert found[0][0].isfinite()
