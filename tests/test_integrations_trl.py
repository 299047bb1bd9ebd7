"""TRL's heads and divergences, ours in their place: what each returned, or should have."""

import contextlib

import pytest
import torch

from fused_rl.integrations.trl import ChunkedDivergenceFunction as DIVERGENCE
from fused_rl.integrations.trl import ChunkedLogProbFunction as HEAD
from fused_rl.ops import tiles
from tests.integrations import formulas
from tests.integrations.trl_heads import (
    ALL,
    NAMES,
    assert_close,
    assert_near_the_host,
    backward_of,
    exact_head,
    gradients,
    leaves_of,
    luck,
    make_head,
    make_targets,
    run_head,
    same_bits,
    upstream_of,
)
from tests.lazy import Lazy, needs_trl

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

chunked_divergence = Lazy("trl.kernels.chunked_divergence", "trl.trainer.utils")
chunked_logprob = Lazy("trl.kernels.chunked_logprob", "trl.trainer.utils")
pytestmark = [pytest.mark.usefixtures("cpu"), needs_trl]

# temperature, soft cap, scale of the logits; with a bias, with banned tokens
HEADS = {
    "plain": ((1.0, None, 1.0), False, False),
    "bias": ((0.7, None, 1.0), True, False),
    "scaled": ((1.3, None, 0.25), True, False),
    "capped": ((0.7, 5.0, 1.0), False, False),
    "all of it": ((0.7, 5.0, 0.5), True, False),
    "banned": ((1.0, None, 1.0), True, True),
    "turned": ((0.7, 5.0, -0.5), True, False),
    "flat": ((0.7, None, 0.0), True, False),
    "turned cap": ((0.7, -5.0, 1.0), False, False),
}


def head_on_both(name, dtype, n):
    """(name, ours, theirs, exact) of every output and gradient."""
    options, bias, banned = HEADS[name]
    head = make_head(dtype, bias, banned, n=n)
    targets = make_targets(head, options)
    exact = exact_head(head, targets, options)
    theirs = run_head(
        chunked_logprob.ChunkedLogProbFunction.apply, leaves_of(head, dtype), targets, options
    )
    ours = run_head(HEAD.apply, leaves_of(head, dtype), targets, options)
    for one, *three in zip(NAMES, ours, theirs, exact, strict=True):
        if three[0] is not None:
            yield one, *three


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("workspace", [512, 0.1])  # in 0.1 MiB, several tiles
@pytest.mark.parametrize(
    "dtype", [FP32, FP64]
)  # of fp64 hidden states the logits are fp32, as TRL's
def test_head_in_fp32(name, workspace, dtype, monkeypatch):
    monkeypatch.setattr(tiles, "CPU_WORKSPACE_MB", workspace)
    for one in head_on_both(name, dtype, 150):
        assert_close(*one, slack=2)  # the order of sums
        # TRL's entropy of a banned token is NaN.
        if name != "banned" or one[0] in (
            "log_probs",
            "log_sum_sq_probs",
        ):
            assert_near_the_host(*one)


def test_a_compiled_head_runs_between_two_graphs():
    head = make_head(FP32, bias=True, n=5)
    targets = make_targets(head, HEADS["bias"][0])

    def call(*leaves):
        return 2 * HEAD.apply(*leaves, targets, 0.7, 16)[0]

    results = []
    for function in (call, torch.compile(call, backend="aot_eager")):
        leaves = leaves_of(head, FP32)
        logprobs = function(*leaves)
        results.append([logprobs.detach(), *torch.autograd.grad(logprobs.sum(), leaves)])
    torch.testing.assert_close(*results)


# Outputs, and the leaves that are frozen: hidden states, weight, bias.
NEEDED = [(("log_probs",), (1, 2)), (("log_probs", "entropy"), (0,)), (("is_top1",), (0, 1))]
NEEDED += [(("mean_logits",), (2,)), (ALL[2:], ())]


@pytest.mark.parametrize(("outputs", "frozen"), NEEDED)
def test_outputs_and_gradients_that_are_not_needed_are_none(outputs, frozen):
    head, options = make_head(FP32), (1.0, None, 1.0)
    targets, wanted = make_targets(head, options), ("log_probs", *outputs)
    wide, leaves = leaves_of(head, FP64), leaves_of(head, FP32)
    for i in frozen:
        leaves[i].requires_grad_(False)
    found = run_head(HEAD.apply, leaves, targets, options, outputs)
    exact = formulas.row_outputs(formulas.scores(*wide, *options), targets)
    backward_of([x for name, x in zip(ALL[:2], exact, strict=False) if name in wanted])
    wanted += tuple(name for i, name in enumerate(NAMES[5:]) if i not in frozen)
    for name, one, truth in zip(NAMES, found, [*exact, *gradients(wide)], strict=True):
        assert (one is not None) == (name in wanted)
        if one is not None:
            torch.testing.assert_close(one.to(truth.dtype), truth, rtol=1e-5, atol=1e-5)
            assert one.requires_grad == (name in ALL[:2])


