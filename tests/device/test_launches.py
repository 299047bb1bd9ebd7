"""Public ops on the device: compiled for sm_90, every launch checked, its PTX executed and compared with fp64."""

import collections
import functools
import itertools
import sys
from typing import NamedTuple

import pytest
import torch

import fused_rl
from tests.device import driver, tensors
from tests.device.on_device import on_device
from tests.device.tensors import put, values
from tests.hostile import OPS, VIEWS, Case, Row
from tests.logits import (
    random_rows,
)
from tests.pairs import pair
from tests.test_hostile import WHOLE, check


def of_device(op):
    ours = tuple(map(on_device, op.ours)) if isinstance(op.ours, tuple) else on_device(op.ours)
    return op._replace(ours=ours)


def names(launches):
    return [launch.name for launch in launches]


# Whatever Triton compiles apart, in turn with what was launched before.
KINDS = {
    "as the first": {},
    "a target that begins at 8 bytes": {"skip": 1},
    "without a mask": {"mask": None},
    "temperatures per row": {"inv_t": torch.tensor([0.5, 2.0])},
    "a soft cap": {"softcap": 3.0},
    "fp16": {"dtype": torch.float16},
    "other compile-time arguments": {"variant": "prefetch"},
}


def test_a_launch_of_another_kind_gets_a_kernel_of_its_own(kernels):
    """`launch` keeps compiled kernels by what they were compiled for; all but the first and its repeat are compiled."""
    from fused_rl.cpu import logprob as cpu
    from fused_rl.kernels import launch, logprob

    logits, targets = random_rows(2, 100, torch.bfloat16, "cpu")
    for kind in [*KINDS, *KINDS]:
        given = {"skip": 0, "mask": torch.tensor([True, False]), "inv_t": 0.7, "softcap": None}
        given |= {"dtype": torch.bfloat16, "variant": "default"} | KINDS[kind]
        x = logits.to(given["dtype"])
        rows = [x, targets, given["mask"], given["inv_t"], given["softcap"]]
        wanted = cpu.logprob_fwd(*rows)
        rows = [put(x) if isinstance(x, torch.Tensor) else x for x in rows]
        rows[1] = put(torch.cat([targets[: given["skip"]], targets]))[given["skip"] :]
        with launch.variant(given["variant"]):
            found = logprob.logprob_fwd(*rows)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(values(ours), theirs, rtol=1e-5, atol=1e-5, msg=kind)
    assert kernels.compiled == ["logprob_fwd_kernel"] * len(KINDS)


def test_a_token_is_sampled_in_two_launches_without_a_wait(kernels):
    """A captured graph repeats both, and reads the raised offset on the device; no temperature compiles anything."""
    logits, state = random_rows(3, 4200, torch.bfloat16, "cpu")[0], torch.tensor([3, 1])
    x, on_device_state = put(logits), put(state)
    found = []
    for temperature in (0.7, 0.7, 1.3):
        with tensors.counted() as waits:
            found.append(fused_rl.sample_token(x, on_device_state, temperature=temperature))
            on_device_state[1] += 1
        assert not waits.reads and not waits.uploads
        tokens = values(found[-1].tokens)
        wanted = fused_rl.token_logprobs(logits, tokens, temperature=temperature).logprobs
        torch.testing.assert_close(values(found[-1].logprobs), wanted, rtol=1e-5, atol=1e-6)
        assert not values(found[-1].broken).any()
    assert not torch.equal(values(found[0].tokens), values(found[1].tokens))
    assert names(kernels.launches) == ["block_kernel", "merge_kernel"] * 3
    assert kernels.compiled == ["block_kernel", "merge_kernel"]


@pytest.fixture
def unexecuted():
    """As `kernels`, but launches are checked and go no further: what they should have written is arbitrary."""
    with driver.session(on_launch=lambda launch: None) as seen, tensors.present():
        yield seen


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").requires_grad_()


@pytest.mark.slow
def test_micro_batches_of_any_length_never_compile(unexecuted):
    """A pass without gradients, and a loss with: of 55 rows, which the budget allows, some would begin at 4 bytes."""
    weight = empty(1000, 8)
    for rows in range(50, 1500, 97):
        hidden = empty(rows, 8)
        targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
        with torch.no_grad():
            fused_rl.linear_token_logprobs(hidden, weight, targets, workspace_mb=0.21)
        given = targets, loss_of_token, torch.ones(rows, device="cuda")
        fused_rl.linear_token_loss(hidden, weight, *given, workspace_mb=0.21).loss.backward()
    # In the loss the entropy has no gradient, nor has lse in tiles of all columns.
    wanted = {"logprob_fwd_kernel": 1, "logprob_bwd_kernel": 2}
    assert collections.Counter(unexecuted.compiled) == wanted


