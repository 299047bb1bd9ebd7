"""linear_token_logprobs and linear_token_loss: values and every gradient, memory and work, autograd's corners."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fused_rl
from fused_rl import reference, tiles
from tests.distributed import run_distributed

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# (N, H, V) and workspace in MiB for each way to cut the logits; test_tiles checks that they are cut so.
ONE_TILE = ((22, 16, 131), 512)
MORE_TOKENS = ((22, 16, 131), 0.008)  # N < V: bf16 takes blocks of columns, the last one narrower
MORE_ROWS = ((70, 16, 37), 0.008)  # N > V: bf16 takes blocks of rows; fp32 always does
SINGLE_ROWS = ((14, 16, 131), 1e-5)  # less than a row of logits: one row, or sixteen columns
CUTS = {"one": ONE_TILE, "more tokens": MORE_TOKENS, "more rows": MORE_ROWS, "single": SINGLE_ROWS}


def make(shape, dtype, device="cpu", bias=True, leading=None, seed=0):
    """hidden, weight, bias, targets, mask of N rows: weights large enough that some rows are nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    n, width, vocab = shape
    hidden = torch.randn(n, width, generator=generator) * torch.linspace(0.1, 2, n)[:, None]
    weight = torch.randn(vocab, width, generator=generator)
    head = torch.randn(vocab, generator=generator)
    targets = torch.randint(vocab, (n,), generator=generator)
    mask = torch.rand(n, generator=generator) < 0.7
    mask[0], mask[-1] = True, False
    leaves = [t.to(device, dtype).requires_grad_() for t in ([hidden, weight, head] if bias else [hidden, weight])]
    return leaves, targets.to(device), mask.to(device)


def in_dtype(leaves, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in leaves]


def call(function, leaves, targets, *args, **options):
    return function(leaves[0], leaves[1], targets, *args, bias=leaves[2] if len(leaves) > 2 else None, **options)


def token_loss(logprobs, entropy, advantages, weights):
    """Clipped ratio and entropy bonus; weights (n, 2) to have a per-token tensor of more than one dimension."""
    ratio = (logprobs + 3).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.2, 4) * advantages)
    return weights[:, 0] * clipped - weights[:, 1] * entropy.square()


def per_token(targets, seed=1):
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(targets.shape, generator=generator)
    return [advantages.to(targets.device), torch.rand(*targets.shape, 2, generator=generator).to(targets.device)]


def logprobs_and_gradients(module, leaves, targets, upstream, **options):
    outputs = call(module.linear_token_logprobs, leaves, targets, **options)
    grads = torch.autograd.grad(outputs, leaves, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)])
    return [*outputs, *grads]


def loss_and_gradients(module, leaves, targets, factor=0.37, **options):
    values = [v.to(FP64 if leaves[0].dtype == FP64 else FP32) for v in per_token(targets)]
    loss, logprobs, entropy = call(module.linear_token_loss, leaves, targets, token_loss, *values, **options)
    if module is fused_rl:  # the error of a sum is luck: it is checked as the sum of what is checked below
        kept = torch.ones_like(targets, dtype=torch.bool) if options.get("mask") is None else options["mask"]
        terms = token_loss(logprobs[kept].double(), entropy[kept].double(), *(v[kept] for v in values))
        assert (loss.double() - terms.sum()).abs() <= 1e-6 * terms.abs().sum()
    return [logprobs, entropy, *torch.autograd.grad(loss * factor, leaves)]


def assert_as_good(results, exact, same_dtype, atol=0.0):
    """Error against fp64 at most twice that of the reference in the inputs' dtype plus two fp32 ulps of its largest."""
    for i, (result, truth, reference_result) in enumerate(zip(results, exact, same_dtype, strict=True)):
        assert result.isfinite().all()
        error = (result.double() - truth).abs().max()
        allowed = 2 * (reference_result.double() - truth).abs().max() + atol + 2**-22 * truth.abs().max()
        assert error <= allowed, f"result {i}: error {error:.2e}, allowed {allowed:.2e}"


