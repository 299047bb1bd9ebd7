"""token_logprobs of several targets per row: from logits, from hidden states, over split vocabularies."""

import itertools
import os

import pytest
import torch

import fused_rl
from bench import traffic
from bench.compiled import interpreter
from fused_rl import linear_token_logprobs, linear_token_loss, reference, token_logprobs, topk_kl
from fused_rl.kernels import targets as kernels
from tests.distributed import run_distributed
from tests.heads import CUTS, assert_as_good, in_dtype
from tests.heads import make as make_head
from tests.logits import FLOATS, OUTPUTS, VIEWS, assert_gradient_close, exact, run
from tests.marks import cpu_fast, on_backends, slow

# none; one; several; more than a block of the kernel
COUNTS = [0, 1, 5, 150]


def random_rows(n, vocab, count, dtype, device, seed=0):
    """Logits, and ids with repetitions: the first row holds one id, the second the likeliest among others."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(n, vocab, generator=generator)).to(device, dtype)
    targets = torch.randint(vocab, (n, count), generator=generator).to(device)
    targets[0] = vocab // 2
    targets[1, count // 2 :] = logits[1].argmax()
    return logits, targets


def upstream_of(targets, names=OUTPUTS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"logprobs": targets.shape, "entropy": targets.shape[:-1], "lse": targets.shape[:-1]}
    return {name: torch.randn(shapes[name], generator=generator).to(targets.device) for name in names}


def assert_outputs_close(actual, expected):
    """As of one target per row, each log-probability by its own size."""
    lse = expected.lse.abs().clamp(min=1)
    allowed = [
        1e-6 * lse[..., None].maximum(expected.logprobs.abs()),
        2e-6 * expected.entropy,
        1e-6 * lse,
    ]
    for a, e, most in zip(actual, expected, allowed, strict=True):
        assert ((a == e) | ((a.double() - e).abs() <= most)).all()


def check(logits, targets, upstream, **options):
    outputs, gradient = run(token_logprobs, logits, targets, upstream, **options)
    wide = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in options.items()
    }
    expected, expected_gradient = exact(logits, targets, upstream, **wide)
    _, naive = run(reference.token_logprobs, logits, targets, upstream, **options)
    assert_outputs_close(outputs, expected)
    assert_gradient_close(gradient, expected_gradient, naive)
    return outputs, gradient


@on_backends("dtype, count", FLOATS, COUNTS, most=2)
def test_values_and_every_gradient(backend, dtype, count):
    logits, targets = random_rows(4, 1000, count, dtype, backend)
    every = [itertools.combinations(OUTPUTS, n) for n in (1, 2, 3)]
    for names in itertools.chain(*every) if count == 5 else (OUTPUTS, OUTPUTS[:1]):
        check(logits, targets, upstream_of(targets, names))


@on_backends("vocab", [300, 1, 7], most=0)
def test_every_id_in_any_order(backend, vocab):
    """K = V: what all probabilities sum to, and their gradient."""
    logits, _ = random_rows(3, vocab, 1, torch.float32, backend)
    targets = torch.stack([torch.randperm(vocab) for _ in range(3)]).to(backend)
    outputs, _ = check(logits, targets, upstream_of(targets))
    assert (outputs.logprobs.double().exp().sum(-1) - 1).abs().max() < 1e-6


OPTIONS = {
    "temperature": {"temperature": 0.7},
    "per row, soft cap": {"temperature": torch.tensor([0.5, 1.0, 2.0, 0.9]), "softcap": 5.0},
    "mask": {"mask": torch.tensor([True, False, True, True])},
}


@on_backends("dtype, options", [torch.float32, torch.bfloat16], OPTIONS, most=0)
def test_options(backend, dtype, options):
    logits, targets = random_rows(4, 900, 6, dtype, backend)
    options = {name: x.to(backend) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    check(logits, targets, upstream_of(targets), **options)


@cpu_fast
def test_one_target_in_two_shapes_has_the_same_bits(backend):
    """On the kernels; the CPU path rounds one sum to fp32 in between, which may show in the last bit."""
    logits, targets = random_rows(6, 1100, 1, torch.float32, backend)
    upstream = upstream_of(targets)
    outputs, gradient = run(token_logprobs, logits, targets, upstream)
    flat = upstream | {"logprobs": upstream["logprobs"][:, 0]}
    single, single_gradient = run(token_logprobs, logits, targets[:, 0], flat)
    ulp = 0 if backend == "cuda" or os.environ["TRITON_INTERPRET"] == "1" else 2**-23
    torch.testing.assert_close(outputs.logprobs[:, 0], single.logprobs, rtol=ulp, atol=0)
    assert torch.equal(outputs.entropy, single.entropy)
    assert torch.equal(outputs.lse, single.lse)
    assert torch.equal(gradient, single_gradient)


@cpu_fast
def test_an_id_that_comes_again_adds_up_in_one_order(backend):
    """The same bits each time, and those of the sum, for terms of very different sizes."""
    logits, _ = random_rows(2, 400, 1, torch.float32, backend)
    targets = torch.tensor([[7, 3, 7, 9, 7, 7, 3]] * 2, device=backend)
    upstream = upstream_of(targets, ["logprobs"])
    upstream["logprobs"][:, 2] = 1e5
    upstream["logprobs"][:, 4] = -1e5
    _, gradient = check(logits, targets, upstream)
    _, again = run(token_logprobs, logits, targets, upstream)
    assert torch.equal(gradient, again)
    d = upstream["logprobs"].double()
    sums = [d[:, [0, 2, 4, 5]].sum(1), d[:, [1, 6]].sum(1), d[:, 3]]
    summed = {"logprobs": torch.stack(sums, 1).float()}
    _, distinct = run(token_logprobs, logits, targets[:, [0, 1, 3]], summed)
    torch.testing.assert_close(gradient, distinct, rtol=1e-5, atol=1e-6)


def test_thousands_of_equal_ids(backend):
    """The walk over equal ids crosses the kernel's blocks."""
    logits, _ = random_rows(2, 50, 1, torch.float32, backend)
    targets = torch.full((2, 3 * kernels.BLOCK + 5), 4, device=backend)
    targets[1, ::7] = 11
    check(logits, targets, upstream_of(targets, ["logprobs"]))