@pytest.mark.slow
def test_lengths_temperatures_and_vocabularies_never_compile(unexecuted):
    """Of each kernel one for short rows, one for split ones, and one for each kind of upstream gradient; nor does K."""
    sizes = itertools.product(range(1, 40, 6), (0.3, 1.0, 1.3), (32000, 50257, 1), (1, 8, 50))
    for rows, temperature, vocab, count in sizes:
        x, y = empty(rows, vocab), empty(rows, vocab)
        targets = torch.zeros(rows, count, dtype=torch.int64, device="cuda")
        for chosen in (targets[:, 0], targets):
            outputs = fused_rl.token_logprobs(x, chosen, temperature=temperature)
            (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
        for direction in ("reverse", "jensen-shannon"):
            fused_rl.token_kl(x, y, direction=direction, temperature=temperature).sum().backward()
    assert max(collections.Counter(unexecuted.compiled).values()) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_hostile_rows(kernels, name):
    """fp32 at an odd stride, masked, temperatures per row; bf16 with columns apart; fp32, transposed: in turn."""
    check(of_device(OPS[name]), WHOLE[[*OPS].index(name) % len(WHOLE)])
    assert kernels.launches


# Whole tiles and a tail; rows that begin anywhere, the last of two segments almost empty; every second column.
LONG = {
    "aligned": {"vocab": 16384, "view": "contiguous", "dtype": torch.bfloat16},
    "odd": {"vocab": 33003, "view": "odd stride", "dtype": torch.bfloat16},
    "fp32": {"vocab": 33003, "view": "odd stride", "dtype": torch.float32},
    "fp16": {"vocab": 9001, "view": "columns apart", "dtype": torch.float16},
}
ON_LOGITS = [
    "token_logprobs",
    "token_logprobs, inplace",
    "token_logprobs, K targets",
    "token_logprobs, support",
]
ROWS = (
    Row("ordinary", "half a nat away", "nowhere", "-inf", "policy"),
    Row("peak of 10 nats", "another", "30 %", "-inf", "both"),
    Row("tie of five", "near", "last 60 %", "-1e9", "policy"),
)
PLAIN = Case(ROWS, 1000, torch.bfloat16, "contiguous", 0.7, None, False, "reverse", 5, seed=0)


PROGRAMS = {"several per row": 132, "one per row": 0}  # by the number of multiprocessors
SPREAD = [
    ("aligned", "one per row"),
    ("odd", "several per row"),
    ("fp32", "one per row"),
    ("fp16", "several per row"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "programs"), SPREAD)
@pytest.mark.parametrize("name", [*ON_LOGITS, "token_kl"])
def test_long_rows(kernels, monkeypatch, name, form, programs):
    from fused_rl.kernels import kl_gradient, launch

    for module in (launch, kl_gradient):
        monkeypatch.setattr(module, "multiprocessors", lambda device: PROGRAMS[programs])
    check(of_device(OPS[name]), PLAIN._replace(**LONG[form]))
    merged = any(launch.name.endswith("merge_kernel") for launch in kernels.launches)
    segment = 16384 if name == "token_kl" else 8192  # columns of two bytes in a short row
    assert merged == (programs == "several per row" and LONG[form]["vocab"] > segment)


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "form"), [("forward", "fp16"), ("jensen-shannon", "odd")])
def test_long_pairs(kernels, direction, form):
    check(of_device(OPS["token_kl"]), PLAIN._replace(direction=direction, **LONG[form]))


# --- 64-bit addresses ------------------------------------------------------------------------------------------------

FAR = 2**31 + 4099  # elements


def far_view(x):
    """The same rows (n, V) in storage of their own, more than 2^31 elements apart."""
    storage = torch.UntypedStorage(x.element_size() * ((len(x) - 1) * FAR + x.shape[1]))
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, (FAR, 1)).copy_(x)


# Rows that several programs share, and merge.
FAR_ROWS = [(name, "reverse") for name in [*ON_LOGITS, "token_kl"]] + [
    ("token_kl", "jensen-shannon"),
    ("linear_token_logprobs, support", "head"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "direction"), FAR_ROWS)
