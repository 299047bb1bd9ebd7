"""linear_token_logprobs and linear_token_loss: values and every gradient, in every way to cut the logits."""

import pytest
import torch

import fused_rl
from fused_rl import reference, tiles
from tests.heads import (
    BF16,
    CUTS,
    FP16,
    FP32,
    FP64,
    MORE_ROWS,
    MORE_TOKENS,
    ONE_TILE,
    OPTIONS,
    SINGLE_ROWS,
    call,
    compare,
    in_dtype,
    logprobs_and_gradients,
    loss_and_gradients,
    make,
    options_for,
    per_token,
    token_loss,
    upstream_of,
)
from tests.marks import grid, on_backends
from tests.paths import DEVICE


def test_tiles():
    """The cases below cut the logits in the ways they claim."""

    def plan(case, dtype):
        (n, width, vocab), workspace_mb = case
        hidden = torch.empty(n, width, dtype=dtype)
        budget = tiles.budget(workspace_mb, hidden, copied=False)
        return tiles.forward_rows(hidden, vocab, budget), tiles.backward_tile(hidden, vocab, (True,) * 3, budget)

    assert plan(ONE_TILE, FP32) == plan(ONE_TILE, BF16) == (22, (22, 131))
    assert plan(MORE_TOKENS, FP32) == (8, (8, 131))
    assert plan(MORE_TOKENS, BF16) == (16, (22, 32))
    assert plan(MORE_ROWS, FP32) == (28, (28, 37))
    assert plan(MORE_ROWS, BF16) == (56, (14, 37))
    assert plan(SINGLE_ROWS, FP32) == (1, (1, 131))
    assert plan(SINGLE_ROWS, BF16) == (1, (14, 16))


THREE = {name: CUTS[name] for name in ("one", "more tokens", "more rows")}


@on_backends(
    "run, dtype, workspace",
    [logprobs_and_gradients, loss_and_gradients],
    [BF16, FP32],
    THREE,
    most=1,
)
def test_on_both_backends(backend, run, dtype, workspace):
    shape, workspace_mb = workspace
    leaves, targets, mask = make(shape, dtype, backend)
    upstream = [upstream_of(targets)] if run is logprobs_and_gradients else []
    compare(
        run,
        leaves,
        targets,
        *upstream,
        mask=mask,
        softcap=4.0,
        temperature=0.8,
        workspace_mb=workspace_mb,
    )


@pytest.mark.usefixtures("cpu")
@grid(
    "run, dtype, name, workspace",
    [logprobs_and_gradients, loss_and_gradients],
    [FP32, BF16, FP16],
    OPTIONS.keys(),
    CUTS,
)
def test_values_and_gradients(run, dtype, name, workspace):
    shape, workspace_mb = workspace
    leaves, targets, mask = make(shape, dtype, DEVICE, bias=name != "no bias")
    upstream = [upstream_of(targets)] if run is logprobs_and_gradients else []
    compare(
        run,
        leaves,
        targets,
        *upstream,
        **options_for(name, targets, mask),
        workspace_mb=workspace_mb,
    )


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=["logprobs", "entropy", "lse", "logprobs+lse"])
def test_gradient_of_some_outputs(used):
    """What is not used has no upstream gradient at all; sum() gives one of stride 0."""
    for shape, workspace_mb in (ONE_TILE, MORE_TOKENS):
        leaves, targets, _ = make(shape, FP32, DEVICE)

        def run(module, leaves, targets, **options):
            outputs = call(module.linear_token_logprobs, leaves, targets, **options)
            return torch.autograd.grad(sum(outputs[i].sum() for i in used), leaves)

        compare(run, leaves, targets, workspace_mb=workspace_mb)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_leading_dimensions(run, integers):
    """(B, T, H) with everything per token (B, T): the rows of the flat call."""
    leaves, targets, mask = make(MORE_TOKENS[0], FP32, DEVICE)
    temperature = torch.linspace(0.5, 2, 22, device=DEVICE)
    upstream = upstream_of(targets)
    args = [upstream] if run is logprobs_and_gradients else []
    flat = run(
        fused_rl,
        leaves,
        targets,
        *args,
        mask=mask,
        temperature=temperature,
        workspace_mb=MORE_TOKENS[1],
    )
    folded = [leaves[0].detach().view(2, 11, 16).requires_grad_(), *leaves[1:]]
    args = [[u.view(2, 11) for u in upstream]] if args else []
    with pytest.MonkeyPatch.context() as patch:  # the same per-token values, folded
        original = per_token(targets)
        patch.setattr("tests.heads.per_token", lambda t: [original[0].view(2, 11), original[1].view(2, 11, 2)])
        results = run(
            fused_rl,
            folded,
            targets.view(2, 11).to(integers),
            *args,
            mask=mask.view(2, 11),
            temperature=temperature.view(2, 11),
            workspace_mb=MORE_TOKENS[1],
        )
    for a, b in zip(results, flat, strict=True):
        torch.testing.assert_close(a.reshape(b.shape), b, rtol=0, atol=0)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
