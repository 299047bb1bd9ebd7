"""sample_token: the distribution, what is never drawn, broken rows, and what a token depends on."""

import math

import pytest
import torch

import fused_rl
from fused_rl.base.backend import backend_of

triton = pytest.importorskip("triton")
tl = triton.language

from fused_rl.kernels import sampling  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAR = -math.inf


@pytest.fixture(params=["kernels", "cpu"], autouse=True)
def path(request, monkeypatch):
    if request.param == "cpu":
        if DEVICE == "cuda":
            pytest.skip("on a GPU there are only kernels")
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    return request.param


def state(seed=5, offset=0):
    return torch.tensor([seed, offset], device=DEVICE)


def rows(n, vocab, dtype=torch.float32):
    drawn = torch.Generator().manual_seed(n + vocab)
    return (3 * torch.randn(n, vocab, generator=drawn)).to(DEVICE, dtype)


def assert_distribution(counts, probabilities):
    """A chi-square test; of a right distribution one seed in a million is refused."""
    total, freedom = counts.sum(), (probabilities > 0).sum() - 1
    assert (counts[probabilities == 0] == 0).all()
    wanted = total * probabilities[probabilities > 0]
    chi2 = ((counts[probabilities > 0] - wanted) ** 2 / wanted).sum()
    assert 1 - torch.special.gammainc(freedom.double() / 2, chi2.double() / 2) > 1e-6


LOGITS = torch.tensor([2.0, 0.5, FAR, 0.5, -3.0, 1.0, -6.0, 0.0])


def test_tokens_have_the_distribution_of_the_softmax(path):
    """At a temperature; a row takes 15 ms in the interpreter."""
    logits = LOGITS.to(DEVICE).expand(200 if path == "kernels" else 5000, -1)
    tokens = fused_rl.sample_token(logits, state(), temperature=2.5).tokens
    counts = tokens.cpu().bincount(minlength=8).double()
    assert_distribution(counts, (LOGITS.double() / 2.5).softmax(0))


@triton.jit
def times_kernel(state_ptr, out_ptr, N: tl.constexpr):
    nth = tl.program_id(0) * N + tl.arange(0, N)
    times = sampling.waiting_times(state_ptr, nth // 2, nth % 2)
    tl.store(out_ptr + tl.program_id(0) * (4 * N) + tl.arange(0, 4 * N), times)


def test_a_million_rows_of_eight_columns(path):
    """The rule on the kernel's numbers: in the interpreter, so many programs of a row would take hours."""
    if path == "cpu":
        pytest.skip("torch's numbers")
    times = torch.empty(2**20, 8, device=DEVICE)
    times_kernel[(32,)](state(), times, 2**16)
    times = times.cpu()
    assert times.min() > 0 and times.isfinite().all()
    tokens = (times * (-LOGITS).exp()).argmin(1)
    assert_distribution(tokens.bincount(minlength=8).double(), LOGITS.double().softmax(0))
    # the smallest times decide between many columns, and are drawn as often as they should
    for bound in (1e-5, 1e-3, 0.1, 3.0):
        below, expected = (times < bound).sum().item(), -math.expm1(-bound) * times.numel()
        assert abs(below - expected) < 5 * expected**0.5, bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 4096, 9001])
def test_the_log_probability_is_that_of_token_logprobs(vocab, dtype):
    """One block, several, and a tail; a row that is not contiguous."""
    logits = rows(6, vocab, dtype)[::2]
    found = fused_rl.sample_token(logits, state(), temperature=0.7)
    assert not found.broken.any()
    wanted = fused_rl.token_logprobs(logits, found.tokens, temperature=0.7).logprobs
    torch.testing.assert_close(found.logprobs, wanted, rtol=1e-6, atol=0)


def test_a_token_depends_on_its_row_seed_and_offset_alone():
    logits = torch.zeros(4, 6000, device=DEVICE)
    tokens = fused_rl.sample_token(logits, state()).tokens
    assert torch.equal(fused_rl.sample_token(logits, state()).tokens, tokens)
    assert torch.equal(fused_rl.sample_token(logits[:2], state()).tokens, tokens[:2])
    wide = torch.full((4, 7001), FAR, device=DEVICE)
    wide[:, :6000] = 0
    others = [tokens, fused_rl.sample_token(logits, state(6)).tokens]
    for offset in (1, 2, 2**32):
        others.append(fused_rl.sample_token(logits, state(5, offset)).tokens)
    assert len(torch.cat(others).unique()) == 20  # of 20 among 6000, which 97 of 100 seeds give
    if backend_of(logits.device).sampling.__name__.startswith("fused_rl.kernels"):
        assert torch.equal(fused_rl.sample_token(wide, state()).tokens, tokens)


def test_the_state_may_be_raised_in_place():
    logits, shared = torch.zeros(2, 5000, device=DEVICE), state()
    tokens = fused_rl.sample_token(logits, shared).tokens
    shared[1] += 1
    raised = fused_rl.sample_token(logits, shared).tokens
    assert not torch.equal(raised, tokens)
    assert torch.equal(raised, fused_rl.sample_token(logits, state(5, 1)).tokens)


def test_the_only_allowed_token_is_drawn_and_others_are_never():
    """In the last column of the first block, and in a block after one that is -inf throughout; at any size."""
    logits = torch.full((3, 8192), FAR, device=DEVICE)
    logits[0, 4095], logits[1, 8000], logits[2, 3] = -1e30, 1e30, 0
    found = fused_rl.sample_token(logits, state(), temperature=1e-3)
    assert found.tokens.tolist() == [4095, 8000, 3]
    assert found.logprobs.tolist() == [0, 0, 0] and not found.broken.any()


def test_a_row_without_a_distribution_is_broken_and_no_other_is():
    logits = rows(5, 5000)
    logits[0, 4500], logits[1, 7], logits[2] = math.nan, math.inf, FAR
    logits[3, 100:] = FAR
    logits[4] = math.nan
    found = fused_rl.sample_token(logits, state())
    assert found.broken.tolist() == [True, True, True, False, True]
    assert ((found.tokens >= 0) & (found.tokens < 5000)).all()
    assert torch.equal(found.logprobs.isnan(), found.broken)


def test_the_operator_is_one_that_torch_compile_takes():
    inputs = rows(2, 9), state(), 1.0
    torch.library.opcheck(torch.ops.fused_rl.sample_token.default, inputs)
    compiled = torch.compile(fused_rl.sample_token, backend="aot_eager", fullgraph=True)
    found, wanted = compiled(*inputs[:2]), fused_rl.sample_token(*inputs[:2])
    assert torch.equal(found.tokens, wanted.tokens)


def test_no_rows():
    found = fused_rl.sample_token(torch.empty(0, 9, device=DEVICE), state())
    assert [len(x) for x in found] == [0, 0, 0]


def test_the_logits_are_read_once(path):
    if path == "cpu" or DEVICE == "cuda":
        pytest.skip("reads are counted in Triton's interpreter")
    from tests.tools import interpreter

    logits = rows(3, 9001, torch.bfloat16)
    with interpreter.count_traffic() as launches:
        fused_rl.sample_token(logits, state())
    assert len(launches) == 2
    read = sum(launch.bytes()[0] for launch in launches)
    assert read == pytest.approx(logits.nbytes, rel=0.01)
