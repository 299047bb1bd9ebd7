"""The two CPU paths of the row functions, rows.c and eager PyTorch, beyond what is asked of both backends."""

import logging
import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fused_rl
from bench import machine
from fused_rl import token_logprobs
from fused_rl.cpu import compiled, logprob, native
from tests.hostile import OPS
from tests.logits import VIEWS, random_rows, run, upstream_of
from tests.marks import slow
from tests.pairs import DIRECTIONS, both_gradients, exact, pair
from tests.test_hostile import WHOLE, check

BLOCK = 512  # columns, in rows.c
VOCAB = 4 * BLOCK + 77  # blocks and a tail
pytestmark = pytest.mark.usefixtures("cpu", "seeded")


@pytest.fixture(params=["rows.c", "eager"])
def path(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setattr(native, "takes", lambda *matrices: False)
    elif not compiled.has_compiler():
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_close_rows_keep_their_digits(size, direction):
    """Of half of the rows one token moves, of the others each."""
    x = torch.randn(6, VOCAB)
    move = size * torch.randn(6, VOCAB)
    move[:3] = 0
    move[range(3), x[:3].argmax(1)] = size
    y = (x.double() + move.double()).float()
    got = fused_rl.token_kl(x, y, direction=direction)
    torch.testing.assert_close(got.double(), exact(x, y, direction), rtol=1e-6, atol=0)


def logprobs_and_gradients(x, y, upstream):
    given = {"logprobs": upstream, "entropy": 1 - upstream, "lse": upstream.square()}
    outputs, gradient = run(token_logprobs, x, x.argmin(-1), given)
    return *(output.detach() for output in outputs), gradient


ROW_OPS = {d: partial(both_gradients, fused_rl.token_kl, direction=d) for d in DIRECTIONS}
ROW_OPS["log-probabilities"] = logprobs_and_gradients


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", ROW_OPS)
def test_bits_of_a_row_depend_on_the_row_alone(monkeypatch, name):
    """Not on the batch, on threads, on chunks, or on where a row begins."""
    x, y = (z[:, :-1] for z in pair(3, 5, VOCAB))
    x[0, 0, 5], y[1, 1, 700] = -torch.inf, -1e9
    upstream = torch.randn(3, 4)
    whole = ROW_OPS[name](x, y, upstream=upstream)
    threads = torch.get_num_threads()
    try:
        for chunk, count in ((1, 1), (5 * VOCAB, 2)):
            monkeypatch.setattr(compiled, "CHUNK", chunk)
            torch.set_num_threads(count)
            assert all(map(torch.equal, ROW_OPS[name](x, y, upstream=upstream), whole))
    finally:
        torch.set_num_threads(threads)
    rows = slice(1, 3), slice(1, 2)
    alone = ROW_OPS[name](*(z[rows].clone() for z in (x, y)), upstream=upstream[rows].clone())
    assert all(torch.equal(ours, best[rows]) for ours, best in zip(alone, whole, strict=True))


@pytest.mark.parametrize("direction", ["jensen-shannon", slow("reverse"), slow("forward")])
def test_nothing_is_kept_beside_the_gradient(path, direction):
    if path == "eager":
        pytest.skip("copies a few rows at a time")
    x, y = (z[:, :-1] for z in pair(2, 65, 65_613, dtype=torch.bfloat16))
    x.requires_grad_()
    least = min(
        machine.peak_extra_bytes(
            lambda: torch.autograd.grad(fused_rl.token_kl(x, y, direction=direction).sum(), x),
            "cpu",
        )
        for _ in range(2)
    )
    assert least <= 1.2 * x.nbytes


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("spread", [3.0, 10.0])
def test_gradients_keep_their_digits_beside_a_large_divergence(spread):
    """Dozens of nats apart log(p / q) is rounded to 2e-6, its distance from its mean is not."""
    x, _ = pair(40, VOCAB, spread=spread)
    y = pair(40, VOCAB, spread=spread, seed=1)[0] + 1000.0  # an offset of one row costs nothing
    upstream = torch.ones(40)
    got = both_gradients(fused_rl.token_kl, x, y, upstream)
    want = both_gradients(fused_rl.reference.token_kl, x.double(), y.double(), upstream)
    errors = [(ours - best).abs().max() for ours, best in zip(got, want, strict=True)]
    largest = [best.abs().max() for best in want]
    assert errors[0] <= 1e-7 * largest[0]
    assert errors[1] <= 3e-7 * largest[1]
    assert errors[2] <= 3e-7 * largest[2]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("fill", [-60.0, -65504.0, -1e9])
def test_a_mask_on_whole_blocks_takes_no_digits(fill):
    """Where P is a mask throughout, u is y's distance from its mean, 20 nats, and Q's mass there is most of the KL."""
    y = 4 * torch.randn(256, 4 * BLOCK)
    x = y + 1e-3 * torch.randn(y.shape)
    x[:, 2 * BLOCK : 3 * BLOCK] = fill
    value = fused_rl.token_kl(x, y, temperature=0.7)
    wanted = fused_rl.reference.token_kl(x.double(), y.double(), temperature=0.7)
    torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("jsd_beta", [1e-3, 0.999])
def test_a_mixture_that_is_nearly_one_side(jsd_beta):
    """Of two columns, with |log(p / q)| just below 1 in the first, where the mixture is near 1/e of the larger."""
    distance = torch.linspace(0.99, 0.9985, 30, dtype=torch.float64)
    p = torch.full_like(distance, 0.05)
    q = p * (-distance if jsd_beta > 0.5 else distance).exp()
    x, y = (torch.stack([z, 1 - z], -1).log().float() for z in (p, q))
    options = {"direction": "jensen-shannon", "jsd_beta": jsd_beta}
    value = fused_rl.token_kl(x, y, **options)
    wanted = fused_rl.reference.token_kl(x.double(), y.double(), **options)
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "name", ["token_logprobs", "token_logprobs, K targets", "token_logprobs, support", "token_kl"]
)
def test_hostile_rows(name):
    """Both paths; one of them is what tests/test_hostile.py has at length."""
    for case in WHOLE:
        check(OPS[name], case)
    check(OPS[name], WHOLE[0]._replace(vocab=2100, direction="jensen-shannon"))