def test_masked_rows_are_not_read(run):
    """NaN in a masked row of hidden and a target outside the vocabulary change nothing; its gradient is exactly 0."""
    leaves, targets, mask = make(MORE_TOKENS[0], FP32, DEVICE)
    args = [upstream_of(targets)] if run is logprobs_and_gradients else []
    clean = run(fused_rl, leaves, targets, *args, mask=mask, workspace_mb=MORE_TOKENS[1])
    spoilt = [
        leaves[0].detach().masked_fill(~mask[:, None], torch.nan).requires_grad_(),
        *leaves[1:],
    ]
    results = run(fused_rl, spoilt, targets.where(mask, -100), *args, mask=mask, workspace_mb=MORE_TOKENS[1])
    for a, b in zip(results, clean, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (results[-3][~mask] == 0).all()
    assert (results[1][~mask] == 0).all()


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("rows", [0, 9], ids=["empty", "all masked"])
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_nothing_counts(run, rows, dtype):
    """The graph stays whole and every gradient is zero: a rank without tokens still takes part in a reduction."""
    leaves, targets, mask = make((9, 16, 131), dtype, DEVICE)
    leaves = [leaves[0].detach()[:rows].requires_grad_(), *leaves[1:]]
    targets, mask = targets[:rows], torch.zeros_like(mask[:rows])
    args = [upstream_of(targets)] if run is logprobs_and_gradients else []
    for result in run(fused_rl, leaves, targets, *args, mask=mask, workspace_mb=1e-3):
        assert (result == 0).all()


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("workspace", [ONE_TILE, MORE_TOKENS], ids=["one", "more tokens"])
def test_banned_tokens(workspace):
    """A bias of -inf bans tokens, here whole blocks of columns; their gradients are 0, and the rest as without them."""
    shape, workspace_mb = workspace
    leaves, targets, _ = make(shape, FP32, DEVICE)
    banned = torch.arange(shape[2], device=DEVICE) % 3 > 0
    banned[:64] = True
    targets = (~banned).nonzero()[targets % 20, 0]
    leaves[2] = leaves[2].detach().masked_fill(banned, -torch.inf).requires_grad_()
    results = compare(logprobs_and_gradients, leaves, targets, upstream_of(targets), workspace_mb=workspace_mb)
    assert (results[-2][banned] == 0).all()
    assert (results[-1][banned] == 0).all()


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("workspace", [ONE_TILE, MORE_TOKENS, MORE_ROWS], ids=["one", "more tokens", "more rows"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_one_pass_equals_recompute(dtype, workspace):
    shape, workspace_mb = workspace
    leaves, targets, mask = make(shape, dtype, DEVICE)
    one_pass = loss_and_gradients(fused_rl, leaves, targets, mask=mask, workspace_mb=workspace_mb)
    logprobs, entropy, _ = call(fused_rl.linear_token_logprobs, leaves, targets, mask=mask, workspace_mb=workspace_mb)
    loss = token_loss(logprobs[mask], entropy[mask], *(v[mask] for v in per_token(targets))).sum()
    recomputed = [logprobs, entropy, *torch.autograd.grad(0.37 * loss, leaves)]
    for a, b in zip(one_pass, recomputed, strict=True):
        ulp = torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=0, atol=8 * ulp * b.abs().max().item())


@pytest.mark.usefixtures("cpu")
def test_one_pass_in_several_tiles_of_bf16():
    """The fp32 sum of the weight's gradient, which `_ONE_PASS_ROWS` keeps small cases from."""
    shape, workspace_mb = (1300, 16, 37), 0.12
    leaves, targets, _ = make(shape, BF16)
    budget = tiles.budget(workspace_mb, leaves[0], copied=False)
    assert tiles.one_pass_rows(leaves[0], 37, (True,) * 3, budget) == 802
    compare(loss_and_gradients, leaves, targets, workspace_mb=workspace_mb)


@pytest.mark.usefixtures("cpu")
def test_sum_over_many_tiles():
    """128 blocks of 8 rows that all add to the weight's gradient: summed in bf16 it would stop growing halfway."""
    leaves, targets, _ = make((1024, 8, 16), BF16, bias=False)
    leaves[0] = (1 + leaves[0].detach().abs() / 8).requires_grad_()
    workspace_mb = 2**-9
    budget = tiles.budget(workspace_mb, leaves[0], copied=False)
    assert tiles.backward_tile(leaves[0], 16, (True, True), budget) == (8, 16)
    lse = fused_rl.linear_token_logprobs(*leaves, targets, workspace_mb=workspace_mb).lse
    dweight = torch.autograd.grad(lse.sum(), leaves[1])[0]
    exact = in_dtype(leaves, FP64)
    truth = torch.autograd.grad(reference.linear_token_logprobs(*exact, targets).lse.sum(), exact[1])[0]
    torch.testing.assert_close(dweight.double(), truth, rtol=2**-7, atol=0)


BAD = {
    "weight of another width": (
        {"weight": torch.zeros(131, 15)},
        "hidden must be .* got .*22, 16.* and .*131, 15",
    ),
    "weight transposed": ({"weight": torch.zeros(16, 131)}, "weight .V, H."),
    "target too large": (
        {"targets": torch.arange(22) * 10},
        r"logits\[14\] is 140, outside .* 131",
    ),
    "bias of another length": (
        {"bias": torch.zeros(130)},
        "bias must be .V,. = .131,., got .130,.",
    ),
    "mixed dtypes": (
        {"weight": torch.zeros(131, 16, dtype=BF16)},
        "one dtype.*torch.float32, torch.bfloat16",
    ),
    "fp64": (
        {"hidden": torch.zeros(22, 16).double(), "weight": torch.zeros(131, 16).double()},
        "float32, bfloat16",
    ),
    "no workspace": ({"workspace_mb": 0}, "workspace_mb must be a finite number above 0"),
}


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    changes, message = BAD[name]
    leaves, targets, _ = make(ONE_TILE[0], FP32)
    arguments = {"hidden": leaves[0], "weight": leaves[1], "targets": targets, **changes}
    with pytest.raises(ValueError, match=message):
        fused_rl.linear_token_logprobs(**arguments)
    with pytest.raises(ValueError, match=message):
        fused_rl.linear_token_loss(**arguments, token_loss=lambda logprobs, entropy: logprobs)


@pytest.mark.usefixtures("cpu")
def test_errors_of_the_loss():
    leaves, targets, mask = make(ONE_TILE[0], FP32)

    def loss(function, *values):
        return fused_rl.linear_token_loss(leaves[0], leaves[1], targets, function, *values, mask=mask)

    with pytest.raises(ValueError, match=r"one value per token, \(\d+,\), unreduced; got \(\)"):
        loss(lambda logprobs, entropy: logprobs.mean())
    with pytest.raises(ValueError, match=r"per_token\[1\] must start with the targets' shape \(22,\), got \(21,\)"):
        loss(lambda logprobs, entropy, a, b: logprobs, torch.zeros(22), torch.zeros(21))
    with pytest.raises(ValueError, match=r"per_token\[0\] requires a gradient"):
        loss(lambda logprobs, entropy, a: logprobs, torch.zeros(22, requires_grad=True))
