"""GRPO's options over a run: refilled groups, a reference that moves, the KL in the reward; resumed, and over ranks."""

import pytest
import torch

from fused_rl.trainers import grpo
from fused_rl.trainers.models import language_model
from fused_rl.trainers.policy import groups
from fused_rl.trainers.policy.options import KLConfig
from tests.trainers import runs, tiny
from tests.trainers.steps import config_of


def trained(folder, rows, output, **options):
    """A run of a few small steps on a verifier that says right or wrong; its metrics."""
    settings = {
        "verifiers": "tests.trainers.tiny:first_is_odd",
        "eval_size": 0,
        "prompts_per_step": 4,
    }
    settings |= {
        "steps": 4,
        "group_size": 2,
        "minibatches": 2,
        "micro_batch_size": 8,
        "save_every": 1,
    }
    settings |= {"model": folder, "dataset": rows, "output_dir": str(output), "keep_checkpoints": 9}
    grpo.train(config_of(**(settings | options)))
    return tiny.untimed(tiny.read_metrics(output))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return tiny.jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", tiny.sums(11))


REFILLED = {"zero_variance": "refill", "overlong_buffer": 2}


SYNCED = {"kl_coef": 0.1, "ref_sync_every": 2, "ref_mixup_alpha": 0.6}


CHARGED = {"kl_in": "reward", "kl_coef": 0.05, "advantage": "group-mean-batch-std", "epochs": 2}


@pytest.mark.slow
def test_a_reference_that_follows_is_a_mixture_of_itself_and_the_policy(
    folder, rows, tmp_path, monkeypatch
):
    synced, sync = [], language_model.sync

    def watched(frozen, policy_, alpha):
        before = {k: v.clone() for k, v in frozen.named_parameters()}
        sync(frozen, policy_, alpha)
        ours = dict(policy_.module.named_parameters())
        for name, weight in frozen.named_parameters():
            mixed = alpha * ours[name].double() + (1 - alpha) * before[name].double()
            torch.testing.assert_close(weight.double(), mixed, rtol=1e-6, atol=1e-8)
        synced.append(before["lm.lm_head.weight"])

    monkeypatch.setattr(language_model, "sync", watched)
    trained(folder, rows, tmp_path, **(SYNCED | CHARGED))
    assert len(synced) == 2 and not torch.equal(*synced)


def kept_in(found: list, monkeypatch, module, name: str):
    """Append to `found` what the function returns from now on."""
    function = getattr(module, name)

    def watched(*inputs, **options):
        found.append(function(*inputs, **options))
        return found[-1]

    monkeypatch.setattr(module, name, watched)


def test_the_reward_that_is_trained_on_is_less_by_the_kl_and_logged(
    folder, rows, tmp_path, monkeypatch
):
    drawn, charged, trained_on = [], [], []
    kept_in(drawn, monkeypatch, grpo, "collect")
    kept_in(charged, monkeypatch, KLConfig, "kl_of_tokens")
    advantages_of = groups.advantages_of
    monkeypatch.setattr(
        grpo,
        "advantages_of",
        lambda c, r, *more: trained_on.append(r) or advantages_of(c, r, *more),
    )
    options = {"minibatches": 2, "save_every": 0, "lr": 1e-2, "kl_coef": 0.5, "steps": 2}
    _, second = trained(folder, rows, tmp_path, kl_in="reward", **options)
    charged = [of_tokens.sum(1) for of_tokens in charged]
    assert charged[1].abs().min() > 1e-4
    torch.testing.assert_close(
        trained_on[1], drawn[1].rollout.rewards - 0.5 * charged[1], rtol=0, atol=1e-6
    )
    assert second["objective/kl"] == pytest.approx(charged[1].mean().item(), rel=1e-5)
    # Which is of the updates.
    assert second["objective/kl1_avg"] != pytest.approx(second["objective/kl"], rel=1e-4)
    assert second["objective/non_score_reward"] == pytest.approx(-0.5 * second["objective/kl"])
    assert second["loss/total_avg"] == pytest.approx(second["loss/policy_avg"], abs=1e-12)
    assert (
        second["val/first_ratio"] == pytest.approx(1, abs=1e-6)
        and abs(second["val/ratio"] - 1) > 1e-4
    )