@cpu_fast
def test_gradient_keeps_its_digits_next_to_certainty(backend):
    """The others' share of the upstream gradient is not lost beside that of a token with nearly all the mass."""
    logits = torch.randn(24, 2000, generator=torch.Generator().manual_seed(0)).to(backend)
    logits[:, 77] = 4 + torch.arange(5, 35, 5, device=backend).repeat(4)  # 1 - p of the token down to 1e-12
    targets = torch.tensor([5, 77, 900, 1500], device=backend).expand(24, 4)
    upstream = upstream_of(targets, ["logprobs"])
    upstream["logprobs"].abs_()[:, [0, 2, 3]] *= -1e-12
    _, gradient = run(token_logprobs, logits, targets, upstream)
    _, expected = exact(logits, targets, upstream)
    # where autograd's own sum over the targets cancels in fp64
    d = upstream["logprobs"].double()
    s = logits.double() - logits[:, 77:78].double()
    rest = s.exp().index_fill(1, torch.tensor(77, device=backend), 0).sum(1)
    expected[:, 77] = (d[:, 1] * rest - d[:, [0, 2, 3]].sum(1)) / (1 + rest)
    torch.testing.assert_close(gradient.double(), expected, rtol=5e-6, atol=0)


def test_targets_that_tie_at_the_maximum(backend):
    """Each is the other's other: of [3, 3] and both as targets nothing remains; one that comes again counts twice."""
    logits = torch.tensor([[3.0, 3.0, 0.0], [3.0, 3.0, -torch.inf]], device=backend)
    targets = torch.tensor([[0, 1, 1], [0, 1, 1]], device=backend)
    upstream = {"logprobs": torch.tensor([[1.0, 0.25, 0.75], [1.0, 0.25, 0.75]], device=backend)}
    for dtype in FLOATS:
        _, gradient = check(logits.to(dtype), targets, upstream)
        assert gradient[1].abs().max() <= 1e-7


@cpu_fast
def test_banned_tokens_and_rows(backend):
    logits, targets = random_rows(4, 900, 5, torch.float32, backend)
    logits[0, targets[0, 1]] = -torch.inf
    logits[1] = -torch.inf
    logits[2, ::2] = -torch.inf
    outputs, gradient = check(logits, targets, upstream_of(targets))
    assert (outputs.logprobs[:2] == -torch.inf).all()
    assert outputs.entropy[1] == 0
    assert (gradient[1] == 0).all()


