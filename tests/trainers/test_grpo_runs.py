"""GRPO's options over a run: a reference that moves, the KL in the reward, a forward pass less."""

import pytest
import torch

from fused_rl.trainers import grpo
from fused_rl.trainers.models import language_model
from tests.marks import slow
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


SYNCED = {"kl_coef": 0.1, "ref_sync_every": 2, "ref_mixup_alpha": 0.6}


SYNCED |= {"kl_in": "reward", "epochs": 2}


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
    trained(folder, rows, tmp_path, **SYNCED)
    assert len(synced) == 2 and not torch.equal(*synced)


BESIDE = [
    {"kl_coef": 0.1, "minibatches": 1},
    slow({"kl_coef": 0.1, "minibatches": 2, "epochs": 2}),
    slow({"loss_from": "logits", "top_p": 0.9, "preset": "gspo"}),
    slow({"lora_rank": 2, "gradient_checkpointing": True, "save_merged": True}),
    slow({"zero_stage": 3}),
]


@pytest.mark.parametrize("options", BESIDE)
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
