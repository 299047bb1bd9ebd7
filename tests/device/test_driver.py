"""How often kernels compile; and every check of driver.py, ptx.py and memory.py sees the slip that it is for."""

import collections

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import fused_rl  # noqa: E402
from tests.device import driver, tensors  # noqa: E402
from tests.device.driver import Argument, LaunchError, check_promises, number  # noqa: E402
from tests.device.instructions import Unknown  # noqa: E402
from tests.device.memory import Fault  # noqa: E402
from tests.device.ptx import Program  # noqa: E402
from tests.device.tensors import put, values  # noqa: E402

# --- compilations ----------------------------------------------------------------------------------------------------


@pytest.fixture
def unexecuted():
    """As `kernels`, but launches are checked and go no further: what they should have written is arbitrary."""
    with driver.session(on_launch=lambda launch: None) as seen, tensors.present():
        yield seen


def loss_of(logprobs, entropy, weights):
    return -logprobs * weights


@pytest.mark.slow
def test_micro_batches_of_any_length_never_compile(unexecuted):
    """A pass without gradients, and a loss with: of 55 rows, which the budget allows, some would begin at 4 bytes."""
    weight = torch.empty(1000, 8, dtype=torch.bfloat16, device="cuda").requires_grad_()
    for rows in range(50, 1500, 97):
        hidden = torch.empty(rows, 8, dtype=torch.bfloat16, device="cuda").requires_grad_()
        targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
        with torch.no_grad():
            fused_rl.linear_token_logprobs(hidden, weight, targets, workspace_mb=0.21)
        ones = torch.ones(rows, device="cuda")
        fused_rl.linear_token_loss(
            hidden, weight, targets, loss_of, ones, workspace_mb=0.21
        ).loss.backward()
    # In the loss the entropy has no gradient, nor has lse in tiles of all columns.
    wanted = {"logprob_fwd_kernel": 1, "logprob_bwd_kernel": 2}
    assert collections.Counter(unexecuted.compiled) == wanted


# --- slips -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["shift", "stride"])
def copy_kernel(
    x_ptr,
    y_ptr,
    shift,
    stride: tl.int32,
    n,
    MASKED: tl.constexpr,
    PROMISED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = x + shift elements, a row per program; right where n <= BLOCK, MASKED, and shift is divisible if PROMISED."""
    column = tl.arange(0, BLOCK)
    offset = tl.program_id(0) * stride + shift
    if PROMISED:
        offset = tl.multiple_of(offset, 16)
    x = tl.load(x_ptr + offset + column, mask=(column < n) if MASKED else None)
    tl.store(y_ptr + tl.program_id(0) * n + column, x, mask=column < n)


@triton.jit
def turn_kernel(x_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """x[1:] = x[:-1] once, in place, then x[0] = 1: two stores that meet what other threads load."""
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + (column + 1) % BLOCK, x)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr, 1.0)


def copied(
    x,
    *,
    rows=1,
    columns=1,
    n=100,
    shift=0,
    stride=0,
    masked=True,
    promised=False,
    y=None,
    block=128,
):
    y = torch.zeros(rows, n, dtype=x.dtype, device="cuda") if y is None else y
    copy_kernel[(rows, columns)](
        x, y, shift, stride, n, MASKED=masked, PROMISED=promised, BLOCK=block
    )
    return values(y)


@pytest.mark.slow
def test_a_load_beyond_the_end_is_seen(kernels):
    with pytest.raises(
        Fault,
        match=r"copy_kernel, program \(0, 0, 0\): .*outside every argument: byte 400 of x_ptr",
    ):
        copied(put(torch.zeros(100)), masked=False)


@pytest.mark.slow
def test_a_wrong_promise_of_alignment_is_seen(kernels):
    with pytest.raises(Fault, match="not aligned to 16 bytes: byte 12 of x_ptr"):
        copied(put(torch.zeros(1024)), shift=3, promised=True, masked=False, block=512)


@pytest.mark.slow
def test_a_missing_barrier_is_seen(kernels):
    with pytest.raises(Fault, match="two threads and no barrier"):
        turn_kernel[(1,)](put(torch.zeros(128)), BLOCK=128, BARRIER=False)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [{"columns": 65536}, {"rows": 0}, {"rows": 2**31}])
def test_a_grid_beyond_the_limits_is_seen(unexecuted, grid):
    y = torch.zeros(1, 100, device="cuda")
    with pytest.raises(LaunchError, match="copy_kernel: a grid of"):
        copied(torch.zeros(128, device="cuda"), y=y, **grid)


@pytest.mark.slow
def test_a_pointer_to_the_cpu_is_seen(unexecuted):
    with pytest.raises(LaunchError, match="x_ptr is a pointer to cpu, not to cuda"):
        copied(torch.zeros(128))


def test_numbers_that_do_not_fit_are_seen():
    assert number("n", "i32", 2**31 - 1).value == 2**31 - 1 and number("n", "u1", True).value == 1
    for kind, value in (("i32", 2**31), ("i32", -(2**31) - 1), ("i64", 2**63), ("u32", -1)):
        with pytest.raises(LaunchError, match=f"n = {value} does not fit into {kind}"):
            number("n", kind, value)
    with pytest.raises(LaunchError, match="k: n = 24 is no multiple of 16"):
        check_promises("k", [Argument("n", "i32", 24)], [True])


def ptx_of(*lines: str) -> Program:
    body = "\n".join(lines)
    return Program(
        f".visible .entry made(\n.param .u64 made_param_0\n)\n.reqntid 32\n{{\n{body}\nret;\n}}\n"
    )


MADE = {
    "setp.lt.u32 %p1, %r1, 8;\n@%p1 bra $L;\n$L:": (Fault, "bra.*: threads part here"),
    "setp.lt.u32 %p1, %r1, 8;\n@%p1 bar.sync 0;": (Fault, "bar.sync.*: threads part here"),
    "$L:\nbra $L;": (Fault, "more than .* instructions"),
    "add.sat.f32 %r2, %r1, %r1;": (Unknown, "add.sat.f32"),
    "tanh.approx.f32 %r2, %r1;": (Unknown, "tanh.approx.f32"),
    "shfl.sync.down.b32 %r2, %r1, 1, 31, -1;": (Unknown, "shfl.down"),
}


@pytest.mark.parametrize("lines", MADE)
def test_what_ptx_must_not_do_is_seen(lines, monkeypatch):
    monkeypatch.setattr("tests.device.ptx.LONGEST", 1000)
    error, message = MADE[lines]
    with pytest.raises(error, match=message):
        ptx_of("mov.u32 %r1, %tid.x;", lines).run((1, 1, 1), [0], [], shared=0)