@pytest.mark.usefixtures("path")
def test_a_rising_maximum_keeps_the_digits_of_what_was_before():
    """Each block's maximum lies far above the last one's: what stands so far becomes small, and must not be rounded."""
    logits = torch.full((1, 1536), -math.inf)
    logits[0, [0, 600, 1100]] = torch.tensor([0.0, 3.0, 27.0])
    rest = logprob.logprob_fwd(logits, torch.tensor([1100]), None, 1.0, None).rest.item()
    assert rest == pytest.approx(math.exp(-27) + math.exp(-24), rel=2e-7)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_a_gradient_between_two_numbers_of_its_dtype_is_the_even_one(dtype, bits):
    """Of 256 equal logits each has 1 / 256 of the upstream gradient, whose digits are all ties."""
    upstream = 1 + torch.arange(1, 2**bits, 2) / 2**bits
    logits, targets = (
        torch.zeros(len(upstream), 256, dtype=dtype),
        torch.zeros(len(upstream)).long(),
    )
    _, gradient = run(token_logprobs, logits, targets, {"logprobs": upstream})
    assert torch.equal(gradient[:, 1], (-upstream / 256).to(dtype))


def test_the_compiled_file_is_kept_and_made_once(monkeypatch, tmp_path):
    if not compiled.has_compiler():
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build = native._library.__wrapped__
    assert build() is not None
    (made,) = (tmp_path / "fused_rl").iterdir()
    before = made.stat().st_mtime_ns
    monkeypatch.setattr(native.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert build() is not None
    assert made.stat().st_mtime_ns == before


def test_a_compiler_that_fails_says_so_and_leaves_the_eager_path(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with caplog.at_level(logging.WARNING, "fused_rl.cpu"):
        assert native._library.__wrapped__() is None
    assert "eager, false -x c" in caplog.text
    assert not list((tmp_path / "fused_rl").iterdir())


def test_a_folder_that_cannot_be_written_is_replaced(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native._folder().is_dir()


def test_whoever_watches_operators_sees_ours():
    """The plain function is for eager calls alone: a mode that counts or traces must find one opaque operator."""
    seen = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    logits, targets = random_rows(3, 40, torch.float32, "cpu")
    logits.requires_grad_()
    with Watched():
        token_logprobs(logits, targets).logprobs.sum().backward()
    watched = logits.grad
    assert {"fused_rl::token_logprobs", "fused_rl::token_logprobs_backward"} <= set(seen)
    logits.grad = None
    token_logprobs(logits, targets).logprobs.sum().backward()
    assert torch.equal(watched, logits.grad)


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "columns apart"])
def test_strided_rows_are_not_copied(monkeypatch, name):
    logits, targets = random_rows(8, 600, torch.float32, "cpu")
    logits = VIEWS[name](logits.view(2, 4, 600))
    seen, forward, backward = [], logprob.logprob_fwd, logprob.logprob_bwd
    monkeypatch.setattr(logprob, "logprob_fwd", lambda x, *a: seen.append(x) or forward(x, *a))
    monkeypatch.setattr(
        logprob, "logprob_bwd", lambda *a, out: seen.append(a[3]) or backward(*a, out=out)
    )
    run(token_logprobs, logits, targets.view(2, 4)[:, :3], upstream_of((2, 3), "cpu"))
    assert {x.untyped_storage().data_ptr() for x in seen} == {logits.untyped_storage().data_ptr()}


def test_without_a_compiler_large_inputs_stay_eager(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiled.has_compiler.cache_clear()
    logits, targets = random_rows(10, 2000, torch.bfloat16, "cpu")
    with caplog.at_level(logging.INFO, "fused_rl.cpu"):
        for _ in range(2):
            token_logprobs(logits, targets)
    compiled.has_compiler.cache_clear()
    assert [r.message for r in caplog.records] == [
        "large logits on the CPU: eager: no C++ compiler 'no-such-compiler'"
    ]
