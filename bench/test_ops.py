"""The ops under pytest-benchmark, for a machine of your own.

    pytest bench --benchmark-only
    pytest bench --benchmark-only --benchmark-autosave          then, after a change:
    pytest bench --benchmark-only --benchmark-compare --benchmark-compare-fail=median:10%

A group holds one operation and shape; its rows are implementations. Ours is checked against plain fp64 before it runs.
"""

import pytest
import torch

import fused_rl
from bench import measure, peers
from bench.kernels import Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(8192, 151936), (8192, 50257)] if DEVICE == "cuda" else [(128, 32000), (32, 151936)]
FOUND = {op: peers.find(known, DEVICE)[0] for op, known in (("token_logprobs", peers.LOGPROBS), ("token_kl", peers.KL))}
NAMES = [(op, name) for op, found in FOUND.items() for name in ["fused_rl", *(p.name for p in found)]]


def _wait(result):
    measure.synchronize(DEVICE)
    return result


@pytest.mark.parametrize("phase", ["forward", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize(("op", "name"), NAMES)
def test_rows(benchmark, op, name, shape, phase):
    benchmark.group = f"{op} {phase} {shape[0]}x{shape[1]} bf16 {DEVICE}"
    case = Case(op, "rows", shape, "bf16", 0.0, DEVICE)
    peer = peers.Peer("fused_rl", fused_rl.__version__, case.ours)
    if name != "fused_rl":
        found = next(p for p in FOUND[op] if p.name == name)
        peer = found._replace(call=case.peer(found.call, name))
    try:
        errors = case.errors(*case.run_once(peer)[:2])
    except peers.Unavailable as reason:
        pytest.skip(str(reason))
    if name == "fused_rl":
        assert not case.failure(errors), errors
    benchmark.extra_info.update(version=peer.version, error=errors, bytes=case.bytes()["both"])
    (x, *_) = case.inputs(peer)

    def run():
        outputs = peer.call(x)
        return _wait(outputs if phase == "forward" else case.backward(outputs, x))

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("name", ["fused_rl", "loop over T"])
@pytest.mark.parametrize("shape", [(64, 1024), (16, 4096)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_gae(benchmark, name, shape):
    benchmark.group = f"gae {shape[0]}x{shape[1]} fp32 {DEVICE}"
    torch.manual_seed(0)
    rewards, values = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE)
    mask = torch.ones(shape, dtype=torch.bool, device=DEVICE)
    if name == "fused_rl":
        exact = peers.loop_gae(rewards.double(), values.double(), mask, 0.99, 0.95)[0]
        ours = fused_rl.gae(rewards, values, mask, gamma=0.99, gae_lambda=0.95)[0]
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)

    def run():
        if name == "fused_rl":
            return _wait(fused_rl.gae(rewards, values, mask, gamma=0.99, gae_lambda=0.95))
        return _wait(peers.loop_gae(rewards, values, mask, 0.99, 0.95))

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
