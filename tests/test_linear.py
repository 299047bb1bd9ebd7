"""linear_token_logprobs and linear_token_loss: values and every gradient, in every way to cut the logits."""

import pytest
import torch

import fused_rl
from fused_rl import reference
from fused_rl.ops import tiles
from tests.heads import (
    BF16,
    CUTS,
    FP32,
    FP64,
    MORE_TOKENS,
    ONE_TILE,
    call,
    compare,
    in_dtype,
    logprobs_and_gradients,
    loss_and_gradients,
    make,
    upstream_of,
)
from tests.marks import cpu_fast
from tests.paths import DEVICE


# temperature per row, soft cap and mask in every cut; one tile of few rows on the kernels, which are interpreted
@cpu_fast
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("run", "count"),
    [(logprobs_and_gradients, None), (logprobs_and_gradients, 5), (loss_and_gradients, None)],
)
def test_values_and_gradients(backend, run, count, dtype, cut):
    shape, workspace_mb = cut
    leaves, targets, mask = make(shape, dtype, backend)
    upstream = [upstream_of(targets)] if run is logprobs_and_gradients else []
    if count:
        targets = (targets[:, None] + 3 * torch.arange(count, device=backend)) % shape[2]
        targets[3] = targets[3, 0]
        upstream[0][0] = upstream_of(targets)[0]
    temperature = torch.linspace(0.5, 2, shape[0], device=backend)
    options = {
        "mask": mask,
        "softcap": 4.0,
        "temperature": temperature,
        "workspace_mb": workspace_mb,
    }
    compare(run, leaves, targets, *upstream, **options)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    "used", [(0,), (1,), (2,), (0, 2)], ids=["logprobs", "entropy", "lse", "logprobs+lse"]
)
def test_gradient_of_some_outputs(used):
    """What is not used has no upstream gradient at all; sum() gives one of stride 0."""
    for shape, workspace_mb in (ONE_TILE, MORE_TOKENS):
        leaves, targets, _ = make(shape, FP32, DEVICE)

        def run(module, leaves, targets, **options):
            outputs = call(module.linear_token_logprobs, leaves, targets, **options)
            return torch.autograd.grad(sum(outputs[i].sum() for i in used), leaves)

        compare(run, leaves, targets, workspace_mb=workspace_mb)


@pytest.mark.usefixtures("cpu")
def test_one_pass_in_several_tiles_of_bf16():
    """The fp32 sum of the weight's gradient, which `_ONE_PASS_ROWS` keeps small cases from."""
    shape, workspace_mb = (1300, 16, 37), 0.12
    leaves, targets, _ = make(shape, BF16)
    budget = tiles.budget(workspace_mb, leaves[0], len(leaves[1]), copied=False)
    assert tiles.one_pass_rows(leaves[0], 37, (True,) * 3, budget) == 800
    compare(loss_and_gradients, leaves, targets, workspace_mb=workspace_mb)


@pytest.mark.usefixtures("cpu")
def test_sum_over_many_tiles():
    """128 blocks of 8 rows that all add to a gradient: summed in bf16 it would stop growing halfway."""
    leaves, targets, _ = make((1024, 8, 16), BF16)
    leaves[0] = (1 + leaves[0].detach().abs() / 8).requires_grad_()
    workspace_mb = 2**-9
    budget = tiles.budget(workspace_mb, leaves[0], len(leaves[1]), copied=False)
    assert tiles.backward_tile(leaves[0], 16, (True, True), budget) == (8, 16)

    def gradients(module, leaves, **options):
        lse = call(module.linear_token_logprobs, leaves, targets, **options).lse
        return torch.autograd.grad(lse.sum(), leaves[1:])

    found = gradients(fused_rl, leaves, workspace_mb=workspace_mb)
    for d, truth in zip(found, gradients(reference, in_dtype(leaves, FP64)), strict=True):
        torch.testing.assert_close(d.double(), truth, rtol=2**-7, atol=0)