def compare(run, leaves, targets, *args, atol=0.0, **options):
    """`run` on fused_rl against the reference in fp64 and in the inputs' dtype."""
    results = run(fused_rl, leaves, targets, *args, **options)
    options.pop("workspace_mb", None)
    exact = run(reference, in_dtype(leaves, FP64), targets, *args, **options)
    same = run(reference, in_dtype(leaves, leaves[0].dtype), targets, *args, **options)
    assert_as_good(results, exact, same, atol)
    return results


OPTIONS = {
    "plain": {},
    "no bias": {},
    "temperature": {"temperature": 0.6},
    "row temperature": {"temperature": "rows"},
    "softcap": {"softcap": 4.0},
    "all": {"temperature": "rows", "softcap": 4.0, "mask": True},
    "mask": {"mask": True},
}


def options_for(name, targets, mask):
    options = dict(OPTIONS[name])
    if options.get("temperature") == "rows":
        options["temperature"] = torch.linspace(0.5, 2, targets.numel(), device=targets.device).view(targets.shape)
    if "mask" in options:
        options["mask"] = mask
    return options


def upstream_of(targets, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(targets.shape, generator=generator).to(targets.device) for _ in range(3)]


def test_tiles():
    """The cases below cut the logits in the ways they claim."""

    def plan(case, dtype):
        (n, width, vocab), workspace_mb = case
        hidden = torch.empty(n, width, dtype=dtype)
        budget = tiles.budget(workspace_mb, hidden, copied=False)
        return tiles.forward_rows(hidden, vocab, budget), tiles.backward_tile(hidden, vocab, (True,) * 3, budget)

    assert plan(ONE_TILE, FP32) == plan(ONE_TILE, BF16) == (22, (22, 131))
    assert plan(MORE_TOKENS, FP32) == (8, (8, 131)) and plan(MORE_TOKENS, BF16) == (16, (22, 32))
    assert plan(MORE_ROWS, FP32) == (28, (28, 37)) and plan(MORE_ROWS, BF16) == (56, (14, 37))
    assert plan(SINGLE_ROWS, FP32) == (1, (1, 131)) and plan(SINGLE_ROWS, BF16) == (1, (14, 16))


