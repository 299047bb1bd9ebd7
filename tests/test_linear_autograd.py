"""linear_token_logprobs and linear_token_loss in autograd's corners, and their work and memory, counted."""

import weakref

import pytest
import torch

import fused_rl
from fused_rl import reference
from fused_rl.ops import tiles
from tests.heads import (
    BF16,
    FP32,
    FP64,
    MORE_ROWS,
    MORE_TOKENS,
    ONE_TILE,
    Work,
    call,
    compare,
    in_dtype,
    logprobs_and_gradients,
    loss_and_gradients,
    make,
    peak_bytes,
    per_token,
    reference_head,
    token_loss,
    upstream_of,
)
from tests.marks import grid
from tests.paths import DEVICE


@pytest.mark.usefixtures("cpu")
def test_loss_without_entropy_or_gradient():
    """A loss that ignores entropy, or is constant, or is only evaluated."""
    leaves, targets, _ = make(ONE_TILE[0], FP32)

    def negative(logprobs, entropy):
        return -logprobs

    def gradients(module, leaves, targets):
        return torch.autograd.grad(
            call(module.linear_token_loss, leaves, targets, negative).loss, leaves
        )

    compare(gradients, leaves, targets)
    ones = call(fused_rl.linear_token_loss, leaves, targets, lambda lp, h: torch.ones(len(lp)))
    assert ones.loss == 22
    assert all((g == 0).all() for g in torch.autograd.grad(ones.loss, leaves))
    loss = call(fused_rl.linear_token_loss, leaves, targets, negative).loss
    with torch.no_grad(), Work() as work:
        evaluated = call(fused_rl.linear_token_loss, leaves, targets, negative)
    assert evaluated.loss == loss
    assert work.flop == 2 * 22 * 16 * 131
    assert not any(output.requires_grad for output in evaluated)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    "workspace", [ONE_TILE, MORE_TOKENS, MORE_ROWS], ids=["one", "more tokens", "more rows"]
)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_work(workspace, dtype):
    """6 H FLOP per logit in one pass, 8 H with recomputing, of the rows that count, in the inputs' dtype."""
    (n, width, vocab), workspace_mb = workspace
    workspace_mb *= 0.4  # the rows that count are fewer, and would fit
    leaves, targets, mask = make((n, width, vocab), dtype)
    unit = 2 * int(mask.sum()) * width * vocab
    with Work() as work:
        logprobs_and_gradients(
            fused_rl, leaves, targets, upstream_of(targets), mask=mask, workspace_mb=workspace_mb
        )
    assert work.flop == 4 * unit
    assert work.dtypes == {dtype}
    with Work() as work:
        loss_and_gradients(fused_rl, leaves, targets, mask=mask, workspace_mb=workspace_mb)
    # a bf16 sum over several blocks of so few rows is what recomputing saves
    assert work.flop == (4 if dtype == BF16 and workspace is not ONE_TILE else 3) * unit


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("cut", [ONE_TILE, MORE_ROWS], ids=["one", "more rows"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_visitor_sees_each_logit_before_the_loss_of_its_token(dtype, cut):
    """In one pass, with the logits formed twice (bf16, more rows), and without gradients."""
    shape, workspace_mb = cut
    leaves, targets, mask = make(shape, dtype)
    logits = torch.addmm(leaves[2], leaves[0], leaves[1].t()).detach()
    advantages, weights = per_token(targets)
    seen = torch.zeros_like(logits)
    filled = torch.full_like(advantages, torch.nan)
    calls = []

    def visit(rows, tile):
        calls.append(rows)
        seen[rows] += tile
        filled[rows] = advantages[rows]

    def loss_of(advantages, **options):
        given = token_loss, advantages, weights
        options["workspace_mb"] = workspace_mb
        return call(fused_rl.linear_token_loss, leaves, targets, *given, **options)

    found, plain = loss_of(filled, visit=visit), loss_of(advantages)
    assert (len(calls) > 1) == (cut is MORE_ROWS)
    torch.testing.assert_close(seen, logits)
    pairs = [(found, plain)]
    # What a visitor holds, such as a tile, is free before the backward pass.
    alive = weakref.ref(visit)
    del visit
    assert alive() is None
    pairs.append([torch.autograd.grad(rows.loss, leaves) for rows in (found, plain)])
    for a, b in pairs:
        assert all(map(torch.equal, a, b))

    # Only the rows that count, and beside log-probabilities as well.
    def read(rows, tile):
        seen[rows] = tile

    options = {"mask": mask, "workspace_mb": workspace_mb, "visit": read}
    for op, given in (
        (fused_rl.linear_token_loss, (token_loss, advantages, weights)),
        (fused_rl.linear_token_logprobs, ()),
    ):
        seen.zero_()
        with torch.no_grad():
            call(op, leaves, targets, *given, **options)
        torch.testing.assert_close(seen[: mask.sum()], logits[mask])


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen(run, frozen):
    """What needs no gradient costs no product, and the other gradients stay the same."""
    leaves, targets, _ = make(MORE_TOKENS[0], FP32, DEVICE)
    args = [upstream_of(targets)] if run is logprobs_and_gradients else []
    options = {"workspace_mb": MORE_TOKENS[1]}
    complete = run(fused_rl, leaves, targets, *args, **options)
    which = ["hidden", "weight", "bias"].index(frozen)
    trained = [leaf for i, leaf in enumerate(leaves) if i != which]
    leaves[which].requires_grad_(False)
    with Work() as work:
        if args:
            outputs = call(fused_rl.linear_token_logprobs, leaves, targets, **options)
            grads = torch.autograd.grad(outputs, trained, *args)
        else:
            given = token_loss, *per_token(targets)
            loss = call(fused_rl.linear_token_loss, leaves, targets, *given, **options).loss
            grads = torch.autograd.grad(0.37 * loss, trained)
    expected = [g for i, g in enumerate(complete[-3:]) if i != which]
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())
    assert work.flop == (3 + len(args) - (frozen != "bias")) * 2 * 22 * 16 * 131


@pytest.mark.usefixtures("cpu")
# MiB of workspace, masked, the dtype of the logits
@grid(
    "run, dtype, budget",
    [logprobs_and_gradients, loss_and_gradients],
    [FP32, BF16],
    [(48, True, None), (32, False, FP32)],
)
def test_memory(run, dtype, budget):
    """Outputs, gradients, workspace + 10 %, where logits would take 40 or 80 MB."""
    workspace_mb, masked, logits_dtype = budget
    shape = (1024, 64, 20480)
    leaves, targets, mask = make(shape, dtype, bias=False)
    options = {"workspace_mb": workspace_mb, "logits_dtype": logits_dtype}
    options["mask"] = mask if masked else None
    args = [upstream_of(targets)] if run is logprobs_and_gradients else []
    # A compiled row function allocates while it is compiled.
    run(fused_rl, leaves, targets, *args, **options)
    most = peak_bytes(lambda: run(fused_rl, leaves, targets, *args, **options))
    gradients = sum(leaf.nbytes for leaf in leaves)
    assert most <= 1.1 * workspace_mb * 2**20 + gradients
    # It was counted.
    assert most >= 0.5 * min(workspace_mb * 2**20, shape[0] * shape[2] * leaves[0].element_size())


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


@pytest.mark.usefixtures("cpu")
def test_a_divergence_of_heads_that_are_frozen_or_empty():
    (shape, workspace_mb), ref = MORE_TOKENS, reference_head(MORE_TOKENS[0], FP32)
    (hidden, weight, bias), _, mask = make(shape, FP32)
    options = {"bias": bias, "workspace_mb": workspace_mb}
    # Policy, reference, both again, the hidden states' gradient; none of the weight's.
    with Work() as work:
        fused_rl.linear_token_kl(hidden, weight.detach(), **ref, **options).sum().backward()
    assert work.flop == 2 * 22 * 131 * (3 * 16 + 2 * 24)
    empty = torch.zeros_like(mask)
    none = fused_rl.linear_token_kl(hidden, weight, **ref, **options, mask=empty)
    assert (none == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(none.sum(), (hidden, weight, bias)))
    # the reference is a constant, whatever it requires: a teacher's head that nobody froze
    live = {name: x.clone().requires_grad_() for name, x in ref.items()}
    fused_rl.linear_token_kl(hidden, weight, **live, **options).sum().backward()
    assert all(x.grad is None for x in live.values())
    assert not fused_rl.linear_token_kl(hidden.detach(), weight.detach(), **live).requires_grad
