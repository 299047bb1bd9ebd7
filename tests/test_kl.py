"""Exact KL and Jensen-Shannon of two logits tensors: values, every gradient, and what no value may ever be."""

import contextlib

import pytest
import torch

import fused_rl
from fused_rl import reference
from tests.marks import cpu_fast, on_backends, slow
from tests.pairs import DIRECTIONS, both_gradients, exact, pair
from tests.tools import interpreter

pytestmark = pytest.mark.usefixtures("seeded")


# KL from 5e-5 to 5e-11 nats; smooth, and nearly all mass on one token
@on_backends("direction, distance, spread", DIRECTIONS, [1e-5, 1e-3], [3.0, 30.0], most=1)
def test_close_distributions_keep_their_relative_precision(backend, spread, distance, direction):
    x, y = pair(4, 5000, spread=spread, distance=distance, device=backend)
    got = fused_rl.token_kl(x, y, direction=direction)
    want = exact(x, y, direction)
    # below 1e-13 (two dominant tokens tens of nats apart) a few terms of the reference itself underflow in fp32
    torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-18)


@on_backends("direction, offset", DIRECTIONS, [1000.0, -1000.0], most=1)
def test_an_offset_of_one_row_costs_nothing(backend, offset, direction):
    """Against fp64 of the same rounded logits, where x - y in fp32 would be off by 6e-5."""
    x, y = pair(4, 5000, distance=1e-2, device=backend)
    x = x + offset
    x[1, :40], y[2, :4500] = -torch.inf, torch.nan  # also where the first columns are banned
    x, y = x.masked_fill(y.isnan(), -torch.inf), y.masked_fill(x.isinf() | y.isnan(), -torch.inf)
    got = fused_rl.token_kl(x, y, direction=direction)
    torch.testing.assert_close(got.double(), exact(x, y, direction), rtol=3e-6, atol=0)


@on_backends("direction, drop", DIRECTIONS, [6.0, 12.0, 20.0], most=2)
def test_a_mean_that_falls_keeps_what_q_has(backend, direction, drop):
    """Of the first columns P has little and Q much in one of them; then comes all of P, and the mean of x - y falls."""
    p = torch.zeros(1, 5000, device=backend)
    q = torch.zeros(1, 5000, device=backend)
    p[:, :2048], q[:, :2048] = -8, -8 - drop
    q[:, 77] = 10
    first, second = (p, q) if direction == "reverse" else (q, p)
    got = fused_rl.token_kl(first, second, direction=direction)
    torch.testing.assert_close(got.double(), exact(first, second, direction), rtol=1e-6, atol=0)


@on_backends("direction, offset", DIRECTIONS, [0.0, 64.0, -1024.0], most=1)
def test_equal_rows_are_exactly_zero(backend, offset, direction):
    """Also where the rows differ by a constant that their fp32 values hold exactly."""
    x = torch.randint(-64, 64, (5, 3001), device=backend) / 8.0
    x[1, ::7] = -torch.inf
    x[2, 1:] = -torch.inf
    x = x.requires_grad_()
    value = fused_rl.token_kl(x, (x.detach() + offset).requires_grad_(), direction=direction)
    assert (value == 0).all()
    (dx,) = torch.autograd.grad(value.sum(), x)  # a stride-0 upstream gradient
    assert (dx == 0).all()


@cpu_fast
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_shows_unless_masked(backend, bad):
    x, y = pair(4, 1300, device=backend)
    x[1, 1222], y[2, 1222] = bad, bad
    mask = torch.tensor([True, True, False, True], device=backend)
    for direction in DIRECTIONS:
        value, dx, dy = both_gradients(
            fused_rl.token_kl, x, y, torch.ones(4, device=backend), direction=direction, mask=mask
        )
        assert value.isnan().tolist() == [False, True, False, False]
        assert (dx[2] == 0).all()
        assert (dy[2] == 0).all()
        assert value[2] == 0
        assert torch.isfinite(dx[[0, 3]]).all()
        assert torch.isfinite(dy[[0, 3]]).all()


# neighbouring columns in neighbouring threads, or in one
# and whole tiles of both dtypes with a few columns, fewer than a load may be ahead
@on_backends("dtype, vocab", [torch.bfloat16, torch.float32], [5001, 5008, 4099], most=3)
def test_rows_have_the_same_bits_at_any_alignment(backend, dtype, vocab):
    """Both rows at 0, 1 and 5 elements from a 16-byte boundary, and at different ones; with a banned column, too."""
    x, y = pair(2, vocab, dtype=dtype, device=backend)
    x[1, 700] = -torch.inf
    want = fused_rl.token_kl(x, y)
    for at in ((0, 1), (1, 1), (5, 5), (5, 0)):
        shifted = [
            torch.cat([z.new_zeros(2, a), z], 1)[:, a:] for a, z in zip(at, (x, y), strict=True)
        ]
        with contextlib.nullcontext() if torch.cuda.is_available() else interpreter.check_memory():
            assert torch.equal(fused_rl.token_kl(*shifted), want), at


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device decides by its own count")
# segments of 4096 columns in place of 32768; the kernels' own
@pytest.mark.parametrize(
    ("direction", "segment"),
    [("reverse", 1), ("jensen-shannon", 1), *(slow(direction, 8) for direction in DIRECTIONS)],
)
def test_a_row_in_several_programs_has_the_bits_of_one(direction, segment, monkeypatch):
    """Three segments: one of fast sums, one with a banned column and a rival hundreds of nats up, an end."""
    kernels = [pytest.importorskip(f"fused_rl.kernels.{name}") for name in ("kl", "kl_gradient")]
    from fused_rl.kernels import jensen_shannon, launch

    monkeypatch.setattr(kernels[0], "SEGMENT", segment)
    monkeypatch.setattr(kernels[0], "SHORT", 0)
    monkeypatch.setattr(jensen_shannon, "SEGMENT", 4 * segment)
    x, y = pair(2, 2 * 4096 * segment + 77, dtype=torch.bfloat16)
    x[:, 5000 * segment], y[:, 5000 * segment] = -torch.inf, -torch.inf
    x[1, 6250 * segment], y[1, 7500 * segment] = 300.0, 250.0
    upstream = torch.randn(2)
    options = {"direction": direction, "temperature": torch.tensor([0.8, 1.3])}
    one = both_gradients(fused_rl.token_kl, x, y, upstream, **options)
    for module in (launch, kernels[1]):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 100)
    with interpreter.check_memory():
        many = both_gradients(fused_rl.token_kl, x, y, upstream, **options)
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
    want = both_gradients(reference.token_kl, x.double(), y.double(), upstream, **options)
    torch.testing.assert_close(one[0].double(), want[0], rtol=2e-6, atol=1e-38)
    for gradient, exact_gradient in zip(one[1:], want[1:], strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-2, atol=1e-6)


