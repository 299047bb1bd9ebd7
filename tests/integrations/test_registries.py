"""Our losses in other trainers, whose modules stand-ins replace: their signatures, registries and reductions."""

import functools
import itertools
import sys
from argparse import Namespace
from types import ModuleType

import numpy as np
import pytest
import torch

import fused_rl
from fused_rl.integrations import registries
from fused_rl.integrations import verl as integration

F64 = torch.float64
B, T, G = 8, 7, 4
LENGTHS = torch.tensor([7, 3, 1, 5, 2, 7, 6, 4])
MASK = torch.arange(T) < LENGTHS[:, None]
made = torch.Generator().manual_seed(0)
OLD = -3 * torch.rand(B, T, generator=made, dtype=F64) - 0.01
NEW = (OLD + 0.4 * torch.randn(B, T, generator=made, dtype=F64)).clamp(max=-1e-3)
REF, ROLLOUT = (NEW + 0.2 * torch.randn(B, T, generator=made, dtype=F64) for _ in range(2))
ADVANTAGES = torch.randn(B, 1, generator=made, dtype=F64).expand(B, T)
WEIGHTS = 0.5 + torch.rand(B, T, generator=made, dtype=F64)
PRESETS = [name for name in fused_rl.PRESETS if name != "scalerl"]


@pytest.fixture
def host(monkeypatch):
    """Make a module of a host that is not installed."""

    def make(name, **attributes):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        for attribute, value in attributes.items():
            monkeypatch.setattr(sys.modules[name], attribute, value, raising=False)

    return make


def graded(loss_of):
    logprobs = NEW.clone().requires_grad_()
    loss = loss_of(logprobs)
    return loss.detach(), *torch.autograd.grad(loss, logprobs)


def surrogates_of(preset, logprobs, mask=MASK, **options):
    """(B, T) losses of single tokens by the library, which it returns one aggregated token at a time."""
    found = torch.zeros(B, T, dtype=F64)
    for i, t in mask.nonzero().tolist():
        share = torch.full((B, T), torch.inf, dtype=F64)
        share[i, t] = 1.0
        chosen = {
            "preset": preset,
            "loss_agg": "prompt-mean",
            "num_sequences": 1,
            "group_lengths": share,
        }
        loss, _ = fused_rl.policy_loss(logprobs, OLD, ADVANTAGES, mask, **chosen, **options)
        found = found + loss * torch.zeros(B, T, dtype=F64).index_put_(
            (torch.tensor(i), torch.tensor(t)), loss.new_ones(())
        )
    return found


def decorator_into(registry):
    """`register_policy_loss(name)` and its like, of verl and SkyRL."""

    def register(name):
        def decorate(function):
            assert name not in registry
            registry[name] = function
            return function

        return decorate

    return register


def agg_loss(losses, mask, mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor):
    """verl's reduction of a rank's micro-batch: the ranks' mean is the reduction of the whole batch."""
    losses = losses * mask
    if mode == "token-mean":
        return losses.sum() / batch_num_tokens * dp_size
    over = {"seq-mean-token-mean": mask.sum(1, keepdim=True), "seq-mean-token-sum": 1}
    over["seq-mean-token-sum-norm"] = loss_scale_factor
    return (losses / over[mode]).sum() / global_batch_size * dp_size


def verl_registered(host, release="0.9.1"):
    losses, estimators = {}, {}
    functions = {
        "agg_loss": agg_loss,
        "register_policy_loss": decorator_into(losses),
        "register_adv_est": decorator_into(estimators),
    }
    host("verl", __version__=release)
    host("verl.trainer.ppo.core_algos", **functions)
    integration.register()
    return losses, estimators


MODES = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"


CASES = [*itertools.product(PRESETS, MODES, ["0.9.1"]), ("gspo", "token-mean", "0.9.0")]
# verl's own do not read the option, of gspo before 0.9.1.
OF_SEQUENCES = {("sapo", "0.9.1"), ("gmpo", "0.9.1"), ("gspo", "0.9.0")}


@pytest.mark.parametrize(("preset", "mode", "release"), CASES)
def test_verl_has_every_preset(host, preset, mode, release):
    """verl calls by name, and reduces by its option; the gradients of two ranks, averaged, are those of the batch."""
    losses, _ = verl_registered(host, release)
    assert {*losses} == {f"fused_{name}" for name in PRESETS}
    info = {"dp_size": 2, "batch_num_tokens": int(MASK.sum())}
    info |= {"global_batch_size": B, "loss_scale_factor": 20}

    def theirs(logprobs):
        total = 0
        for rows in torch.arange(B).chunk(2):
            loss, metrics = losses[f"fused_{preset}"](
                old_log_prob=OLD[rows],
                log_prob=logprobs[rows],
                advantages=ADVANTAGES[rows],
                response_mask=MASK[rows].long(),
                loss_agg_mode=mode,
                config=Namespace(global_batch_info=info),
                rollout_is_weights=WEIGHTS[rows] if preset == "dapo" else None,
            )
            assert all(isinstance(value, float) for value in metrics.values())
            log_ratio = (logprobs - OLD).detach()[rows][MASK[rows]]
            assert metrics["actor/approx_kl"] == pytest.approx(
                (log_ratio.square() / 2).mean().item()
            )
            total = total + loss / 2
        return total

    chosen = {"preset": preset, "max_length": 20}
    chosen["loss_agg"] = "seq-mean-token-mean" if (preset, release) in OF_SEQUENCES else mode
    scaled = ADVANTAGES * WEIGHTS if preset == "dapo" else ADVANTAGES
    ours = graded(lambda x: fused_rl.policy_loss(x, OLD, scaled, MASK, **chosen)[0])
    torch.testing.assert_close(graded(theirs), ours)


