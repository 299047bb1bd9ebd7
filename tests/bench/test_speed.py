"""Our ops under pytest-benchmark, which compares runs before and after a change.

pytest tests/bench/test_speed.py --benchmark-autosave          then, after a change:
pytest tests/bench/test_speed.py --benchmark-compare --benchmark-compare-fail=median:10%
"""

import pytest
import torch

from bench import machine
from bench.cases.case import Spec
from bench.cases.kl import KLCase
from bench.cases.logprobs import LogprobsCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("kind", [LogprobsCase, KLCase])
def test_forward_and_backward(kind, benchmark):
    case = kind(Spec((8192, 151936) if DEVICE == "cuda" else (32, 32000), "bf16"), DEVICE)
    ours = case.ours()[0]
    x, backward = case.inputs(ours)[0], case.backward_of(ours)

    def both():
        backward(ours.call(x), x)
        machine.synchronize(DEVICE)

    benchmark.pedantic(both, rounds=5, warmup_rounds=1)
