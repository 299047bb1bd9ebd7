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
from fused_rl import reference
from fused_rl.objectives import presets
from fused_rl.objectives.aggregation import LOSS_AGGS
from fused_rl.objectives.surrogates import RATIO_LEVELS, SURROGATES
from tests import papers
from tests.lazy import transformers
from tests.marks import diagonal
from tests.papers import F64, GROUP_LENGTHS, MASKS, PAPERS, B, T, batch, head

KLS = (None, "k2", "k3", "rk3")


pytestmark = pytest.mark.usefixtures("seeded")


@functools.cache
def graphs(kind):
    """One graph in fp64, (logprobs, [logits, hidden, weight]), and two in fp32, (logprobs, leaves)."""
    mask = batch(kind)[0]
    hidden, weight, targets = head()
    hidden64, weight64 = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits64 = hidden64 @ weight64.T
    exact = reference.token_logprobs(logits64, targets, mask=mask).logprobs
    logits = logits64.detach().float().requires_grad_()
    from_logits = fused_rl.token_logprobs(logits, targets, mask=mask).logprobs
    from_hidden = fused_rl.linear_token_logprobs(hidden, weight, targets, mask=mask).logprobs
    return (exact, [logits64, hidden64, weight64]), [
        (from_logits, [logits]),
        (from_hidden, [hidden, weight]),
    ]