@pytest.mark.parametrize("workspace", [ONE_TILE, MORE_TOKENS, MORE_ROWS], ids=["one", "more tokens", "more rows"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
def test_on_both_backends(backend, run, dtype, workspace):
    shape, workspace_mb = workspace
    leaves, targets, mask = make(shape, dtype, backend)
    upstream = [upstream_of(targets)] if run is logprobs_and_gradients else []
    compare(run, leaves, targets, *upstream, mask=mask, softcap=4.0, temperature=0.8, workspace_mb=workspace_mb)


@pytest.fixture
def cpu(monkeypatch):
    """The CPU path alone: what is tested lies above the row functions."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("workspace", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
def test_values_and_gradients(run, dtype, name, workspace):
    shape, workspace_mb = workspace
    leaves, targets, mask = make(shape, dtype, bias=name != "no bias")
    upstream = [upstream_of(targets)] if run is logprobs_and_gradients else []
    compare(run, leaves, targets, *upstream, **options_for(name, targets, mask), workspace_mb=workspace_mb)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=["logprobs", "entropy", "lse", "logprobs+lse"])
def test_gradient_of_some_outputs(used):
    """What is not used has no upstream gradient at all; sum() gives one of stride 0."""
    for shape, workspace_mb in (ONE_TILE, MORE_TOKENS):
        leaves, targets, _ = make(shape, FP32)

        def run(module, leaves, targets, **options):
            outputs = call(module.linear_token_logprobs, leaves, targets, **options)
            return torch.autograd.grad(sum(outputs[i].sum() for i in used), leaves)

        compare(run, leaves, targets, workspace_mb=workspace_mb)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_leading_dimensions(run, integers):
    """(B, T, H) with everything per token (B, T): the rows of the flat call."""
    leaves, targets, mask = make(MORE_TOKENS[0], FP32)
    temperature = torch.linspace(0.5, 2, 22)
    upstream = upstream_of(targets)
    args = [upstream] if run is logprobs_and_gradients else []
    flat = run(fused_rl, leaves, targets, *args, mask=mask, temperature=temperature, workspace_mb=MORE_TOKENS[1])
    folded = [leaves[0].detach().view(2, 11, 16).requires_grad_(), *leaves[1:]]
    args = [[u.view(2, 11) for u in upstream]] if args else []
    with pytest.MonkeyPatch.context() as patch:  # the same per-token values, folded
        original = per_token(targets)
        patch.setattr("tests.test_linear.per_token", lambda t: [original[0].view(2, 11), original[1].view(2, 11, 2)])
        results = run(
            fused_rl, folded, targets.view(2, 11).to(integers), *args,
            mask=mask.view(2, 11), temperature=temperature.view(2, 11), workspace_mb=MORE_TOKENS[1],
        )  # fmt: skip
    for a, b in zip(results, flat, strict=True):
        torch.testing.assert_close(a.reshape(b.shape), b, rtol=0, atol=0)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
def test_masked_rows_are_not_read(run):
    """NaN in a masked row of hidden and a target outside the vocabulary change nothing; its gradient is exactly 0."""
    leaves, targets, mask = make(MORE_TOKENS[0], FP32)
    args = [upstream_of(targets)] if run is logprobs_and_gradients else []
    clean = run(fused_rl, leaves, targets, *args, mask=mask, workspace_mb=MORE_TOKENS[1])
    spoilt = [leaves[0].detach().masked_fill(~mask[:, None], torch.nan).requires_grad_(), *leaves[1:]]
    results = run(fused_rl, spoilt, targets.where(mask, -100), *args, mask=mask, workspace_mb=MORE_TOKENS[1])
    for a, b in zip(results, clean, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (results[-3][~mask] == 0).all() and (results[1][~mask] == 0).all()


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("rows", [0, 9], ids=["empty", "all masked"])
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_nothing_counts(run, rows, dtype):
    """The graph stays whole and every gradient is zero: a rank without tokens still takes part in a reduction."""
    leaves, targets, mask = make((9, 16, 131), dtype)
    leaves = [leaves[0].detach()[:rows].requires_grad_(), *leaves[1:]]
    targets, mask = targets[:rows], torch.zeros(rows, dtype=torch.bool)
    args = [upstream_of(targets)] if run is logprobs_and_gradients else []
    for result in run(fused_rl, leaves, targets, *args, mask=mask, workspace_mb=1e-3):
        assert (result == 0).all()


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("workspace", [ONE_TILE, MORE_TOKENS], ids=["one", "more tokens"])
def test_banned_tokens(workspace):
    """A bias of -inf bans tokens, here whole blocks of columns; their gradients are 0, and the rest as without them."""
    shape, workspace_mb = workspace
    leaves, targets, _ = make(shape, FP32)
    banned = torch.arange(shape[2]) % 3 > 0
    banned[:64] = True
    targets = (~banned).nonzero()[targets % 20, 0]
    leaves[2] = leaves[2].detach().masked_fill(banned, -torch.inf).requires_grad_()
    results = compare(logprobs_and_gradients, leaves, targets, upstream_of(targets), workspace_mb=workspace_mb)
    assert (results[-2][banned] == 0).all() and (results[-1][banned] == 0).all()


# ------------------------------------------------------------------ one pass


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("workspace", [ONE_TILE, MORE_TOKENS, MORE_ROWS], ids=["one", "more tokens", "more rows"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_one_pass_equals_recompute(dtype, workspace):
    shape, workspace_mb = workspace
    leaves, targets, mask = make(shape, dtype)
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


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("run", ["logprobs", "loss"])
def test_retained_graph(run):
    """The second and third use give the first one's gradients, scaled by their own factor, and leave those alone."""
    leaves, targets, mask = make(MORE_TOKENS[0], FP32)
    options = {"mask": mask, "workspace_mb": MORE_TOKENS[1]}
    if run == "loss":
        total = call(fused_rl.linear_token_loss, leaves, targets, token_loss, *per_token(targets), **options).loss
    else:
        total = sum(o.square().sum() for o in call(fused_rl.linear_token_logprobs, leaves, targets, **options))
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    for factor in (2.0, 0.25):
        again = torch.autograd.grad(factor * total, leaves, retain_graph=True)
        for a, b, c in zip(again, first, kept, strict=True):
            torch.testing.assert_close(b, c, rtol=0, atol=0)
            torch.testing.assert_close(a, factor * c, rtol=1e-5, atol=1e-6 * factor * c.abs().max().item())
    total.backward(retain_graph=True)
    total.backward()  # accumulates into what the one before handed over
    for leaf, gradient in zip(leaves, kept, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * gradient, rtol=1e-5, atol=1e-6 * gradient.abs().max().item())


@pytest.mark.usefixtures("cpu")
def test_loss_without_entropy_or_gradient():
    """A loss that ignores entropy, or is constant, or is only evaluated."""
    leaves, targets, _ = make(ONE_TILE[0], FP32)
    loss = call(fused_rl.linear_token_loss, leaves, targets, lambda logprobs, entropy: -logprobs).loss
    exact = in_dtype(leaves, FP64)
    truth = -call(reference.linear_token_logprobs, exact, targets).logprobs.sum()
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=0)
    for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-6 * b.abs().max().item())
    constant = call(fused_rl.linear_token_loss, leaves, targets, lambda logprobs, entropy: torch.ones(len(logprobs)))
    assert constant.loss == 22
    assert all((g == 0).all() for g in torch.autograd.grad(constant.loss, leaves))
    with torch.no_grad(), Work() as work:
        evaluated = call(fused_rl.linear_token_loss, leaves, targets, lambda logprobs, entropy: -logprobs)
    assert evaluated.loss == loss and not evaluated.loss.requires_grad
    assert work.flop == 2 * 22 * 16 * 131
    assert not evaluated.logprobs.requires_grad and not evaluated.entropy.requires_grad


