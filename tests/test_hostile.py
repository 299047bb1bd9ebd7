"""Every public op on hostile inputs (tests/hostile.py), kernels and CPU path, values and gradients, against fp64."""

import contextlib
import functools
import itertools
import math
import os
from unittest import mock

import pytest
import torch

import fused_rl
from fused_rl.kernels import jensen_shannon, kl, kl_gradient, launch, logprob
from tests import hostile_tokens
from tests.drawn import given, settings
from tests.hostile import (
    FILLS,
    LOOKS,
    OPS,
    PLACES,
    RARE,
    SIDES,
    VOCABULARIES,
    Case,
    Row,
    blurred,
    build,
    cases,
    kl_promise,
    logprobs_promise,
    placed,
    sizes_of_cross_entropy,
    sizes_of_head,
    topk_promise,
)
from tests.hostile import OTHERS as OTHER_ROWS
from tests.marks import diagonal, release, slow

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # where there is no GPU
OF_HEAD = (sizes_of_head, sizes_of_cross_entropy)


def run(op, call, batch, leaves, seed, constant=None, retained=False):
    """Outputs, and the gradient of each leaf for random upstream gradients; zeros where there is none.

    It is that of a second backward pass where the graph is `retained`.
    """
    leaves = [leaf.detach().requires_grad_(i != constant) for i, leaf in enumerate(leaves)]
    outputs = [*call(op, batch, *leaves)]
    generator = torch.Generator().manual_seed(seed)
    upstream = [
        torch.randn(o.shape, generator=generator, dtype=torch.float32).to(o) for o in outputs
    ]
    used = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
    # What a caller does not use has no upstream gradient.
    used = used[seed % 2 :: 1 + seed % 3] or used
    options = {"allow_unused": True, "materialize_grads": True}
    wanted = [leaf for leaf in leaves if leaf.requires_grad and used]
    found = iter(())
    for keeps in (True, False) if retained else (False,):
        if wanted:
            outputs_and_upstream = [o for o, _ in used], wanted, [g for _, g in used]
            found = iter(torch.autograd.grad(*outputs_and_upstream, retain_graph=keeps, **options))
    gradients = [
        next(found) if leaf.requires_grad and used else torch.zeros_like(leaf) for leaf in leaves
    ]
    return [o.detach() for o in outputs], gradients


def assert_within(name, ours, exact, allowed):
    """Infinities and NaN where fp64 has them, once fp32 ends; elsewhere no further off than allowed."""
    rounded = exact.to(ours.dtype).double()
    error = (ours.double() - exact).abs()
    right = (
        (ours.double() == rounded)
        | (error <= allowed)
        | (ours.isnan() & exact.isnan())
        | (allowed == torch.inf)
    )
    assert right.all(), (
        f"{name}: {int((~right).sum())} of {right.numel()} wrong, such as {ours[~right][:3].tolist()} for "
        f"{exact[~right][:3].tolist()}, allowed {allowed.expand_as(exact)[~right][:3].tolist()}"
    )


def allowed_gradient(op, batch, leaf, exact, naive, size):
    """Twice the error of the reference, two roundings to the leaf's dtype, and the op's part of the largest."""
    of_head = op.sizes in OF_HEAD
    summed = 2**-21 * batch.logits.shape[1] ** 0.5 if of_head else 0  # by a GEMM in fp32
    largest = [
        2 * (naive.double() - exact).abs().nan_to_num(0, 0, 0),
        (op.floor + blurred(batch) + summed) * size,
    ]
    if exact.numel():
        dims = tuple(range(exact.dim())) if of_head else -1
        largest = [z.amax(dims, keepdim=True) for z in largest]
    limits = torch.finfo(leaf.dtype)
    return sum(largest) + 2 * limits.eps * size + 1e-12 + limits.smallest_normal