@pytest.mark.slow
def test_a_forward_pass_that_does_not_repeat_itself_is_reported(
    folder, rows, tmp_path, monkeypatch, capsys
):
    """Where rewards that pay for the KL have taken log-probabilities, the first minibatch's are compared with them."""
    options = {"minibatches": 1, "save_every": 0, "steps": 1, "kl_in": "reward", "kl_coef": 0.05}
    trained(folder, rows, tmp_path / "same", **options)
    assert "warning" not in capsys.readouterr().out
    forward = language_model.LanguageModel.forward

    def noisy(self, *inputs, **more):
        if "loss_beside" in more:
            with torch.no_grad():
                self.base.get_output_embeddings().weight.add_(1e-3)
                self.base.get_output_embeddings().weight[::2].mul_(0.9)
        return forward(self, *inputs, **more)

    monkeypatch.setattr(language_model.LanguageModel, "forward", noisy)
    trained(folder, rows, tmp_path / "noisy", **options)
    assert "warning: step 1: first-ratio: val/first_ratio is 0.996" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("options", [REFILLED, SYNCED | CHARGED], ids=["refilled", "synced"])
def test_the_size_of_micro_batches_changes_nothing(folder, rows, tmp_path, options):
    whole = trained(folder, rows, tmp_path / "8", save_every=0, **options)
    division = runs.division("40 tokens" if options is REFILLED else 3)
    split = trained(folder, rows, tmp_path / "3", save_every=0, **division, **options)
    for a, b in zip(whole, split, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    weights = tiny.weights(tmp_path / "3" / "model")
    for name, weight in tiny.weights(tmp_path / "8" / "model").items():
        torch.testing.assert_close(weights[name], weight, atol=1e-4, rtol=0, msg=name)


BESIDE = {
    "a token loss": {"kl_coef": 0.1, "minibatches": 1},
    "two minibatches": {"kl_coef": 0.1, "minibatches": 2, "epochs": 2},
    "a loss of sequences": {"preset": "gspo"},
    "kept sets": {"top_p": 0.9},
    "whole logits, kept sets": {"loss_from": "logits", "top_p": 0.9},
    "adapters": {"lora_rank": 2, "gradient_checkpointing": True, "save_merged": True},
    "partitioned": {"zero_stage": 3},
}
SLOW = [pytest.param(options, id=name, marks=pytest.mark.slow) for name, options in BESIDE.items()]


@pytest.mark.parametrize(
    "options", [pytest.param(BESIDE["a token loss"], id="a token loss"), *SLOW[1:]]
)
def test_what_is_trained_on_first_is_compared_in_its_own_pass(
    folder, rows, tmp_path, monkeypatch, options
):
    """Without a pass of the policy before: every metric, the exact KL among them, and the weights stay."""
    passes = []
    score = language_model.LanguageModel.score

    def noted(self, *inputs, **requests):
        passes.append("reference" in requests)
        return score(self, *inputs, **requests)

    monkeypatch.setattr(language_model.LanguageModel, "score", noted)
    counts = []
    for name in ("beside", "before"):
        if name == "before":
            monkeypatch.setattr(grpo, "trains_before_measuring", lambda *_: False)
        passes.clear()
        config = runs.grpo_config((folder, rows), tmp_path / name, steps=2, eval_size=0, **options)
        grpo.train(config)
        counts.append(len(passes))
    runs.assert_same_metrics(tmp_path / "beside", tmp_path / "before", 1e-6)
    runs.assert_same_weights(tmp_path / "beside", tmp_path / "before", 1e-6)
    # Two steps of two micro-batches, or as many of the first of two minibatches.
    minibatches = options.get("minibatches", 2)
    assert counts[1] - counts[0] == 4 // minibatches