# ------------------------------------------------------------------ work and memory, counted


class Work(TorchDispatchMode):
    """FLOP of the matrix products that run inside."""

    flop = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = args[-2:]
            assert a.dtype == b.dtype
            self.flop += 2 * a.shape[0] * a.shape[1] * b.shape[1]
            self.dtypes = {*getattr(self, "dtypes", ()), a.dtype}
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("workspace", [ONE_TILE, MORE_TOKENS, MORE_ROWS], ids=["one", "more tokens", "more rows"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_work(workspace, dtype):
    """6 H FLOP per logit in one pass, 8 H with recomputing, of the rows that count, in the inputs' dtype."""
    (n, width, vocab), workspace_mb = workspace
    workspace_mb *= 0.4  # the rows that count are fewer, and would fit
    leaves, targets, mask = make((n, width, vocab), dtype)
    unit = 2 * int(mask.sum()) * width * vocab
    with Work() as work:
        logprobs_and_gradients(fused_rl, leaves, targets, upstream_of(targets), mask=mask, workspace_mb=workspace_mb)
    assert work.flop == 4 * unit and work.dtypes == {dtype}
    with Work() as work:
        loss_and_gradients(fused_rl, leaves, targets, mask=mask, workspace_mb=workspace_mb)
    # a bf16 sum over several blocks of so few rows is what recomputing saves
    assert work.flop == (4 if dtype == BF16 and workspace is not ONE_TILE else 3) * unit


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen(run, frozen):
    """What needs no gradient costs no product, and the other gradients stay the same."""
    leaves, targets, _ = make(MORE_TOKENS[0], FP32)
    args = [upstream_of(targets)] if run is logprobs_and_gradients else []
    complete = run(fused_rl, leaves, targets, *args, workspace_mb=MORE_TOKENS[1])
    which = ["hidden", "weight", "bias"].index(frozen)
    leaves[which].requires_grad_(False)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    with Work() as work:
        if run is logprobs_and_gradients:
            outputs = call(fused_rl.linear_token_logprobs, leaves, targets, workspace_mb=MORE_TOKENS[1])
            grads = torch.autograd.grad(outputs, trained, args[0])
        else:
            values = per_token(targets)
            loss = call(
                fused_rl.linear_token_loss, leaves, targets, token_loss, *values, workspace_mb=MORE_TOKENS[1]
            ).loss
            grads = torch.autograd.grad(0.37 * loss, trained)
    expected = [g for i, g in enumerate(complete[-3:]) if i != which]
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())
    products = (4 if run is logprobs_and_gradients else 3) - (frozen != "bias")
    assert work.flop == products * 2 * 22 * 16 * 131


def peak_bytes(run):
    """The most that `run` holds at once beyond the start, by every allocation of torch's; it returns what it keeps."""
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    del kept
    return most


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("workspace_mb", "masked"), [(32, False), (48, True)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
def test_memory(run, dtype, masked, workspace_mb):
    """Outputs, gradients, workspace + 10 %, where logits would take 40 or 80 MB."""
    shape = (1024, 64, 20480)
    leaves, targets, mask = make(shape, dtype, bias=False)
    options = {"workspace_mb": workspace_mb, "mask": mask if masked else None}
    args = [upstream_of(targets)] if run is logprobs_and_gradients else []
    run(fused_rl, leaves, targets, *args, **options)  # a compiled row function allocates while it is compiled
    most = peak_bytes(lambda: run(fused_rl, leaves, targets, *args, **options))
    gradients = sum(leaf.nbytes for leaf in leaves)
    assert most <= 1.1 * workspace_mb * 2**20 + gradients
    assert most >= 0.5 * min(workspace_mb * 2**20, shape[0] * shape[2] * leaves[0].element_size())  # it was counted


# ------------------------------------------------------------------ autograd's surroundings


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients])
@pytest.mark.parametrize("parameters", [FP32, BF16])
def test_autocast(run, parameters):
    """fp32 states and weights take bf16 products, as torch.nn.functional.linear does; gradients come back as fp32."""
    leaves, targets, mask = make(MORE_TOKENS[0], FP32)
    args = [upstream_of(targets)] if run is logprobs_and_gradients else []
    leaves = [leaves[0], *in_dtype(leaves[1:], parameters)]

    def under_autocast(module, leaves, targets, *args, **options):
        context = contextlib.nullcontext() if leaves[0].dtype == FP64 else torch.autocast("cpu", BF16)
        with context:
            return run(module, leaves, targets, *args, **options)

    with Work() as work:
        results = under_autocast(fused_rl, leaves, targets, *args, mask=mask, workspace_mb=MORE_TOKENS[1])
    assert work.dtypes == {BF16}
    assert [r.dtype for r in results[-3:]] == [leaf.dtype for leaf in leaves]
    exact = under_autocast(reference, in_dtype(leaves, FP64), targets, *args, mask=mask)
    same = under_autocast(reference, [x.detach().requires_grad_() for x in leaves], targets, *args, mask=mask)
    assert_as_good(results, exact, same)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("run", ["logprobs", "loss"])