@pytest.mark.parametrize(
    "advantage", [name for name in fused_rl.ADVANTAGES if name not in ("gae", "gdpo")]
)
def test_estimators_of_groups_in_any_order(host, advantage):
    """verl names groups by uid, and balances rows over ranks before: those of one group need not be adjacent."""
    _, estimators = verl_registered(host)
    rewards = torch.rand(B, generator=made)
    last = torch.zeros(B, T).scatter(1, LENGTHS[:, None] - 1, rewards[:, None])
    want = (
        fused_rl.response_advantages(rewards, advantage, group_size=G, lengths=LENGTHS)[:, None]
        * MASK
    )
    order = torch.randperm(B, generator=made)
    uids = np.array(["uid-b"] * G + ["uid-a"] * G, dtype=object)[order.numpy()]
    given = {
        "token_level_rewards": last[order],
        "response_mask": MASK[order].long(),
        "config": None,
        "index": uids,
    }
    advantages, returns = estimators[f"fused_{advantage}"](**given)
    torch.testing.assert_close(advantages, want[order])
    assert torch.equal(returns, advantages)
    with pytest.raises(
        ValueError, match=f"fused_{advantage} needs groups of one size, got 1 to 7 responses"
    ):
        estimators[f"fused_{advantage}"](**given | {"index": np.array(["a"] + ["b"] * 7)})


@pytest.mark.parametrize("preset", ["grpo", "gspo", "gmpo", "vespo", "scalerl"])
def test_skyrl_sums_losses_whose_advantages_it_has_scaled(host, preset):
    """SkyRL's positional call; its correction weighs tokens and may drop some."""

    def apply_off_policy_correction(
        loss, old_log_probs, rollout_logprobs, loss_mask, off_policy_correction
    ):
        assert off_policy_correction == "its config" and old_log_probs is OLD
        return loss * WEIGHTS, loss_mask * (rollout_logprobs > -1), {"tis": 1.0}

    losses, estimators = {}, {}
    host(
        "skyrl.backends.skyrl_train.utils.ppo_utils",
        register_policy_loss=decorator_into(losses),
        register_advantage_estimator=decorator_into(estimators),
        apply_off_policy_correction=apply_off_policy_correction,
    )
    registries.register("skyrl")
    assert {*losses} == {
        f"fused_{name}" for name in fused_rl.PRESETS
    } and "fused_maxrl" in estimators
    config = Namespace(off_policy_correction="its config")
    call = functools.partial(
        losses[f"fused_{preset}"], loss_mask=MASK.float(), rollout_logprobs=-WEIGHTS
    )
    metrics = call(NEW, OLD, ADVANTAGES, config)[1]
    assert metrics["tis"] == 1.0 and isinstance(metrics["approx_kl"], float)
    theirs = graded(lambda x: call(x, OLD, ADVANTAGES, config)[0])
    kept = MASK & (WEIGHTS < 1)
    ours = graded(lambda x: (surrogates_of(preset, x, kept) * WEIGHTS).sum())
    torch.testing.assert_close(theirs, ours)


def sample(i, logprobs, weights=None):
    """prime-rl's LossInputs of one sample, (T,) each."""
    given = {"trainer_logprobs": logprobs[i], "inference_logprobs": OLD[i], "ref_logprobs": None}
    return Namespace(**given, advantages=ADVANTAGES[i], loss_mask=MASK[i], loss_weights=weights)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "gmpo", "vespo", "reinforce++"])
@pytest.mark.parametrize("weighted", [False, True])
def test_prime_rl_imports_a_loss_of_one_sample(host, preset, weighted):
    host("prime_rl.trainer.rl.loss", LossOutputs=Namespace)
    custom = getattr(registries, f"prime_{preset}")  # as import_object does

    def theirs(logprobs):
        total = 0
        for i in range(B):
            outputs = custom(sample(i, logprobs, WEIGHTS[i] if weighted else None))
            assert outputs.metrics["approx_kl"].dim() == 0
            total = total + outputs.loss
        return total

    weights = WEIGHTS if weighted else torch.ones(B, T, dtype=F64)
    torch.testing.assert_close(
        graded(theirs), graded(lambda x: (surrogates_of(preset, x) * weights).sum())
    )