@on_backends("bad", [torch.nan, torch.inf], most=0)
def test_nan_shows_in_its_row_unless_masked(backend, bad):
    logits, targets = random_rows(3, 1100, 4, torch.float32, backend)
    clean, clean_gradient = run(token_logprobs, logits, targets, upstream_of(targets))
    logits[1, 600] = bad
    for before, after in zip(clean, token_logprobs(logits, targets), strict=True):
        assert after[1].isnan().all()
        assert torch.equal(after[::2], before[::2])
    mask = torch.tensor([True, False, True], device=backend)
    targets[1] = -100
    outputs, gradient = run(token_logprobs, logits, targets, upstream_of(targets), mask=mask)
    for before, after in zip(clean, outputs, strict=True):
        assert not after[1].any()
        assert torch.equal(after[mask], before[mask])
    assert not gradient[1].any()
    assert torch.equal(gradient[mask], clean_gradient[mask])


@on_backends("view", [name for name in VIEWS if name not in ("columns apart", "contiguous")], most=0)
def test_bits_of_a_row_depend_on_the_row_alone(backend, view):
    logits, targets = random_rows(8, 601, 5, torch.bfloat16, backend)
    logits, targets = logits.view(2, 4, -1), targets.view(2, 4, 5)[:, :3]
    upstream = upstream_of(targets)
    outputs, gradient = run(token_logprobs, VIEWS["contiguous"](logits), targets, upstream)
    again, gradient_again = run(token_logprobs, VIEWS[view](logits), targets, upstream)
    assert all(map(torch.equal, outputs, again))
    assert torch.equal(gradient, gradient_again)
    alone, _ = run(token_logprobs, logits[1, 2], targets[1, 2], {name: g[1, 2] for name, g in upstream.items()})
    assert all(torch.equal(a, o[1, 2]) for a, o in zip(alone, outputs, strict=True))


@on_backends("inplace", [True, False], most=0)
def test_shift_and_gradient_in_place(backend, inplace):
    logits, targets = random_rows(12, 130, 4, torch.float32, backend)
    logits, targets = logits.view(3, 4, -1), targets.view(3, 4, 4)
    upstream = upstream_of(targets[:, 1:])
    mask = torch.arange(9, device=backend).view(3, 3) % 4 != 0
    outputs, gradient = run(
        lambda x, y: token_logprobs(x * 1, y, shift=True, inplace=inplace, mask=mask),
        logits,
        targets,
        upstream,
    )
    expected, sliced = run(token_logprobs, logits[:, :-1], targets[:, 1:], upstream, mask=mask)
    assert all(map(torch.equal, outputs, expected))
    assert torch.equal(gradient[:, :-1], sliced)
    assert not gradient[:, -1].any()


def test_nothing_to_score(backend):
    for shape in ((0,), (2, 0), (0, 3)):
        logits = torch.randn(*shape, 9, device=backend, requires_grad=True)
        outputs = token_logprobs(logits, torch.zeros(*shape, 4, dtype=torch.long, device=backend))
        assert outputs.logprobs.shape == (*shape, 4)
        assert outputs.entropy.shape == shape
        sum(o.sum() for o in outputs).backward()
        assert logits.grad.shape == logits.shape


@cpu_fast
def test_outputs_may_be_modified_in_place(backend):
    logits, targets = random_rows(3, 90, 4, torch.float32, backend)
    upstream = upstream_of(targets)
    _, expected = run(token_logprobs, logits, targets, upstream)
    x = logits.clone().requires_grad_()
    outputs = token_logprobs(x, targets)
    for output in outputs:
        output.mul_(2)
    sum((getattr(outputs, name) * g / 2).sum() for name, g in upstream.items()).backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-6, atol=1e-7)


def test_fp64_and_its_reference_by_finite_differences():
    logits, targets = random_rows(6, 11, 4, torch.float64, "cpu")
    logits = logits.view(2, 3, 11).requires_grad_()
    targets = targets.view(2, 3, 4)
    options = {"mask": torch.rand(2, 2) > 0.3, "temperature": 0.7, "softcap": 4.0, "shift": True}
    assert torch.autograd.gradcheck(lambda x: tuple(reference.token_logprobs(x, targets, **options)), logits)
    outputs = token_logprobs(logits, targets, **options)
    assert outputs.logprobs.dtype == torch.float64
    assert outputs.logprobs.shape == (2, 2, 4)