def test_far_rows_of_every_op(kernels, monkeypatch, name, direction):
    monkeypatch.setitem(VIEWS, "far apart", far_view)
    # of a head each row of the vocabulary is far away
    vocab = {"token_kl": 16501, "linear_token_logprobs, support": 4}.get(name, 9001)
    check(of_device(OPS[name]), PLAIN._replace(vocab=vocab, view="far apart", direction=direction))
    assert direction != "reverse" or any(
        launch.name.endswith("merge_kernel") for launch in kernels.launches
    )


@pytest.mark.slow
def test_more_than_32_bits_of_outputs():
    """Of B x T tokens, whose memory is never touched, the last program alone runs."""
    columns = 2**15 + 1
    rows = 2**31 // columns + 2  # so that the last begins beyond
    given = torch.randn(2, 1, columns)
    options = {"gamma": 0.99, "gae_lambda": 0.95}
    wanted = fused_rl.gae(*given, torch.ones(1, columns, dtype=torch.bool), **options)

    def last(launch):
        launch.run(chosen=[(rows - 1, 0, 0)])

    with driver.session(on_launch=last), tensors.present():
        mask = put(torch.ones(1, columns, dtype=torch.bool)).expand(rows, columns)
        found = fused_rl.gae(*(put(x).expand(rows, columns) for x in given), mask, **options)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(values(ours)[-1], theirs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["reverse", "jensen-shannon"])
def test_a_gradient_of_more_than_32_bits_of_elements(direction):
    """Of rows that are one row in memory, whose gradients are not: the last program alone runs, beyond 2^31."""
    from fused_rl.kernels import jensen_shannon, kl, kl_gradient

    vocab = 2**16
    rows = 2**31 // vocab + 2
    x, y = (put(z) for z in pair(1, 1, vocab, dtype=torch.bfloat16))
    with driver.session(), tensors.present():
        divergence, state = kl.kl_fwd(x, y, None, 1.0)
        sums = (
            jensen_shannon.js_fwd(x, y, None, 1.0, state) if direction == "jensen-shannon" else None
        )
        g = torch.ones(1, device="cuda")
        wanted = kl_gradient.kl_bwd(g, x, y, None, 1.0, divergence, state, sums, True, True)
    again = [
        None if z is None else put(values(z).expand(*z.shape[:-1], rows).contiguous())
        for z in (g, divergence, state, sums)
    ]
    far = [z.expand(1, rows, vocab) for z in (x, y)]

    def only_last(launch):
        launch.run(chosen=[(rows - 1, part, 0) for part in range(launch.grid[1])])

    with driver.session(on_launch=only_last), tensors.present():
        found = kl_gradient.kl_bwd(again[0], *far, None, 1.0, *again[1:], True, True)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(values(ours)[0, -1], values(theirs)[0, 0])


# --- how much a call asks of the host --------------------------------------------------------------------------------