# What no rounding may exceed: a log-probability, an entropy, a divergence.
BOUNDS = {
    logprobs_promise: ((-torch.inf, 0.0), (0.0, torch.inf)),
    kl_promise: ((0.0, torch.inf),),
    topk_promise: ((0.0, torch.inf),),
}


# In place is refused, and what puts a split vocabulary together (tests/one_process.py) does not compile.
EAGER = [op for name, op in OPS.items() if name.startswith("vocab") or "inplace" in name]


@contextlib.contextmanager
def split_after(unsplit):
    """The interpreter has no device whose multiprocessors a launch would fill. Segments are as small as can be."""
    one = {"multiprocessors": lambda device: 1}
    few = {"choose_unsplit_rows": lambda rows, *_: min(rows, unsplit)}
    changed = {launch: one | {"THREADS": 32}, kl_gradient: one, logprob: few}
    changed |= {kl: few | {"SEGMENT": 2}, jensen_shannon: {"SEGMENT": 4}}
    with contextlib.ExitStack() as stack:
        for module in changed if INTERPRETED and unsplit is not None else ():
            stack.enter_context(mock.patch.multiple(module, **changed[module]))
        yield


def check(op, case, device="cpu"):
    batch = op.prepare(placed(build(case), device))
    leaves = op.leaves(batch)
    wide = [leaf.double() for leaf in leaves]
    # hidden states and heads: logits and their gradients are rounded to the inputs' dtype
    plain = leaves if op.sizes in OF_HEAD else [leaf.float() for leaf in leaves]
    call = op.call
    if case.compiled and op not in EAGER:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", dynamic=True)
    ours = op.ours
    if case.tiled and op.sizes in OF_HEAD:
        row = 8 * case.vocab / 2**20  # MiB
        logits_dtype = torch.float32 if case.seed % 2 else None  # tiles of columns have none
        ours = functools.partial(ours, workspace_mb=row, logits_dtype=logits_dtype)
    with split_after(case.unsplit):
        inplace = "inplace" in getattr(op.call, "keywords", ())
        retained = case.seed % 3 == 0 and not case.compiled and not inplace
        ours, gradients = run(ours, call, batch, leaves, case.seed, case.constant, retained)
    exact, terms = run(op.reference, op.call, batch, wide, case.seed)
    best = [torch.zeros_like(term) if i == case.constant else term for i, term in enumerate(terms)]
    _, naive = run(op.reference, op.call, batch, plain, case.seed, case.constant)
    promised = op.promise(batch, exact)
    for i, values in enumerate(zip(ours, exact, promised, strict=True)):
        assert_within(f"output {i}", *values)
    bounds = BOUNDS.get(op.promise, ())
    if batch.mask is not None and op.promise in (logprobs_promise, kl_promise):
        assert not gradients[0][~batch.mask].any()
    if batch.direction == "jensen-shannon" and op.promise is kl_promise:
        bounds = [(0.0, math.log(2))]
    for value, (least, most) in zip(ours, bounds, strict=False):
        assert not ((value < least) | (value > most)).any()
    sizes = op.sizes(batch, terms, leaves)
    unknown = unknown_gradients(op, promised, leaves, sizes)
    for i, (leaf, actual, wanted, *others) in enumerate(
        zip(leaves, gradients, best, naive, sizes, strict=True)
    ):
        assert actual.dtype == leaf.dtype
        allowed = allowed_gradient(op, batch, leaf, wanted, *others)
        assert_within(f"gradient {i}", actual, wanted, torch.where(unknown, torch.inf, allowed))


def unknown_gradients(op, promised, leaves, sizes):
    """() or (n, 1) bool: what has no promise has none for its gradient, and terms beyond fp16 leave none."""
    beyond = [
        (size > torch.finfo(leaf.dtype).max / 4).any()
        for leaf, size in zip(leaves, sizes, strict=True)
    ]
    unknown = (promised[0] == torch.inf) & (len(promised) == 1)  # divergences
    of_all = unknown.any() | torch.stack(beyond).any()
    return of_all if len(promised) > 1 or op.sizes in OF_HEAD else unknown[:, None] | of_all