def cell(kind, kl):
    """Arguments and options of policy_loss: old and ref logprobs near the policy's, denominators of a larger step."""
    mask, ids, advantages, _, drift = batch(kind)
    old, ref = (graphs(kind)[0][0].detach() + drift).unbind()
    options = {"num_tokens": 50, "num_sequences": 9, "max_length": 16}
    options["group_lengths"] = GROUP_LENGTHS.repeat_interleave(len(advantages) // B)
    options |= {"sequence_ids": ids} if kind == "packed" else {}
    if kl is not None:
        options |= {"kl_coef": 0.3, "kl_estimator": kl, "ref_logprobs": ref}
    return (old, advantages, mask), options


@functools.cache
def expected(surrogate, level, loss_agg, clip_low, clip_high, kind, kl):
    """The plain formula in fp64: its value, and its gradients on logprobs, logits, hidden states and weight."""
    logprobs, leaves = graphs(kind)[0]
    (old, _, mask), options = cell(kind, kl)
    options |= {
        "ratio_level": level,
        "surrogate": surrogate,
        "loss_agg": loss_agg,
        "sequence_ids": batch(kind)[1],
    }
    options |= {"clip_low": clip_low, "clip_high": clip_high}
    loss = papers.policy_loss(logprobs, old, batch(kind)[3], mask, **options)
    return loss.detach(), torch.autograd.grad(loss, [logprobs, *leaves], retain_graph=True)


def cells(preset, kind):
    """Every ratio level x aggregation x KL: what is expected, a random upstream gradient, arguments and options."""
    generator = torch.Generator().manual_seed(0)
    surrogate, _, _, *clip = PAPERS[preset]
    levels = RATIO_LEVELS if "ratio_level" in SURROGATES[surrogate].reads else ["token"]
    for level, loss_agg, kl in itertools.product(levels, LOSS_AGGS, KLS):
        want = expected(surrogate, level, loss_agg, *clip, kind, kl)
        upstream = torch.randn((), generator=generator, dtype=F64)
        arguments, options = cell(kind, kl)
        yield (
            *want,
            upstream,
            arguments,
            options | {"preset": preset, "ratio_level": level, "loss_agg": loss_agg},
        )


def assert_grads_close(grads, wants, upstream):
    for grad, want in zip(grads, wants, strict=True):
        want = want * upstream
        atol = 1e-5 * want.abs().max().item() + 1e-9
        torch.testing.assert_close(grad.double(), want, rtol=0, atol=atol)


# The cells of presets with one surrogate differ by the clip bounds alone: one preset for each.
ONE_OF_EACH = ["dapo", "cispo", "sapo", "vespo", "rloo", "gmpo"]


@pytest.mark.parametrize(("preset", "kind"), diagonal(ONE_OF_EACH, MASKS))
def test_gradient_matrix(preset, kind, monkeypatch):
    """In fp64 on (B, T); in fp32 from logits, from hidden states, and with the gradient formed in the forward pass."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the CPU path; the kernels have their own tests
    (exact, _), fp32 = graphs(kind)
    exact = exact.detach().requires_grad_()
    hidden, weight, targets = head()
    for want, want_grads, upstream, (old, advantages, mask), options in cells(preset, kind):
        poison = torch.where(mask, 0, torch.nan)  # what is masked reaches nothing
        ref = (
            {"ref_logprobs": options["ref_logprobs"] + poison} if "ref_logprobs" in options else {}
        )
        loss, _ = fused_rl.policy_loss(
            exact + poison, old + poison, advantages, mask, **(options | ref)
        )
        (grad,) = torch.autograd.grad(loss, exact, upstream)
        torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grad, want_grads[0] * upstream, rtol=1e-9, atol=1e-12)
        assert (grad[~mask] == 0).all()

        for (logprobs, leaves), leaf_grads in zip(
            fp32, (want_grads[1:2], want_grads[2:]), strict=True
        ):
            loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, **options)
            torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
            # every cell uses the logprobs' graph again
            grads = torch.autograd.grad(loss, leaves, upstream.float(), retain_graph=True)
            assert_grads_close(grads, leaf_grads, upstream)

        if options["ratio_level"] != "token" or preset == "gmpo":
            with pytest.raises(ValueError, match="needs more than one token"):
                fused_rl.policy_token_loss(old, advantages, mask, **options)
            continue
        token_loss, per_token = fused_rl.policy_token_loss(old, advantages, mask, **options)
        out = fused_rl.linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=mask)
        torch.testing.assert_close(out.loss.double(), want, rtol=1e-5, atol=1e-5)
        for up in (upstream, 1 - upstream):  # the retained graph used twice
            grads = torch.autograd.grad(out.loss, (hidden, weight), up.float(), retain_graph=True)
            assert_grads_close(grads, want_grads[2:], up)


@pytest.mark.parametrize("preset", PAPERS)
def test_presets_are_the_papers(preset):
    """The preset alone, with local denominators, equals the same formula with the paper's numbers."""
    mask, ids, advantages, spread, drift = batch("partial")
    logprobs = torch.randn(B, T, dtype=F64).sub(3).requires_grad_()
    old = logprobs.detach() + drift[0]
    surrogate, level, loss_agg, clip_low, clip_high = PAPERS[preset]
    want = papers.policy_loss(
        logprobs,
        old,
        spread,
        mask,
        sequence_ids=ids,
        ratio_level=level,
        surrogate=surrogate,
        loss_agg=loss_agg,
        clip_low=clip_low,
        clip_high=clip_high,
        group_lengths=GROUP_LENGTHS,
    )
    given = {"group_lengths": GROUP_LENGTHS}
    loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, preset=preset, **given)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-13)
    same, _ = fused_rl.policy_loss(
        logprobs, old, advantages, mask, **fused_rl.PRESETS[preset].options, **given
    )
    assert same == loss
    assert set(PAPERS) == set(fused_rl.PRESETS)