N, V, H, K = 4, 100, 16, 3
# operators that launch nothing
FREE = {"view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "detach", "alias", "select"}
FREE |= {
    "slice",
    "as_strided",
    "t",
    "unbind",
    "lift_fresh",
    "empty",
    "empty_like",
    "empty_strided",
}
FREE |= {"new_empty", "_local_scalar_dense", "_reshape_alias", "resize_"}


class Counts(NamedTuple):
    """Of a call with its backward pass: launches of kernels, of other operators, and calls of our functions forward."""

    kernels: int
    others: int
    most_calls: int


def rows(*shape):
    return put(torch.randn(shape).requires_grad_())


def ids(*shape):
    return put(torch.randint(V, shape))


def kept_sets(targets):
    lists = [[*{t, (t + 1) % V}] for t in values(targets).tolist()]
    cpu = fused_rl.TokenSupport.from_lists(lists)
    return fused_rl.TokenSupport(put(cpu.ids), put(cpu.offsets))


def with_sets(op, *leaves):
    targets = ids(N)
    return op(*leaves, targets, support=kept_sets(targets)).logprobs


def loss_of_token(logprobs, entropy, weights):
    return -logprobs * weights


def loss_of_head(*leaves):
    return fused_rl.linear_token_loss(*leaves, ids(N), loss_of_token, rows(N).detach()).loss


def loss_of_policy(logprobs, entropy):
    old, ref = rows(N, 5).detach(), rows(N, 5).detach()
    options = {"ref_logprobs": ref, "kl_coef": 0.04, "entropy_coef": 0.01, "preset": "grpo"}
    mask = put(torch.ones(N, 5, dtype=torch.bool))
    advantages = rows(N).detach()
    return fused_rl.policy_loss(logprobs, old, advantages, mask, entropy=entropy, **options)[0]


LOGITS, PAIR, HEAD, HEADS = [(N, V)], [(N, V)] * 2, [(N, H), (V, H)], [(N, H), (V, H)] * 2
logprobs, head = fused_rl.token_logprobs, fused_rl.linear_token_logprobs
mask = functools.partial(torch.ones, 2, 5, dtype=torch.bool)
# An op of leaves with these shapes, whose output is differentiated; the products of a head are four of the others.
OF_HOST = {
    "token_logprobs": (LOGITS, lambda x: logprobs(x, ids(N)).logprobs, Counts(2, 0, 33)),
    "token_logprobs, in sequences": (
        [(2, N, V)],
        lambda x: logprobs(x, ids(2, N)).logprobs,
        Counts(2, 0, 33),
    ),
    "token_logprobs, K targets": (
        LOGITS,
        lambda x: logprobs(x, ids(N, K)).logprobs,
        Counts(5, 3, 42),
    ),
    "token_logprobs, support": (LOGITS, lambda x: with_sets(logprobs, x), Counts(4, 3, 76)),
    "token_kl": (PAIR, fused_rl.token_kl, Counts(2, 0, 38)),
    "token_kl, Jensen-Shannon": (
        PAIR,
        lambda x, y: fused_rl.token_kl(x, y, direction="jensen-shannon"),
        Counts(3, 4, 49),
    ),
    "linear_token_logprobs": (HEAD, lambda h, w: head(h, w, ids(N)).logprobs, Counts(2, 4, 70)),
    "linear_token_logprobs, support": (
        HEAD,
        functools.partial(with_sets, head),
        Counts(5, 52, 104),
    ),
    "linear_token_loss": (HEAD, loss_of_head, Counts(2, 13, 110)),
    "linear_token_kl": (HEADS, fused_rl.linear_token_kl, Counts(2, 7, 102)),
    "topk_kl": (
        [(N, K)] * 2,
        lambda x, y: fused_rl.topk_kl(x.log_softmax(-1), y.log_softmax(-1)),
        Counts(0, 257, 38),
    ),
    "policy_loss": ([(N, 5)] * 2, loss_of_policy, Counts(0, 165, 122)),
    "kl_estimate": ([(N, 5)] * 2, fused_rl.kl_estimate, Counts(0, 51, 28)),
    "gae": (
        [(2, 5)] * 2,
        lambda r, v: fused_rl.gae(r, v, put(mask()), gamma=1.0, gae_lambda=0.9)[0],
        Counts(1, 0, 49),
    ),
    "group_advantages": ([(8,)], lambda r: fused_rl.group_advantages(r, 4), Counts(0, 10, 19)),
}


@pytest.mark.parametrize("name", OF_HOST)
def test_a_call_asks_little_of_the_host(kernels, monkeypatch, name):
    """Each launch takes the host 5 us, each call of ours 0.1: counts, because no test depends on a machine's speed.

    As for plain tensors, nothing goes through the dispatcher of registered operators.
    """
    from fused_rl.objectives import advantages
    from fused_rl.ops import kl
    from fused_rl.ops import logprobs as of_logprobs

    for module in (advantages, kl, of_logprobs):
        monkeypatch.setattr(module, "skips_dispatcher", lambda *x: True)
    monkeypatch.setattr(tensors, "_registered", lambda name, *_: pytest.fail(name))
    shapes, call, wanted = OF_HOST[name]
    leaves = [rows(*shape) for shape in shapes]
    call(*leaves)  # fills caches
    folders, calls = tuple(str(tensors.ROOT / f) for f in ("fused_rl", "kernels")), []

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            calls.append(frame.f_code.co_name)

    before = len(kernels.launches)
    with tensors.counted() as waits:
        sys.setprofile(watch)
        try:
            output = call(*leaves)
        finally:
            sys.setprofile(None)
        if output.requires_grad:
            upstream = put(torch.ones(output.shape))
            needs = [leaf for leaf in leaves if leaf.requires_grad]
            torch.autograd.grad(output, needs, upstream, allow_unused=True)
    others = {name: n for name, n in waits.launches.items() if name not in FREE}
    found = Counts(len(kernels.launches) - before, sum(others.values()), len(calls))
    assert found[:2] == wanted[:2], others
    assert found.most_calls <= wanted.most_calls, calls