def test_checkpoint(run, reentrant):
    """Gradient checkpointing around the op changes nothing, and what is below it gets its gradient."""
    leaves, targets, mask = make(MORE_TOKENS[0], FP32)
    options = {"mask": mask, "workspace_mb": MORE_TOKENS[1]}

    def block(hidden):
        inputs = [hidden.tanh(), *leaves[1:]]
        if run == "loss":
            return call(fused_rl.linear_token_loss, inputs, targets, token_loss, *per_token(targets), **options).loss
        logprobs, entropy, lse = call(fused_rl.linear_token_logprobs, inputs, targets, **options)
        return (logprobs * entropy).sum() + lse.square().sum()

    def gradients(function):
        for leaf in leaves:
            leaf.grad = None
        (3 * function(leaves[0])).backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(block)
    results = gradients(lambda hidden: checkpoint(block, hidden, use_reentrant=reentrant))
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7 * b.abs().max().item())


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("run", ["logprobs", "loss"])
def test_tied_weight(run):
    """The embedding is the head: one gradient, the sum of both uses."""
    (_, weight, bias), targets, mask = make(MORE_TOKENS[0], FP32)
    tokens = torch.arange(22) * 5

    def total(module, weight, bias, targets):
        hidden = torch.nn.functional.embedding(tokens, weight).tanh()
        if run == "loss":
            values = [v.to(weight.dtype) for v in per_token(targets)]
            return module.linear_token_loss(hidden, weight, targets, token_loss, *values, bias=bias, mask=mask).loss
        return sum((o.square()).sum() for o in module.linear_token_logprobs(hidden, weight, targets, bias=bias))

    def gradients(module, leaves, targets):
        return torch.autograd.grad(total(module, *leaves, targets), leaves)

    compare(gradients, [weight, bias], targets)


