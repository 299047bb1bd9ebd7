"""Our ops under pytest-benchmark, which compares runs before and after a change.

    pytest tests/bench/test_speed.py --benchmark-autosave          then, after a change:
    pytest tests/bench/test_speed.py --benchmark-compare --benchmark-compare-fail=median:10%

Beside other libraries the suite shows them: `python -m bench`.
"""

import pytest
import torch

from bench import machine, results, run
from bench.cases.case import Spec
from bench.cases.gae import GAECase
from bench.cases.kl import KLCase
from bench.cases.logprobs import LogprobsCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = (8192, 151936) if DEVICE == "cuda" else (32, 32000)


@pytest.mark.parametrize(("kind", "shape"), [(LogprobsCase, ROWS), (KLCase, ROWS), (GAECase, (16, 4096))])
def test_forward_and_backward(kind, shape, benchmark):
    case = kind(Spec(shape, "bf16"), DEVICE)
    peer = case.ours()[0]
    once = run.run_once(case, peer)
    assert run.judged(case, peer, case.errors(peer, once.outputs, once.gradient)) == {"status": results.OK}
    x, backward = case.inputs(peer)[0], case.backward_of(peer)

    def both():
        outputs = peer.call(x)
        if backward:
            backward(outputs, x)
        machine.synchronize(DEVICE)

    benchmark.pedantic(both, rounds=5, warmup_rounds=1)
