"""The CPU path of the exact divergences beyond what `test_kl` asks of both backends: blocks, and the compiled form."""

import pytest
import torch

import fused_rl
from bench import machine
from fused_rl.cpu import compiled as cpu
from fused_rl.cpu import pair as rows_of_two
from tests.pairs import DIRECTIONS, assert_as_good_as_reference, both_gradients, exact, pair

VOCAB = 4 * cpu.BLOCK + 77  # blocks and a tail


pytestmark = pytest.mark.usefixtures("cpu", "seeded")


@pytest.fixture
def compiled(monkeypatch):
    """Sends small inputs to the compiled functions; returns the names of those that were called."""
    if not cpu.compiler_found():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(cpu, "WORTH_COMPILING", 1)
    names, call = [], cpu.by_inductor
    monkeypatch.setattr(
        cpu, "by_inductor", lambda function: names.append(function.__name__) or call(function)
    )
    return names


def tops(x):
    """The column of each block's largest logit, (N, blocks)."""
    return torch.cat(
        [i * cpu.BLOCK + b.argmax(1, True) for i, b in enumerate(x.split(cpu.BLOCK, 1))], 1
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize(
    "where", ["one token", "the top of each block", "each block alike", "all but the tops"]
)
def test_blocks_that_move_apart(where, size, direction):
    """Where the reference of a block, x - y at its top, is far from the mean in units of the spread."""
    x = torch.randn(6, VOCAB).double()
    top = tops(x)
    move = torch.zeros_like(x)
    if where == "one token":
        move[range(6), x.argmax(1)] = size
    elif where == "each block alike":
        move += size * torch.randn(6, 5).double().repeat_interleave(cpu.BLOCK, 1)[:, :VOCAB]
    else:
        move.scatter_(1, top, size * torch.randn(6, top.shape[1]).double())
        if where == "all but the tops":
            move = size * torch.randn(6, VOCAB).double().masked_fill(move != 0, 0)
    x = x.float()
    y = (x.double() + move).float()
    got = fused_rl.token_kl(x, y, direction=direction)
    torch.testing.assert_close(got.double(), exact(x, y, direction), rtol=1e-6, atol=0)


@pytest.mark.parametrize("apart", [0.1, 30.0])
def test_first_columns_of_blocks_far_off_the_mean(apart):
    """Without mass, where x - y is not what it is elsewhere: 5e-12 nats keep their digits."""
    x, y = pair(4, VOCAB, distance=3e-6)
    x[:, :: cpu.BLOCK] -= 60.0
    y[:, :: cpu.BLOCK] -= 60.0 + apart
    got = fused_rl.token_kl(x, y)
    torch.testing.assert_close(got.double(), exact(x, y, "reverse"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_blocks_without_mass(direction):
    """Blocks that are banned, thousands of nats down in one or both, or nearly all of the mass."""
    x, y = pair(5, VOCAB)
    x[0, 512:1024], y[0, 512:1024] = -torch.inf, -torch.inf
    x[1, :1024], y[1, :1024] = x[1, :1024] - 3000.0, y[1, :1024] - 2000.0
    x[2, :1024] -= 8.0
    x[3], y[3] = x[3] * 100, y[3].flip(0) * 100
    x[4, 700] += 90.0
    upstream = torch.randn(5)
    got = both_gradients(fused_rl.token_kl, x, y, upstream, direction=direction)
    assert_as_good_as_reference(
        got, *(z.clamp(min=-1e5) for z in (x, y)), upstream, direction=direction
    )


@pytest.mark.slow
# With and without what x - y rounds off.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_compiled(compiled, direction, dtype):
    x, y = (z[:, :-1] for z in pair(3, 5, VOCAB, dtype=dtype))  # not one matrix
    x[0, 0, :600], y[0, 0, :600] = -torch.inf, -torch.inf
    x[1, 1] += 1000.0
    y[1, 2] = x[1, 2]
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2, 1:3] = False
    x[2, 2, 7] = torch.nan  # not read
    options = {"direction": direction, "temperature": torch.rand(3, 1) + 0.5, "mask": mask}
    upstream = torch.randn(3, 4)
    got = both_gradients(fused_rl.token_kl, x, y, upstream, **options)
    names = (
        {"_js_sums", "js_dx", "js_dy"} if direction == "jensen-shannon" else {"_kl_dx", "_kl_dy"}
    )
    assert set(compiled) == {"_near_sums"} | names
    assert all((z[~mask] == 0).all() for z in got)
    assert got[0][1, 2] == 0
    assert (got[1][1, 2] == 0).all()
    finite = [z.masked_fill(~mask[..., None], 0).clamp(min=-1e4) for z in (x, y)]
    # floor: 1 / temperature is rounded to fp32
    assert_as_good_as_reference(got, *finite, upstream, floor=3e-6, **options)
    # the bits of a row are its own
    alone = both_gradients(
        fused_rl.token_kl,
        x[1:, :2],
        y[1:, :2],
        upstream[1:, :2],
        direction=direction,
        temperature=options["temperature"][1:],
    )
    for ours, best in zip(alone, got, strict=True):
        assert torch.equal(ours[0], best[1, :2])


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_compiled_keeps_no_intermediate(compiled, direction):
    """The gradient, and next to nothing else, is as large as the logits: also in what is compiled second."""
    small = [z.requires_grad_() for z in pair(8, VOCAB)]
    fused_rl.token_kl(*small, direction=direction).sum().backward()
    x, y = pair(128, 65_613, dtype=torch.bfloat16)
    x.requires_grad_()
    least = min(
        machine.peak_extra_bytes(
            lambda: torch.autograd.grad(fused_rl.token_kl(x, y, direction=direction).sum(), x),
            "cpu",
        )
        for _ in range(3)  # the first time compiles
    )
    assert least <= 1.6 * x.nbytes


def test_slices_are_not_copied():
    x = torch.randn(3, 5, 40)
    for z in (x[:, :-1], x[:, 1:], x[..., :30], x[1:, 2:4, 5:]):
        rows = torch.tensor([0, 2, z.shape[0] * z.shape[1] - 1])
        matrix, at = rows_of_two.matrix(z, rows)
        assert matrix.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert torch.equal(matrix[at], z.reshape(-1, z.shape[-1])[rows])
    z = torch.randn(5, 40).expand(3, 5, 40)  # the same rows again and again
    matrix, at = rows_of_two.matrix(z, rows)
    assert torch.equal(matrix[at], z.reshape(-1, 40)[rows])


@pytest.mark.parametrize("fill", [-60.0, -65504.0, -1e9])
def test_a_mask_on_whole_blocks_takes_no_digits(fill):
    """Where P is a mask throughout, u is y's distance from its mean, 20 nats, and Q's mass there is most of the KL."""
    y = 4 * torch.randn(256, 4 * cpu.BLOCK)
    x = y + 1e-3 * torch.randn(y.shape)
    x[:, 2 * cpu.BLOCK : 3 * cpu.BLOCK] = fill
    value = fused_rl.token_kl(x, y, temperature=0.7)
    wanted = fused_rl.reference.token_kl(x.double(), y.double(), temperature=0.7)
    torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=0)