@pytest.mark.parametrize("preset", PAPERS)
def test_far_from_the_old_policy_nothing_overflows(preset):
    """100 nats either way, where exp() is inf in fp32: finite, and a ratio that must fall still has a gradient."""
    logprobs = torch.tensor([[-100.0, -1, -2], [-1, -100, -0.5]], requires_grad=True)
    old = torch.tensor([[-1.0, -100, -2.5], [-100, -2, -90]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    options = {"ref_logprobs": old, "kl_coef": 0.1, "rollout_logprobs": -old, "preset": preset}
    options["group_lengths"] = GROUP_LENGTHS[:2]
    for advantages in (torch.tensor([1.0, -1]), torch.tensor([-1.0, 1])):
        loss, metrics = fused_rl.policy_loss(logprobs, old, advantages, mask, **options)
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert loss.isfinite()
        assert grad.isfinite().all()
        assert all(m.isfinite() for m in metrics.values())
    if preset in ("ppo", "grpo"):
        loss, _ = fused_rl.policy_loss(logprobs, old, -torch.ones(2), mask, preset=preset)
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert (grad[logprobs - old > 0] > 0).all()


def test_an_empty_batch_keeps_the_graph():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for preset in PAPERS:
        given = {"preset": preset, "group_lengths": torch.zeros(2)}
        loss, metrics = fused_rl.policy_loss(logprobs, None, torch.ones(2), mask, **given)
        assert loss == 0
        assert all(m == 0 for m in metrics.values())
        assert (torch.autograd.grad(loss, logprobs)[0] == 0).all()


def test_one_pass_with_every_option_it_has():
    """policy_token_loss summed is policy_loss, with rollout weights, truncation, a threshold and an entropy bonus."""
    mask, _, advantages, _, drift = batch("partial")
    logprobs = (torch.randn(B, T) - 3).requires_grad_()
    entropy = torch.rand(B, T).requires_grad_()
    options = {
        "ref_logprobs": logprobs.detach() + drift[1],
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "preset": "grpo",
    }
    options |= {
        "rollout_logprobs": logprobs.detach() - drift[1],
        "rollout_correction": "sequence-truncate",
    }
    options |= {"truncated": torch.tensor([False, True, False, False]), "entropy_threshold": 0.3}
    for old in (logprobs.detach() + drift[0], None):
        if old is None:  # whose ratio to the sampler is the caller's to know
            del options["rollout_logprobs"], options["rollout_correction"]
        want, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, entropy=entropy, **options)
        token_loss, per_token = fused_rl.policy_token_loss(old, advantages, mask, **options)
        loss = token_loss(
            logprobs[mask], entropy[mask], *(tensor[mask] for tensor in per_token)
        ).sum()
        torch.testing.assert_close(loss, want)
        grads = [torch.autograd.grad(x, (logprobs, entropy)) for x in (loss, want)]
        torch.testing.assert_close(*grads)


def test_entropy_bonus():
    entropy = torch.tensor([[0.5, 1.5, torch.nan], [2.0, torch.nan, torch.nan]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    loss, metrics = fused_rl.entropy_bonus(entropy, mask, 0.1, loss_agg="seq-mean-token-mean")
    torch.testing.assert_close(loss.item(), -0.15)
    torch.testing.assert_close(metrics["entropy"].item(), 4 / 3)
    (grad,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(grad, torch.tensor([[-0.025, -0.025, 0], [-0.05, 0, 0]]))
    logprobs, advantages = torch.zeros(2, 3), torch.ones(2)
    options = {"preset": "grpo", "entropy": entropy}
    with_bonus, _ = fused_rl.policy_loss(
        logprobs, None, advantages, mask, **options, entropy_coef=0.1
    )
    without, _ = fused_rl.policy_loss(logprobs, None, advantages, mask, **options)
    torch.testing.assert_close(with_bonus, without + loss)
    torch.testing.assert_close(torch.autograd.grad(with_bonus, entropy)[0], grad)


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


def test_value_loss():
    one = torch.ones(1, 1)
    loss, metrics = fused_rl.value_loss(one, 0 * one, 2 * one, one.bool(), value_clip=0.2)
    torch.testing.assert_close(loss.item(), 1.62)
    assert metrics["value_clipfrac"] == 1


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0.693147, 0.313262, 1.313262, 0.006715]),
        ({"margin": 1.0}, [1.313262, 0.693147, 2.126928, 0.018150]),
        ({"loss_type": "hinge", "margin": 0.5}, [1.5, 0.5, 2.5, 0.0]),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, [1.0, 0.2, 1.8, 0.6]),
        ({"loss_type": "squared", "margin": 0.5}, [0.25, 0.25, 2.25, 20.25]),
        ({"label_smoothing": 0.1}, [0.693147, 0.413262, 1.213262, 0.506715]),  # .9 l(d) + .1 l(-d)
        # + .01 (chosen + rejected)^2.
        (
            {"centering": 0.01},
            [0.693147, 0.323262, 1.323262, 0.256715],
        ),
    ],
)
def test_preference_loss(options, want):
    for lead, value in zip((0.0, 1.0, -1.0, 5.0), want, strict=True):
        loss, _ = fused_rl.preference_loss(torch.tensor([lead]), torch.zeros(1), **options)
        torch.testing.assert_close(loss.item(), value, rtol=0, atol=1.5e-6)
    leads = torch.tensor([0.0, 1.0, -1.0, 5.0], dtype=F64, requires_grad=True)
    loss, metrics = fused_rl.preference_loss(leads, torch.zeros(4, dtype=F64), **options)
    torch.testing.assert_close(loss.item(), sum(want) / 4, rtol=0, atol=1.5e-6)
    halves = [
        fused_rl.preference_loss(leads[i:j], torch.zeros(2), num_sequences=4, **options)[0]
        for i, j in ((0, 2), (2, 4))
    ]
    torch.testing.assert_close(sum(halves), loss)
    assert torch.autograd.gradcheck(
        lambda x, y: fused_rl.preference_loss(x, y, **options)[0],
        (leads, leads.detach().flip(0).requires_grad_()),
    )
    assert metrics["accuracy"] == 0.625  # a tie counts half
    assert metrics["reward_margin"] == 1.25
    assert metrics["min_reward"] == -1
    assert metrics["max_reward"] == 5


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