def test_top1_is_the_first_of_equal_tokens():
    """A tie with an earlier token is none; one with a later token, and an impossible row, are as TRL has them."""
    logits = torch.tensor(
        [[1.0, 3, 3, 0], [1, 3, 3, 0], [3, 1, 0, 3], [-torch.inf] * 4, [0, 0, 0, 0]]
    )
    targets = torch.tensor([1, 2, 3, 0, 0])
    weight, nothing = torch.eye(4), torch.zeros(1, 4)
    found = []
    for function in (chunked_logprob.ChunkedLogProbFunction, HEAD):
        rows = []
        for row, target in zip(logits, targets[:, None], strict=True):
            rows.append(function.apply(nothing, weight, row, target, 1.0, 4, None, 1.0, ALL)[-1])
        found.append(torch.cat(rows).tolist())
    assert found[0] == found[1] == [True, False, False, False, True]


MIXED = {
    "autocast": (FP32, FP32, True),
    "autocast, hidden in bf16": (BF16, FP32, True),
    "fp32 head over 16-bit weights": (FP32, BF16, False),
    "16-bit hidden, fp32 head": (BF16, FP32, False),
}


@pytest.mark.parametrize("name", MIXED)
def test_dtypes_that_differ(name, monkeypatch):
    """Products in the dtype that TRL chooses; gradients in each tensor's own, not rounded to that of the products."""
    monkeypatch.setattr(tiles, "CPU_WORKSPACE_MB", 0.1)  # several tiles
    hidden_dtype, head_dtype, autocast = MIXED[name]
    hidden, weight, bias = make_head(BF16, n=1500)  # the values fit both
    weight /= 16  # the rounding of large logits would hide that of the gradients
    head = [hidden.to(hidden_dtype), weight.to(head_dtype), bias.to(head_dtype)]
    options = (0.8, None, 1.0)
    targets = make_targets(head, options)
    exact = exact_head(head, targets, options)
    teacher = make_head(BF16, seed=1, n=1500)
    exact += exact_divergence(head, teacher, 0.0, 0.8)
    found, head_leaves = [], None
    for of_head, of_divergence in (
        (HEAD, DIVERGENCE),
        (chunked_logprob.ChunkedLogProbFunction, chunked_divergence.ChunkedDivergenceFunction),
    ):
        leaves, again = ([x.detach().clone().requires_grad_() for x in head] for _ in range(2))
        with torch.autocast("cpu", enabled=autocast):
            outputs = of_head.apply(*leaves, targets, 0.8, 64, None, 1.0, ALL)
            divergence = of_divergence.apply(*again, *teacher, 0.0, 0.8)
        backward_of(outputs[:2])
        backward_of(divergence[:1])
        found.append([*outputs, *gradients(leaves), *divergence, *gradients(again)])
        head_leaves = head_leaves or (leaves, again)
    names = (*NAMES, "divergence", "entropy", "dhidden", "dweight", "dbias")
    for one, *three in zip(names, *found, exact, strict=True):
        assert_close(one, *three, luck(one))
    for one in (*gradients(head_leaves[0]), *gradients(head_leaves[1])):
        rounded = torch.equal(one, one.bfloat16().to(one.dtype))
        assert rounded == (one.dtype == BF16), "an fp32 gradient that was rounded on its way"


def test_backward_twice_and_changed_outputs():
    """A retained graph gives its gradient again, also when the outputs were changed in place."""
    head, teacher = make_head(FP32), make_head(FP32, seed=1)
    targets = make_targets(head, (1.0, None, 1.0))
    for function in (
        lambda *x: HEAD.apply(*x, targets, 1.0, 64, None, 1.0, ALL)[:2],
        lambda *x: DIVERGENCE.apply(*x, *teacher, 0.5)[:1],
    ):
        leaves = leaves_of(head, FP32)
        outputs = function(*leaves)
        given = outputs, leaves, [torch.ones_like(x, requires_grad=True) for x in outputs]
        first = torch.autograd.grad(*given, retain_graph=True)
        with torch.no_grad():
            for x in outputs:
                x.mul_(0)
        assert all(map(torch.equal, first, torch.autograd.grad(*given, retain_graph=True)))
        slope = torch.autograd.grad(*given, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()


def test_a_sharded_head_is_gathered_again_in_the_backward_pass(monkeypatch):
    """As ZeRO-3 has it: outside of the context that gathers it, a parameter is empty."""
    whole = {}

    @contextlib.contextmanager
    def gather(*parameters):
        parameters = [p for p in parameters if p is not None]
        for p in parameters:
            p.data = whole[p]
        yield
        for p in parameters:
            p.data = p.data.new_empty(0)

    monkeypatch.setattr("trl.trainer.utils.maybe_gather_lm_head_ctx", gather)
    head = make_head(FP32)
    options = (1.0, None, 1.0)
    teacher = make_head(FP32, seed=1)
    targets = make_targets(head, options)
    exact = exact_head(head, targets, options)[5:], exact_divergence(head, teacher, 1.0, 1.0)[2:]
    for i, truths in enumerate(exact):
        leaves, other = leaves_of(head, FP32), [x.clone() for x in teacher]
        whole.update((x, x.data) for x in (*leaves[1:], *other[1:]))
        with gather(*leaves[1:]):
            outputs = HEAD.apply(*leaves, targets, 1.0, 64, None, 1.0, ALL)[:2]
        if i:
            outputs = DIVERGENCE.apply(*leaves, *other, 1.0)[:1]
        assert leaves[1].numel() == 0
        # An empty leaf cannot hold a gradient.
        found = torch.autograd.grad(outputs, leaves, upstream_of(outputs))
        for one, truth in zip(found, truths, strict=True):
            torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-5)


