"""`logits_dtype`: fp32 logits of 16-bit hidden states and heads, in every op that forms logits from them.

Values are held to fp64 of the same operands, and gradients to twice the error of the reference in 16 bits.
"""

from types import SimpleNamespace

import pytest
import torch

import fused_rl
from fused_rl import reference
from fused_rl.ops import tiles
from tests.heads import (
    BF16,
    FP16,
    FP32,
    FP64,
    MORE_ROWS,
    MORE_TOKENS,
    compare,
    in_dtype,
    kl_and_gradients,
    logprobs_and_gradients,
    loss_and_gradients,
    make,
    reference_head,
    upstream_of,
)
from tests.kept_sets import some_rows
from tests.marks import on_backends, slow


def check(run, leaves, targets, *args, **options):
    """Values within a few fp32 roundings of fp64's; gradients as of 16-bit operands."""
    results = compare(run, leaves, targets, *args, **options, logits_dtype=FP32)
    options.pop("workspace_mb", None)
    exact = run(reference, in_dtype(leaves, FP64), targets, *args, **options)
    for result, truth in zip(results[: -len(leaves)], exact, strict=False):
        error = (result.double() - truth).abs()
        assert (error <= 4e-6 * truth.abs().clamp(min=1)).all(), f"{error.max():.1e}"


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("run", [logprobs_and_gradients, loss_and_gradients, kl_and_gradients])
def test_values_and_gradients(run, dtype):
    for shape, workspace_mb in (MORE_TOKENS, MORE_ROWS):
        leaves, targets, mask = make(shape, dtype)
        args = {
            logprobs_and_gradients: [upstream_of(targets)],
            kl_and_gradients: [reference_head(shape, dtype)],
        }
        temperature = torch.linspace(0.5, 2, shape[0])
        options = {"mask": mask, "temperature": temperature, "workspace_mb": workspace_mb}
        check(run, leaves, targets, *args.get(run, ()), **options, softcap=4.0)


@on_backends("longest", {"gathered and whole": 82, "in tiles": 1024}, most=0)
def test_kept_sets(backend, longest):
    """Sets that are gathered, that go through tiles, and rows without a set."""
    lists, targets = some_rows(1024, longest)
    leaves, _, _ = make((len(lists), 16, 1024), BF16, backend)
    targets = targets.to(backend)
    options = {"support": fused_rl.TokenSupport.from_lists(lists).to(backend), "temperature": 0.9}
    check(logprobs_and_gradients, leaves, targets, upstream_of(targets), **options)


def head_of(sigma, offset, where, rows=96, width=512, vocab=8000):
    """Logits of deviation `sigma` about `offset`, which the head's rows have in common, or its bias, or nothing has."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator) * (sigma / width**0.5)
    bias = None
    if where == "weight":
        hidden[:, 0], weight[:, 0] = 8.0, offset / 8
    if where == "bias":
        bias = torch.full((vocab,), float(offset), dtype=BF16)
        bias[::1000] = -torch.inf
    targets = torch.randint(1, vocab, (rows,), generator=generator)
    targets[targets % 1000 == 0] += 1
    return hidden.to(BF16), weight.to(BF16), bias, targets


# Where the offset is of the hidden states' making it is gone before anything is summed; 100 is fp32's 7.6e-6.
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    ("sigma", "offset", "where", "shape"),
    [
        (3, 0, "", {}),
        # A sum of so many in one go is off by more.
        slow(3, 0, "", {"rows": 64, "width": 8192, "vocab": 4000}),
        (3, 100, "weight", {}),
        (3, 100, "bias", {}),
    ],
)
def test_an_exact_head(sigma, offset, where, shape):
    """At most 3e-6 from fp64 of the same operands, where bf16 logits are off by 1e-2 and more."""
    hidden, weight, bias, targets = head_of(sigma, offset, where, **shape)
    logits = torch.nn.functional.linear(
        hidden.double(), weight.double(), None if bias is None else bias.double()
    )
    truth = fused_rl.token_logprobs(logits, targets)
    exact, rounded = (
        fused_rl.linear_token_logprobs(hidden, weight, targets, bias=bias, logits_dtype=dtype)
        for dtype in (FP32, BF16)
    )
    assert (exact.logprobs - truth.logprobs).abs().max() <= 3e-6
    assert (exact.entropy - truth.entropy).abs().max() <= 3e-6
    assert (exact.lse - truth.lse).abs().max() <= 1e-6 * max(3, offset)
    assert (rounded.logprobs - truth.logprobs).abs().max() >= 2e-3


@pytest.mark.usefixtures("cpu")
def test_a_row_of_the_head_beyond_all_others():
    """One row of 1e30, another of NaN in half of its head: what the rows have in common is not theirs."""
    hidden, weight, _, targets = head_of(1, 0, "", rows=8, vocab=500)
    weight[0] = 0
    clean = fused_rl.linear_token_logprobs(hidden, weight, targets, logits_dtype=FP32)
    weight[0] = -1e30 * hidden.sign()[0]
    spoilt = fused_rl.linear_token_logprobs(hidden, weight, targets, logits_dtype=FP32)
    assert spoilt.logprobs[0].isfinite()
    assert (spoilt.logprobs[0] - clean.logprobs[0]).abs() < 0.1
    weight[:] = torch.nan
    assert (
        fused_rl.linear_token_logprobs(hidden, weight, targets, logits_dtype=FP32)
        .logprobs.isnan()
        .all()
    )


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("banned", [0.3, 0.97])
@pytest.mark.parametrize("value", [-1e4, torch.finfo(BF16).min])
@pytest.mark.parametrize("where", ["bias", "weight"])
def test_masks_in_the_head_take_no_digits(where, value, banned):
    """Large finite values in place of -inf, on most columns: in the bias, or as the weight of a constant feature."""
    hidden, weight, _, targets = head_of(3, 0, "", rows=32, width=64, vocab=1000)
    columns = torch.rand(1000, generator=torch.Generator().manual_seed(1)) < banned
    targets = (~columns).nonzero()[targets % int((~columns).sum()), 0]
    bias = torch.zeros(1000, dtype=BF16)
    hidden[:, 0] = 1
    (bias if where == "bias" else weight[:, 0])[columns] = value
    logits = hidden.double() @ weight.double().t() + bias.double()
    truth = fused_rl.token_logprobs(logits, targets)
    found = fused_rl.linear_token_logprobs(hidden, weight, targets, bias=bias, logits_dtype=FP32)
    for output, expected in zip(found, truth, strict=True):
        assert (output - expected).abs().max() <= 5e-6


@pytest.mark.usefixtures("cpu")
def test_the_same_head_twice_has_no_divergence():
    hidden, weight, bias, _ = head_of(3, 30, "bias")
    options = {"bias": bias, "ref_bias": bias, "logits_dtype": FP32}
    assert (fused_rl.linear_token_kl(hidden, weight, hidden, weight, **options) == 0).all()


def test_none_is_fp32_where_products_return_it():
    """CUDA and ROCm: tiles are counted so."""
    assert tiles.default_logits_dtype(BF16, torch.device("cuda")) == FP32
    assert tiles.default_logits_dtype(FP32, torch.device("cuda")) == FP32
    assert tiles.default_logits_dtype(BF16, torch.device("cpu")) == BF16
    hidden = SimpleNamespace(device=torch.device("cuda"), dtype=BF16)
    assert tiles.budget(1, hidden, 5, copied=False) == (2**20, FP32)
    # beside a logit its gradient, as a 16-bit operand
    assert tiles.Budget(1, FP32).per_logit(BF16) == 6
