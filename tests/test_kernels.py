"""The row kernels below the public op: bits, bytes, bounds and races, and the helpers that a row is finished with."""

import contextlib

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from fused_rl.kernels import launch, logprob, online  # noqa: E402
from tests.marks import grid  # noqa: E402
from tests.paths import DEVICE  # noqa: E402
from tests.tools import interpreter  # noqa: E402

# With 32 threads a program streams tiles of 2048 bf16 columns and segments of 4096, so that small rows have all parts:
# nothing but an end; an end that crosses a segment; whole tiles; several segments, with the last one almost empty.
VOCABULARIES = [1, 17, 300, 2305, 4100, 2 * 4096 + 100]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(launch, "THREADS", 32)
    for module in (launch, logprob):
        monkeypatch.setattr(module, "SEGMENT", 2)
    monkeypatch.setattr(logprob, "SHORT", 0)


def watched():
    """What a program must not touch raises, in the interpreter."""
    return interpreter.check_memory() if DEVICE == "cpu" else contextlib.nullcontext()


def split(monkeypatch, yes):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 10**6 if yes else 0)


def one_row(vocab, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    row = (3 * torch.randn(1, vocab, generator=generator)).to(dtype)
    row[torch.rand(1, vocab, generator=generator) < 0.1] = -torch.inf
    row[0, vocab // 2] = 1.0
    return row.to(DEVICE), torch.tensor([vocab // 2], device=DEVICE)


def at(offset, row, n=1, stride=None, fill=float("nan")):
    """The row n times in a buffer of NaN, `stride` apart, the first one `offset` elements after a 16-byte boundary."""
    stride = row.shape[1] if stride is None else stride
    buffer = row.new_full((32 + offset + n * stride + row.shape[1],), fill)
    view = buffer.as_strided((n, row.shape[1]), (stride, 1), 16 + offset)
    view.copy_(row.expand(n, -1))
    return view


def both(logits, targets, mask=None, inv_t=0.8, softcap=None, inplace=False):
    outputs = logprob.logprob_fwd(logits, targets, mask, inv_t, softcap)
    _, entropy, _, m, rest = outputs
    upstream = [torch.tensor([u], device=DEVICE).expand(len(targets)) for u in (0.7, -1.3, 0.4)]
    out = logits if inplace else None
    gradient = logprob.logprob_bwd(
        *upstream, logits, targets, mask, entropy, m, rest, inv_t, softcap, out
    )
    return [*outputs, gradient]


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(
            a.contiguous().view(torch.uint8), e.expand(a.shape).contiguous().view(torch.uint8)
        )


@grid("dtype, vocab", [torch.bfloat16, torch.float32], VOCABULARIES, most=4)
def test_bits_do_not_depend_on_alignment_batch_or_split(dtype, vocab, monkeypatch):
    row, target = one_row(vocab, dtype)
    split(monkeypatch, False)
    expected = both(row, target)
    for offset in (1, 2, 7 if dtype == torch.bfloat16 else 3):
        split(monkeypatch, offset != 2)
        with watched():
            assert_same_bits(both(at(offset, row), target), expected)
    # Four rows, each of another alignment; then the in-place gradient of the second of them, by several programs.
    split(monkeypatch, False)
    assert_same_bits(both(at(0, row, n=4, stride=vocab + 3), target.expand(4)), expected)
    split(monkeypatch, True)
    with watched():
        assert_same_bits(both(at(vocab + 3, row), target, inplace=True), expected)


def test_a_target_may_be_the_first_or_last_column_of_anything(monkeypatch):
    """Of the row, a program, a tile, or the columns around the tiles, which two programs share."""
    split(monkeypatch, True)
    row = one_row(2305, torch.bfloat16)[0].clamp(min=-9)
    # The row begins three elements after a 16-byte boundary, so its two tiles of 1024 begin five further on.
    targets = torch.tensor([0, 4, 5, 1028, 1029, 2052, 2053, 2303, 2304], device=DEVICE)
    logits = at(3, row, n=len(targets), stride=2312)
    exact = logits.double().requires_grad_()
    logprobs, *_, gradient = both(logits, targets, inplace=True)  # else it has other tiles
    logp = (exact * 0.8).log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    want = logp.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-5, atol=0)
    (0.7 * want - 1.3 * entropy + 0.4 * (exact * 0.8).logsumexp(1)).sum().backward()
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("name", list(launch.VARIANTS)[1:])
def test_every_variant_of_the_stream_returns_the_same_bits(name):
    row, target = one_row(4100, torch.bfloat16)
    expected = logprob.logprob_fwd(row, target, None, 0.8, None)
    with launch.variant(name):
        assert_same_bits(logprob.logprob_fwd(row, target, None, 0.8, None), expected)


@pytest.mark.parametrize("bad", [-1, 300, 2**40])
def test_a_target_outside_the_vocabulary_is_nan_and_touches_nothing(bad):
    row, _ = one_row(300, torch.float32)
    target = torch.tensor([bad], device=DEVICE)
    with watched():
        outputs = logprob.logprob_fwd(row, target, None, 1.0, None)
        upstream = torch.ones(1, device=DEVICE)
        gradient = logprob.logprob_bwd(
            upstream,
            None,
            None,
            row,
            target,
            None,
            *outputs[1::2],
            outputs[4],
            1.0,
            None,
        )
    assert outputs[0].isnan()
    assert outputs[1].isfinite()
    assert outputs[2].isfinite()
    # As on a shard that does not hold the target.
    torch.testing.assert_close(gradient, -torch.softmax(row, 1))


def test_an_offset_of_all_logits_cancels():
    """To rounding in the outputs; to the bit in the gradient."""
    row = (8 * torch.randn(1, 3000, generator=torch.Generator().manual_seed(0))).round().to(
        DEVICE
    ) / 8
    target = row.argmin(1)
    expected = both(row, target)
    for offset in (1000.0, -1000.0, 16384.0):
        actual = both(row + offset, target)
        torch.testing.assert_close(actual[0], expected[0], rtol=3e-7, atol=0)
        torch.testing.assert_close(actual[1], expected[1], rtol=3e-7, atol=0)
        torch.testing.assert_close(actual[4], expected[4], rtol=5e-7, atol=0)
        torch.testing.assert_close(actual[5], expected[5], rtol=2e-6, atol=1e-9)


# the last two columns: beside the narrow end of the row, and in it
@grid("gap, column, inv_t", [10.0, 17.0, 23.0, 29.0], [0, 2380, 2399], [1.0, 1 / 0.7, 1 / 1.3])
def test_one_token_with_all_the_mass(gap, column, inv_t):
    """l' and H where sum(exp) - 1 is far below an ulp of 1, wherever the maximum stands."""
    generator = torch.Generator().manual_seed(int(gap))
    row = (torch.randn(1, 2400, generator=generator) * 0.5 - gap) / inv_t
    row[0, column] = 2.0
    row = row.to(DEVICE)
    s = (row.double() - 2) * inv_t
    p = s.exp()
    p[0, column] = 0
    rest = p.sum()
    logprobs, h, _, _, l_prime = logprob.logprob_fwd(
        row, torch.tensor([column], device=DEVICE), None, inv_t, None
    )
    entropy = rest.log1p() - (p * s).sum() / (1 + rest)
    torch.testing.assert_close(h[0].double(), entropy, rtol=3e-7, atol=0)
    torch.testing.assert_close(l_prime[0].double(), rest, rtol=3e-7, atol=0)
    torch.testing.assert_close(logprobs[0].double(), -rest.log1p(), rtol=3e-7, atol=0)


# ----------------------------------------------------------------------------------------- helpers of a row's end


# ----------------------------------------------------------------------------------------- the checks themselves


@triton.jit
def apply_kernel(x_ptr, y_ptr, FUNCTION: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, FUNCTION(tl.load(x_ptr + i)))


def applied(function, x):
    y = torch.empty_like(x)
    apply_kernel[(1,)](x, y, FUNCTION=function, N=len(x))
    return y


@pytest.mark.parametrize(("name", "rtol"), [("log1p", 1.2e-7), ("tanh", 2.4e-7)])
def test_what_a_row_ends_with_is_right_to_an_ulp(name, rtol):
    x = torch.cat([torch.logspace(-30, 5.5, 1022), torch.tensor([0.0, torch.inf])])
    x = (torch.cat([x, -x]) if name == "tanh" else torch.cat([x, x / 3])).to(DEVICE)
    y = applied(getattr(online, name), x)
    torch.testing.assert_close(y.double(), getattr(x.double(), name)(), rtol=rtol, atol=0)


def test_a_sum_is_free_of_order():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1024, generator=generator).to(DEVICE) ** 20
    total = applied(online.exact_sum, x)
    torch.testing.assert_close(total[0].double(), x.double().sum(), rtol=6e-8, atol=0)
    for _ in range(3):
        order = torch.randperm(1024, generator=generator)
        assert torch.equal(applied(online.exact_sum, x[order]), total)