# Three times more is read of a segment of three: with a banned column, or one 80 nats off in one row. Where the first
# columns say that x and y are 1e9 apart, the maxima of the rows are looked for, and tell better.
FAR = {
    "nothing": (slice(0), 0.0, 0.0, 0),
    "80 nats": ([40000], -80.0, 0.0, 3 * 32768),
    "banned": ([40000], -torch.inf, -torch.inf, 3 * 32768),
    "a mask of the first": (slice(64), -1e9, None, 2 * 32768 + 80 + 3 * 32768),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter loads")
@pytest.mark.parametrize(
    "what", ["80 nats", "a mask of the first", slow("nothing"), slow("banned")]
)
def test_only_segments_that_need_it_are_read_again(what):
    columns, of_x, of_y, more = FAR[what]
    x, y = pair(1, 2 * 32768 + 80, dtype=torch.bfloat16)
    x[:, columns] = of_x
    if of_y is not None:
        y[:, columns] = of_y
    with interpreter.count_traffic() as launches:
        value = fused_rl.token_kl(x, y)
    assert round(launches[0].bytes()[0] / (2 * 2) - x.shape[1] - more, -3) == 0
    wanted = reference.token_kl(x.double(), y.double())
    torch.testing.assert_close(value.double(), wanted, rtol=2e-6, atol=0)


def test_a_likeliest_column_far_off_the_mean_costs_no_digits(backend):
    """Where the likeliest column's difference is far from all others': 1 - 1e-3 of F would cancel."""
    x = torch.zeros(1, 4000, device=backend)
    y = 1e-4 * torch.randn(1, 4000, device=backend)
    x[0, 77], y[0, 77] = 0.5, 0.5 - 0.03
    value = fused_rl.token_kl(x, y)
    torch.testing.assert_close(value.double(), exact(x, y, "reverse"), rtol=1e-6, atol=0)


def test_rows_that_the_kernels_read_16_bytes_at_a_time_begin_there():
    """A wide load from anywhere else faults on a GPU; the interpreter would not notice."""
    pair_of_rows = pytest.importorskip("fused_rl.kernels.pair")
    whole = torch.randn(2, 3, 5056)
    for x in (
        whole[..., 1:5009],
        whole[..., :5008].expand(2, 3, 5008),
        torch.randn(2, 3, 5009)[..., :5008],
    ):
        got, same, *_ = pair_of_rows.launch_arguments(x, whole[..., :5008], 1.0, None)
        assert torch.equal(got, x)
        assert got.data_ptr() % 16 == 0
        assert all(n % 16 == 0 for n in got.stride()[:2])
        assert same.data_ptr() == whole.data_ptr(), "no copy without need"


@pytest.mark.parametrize("nats", [20.0, 41.0, 50.0])
def test_one_token_that_the_reference_has_all_but_dropped(backend, nats):
    """The first of its lane, so that the lane's mean of log(p / q) begins far up and falls: F must not cancel then."""
    x = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0))
    x[:, 700] = 3.0
    y = x.index_add(1, torch.tensor([700]), torch.tensor([[-nats]]))
    value = fused_rl.token_kl(x.to(backend), y.to(backend))
    exact = reference.token_kl(x.double(), y.double())
    torch.testing.assert_close(value.double().cpu(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reference_gradients(direction):
    """The oracle itself, and the fixed example of the KL's gradient."""
    x, y = pair(2, 6)
    x, y = x.double().requires_grad_(), y.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: reference.token_kl(a, b, direction=direction, temperature=0.7), (x, y)
    )
    torch.testing.assert_close(
        reference.token_kl(x, y, direction=direction), exact(x, y, direction)
    )


@pytest.mark.parametrize("jsd_beta", [None, 0.3])
@pytest.mark.parametrize("masked", [False, True])
def test_operators_pass_opcheck(backend, jsd_beta, masked):
    (x, y), ops = pair(3, 40, device=backend), torch.ops.fused_rl
    mask = torch.tensor([True, False, True], device=backend) if masked else None
    options = mask, None, 0.7, jsd_beta, None
    divergence, *state = ops.token_kl(x, y, *options)
    given = (divergence.sin(), divergence, x, y, mask, None, *state, *options[2:], True, True)
    torch.library.opcheck(ops.token_kl_backward.default, given)
    torch.library.opcheck(ops.token_kl.default, (x.requires_grad_(), y.requires_grad_(), *options))