# Divergences, to the teacher of another width.


def run_divergence(function, student, teacher, beta, temperature, scales=(1.0, None, 1.0, None)):
    found = function(*student, *teacher, beta, temperature, *scales)
    backward_of(found[:1])
    return [*found, *gradients(student)]


def exact_divergence(student, teacher, beta, temperature, scales=(1.0, None, 1.0, None)):
    leaves, other = leaves_of(student, FP64), leaves_of(teacher, FP64)
    x = formulas.scores(*leaves, temperature, scales[1], scales[0])
    y = formulas.scores(*other, temperature, scales[3], scales[2])
    found = formulas.divergence(x, y.detach(), beta)
    backward_of(found[:1])
    return [*found, *gradients(leaves)]


def divergence_on_both(beta, dtype, scales, n):
    """(name, ours, theirs, exact) of every output and gradient."""
    bias = scales[1] is not None
    student = make_head(dtype, bias, n=n)
    teacher = make_head(dtype, not bias, seed=1, width=24, n=n)
    exact = exact_divergence(student, teacher, beta, 0.7, scales)
    theirs = run_divergence(
        chunked_divergence.ChunkedDivergenceFunction.apply,
        leaves_of(student, dtype),
        teacher,
        beta,
        0.7,
        scales,
    )
    leaves = leaves_of(student, dtype)
    ours = run_divergence(DIVERGENCE.apply, leaves, teacher, beta, 0.7, scales)
    assert not ours[1].requires_grad
    for one, *three in zip(("divergence", "entropy", *NAMES[5:]), ours, theirs, exact, strict=True):
        if three[0] is not None:
            yield one, *three


# scale and cap of the student's logits, of the teacher's
SCALES = [(1.0, None, 1.0, None), (0.5, 5.0, 2.0, None), (1.0, None, 0.25, 3.0)]
SCALES += [(-0.5, -5.0, 2.0, None), (1.0, None, 0.0, None)]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
@pytest.mark.parametrize("beta", [0.0, 0.03, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("scales", SCALES)
def test_divergence(beta, dtype, scales, monkeypatch):
    monkeypatch.setattr(tiles, "CPU_WORKSPACE_MB", 0.3)  # several tiles
    for one in divergence_on_both(beta, dtype, scales, 150):
        assert_close(*one, slack=1.02 if dtype == BF16 else 2)
        if dtype != BF16:
            assert_near_the_host(*one)


# What is not served is TRL's own, to the bit.


@pytest.mark.parametrize(("temperature", "outputs"), [(-1.0, ALL), (1e-7, ALL), (1.0, (*ALL, "n"))])
def test_other_heads_are_the_hosts(temperature, outputs):
    head, functions = make_head(FP32), (HEAD, chunked_logprob.ChunkedLogProbFunction)
    given = make_targets(head, (1.0, None, 1.0)), (temperature, None, 1.0), outputs
    pair = [run_head(function.apply, leaves_of(head, FP32), *given) for function in functions]
    assert all(map(same_bits, *pair))


def test_other_divergences_are_the_hosts():
    student, teacher = make_head(FP32), make_head(FP32, seed=1)
    functions = DIVERGENCE, chunked_divergence.ChunkedDivergenceFunction
    given = teacher, 0.5, -1.0
    pair = [run_divergence(each.apply, leaves_of(student, FP32), *given) for each in functions]
    assert all(map(same_bits, *pair))
    with pytest.raises(ValueError, match="math domain"):  # TRL's
        run_divergence(DIVERGENCE.apply, leaves_of(student, FP32), teacher, 1.5, 1.0)