def with_mask(place, vocab, direction="reverse", fill="-1e9", dtype=torch.float32):
    row = Row("ordinary", "another", place, fill, "policy")
    return Case((row,), vocab, dtype, "contiguous", 1.0, None, 0.0, direction, 2, 0)


# What took 23 to 401 draws to find, drawn every time: a mask of -1e9 on the policy's lanes, blocks and most columns.
DIRECTIONS = "reverse", "forward"
MASKED = [with_mask("99 %", 4097, direction) for direction in DIRECTIONS]
MASKED += [with_mask("30 %", 100, direction) for direction in DIRECTIONS]
MASKED.append(with_mask("last 60 %", 4097, dtype=torch.bfloat16))
# Fills that are not drawn: within what fp32 holds beside logits, and far beyond it.
MASKED += [with_mask("last 60 %", 513, fill=fill) for fill in ("-1e3", "-1e15")]
# One of many likeliest columns, which says nothing of the others.
row = Row("all equal", "8 nats higher", "a column", "-1e9", "reference")
MASKED.append(MASKED[0]._replace(rows=(row,), vocab=2100, dtype=torch.float16))


def masked(case):
    return f"{case.rows[0].fill} at {case.rows[0].place} of {case.vocab}, {case.direction}"


DIVERGENCES = [name for name in OPS if name.endswith("token_kl")]


@pytest.mark.parametrize(
    ("name", "case"), diagonal(DIVERGENCES, {masked(case): case for case in MASKED})
)
def test_masks_of_most_columns(backend, name, case):
    check(OPS[name], case, backend)


AXES = [*LOOKS], [*OTHER_ROWS], [*PLACES], FILLS, SIDES


def whole(number):
    """A batch of four rows; in four such batches every look, relation, place, fill and side stands."""
    rows = []
    for i in range(4 * number, 4 * number + 4):
        look, other, place, fill, side = (axis[i % len(axis)] for axis in AXES)
        rows.append(Row(look, other, place, fill, side))
    drawn = Case(
        tuple(rows), 513, torch.float32, "odd stride", "per row", None, 0.3, "reverse", 5, number
    )
    if number == 1:
        return drawn._replace(
            vocab=2100,
            dtype=torch.bfloat16,
            view="columns apart",
            temperature=0.7,
            softcap=30.0,
            biased=False,
        )
    if number == 2:
        drawn = drawn._replace(vocab=33, view="transposed", masked=0.0)
        return drawn._replace(direction="jensen-shannon", rows=(*rows, RARE[-1]))
    return drawn


WHOLE = [whole(number) for number in range(4)]


# A split vocabulary runs the same kernels, again for each reduction; of it one form of each op is fast.
SPLIT = [name for name in OPS if name.startswith("vocab_parallel") and "," in name]
SPLIT.remove("vocab_parallel_token_logprobs, support")
CELLS = [("cpu", name) for name in OPS] + [
    slow("kernel", n) if n in SPLIT else ("kernel", n) for n in OPS
]


@pytest.mark.parametrize(("backend", "name"), CELLS, indirect=["backend"])
def test_ops(backend, name):
    """One batch of `WHOLE`, then draws: pairs of options are drawn, not listed."""
    split = name.startswith("vocab_parallel")  # whose ranks run again for each reduction
    check(OPS[name], WHOLE[2 if split else [*OPS].index(name) % len(WHOLE)], backend)
    short = backend == "cpu" and os.environ["TRITON_INTERPRET"] == "1"  # interpreted
    vocabularies = [v for v in VOCABULARIES if v < 5000 or not short]
    settings(max_examples=3 if split or short else 8)(
        given(cases(vocabularies))(lambda case: check(OPS[name], case, backend))
    )()