@pytest.mark.usefixtures("cpu")
def test_weight_that_is_not_contiguous():
    leaves, targets, _ = make(MORE_TOKENS[0], FP32)
    transposed = [leaves[0], leaves[1].detach().t().contiguous().t().requires_grad_(), leaves[2]]
    compare(logprobs_and_gradients, transposed, targets, upstream_of(targets), workspace_mb=MORE_TOKENS[1])
    strided = leaves[0].detach().repeat_interleave(2, 0)[::2].requires_grad_()
    compare(logprobs_and_gradients, [strided, *leaves[1:]], targets, upstream_of(targets), workspace_mb=MORE_TOKENS[1])


# ------------------------------------------------------------------ distillation


def reference_head(shape, dtype, device="cpu"):
    """A reference of another width whose distributions differ from the policy's by a little in some rows."""
    n, width, vocab = shape
    leaves, _, _ = make((n, width + 8, vocab), dtype, device, seed=5)
    ref_hidden, ref_weight, ref_bias = (x.detach() for x in leaves)
    return {"ref_hidden": ref_hidden, "ref_weight": ref_weight, "ref_bias": ref_bias}


def kl_and_gradients(module, leaves, targets, ref, **options):
    hidden, weight, bias = leaves
    ref = {name: x.to(hidden.dtype) for name, x in ref.items()}
    kl = module.linear_token_kl(hidden, weight, bias=bias, **ref, **options)
    return [kl, *torch.autograd.grad(kl, leaves, upstream_of(targets)[0].to(kl.dtype))]