@cpu_fast
def test_operators_pass_opcheck(backend):
    logits, targets = random_rows(2, 40, 3, torch.float32, backend)
    logits.requires_grad_()
    mask = targets[..., 0] > 20
    per_row = 0.5 + torch.rand(2, device=backend)
    forward = torch.ops.fused_rl.token_logprobs.default
    torch.library.opcheck(forward, (logits, targets, mask, 1.0, per_row, 3.0))
    logprobs, entropy, lse, m, rest, _ = (o.detach() for o in forward(logits, targets, None, 0.7, None, None))
    arguments = (logprobs, None, lse, logits.detach(), targets, None, entropy, m, rest, 0.7, None, None)
    torch.library.opcheck(torch.ops.fused_rl.token_logprobs_backward.default, arguments)


@cpu_fast
def test_one_graph(backend):
    def loss(logits, targets, ref_logprobs):
        logprobs = token_logprobs(logits, targets).logprobs
        return topk_kl(logprobs, ref_logprobs, direction="forward").sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    logits, targets = random_rows(4, 64, 3, torch.float32, backend)
    targets = torch.arange(3, device=backend).expand(4, 3)
    ref = torch.log_softmax(logits.flip(0), -1)[:, :3]
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(logits, targets, ref), logits)
    (expected,) = torch.autograd.grad(loss(logits, targets, ref), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


X, Y = torch.zeros(2, 3, 8), torch.zeros(2, 3, 4, dtype=torch.long)
BAD = {
    "other rows": (X, Y[:, 1:], {}, r"\(\.\.\., K\) must begin with .* \(2, 3\), got \(2, 2, 4\)"),
    "two more dimensions": (X, Y[..., None], {}, r"\(2, 3\), got \(2, 3, 4, 1\)"),
    "outside": (
        X,
        Y.clone().index_put_((torch.tensor(1), torch.tensor(2), torch.tensor(3)), torch.tensor(8)),
        {},
        r"target 3 of logits\[1, 2\] is 8, outside the vocabulary of 8 \(0 to 7\); 1 of 24 targets",
    ),
    "ignore index": (
        X,
        Y - 100,
        {"mask": torch.arange(6).view(2, 3) > 4},
        r"target 0 of logits\[1, 2\] is -100",
    ),
    "fp64": (X.double(), Y + 8, {}, r"target 0 of logits\[0, 0\] is 8"),
    "mask of targets": (X, Y, {"mask": Y == 0}, r"outputs, \(2, 3\), got \(2, 3, 4\)"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_targets(backend, case):
    logits, targets, options, message = case
    if backend != "cpu":
        pytest.skip("these are CPU tensors")
    with pytest.raises(ValueError, match=message):
        token_logprobs(logits, targets, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the kernels run interpreted")
def test_the_kernels_give_a_target_outside_the_vocabulary_nan_and_no_gradient(monkeypatch):
    """As for one target: what a GPU does, where values are not looked at."""
    monkeypatch.setattr("fused_rl.logprobs.values_are_checked", lambda device: False)
    logits, targets = random_rows(3, 90, 4, torch.float32, "cpu")
    targets[2] = torch.tensor([3, -100, 90, 2**40])
    upstream = upstream_of(targets)
    with interpreter.check_memory():
        outputs, gradient = run(token_logprobs, logits, targets, upstream)
    assert outputs.logprobs.isnan().nonzero().tolist() == [[2, 1], [2, 2], [2, 3]]
    assert gradient.isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are counted in Triton's interpreter")
@pytest.mark.parametrize("inplace", [True, slow(False)])
def test_one_read_forward_one_read_and_one_write_backward(inplace):
    """And about a hundred bytes per target: ids, their order, log-probabilities and gradients."""
    shape, count = (1, 2, 50257), 32
    logits, _ = traffic.inputs(shape)
    targets = torch.randint(shape[-1], (*shape[:2], count))
    counts = traffic.count(lambda x: token_logprobs(x, targets, inplace=inplace), logits)
    slack = 2e-3 + 120 * count / (2 * shape[-1])
    assert 1 <= sum(counts["forward"]) <= 1 + slack
    assert 2 <= sum(counts["backward"]) <= 2 + slack


# Every cut on the CPU path; on the kernels, which are interpreted, those that give each kind of tile.
CUT_CASES = [*itertools.product(["cpu"], CUTS, (torch.float32, torch.bfloat16))]
CUT_CASES += [slow("kernel", "more tokens", torch.bfloat16), slow("kernel", "one", torch.float32)]


@pytest.fixture
def device(request, monkeypatch):
    """Of a case in `CUT_CASES`."""
    path = request.node.callspec.params["path"]
    if path == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    return "cuda" if path == "kernel" and torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("path", "cut", "dtype"), CUT_CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_from_hidden_states(device, path, dtype, cut, masked):
    shape, workspace = CUTS[cut]
    leaves, _, mask = make_head(shape, dtype, device)
    options = {"mask": mask} if masked else {"temperature": 0.7, "softcap": 20.0}
    targets = torch.randint(shape[2], (shape[0], 5), generator=torch.Generator().manual_seed(3)).to(device)
    targets[3] = targets[3, 0]
    upstream = list(upstream_of(targets).values())

    def results(module, leaves, **more):
        hidden, weight, bias = leaves
        outputs = module.linear_token_logprobs(hidden, weight, targets, bias=bias, **options, **more)
        grads = torch.autograd.grad(outputs, leaves, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)])
        return [*outputs, *grads]

    exact_results = results(reference, in_dtype(leaves, torch.float64))
    same_dtype = results(reference, in_dtype(leaves, dtype))
    assert_as_good(results(fused_rl, leaves, workspace_mb=workspace), exact_results, same_dtype)


@pytest.mark.parametrize(("path", "cut", "dtype"), CUT_CASES)
def test_a_loss_of_several_targets_in_one_pass(device, path, dtype, cut):
    """Distillation: its gradient formed in the forward pass, again from a retained graph, and as the recomputed one."""
    shape, workspace = CUTS[cut]
    leaves, _, mask = make_head(shape, dtype, device)
    ids = torch.stack([torch.randperm(shape[2])[:4] for _ in range(shape[0])]).to(device)
    ref = torch.log_softmax(torch.randn(shape[0], 9), -1)[:, :4].to(device)
    options = {"bias": leaves[2], "mask": mask, "workspace_mb": workspace}

    def token_loss(logprobs, entropy, ref_logprobs):
        return topk_kl(logprobs, ref_logprobs, direction="forward") - 0.1 * entropy

    one = linear_token_loss(leaves[0], leaves[1], ids, token_loss, ref, **options)
    first, second = (torch.autograd.grad(one.loss * 0.5, leaves, retain_graph=True) for _ in range(2))
    outputs = linear_token_logprobs(leaves[0], leaves[1], ids, **options)
    loss = 0.5 * token_loss(outputs.logprobs[mask], outputs.entropy[mask], ref[mask]).sum()
    assert one.logprobs.shape == ids.shape
    assert one.entropy.shape == mask.shape
    assert torch.equal(one.logprobs, outputs.logprobs)
    digits = 2e-5 if dtype == torch.float32 else 2e-2
    for a, b, expected in zip(first, second, torch.autograd.grad(loss, leaves), strict=True):
        for gradient in (a, b):
            assert (gradient - expected).abs().max() <= digits * expected.abs().max()


def sharded(rank, world, interpret):
    """Logprobs of K targets over columns split between the ranks."""
    os.environ["TRITON_INTERPRET"] = interpret
    edges = [0, 450, 900, 1300][: world + 1]
    edges[-1] = 1300
    logits, targets = random_rows(6, 1300, 7, torch.float32, "cpu")
    logits, targets = logits.view(2, 3, -1), targets.view(2, 3, 7)
    options = {
        "mask": torch.arange(6).view(2, 3) != 4,
        "temperature": torch.linspace(0.5, 2, 6).view(2, 3),
    }
    columns = slice(edges[rank], edges[rank + 1])

    def local(x, y, **more):
        return fused_rl.vocab_parallel_token_logprobs(x, y, columns.start, **more)

    for names in (OUTPUTS, OUTPUTS[:1]):
        upstream = upstream_of(targets, names)
        outputs, gradient = run(local, logits[..., columns], targets, upstream, **options)
        wide = options | {"temperature": options["temperature"].double()}
        expected, expected_gradient = exact(logits, targets, upstream, **wide)
        _, naive = run(reference.token_logprobs, logits, targets, upstream, **options)
        assert_outputs_close(outputs, expected)
        assert_gradient_close(gradient, expected_gradient[..., columns], naive[..., columns])
    with pytest.raises(ValueError, match="target 1300 of row 0 is in the columns of 0 ranks"):
        local(logits[..., columns], torch.full_like(targets, 1300))
    return True


@pytest.mark.parametrize(("world", "interpret"), [slow(2, "0"), slow(2, "1"), slow(3, "0")])
def test_over_split_vocabularies(world, interpret):
    assert run_distributed(sharded, world, interpret) == [True] * world