@pytest.mark.parametrize("backend", ["kernel"], indirect=True)
@pytest.mark.parametrize("name", ["token_logprobs", "token_kl"])
def test_launches_that_split_some_rows(backend, name):
    """Rows of several segments, of which the first alone may have what counts, and masked ones among them."""

    def divided(case):
        case = case._replace(temperature="per row", softcap=None, masked=0.3)
        return case._replace(rows=(*RARE, *case.rows[:1]), unsplit=case.seed % 3)

    # Segments of token_logprobs have more than one tile from 32,769 columns on.
    drawn = cases([33001 if name == "token_logprobs" else 4097]).map(divided)
    settings(max_examples=4)(given(drawn)(lambda case: check(OPS[name], case, backend)))()


DEFAULTS = [torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=DEFAULTS, ids=str)
def default_dtype(request):
    """Return another default dtype, and restore torch's own after the test."""
    yield request.param
    torch.set_default_dtype(torch.float32)


# Rows of `WHOLE`: of several blocks and a tail; with a soft cap; and of Jensen-Shannon with shares of its own.
SMALL = [
    WHOLE[3]._replace(vocab=33, softcap=30.0),
    WHOLE[0]._replace(vocab=2100, temperature=0.7),
    WHOLE[3]._replace(vocab=33, direction="jensen-shannon", jsd_beta=0.1),
]


def assert_same_bits(ran, default_dtype):
    """Assert that the tensors which `ran()` returns do not depend on the default dtype."""
    usual = ran()
    torch.set_default_dtype(default_dtype)
    other = ran()
    torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(other, usual, rtol=0, atol=0, equal_nan=True)


# On the kernels each op that is fast there, under one of the three.
UNDER_DEFAULTS = []
for i, (name, dtype) in enumerate(itertools.product(OPS, DEFAULTS)):
    fast = not name.startswith("vocab_parallel") and DEFAULTS[i // 3 % 3] == dtype
    UNDER_DEFAULTS.append(("cpu", name, dtype))
    UNDER_DEFAULTS.append(("kernel", name, dtype) if fast else slow("kernel", name, dtype))


@pytest.mark.parametrize(
    ("backend", "name", "default_dtype"), UNDER_DEFAULTS, indirect=["backend", "default_dtype"]
)
def test_ops_under_a_default_dtype(backend, name, default_dtype, monkeypatch):
    """Values and gradients on the kernels, on rows.c and in eager mode, whatever dtype a model's code has set."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    op, seed = OPS[name], 0

    def ran():
        return run(op.ours, op.call, batch, leaves, seed)

    for case in SMALL[: 1 if interpreted else None]:
        batch = op.prepare(placed(build(case), backend))
        leaves = op.leaves(batch)
        assert_same_bits(ran, default_dtype)
        with monkeypatch.context() as patched:
            patched.setattr("fused_rl.cpu.native.takes", lambda *matrices: False)
            if not interpreted:
                assert_same_bits(ran, default_dtype)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", OPS)
def test_ops_in_inference_mode(name):
    """Where nothing counts the changes of a tensor."""
    batch = OPS[name].prepare(build(SMALL[1]))
    leaves = OPS[name].leaves(batch)
    usual = OPS[name].call(OPS[name].ours, batch, *leaves)
    with torch.inference_mode():
        found = OPS[name].call(OPS[name].ours, batch, *leaves)
    torch.testing.assert_close([*found], [*usual], rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in OPS if OPS[name].sizes in OF_HEAD])
def test_heads_under_autocast(name, parameters):
    """As torch.nn.functional.linear's: products of rounded operands, and gradients in each leaf's own dtype."""
    op, batch = OPS[name], OPS[name].prepare(build(SMALL[0]))
    leaves = [x.to(parameters if i % 3 else x) for i, x in enumerate(op.leaves(batch))]
    wanted, rounded = run(op.ours, op.call, batch, [x.bfloat16() for x in leaves], 0)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(op.ours, op.call, batch, leaves, 0)
    rounded = [x.to(leaf.dtype) for x, leaf in zip(rounded, leaves, strict=True)]
    torch.testing.assert_close(found, (wanted, rounded), rtol=0, atol=0, equal_nan=True)


@pytest.mark.release
@pytest.mark.parametrize("name", OPS)
def test_ops_at_length(backend, name):
    """Twenty times as many on the CPU path, eight on the kernels; others by `make test-hostile`."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    settings(max_examples=24 if interpreted else 120)(
        given(cases())(lambda case: check(OPS[name], case, backend))
    )()