def test_prime_rl_passes_options_and_a_name_that_is_none_says_which_are(host):
    host("prime_rl.trainer.rl.loss", LossOutputs=Namespace)
    options = {"surrogate": "ipo", "ipo_tau": 0.3}  # kwargs of its config
    found = registries.prime_dapo(sample(0, NEW), **options).loss
    torch.testing.assert_close(found, surrogates_of("dapo", NEW, **options)[0].sum())
    with pytest.raises(
        AttributeError,
        match="no loss prime_pppo; a name is prime or slime or miles, _ and one of ppo, ",
    ):
        registries.prime_pppo  # noqa: B018


def get_log_probs_and_entropy(
    logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy, **more
):
    """The hosts' function, for "logits" that are the log-probabilities of all responses, one after the other."""
    assert (
        with_entropy
        and total_lengths == [n + 2 for n in LENGTHS.tolist()]
        and len(unconcat_tokens) == B
    )
    log_probs = [*logits[0].split(response_lengths)]
    return {"log_probs": log_probs, "entropy": [-2 * each for each in log_probs]} | {"more": more}


def hosts_of_paths(host):
    def scoring(more, returned):
        def score(*arguments, **options):
            found = get_log_probs_and_entropy(*arguments, **options)
            assert found.pop("more") == more
            return returned(found)

        return score

    replay = {"top_p_token_ids": [1]}
    of_slime = {"get_log_probs_and_entropy": scoring(replay, lambda found: (torch.empty(0), found))}
    host(
        "slime.backends.megatron_utils.loss",
        get_rollout_top_p_logprob_kwargs=lambda args, batch: replay,
        **of_slime,
    )
    of_miles = scoring({"max_seq_lens": None}, lambda found: found)
    host("miles.backends.training_utils.loss_hub.losses", get_log_probs_and_entropy=of_miles)


def rows(values):
    return [each[:n] for each, n in zip(values, LENGTHS.tolist(), strict=True)]


def megatron_batch():
    lengths = {"response_lengths": LENGTHS.tolist(), "total_lengths": (LENGTHS + 2).tolist()}
    return lengths | {
        "unconcat_tokens": [0] * B,
        "advantages": rows(ADVANTAGES),
        "loss_masks": rows(MASK.int()),
    }


def sum_of_sample_mean(values):
    """Both hosts', without context parallelism: the sum over samples of their means."""
    parts = values.split(LENGTHS.tolist())
    return sum(
        (part * mask[: len(part)]).sum() / len(part)
        for part, mask in zip(parts, MASK.to(F64), strict=True)
    )


@pytest.mark.parametrize("options", ["plain", "everything", "sampler"])
@pytest.mark.parametrize("preset", ["dapo", "gspo", "gmpo"])
@pytest.mark.parametrize("name", ["slime", "miles"])
def test_slime_and_miles_load_a_loss_of_a_micro_batch(host, name, preset, options):
    hosts_of_paths(host)
    function = getattr(registries, f"{name}_{preset}")  # as load_function does
    everything = options == "everything"
    args = Namespace(
        use_rollout_logprobs=options == "sampler",
        use_tis=everything,
        use_kl_loss=everything,
        tis_clip=1.1,
    )
    args.entropy_coef, args.kl_loss_coef, args.kl_loss_type = (
        0.1 if everything else 0.0,
        0.3,
        "low_var_kl",
    )

    batch = megatron_batch() | {"log_probs": rows(OLD), "ref_log_probs": rows(REF)}
    batch["rollout_log_probs"] = rows(OLD if options == "sampler" else ROLLOUT)
    if options == "sampler":
        batch["log_probs"] = None

    def theirs(logprobs):
        loss, log = function(args, batch, torch.cat(rows(logprobs))[None], sum_of_sample_mean)
        assert log["loss"] == loss and all(value.dim() == 0 for value in log.values())
        return loss

    def ours(logprobs):
        given = {}
        if everything:
            given = {
                "ref_logprobs": REF,
                "kl_coef": 0.3,
                "kl_estimator": "k3",
                "entropy": -2 * logprobs,
            }
            given |= {"entropy_coef": 0.1, "rollout_logprobs": ROLLOUT, "rollout_high": 1.1}
        return (surrogates_of(preset, logprobs, **given).sum(1) / LENGTHS).sum()

    torch.testing.assert_close(graded(theirs), graded(ours))


def test_slime_s_first_update_has_the_pass_itself_as_old(host):
    hosts_of_paths(host)
    args = Namespace(use_rollout_logprobs=False, use_tis=False, use_kl_loss=False, entropy_coef=0.0)
    loss, _ = registries.slime_ppo(
        args, megatron_batch(), torch.cat(rows(NEW))[None], sum_of_sample_mean
    )
    torch.testing.assert_close(loss, -ADVANTAGES[:, 0].sum())
