"""GRPO's options over a run: a reference that moves, a forward pass less."""

import pytest
import torch

from fused_rl.trainers import grpo
from fused_rl.trainers.models import language_model
from tests.marks import slow
from tests.trainers import runs, tiny
from tests.trainers.steps import Plain, config_of


def test_a_reference_that_follows_is_a_mixture_of_itself_and_the_policy(folder):
    frozen, trained = (tiny.load_lm(config_of(folder), trainable=grows) for grows in (False, True))
    before = {name: weight.double() for name, weight in frozen.named_parameters()}
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(torch.randn(weight.shape))
        language_model.sync(frozen, Plain(trained), 0.6)
    for name, weight in trained.named_parameters():
        mixed = 0.6 * weight.double() + 0.4 * before[name]
        found = frozen.get_parameter(name).double()
        torch.testing.assert_close(found, mixed, rtol=1e-6, atol=1e-6)


SIDE_FIGURES = [
    {"kl_coef": 0.1, "minibatches": 1},
    slow({"kl_coef": 0.1, "minibatches": 2, "epochs": 2}),
]


@pytest.mark.parametrize("options", SIDE_FIGURES)
def test_what_is_trained_on_first_is_compared_in_its_own_pass(
    files, tmp_path, monkeypatch, options
):
    """Without a pass of the policy before: every metric, the exact KL among them, and the weights stay."""
    passes, counts = [], []
    score = language_model.LanguageModel.score

    def noted(self, *inputs, **requests):
        passes.append(requests)
        return score(self, *inputs, **requests)

    monkeypatch.setattr(language_model.LanguageModel, "score", noted)
    for name in ("beside", "before"):
        if name == "before":
            monkeypatch.setattr(grpo, "trains_before_measuring", lambda *_: False)
        passes.clear()
        grpo.train(runs.grpo_config(files, tmp_path / name, steps=2, eval_size=0, **options))
        counts.append(len(passes))
    runs.assert_same_metrics(tmp_path / "beside", tmp_path / "before", 1e-6)
    runs.assert_same_weights(tmp_path / "beside", tmp_path / "before", 1e-6)
    # Two steps of two micro-batches, or as many of the first of two minibatches.
    assert counts[1] - counts[0] == 4 // options.get("minibatches", 2)
