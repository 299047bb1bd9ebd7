"""What stands in the place of older releases' functions: the same numbers under other parameters."""

import inspect

import pytest
import torch

from fused_rl.integrations import trl as integration
from fused_rl.integrations.trl_samples import (
    divergence_loss_samples,
    head_loss_samples,
    head_samples,
)
from tests.integrations import formulas
from tests.lazy import needs_trl

pytestmark = [pytest.mark.usefixtures("cpu"), needs_trl]

FP32, FP64 = torch.float32, torch.float64
HEADS = [row for row in integration._TABLE if row.name == integration._OLDER_LOGPROB]


def rows_of(name):
    return [row for row in integration._TABLE if row.name == name]


@pytest.mark.parametrize("row", HEADS, ids=lambda row: row.versions)
def test_an_older_head_is_the_newest_of_the_same_arguments(row):
    names = inspect.signature(row.ours.apply).parameters
    for sample in head_samples(FP32):
        lacking = {"bias": None, "final_logit_softcapping": None}
        known = {name: value for name, value in lacking.items() if name not in names}
        sample = sample | known
        leaves = sample["hidden"], sample["weight"]
        newest = inspect.signature(integration.ChunkedLogProbFunction.apply).parameters
        expected = integration.ChunkedLogProbFunction.apply(*(sample[name] for name in newest))[:2]
        found = row.ours.apply(*(sample[name] for name in names))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        # Before 1.13 TRL drops the entropy's gradient.
        assert found[1].requires_grad == (
            "<1.13" not in row.versions and "<1.5" not in row.versions
        )
        gradients = [torch.autograd.grad(x[0].sum(), leaves) for x in (found, expected)]
        assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("autocasts", [False, True])
def test_a_head_before_autocast_keeps_the_hidden_states_dtype(autocasts):
    """Its products are in fp32 of fp32 hidden states, as TRL's are, and so have the digits of fp32."""
    ours = integration._older_head(integration._WITH_BIAS, autocasts=autocasts)
    (sample, _) = head_samples(FP32)
    arguments = [sample[name] for name in integration._WITH_BIAS.split() if name in sample]
    exact = ours.apply(*arguments)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours.apply(*arguments)[0]
    assert torch.equal(found, exact) != autocasts


def exact_cross_entropy(sample):
    hidden, weight, bias = (
        sample[name].detach().double().requires_grad_()
        for name in ("hidden_states", "lm_head_weight", "lm_head_bias")
    )
    shifted = sample.get("shift_labels")
    labels = sample["labels"][:, 1:] if shifted is None else shifted
    used = hidden[:, :-1] if shifted is None else hidden
    counts = labels != -100
    options = 1.0, sample.get("final_logit_softcapping"), sample["logit_scale"]
    x = formulas.scores(used[counts], weight, bias, *options)
    logprobs, entropy, _, _, is_top1 = formulas.row_outputs(x, labels[counts])
    items = sample["num_items_in_batch"]
    loss = -logprobs.sum() / (counts.sum() if items is None else items)
    return (loss, is_top1.sum(), entropy.sum(), counts.sum()), (hidden, weight, bias)


@pytest.mark.parametrize("row", rows_of(integration._SFT_LOSS), ids=lambda row: row.versions)
def test_the_loss_of_sft(row):
    for sample in head_loss_samples(FP32):
        expected, exact_leaves = exact_cross_entropy(sample)
        found = row.ours(**sample)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)
        names = "hidden_states", "lm_head_weight", "lm_head_bias"
        gradients = torch.autograd.grad(found[0], [sample[name] for name in names])
        for one, other in zip(
            gradients, torch.autograd.grad(expected[0], exact_leaves), strict=True
        ):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "row", rows_of(integration._DISTILLATION_LOSS), ids=lambda row: row.versions
)
def test_the_loss_of_distillation(row):
    for sample in divergence_loss_samples(FP32):
        counts = sample["completion_mask"] != 0
        scores = []
        for whose in ("student", "teacher"):
            hidden, weight, bias = (
                sample[f"{whose}_{name}"].detach().double()
                for name in ("hidden_states", "lm_head_weight", "lm_head_bias")
            )
            softcap = sample[f"{whose}_final_logit_softcapping"]
            options = sample["temperature"], softcap, sample[f"{whose}_logit_scale"]
            scores.append(formulas.scores(hidden[counts], weight, bias, *options))
        divergence, entropy = formulas.divergence(*scores, sample["beta"])
        items = sample["num_items_in_batch"]
        expected = divergence.sum() / (counts.sum() if items is None else items), entropy.sum()
        found = row.ours(**sample)
        close = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close([x.double() for x in found[:2]], list(expected), **close)
        assert found[2] == counts.sum()


@pytest.mark.parametrize("name", [integration._SFT_LOSS, integration._DISTILLATION_LOSS])
def test_a_batch_without_a_token_that_counts_has_a_loss_of_zero(name):
    """And gradients of zero, so that ranks do not wait for each other."""
    row = rows_of(name)[0]
    sample = next(iter(row.samples(FP32))) | {"num_items_in_batch": None}
    of_student = "student_" if "student_hidden_states" in sample else ""
    for key, nothing in (("labels", -100), ("completion_mask", 0)):
        if key in sample:
            sample[key] = torch.full_like(sample[key], nothing)
    loss = row.ours(**sample)[0]
    assert loss == 0
    leaves = [sample[of_student + x] for x in ("hidden_states", "lm_head_weight", "lm_head_bias")]
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))