def run_blocks(page, **namespace):
    """Every Python block of a page, one after the other, in one namespace."""
    blocks = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parent.parent / page).read_text(), re.DOTALL
    )
    assert blocks
    exec("\n".join(blocks), namespace)
    return namespace


def test_the_loss_of_the_readme_runs(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    text = (Path(__file__).parent.parent / "README.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block and len(block[1].splitlines()) <= 10
    namespace: dict = {}
    exec(block[1], namespace)
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
        "docs/sampling_replay.md",
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
    """arXiv:2507.18071, eq. 13 and 14: s_it = sg(s_i) p_it / sg(p_it), so that token t's gradient has its own A_t."""
    generator = torch.Generator().manual_seed(0)
    logprobs = (torch.randn(3, 5, dtype=F64, generator=generator) - 3).requires_grad_()
    old = logprobs.detach() + 1e-4 * torch.randn(3, 5, dtype=F64, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 1, 0, 1, 1]]).bool()
    advantages = torch.randn(3, 5, dtype=F64, generator=generator)
    loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, preset="gspo")
    (gradient,) = torch.autograd.grad(loss, logprobs)
    counts = mask.sum(1, keepdim=True)
    ratio = (((logprobs - old).detach() * mask).sum(1, keepdim=True) / counts).exp()
    free = torch.where(advantages > 0, ratio <= 1 + 4e-4, ratio >= 1 - 3e-4)
    torch.testing.assert_close(
        gradient, torch.where(mask & free, -ratio * advantages / counts / 3, 0.0)
    )

    # one advantage for all tokens of a sequence, in either shape: one loss and one gradient
    same = advantages[:, :1].expand(3, 5)
    for given in (advantages[:, 0], same):
        loss, _ = fused_rl.policy_loss(logprobs, old, given, mask, preset="gspo")
        (gradient,) = torch.autograd.grad(loss, logprobs)
        free = torch.where(same > 0, ratio <= 1 + 4e-4, ratio >= 1 - 3e-4)
        torch.testing.assert_close(
            gradient, torch.where(mask & free, -ratio * same / counts / 3, 0.0)
        )