def run_tokens(call, batch, dtype, leaf):
    """Outputs with the inputs in a dtype, and the gradient of the leaf for the sum of all."""
    floats = [name for name in batch._fields if name != "mask"]
    batch = batch._replace(**{name: getattr(batch, name).to(dtype) for name in floats})
    leaf = getattr(batch, leaf).requires_grad_()
    outputs = call(leaf, batch)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
    total = sum(o.sum() for o in outputs)
    (gradient,) = (
        torch.autograd.grad(total, leaf) if total.requires_grad else (torch.zeros_like(leaf),)
    )
    return [o.detach() for o in outputs] + [gradient]


def check_tokens(function, case):
    """fp32 arithmetic: 2e-5 of each element, and four times the error of the definition in fp32."""
    case = case._replace(dtype=torch.float32) if function.single else case
    batch = hostile_tokens.build(case)
    plain = hostile_tokens.numbers(batch)
    wide = torch.promote_types(case.dtype, torch.float32)
    ran = [
        run_tokens(function.ours, batch, case.dtype, function.leaf),
        run_tokens(function.definition, plain, torch.float64, function.leaf),
        run_tokens(function.definition, plain, wide, function.leaf),
    ]
    for i, (ours, exact, naive) in enumerate(zip(*ran, strict=True)):
        error = (naive.double() - exact).abs().amax() if exact.numel() else 0
        assert ours.dtype == (case.dtype if i + 1 == len(ran[0]) else wide)
        rounding = 2e-5 + 2 * torch.finfo(ours.dtype).eps
        assert_within(f"output {i}", ours, exact, rounding * exact.abs() + 4 * error + 1e-12)


@pytest.mark.parametrize("name", hostile_tokens.FUNCTIONS)
def test_functions_of_tokens_under_a_default_dtype(name, default_dtype):
    function = hostile_tokens.FUNCTIONS[name]
    for dtype in (torch.float32,) if function.single else (torch.float32, torch.bfloat16):
        case = hostile_tokens.Case(1.0, (4, 7), "half", dtype, seed=0)
        batch = hostile_tokens.build(case)
        ran = functools.partial(run_tokens, function.ours, batch, dtype, function.leaf)
        assert_same_bits(ran, default_dtype)


@pytest.mark.parametrize("examples", [6, release(120)])
@pytest.mark.parametrize("name", hostile_tokens.FUNCTIONS)
def test_functions_of_tokens(name, examples):
    function = hostile_tokens.FUNCTIONS[name]
    settings(max_examples=examples)(
        given(hostile_tokens.cases())(lambda case: check_tokens(function, case))
    )()


# Names that are no functions of logits, hidden states or tokens.
OTHERS = {
    "ADVANTAGES",
    "PRESETS",
    "LinearTokenLoss",
    "PolicyLossOptions",
    "Preset",
    "SampledTokens",
    "TokenLogprobs",
    "TokenSupport",
}
OTHERS |= {"tf_adam_epsilon", "judge"}  # of an optimizer; of texts
RANDOM = {"sample_token"}  # no function has these values: tests/test_sampling.py


def test_every_public_op_is_listed():
    """A new name of `fused_rl.__all__` needs a row of OPS (tests/hostile.py) or FUNCTIONS (tests/hostile_tokens.py)."""
    listed = {name.partition(",")[0] for name in (*OPS, *hostile_tokens.FUNCTIONS)}
    assert listed | OTHERS | RANDOM == set(fused_rl.__all__)
