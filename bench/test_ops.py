"""The ops under pytest-benchmark, for a machine of your own.

    pytest bench --benchmark-only
    pytest bench --benchmark-only --benchmark-autosave          then, after a change:
    pytest bench --benchmark-only --benchmark-compare --benchmark-compare-fail=median:10%

A group holds one operation and shape; its rows are implementations. Ours is checked against plain fp64 before it runs.
"""

import pytest
import torch

from bench import machine, peers, results, run
from bench.cases.case import Spec
from bench.cases.gae import GAECase
from bench.cases.kl import KLCase
from bench.cases.logprobs import LogprobsCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(8192, 151936), (8192, 50257)] if DEVICE == "cuda" else [(128, 32000), (32, 151936)]
NAMES = []
for kind in (LogprobsCase, KLCase):
    running, _ = peers.find(kind.known, DEVICE)
    NAMES += [(kind, name) for name in ["fused_rl", *[peer.name for peer in running]]]


def timed(benchmark, case, name, phase):
    """Check the implementation of this name if it is ours, then hand its runs to pytest-benchmark."""
    shape = results.sizes(case.spec.shape, "x")
    benchmark.group = f"{case.op} {phase} {shape} {case.spec.dtype} {DEVICE}"
    found, _ = case.contenders(name if name in case.known else "none")
    named = [peer for peer in found if peer.name == name]
    if not named:
        pytest.skip(f"{name} has no answer to this case")
    peer = named[0]
    once = run.run_once(case, peer)
    errors = case.errors(peer, once.outputs, once.gradient)
    if peer.role == "ours":
        assert run.judged(case, peer, errors) == {"status": "ok"}
    benchmark.extra_info.update(version=peer.version, error=errors, bytes=case.bytes()[0]["both"])
    x, backward = case.inputs(peer)[0], case.backward_of(peer)

    def one():
        outputs = peer.call(x)
        if phase == "both":
            backward(outputs, x)
        machine.synchronize(DEVICE)

    benchmark.pedantic(one, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("phase", ["forward", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_rows(benchmark, kind, name, shape, phase):
    timed(benchmark, kind(Spec(shape, "bf16"), DEVICE), name, phase)


@pytest.mark.parametrize("name", ["fused_rl", "loop over T"])
@pytest.mark.parametrize("shape", [(64, 1024), (16, 4096)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_gae(benchmark, name, shape):
    timed(benchmark, GAECase(Spec(shape), DEVICE), name, "forward")