@pytest.mark.parametrize("workspace", [ONE_TILE, MORE_TOKENS], ids=["one", "more tokens"])
@pytest.mark.parametrize("direction", ["reverse", "forward", "jensen-shannon"])
def test_kl_on_both_backends(backend, direction, workspace):
    shape, workspace_mb = workspace
    leaves, targets, mask = make(shape, BF16, backend)
    options = {"direction": direction, "mask": mask, "temperature": 0.8, "workspace_mb": workspace_mb}
    compare(kl_and_gradients, leaves, targets, reference_head(shape, BF16, backend), **options)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("workspace", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("direction", ["reverse", "forward", "jensen-shannon"])
def test_kl(direction, dtype, workspace):
    shape, workspace_mb = workspace
    leaves, targets, mask = make(shape, dtype)
    ref = reference_head(shape, dtype)
    temperature = torch.linspace(0.5, 2, shape[0])
    options = {"direction": direction, "temperature": temperature, "mask": mask}
    # logits of 20 are rounded by 1e-6, and a KL of 20 nats multiplies that: whose rounding is luckier is chance
    compare(
        kl_and_gradients,
        leaves,
        targets,
        ref,
        atol=1e-6 if direction == "jensen-shannon" else 1e-5,
        **options,
        workspace_mb=workspace_mb,
    )
    spoilt = ref | {"ref_hidden": ref["ref_hidden"].masked_fill(~mask[:, None], torch.nan)}
    clean, again = (kl_and_gradients(fused_rl, leaves, targets, r, **options) for r in (ref, spoilt))
    for a, b in zip(again, clean, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (clean[0][~mask] == 0).all() and (clean[1][~mask] == 0).all()


@pytest.mark.usefixtures("cpu")
def test_kl_retained_frozen_empty_and_errors():
    shape, workspace_mb = MORE_TOKENS
    leaves, targets, mask = make(shape, FP32)
    ref = reference_head(shape, FP32)
    options = {"bias": leaves[2], "workspace_mb": workspace_mb, **ref}
    kl = fused_rl.linear_token_kl(*leaves[:2], **options)
    assert torch.equal(
        *(torch.autograd.grad(kl.square().sum(), leaves[1], retain_graph=keep)[0] for keep in (True, False))
    )
    with Work() as work:  # policy, reference, both again, the hidden states' gradient; none of the weight's
        fused_rl.linear_token_kl(leaves[0], leaves[1].detach(), **ref, workspace_mb=workspace_mb).sum().backward()
    assert work.flop == 2 * 22 * 131 * (3 * 16 + 2 * 24)
    none = fused_rl.linear_token_kl(*leaves[:2], **options, mask=torch.zeros_like(mask))
    assert (none == 0).all() and all((g == 0).all() for g in torch.autograd.grad(none.sum(), leaves))
    # the reference is a constant, whatever it requires: a teacher's head that nobody froze
    live = {name: x.clone().requires_grad_() for name, x in ref.items()}
    trained = fused_rl.linear_token_kl(*leaves[:2], **(options | live))
    trained.sum().backward()
    assert torch.equal(trained, kl) and all(x.grad is None for x in live.values())
    assert not fused_rl.linear_token_kl(*(x.detach() for x in leaves[:2]), **live).requires_grad
    for changes, message in (
        ({"direction": "both"}, "direction must be one of"),
        ({"ref_hidden": ref["ref_hidden"][:21]}, "the same tokens and vocabulary"),
        ({n: x.detach().bfloat16() for n, x in ref.items()}, "one dtype and device"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_rl.linear_token_kl(*leaves[:2], **(options | changes))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_kl_memory(dtype):
    shape = (1024, 64, 20480)
    leaves, targets, _ = make(shape, dtype)
    ref = reference_head(shape, dtype)
    kl_and_gradients(fused_rl, leaves, targets, ref, workspace_mb=48)
    most = peak_bytes(lambda: kl_and_gradients(fused_rl, leaves, targets, ref, workspace_mb=48))
    assert 12 * 2**20 < most <= 1.1 * 48 * 2**20 + sum(leaf.nbytes for leaf in leaves)


# ------------------------------------------------------------------ sharded weights


class Policy(torch.nn.Module):
    """Embedding, one layer and the head, with both ops in the forward of the module that is sharded."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = torch.nn.Embedding(131, 16), torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 131, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, module, tokens, advantages):
        hidden = self.layer(self.embed(tokens[:, :-1])).tanh()
        options = {"bias": self.head.bias, "mask": tokens[:, 1:] % 3 > 0, "workspace_mb": MORE_TOKENS[1]}
        weights = torch.stack([advantages, advantages.square()], -1)
        args = hidden, self.head.weight, tokens[:, 1:]
        loss = module.linear_token_loss(*args, token_loss, advantages, weights, **options).loss
        logprobs, entropy, _ = module.linear_token_logprobs(*args, **options)
        return loss - (logprobs * advantages + 0.1 * entropy.square()).sum()


def batches(world):
    """Three micro-batches for each of `world` ranks, of different lengths."""
    generator = torch.Generator().manual_seed(3)
    lengths = [[12, 7, 9], [5, 12, 8]]
    return [
        [
            (torch.randint(131, (2, n + 1), generator=generator), torch.randn(2, n, generator=generator))
            for n in lengths[rank]
        ]
        for rank in range(world)
    ]


def plain_training(tied):
    """Two steps on the whole batch with the reference."""
    model = Policy(tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for batch in (b for rank in batches(2) for b in rank):
            (model(reference, *batch) / 50).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def zero_training(rank, world, cases):
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled for collectives in shared memory
    deepspeed.init_distributed("gloo")
    trained = []
    for stage, tied in cases:
        model = Policy(tied)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "managed_gradient_accumulation": False,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            },
        )
        assert stage < 3 or model.head.weight.numel() == 0  # else nothing is sharded, and nothing tested
        for _ in range(2):
            for batch in batches(world)[rank]:
                engine.backward(engine(fused_rl, *batch) / 50 * world)
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            trained.append({name: p.detach().clone().numpy() for name, p in model.named_parameters()})
    return trained


def fsdp_training(rank, world, cases):
    from torch.distributed.fsdp import fully_shard

    trained = []
    for head_alone, tied in cases:
        model = Policy(tied)
        if head_alone:  # its own group: inside the root's forward the weight is still a shard
            fully_shard(model.head)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            for batch in batches(world)[rank]:
                (model(fused_rl, *batch) / 50 * world).backward()
            optimizer.step()
        trained.append({name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()})
    return trained


def assert_trained_alike(results, cases):
    start = dict(Policy(False).named_parameters())
    for rank in results:
        for (_, tied), trained in zip(cases, rank, strict=True):
            expected = plain_training(tied)
            assert trained.keys() == expected.keys()
            for name, p in expected.items():
                assert (p - start[name]).abs().max() > 1e-2
                torch.testing.assert_close(torch.from_numpy(trained[name]), p, rtol=0, atol=3e-6, msg=name)


@pytest.mark.usefixtures("cpu")
def test_deepspeed_zero():
    """ZeRO 0 to 3 over two processes train as one process does on the whole batch, loss scaled after the op."""
    cases = [(0, False), (1, False), (2, False), (3, False), (3, True)]
    assert_trained_alike(run_distributed(zero_training, 2, cases), cases)


@pytest.mark.usefixtures("cpu")
def test_fsdp():
    """FSDP2 over two processes, the head in the root's group and in one of its own."""
    cases = [(False, False), (True, False), (False, True)]
    assert_trained_alike(run_distributed(fsdp_training, 2, cases), cases)


# ------------------------------------------------------------------ errors


BAD = {
    "weight of another width": ({"weight": torch.zeros(131, 15)}, "hidden must be .* got .*22, 16.* and .*131, 15"),
    "weight transposed": ({"weight": torch.zeros(16, 131)}, "weight .V, H."),
    "targets of another shape": ({"targets": torch.zeros(21, dtype=torch.long)}, "targets must have the shape"),
    "targets not integer": ({"targets": torch.zeros(22)}, "targets must be an integer tensor .* got torch.float32"),
    "target too large": (
        {"targets": torch.arange(22) * 10},
        r"logits\[14\] is 140, outside .* 131",
    ),
    "target negative": ({"targets": torch.arange(22) - 1}, r"target of logits\[0\] is -1"),
    "bias of another length": ({"bias": torch.zeros(130)}, "bias must be .V,. = .131,., got .130,."),
    "mixed dtypes": ({"weight": torch.zeros(131, 16, dtype=BF16)}, "one dtype.*torch.float32, torch.bfloat16"),
    "fp64": ({"hidden": torch.zeros(22, 16).double(), "weight": torch.zeros(131, 16).double()}, "float32, bfloat16"),
    "mask not bool": ({"mask": torch.ones(22)}, "mask must be a bool tensor"),
    "mask of another shape": (
        {"mask": torch.ones(11, dtype=torch.bool)},
        "mask must have .* .22,., got .11,.",
    ),
    "temperature zero": ({"temperature": 0.0}, r"temperature must be a number from 1e-06 to 1e\+06 .*, got 0.0"),
    "temperature of another shape": ({"temperature": torch.ones(21)}, "temperature must be a number or broadcastable"),
    "temperature of a row negative": ({"temperature": torch.arange(22) - 1.0}, r"got -1.0 for\s+logits\[0\]"),
    "softcap negative": ({"softcap": -1.0}, "softcap must be a finite number > 0"),
    "no workspace": ({"workspace_mb": 0}, "workspace_mb must be a finite number > 0"),
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
