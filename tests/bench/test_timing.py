"""Turns, budgets, what a GPU's timer repeats, and peak memory."""

import pytest
import torch

from bench import machine, timing
from tests.bench.cases import one_case


def test_each_has_its_turn_in_every_round_and_what_is_too_slow_keeps_its_first_sample():
    calls = []

    def run(name, seconds):
        return lambda: calls.append(name) or {"forward": seconds, "both": 2 * seconds}

    costs = {"slow": 5.0, "ours": 4.0, "fast": 0.01, "medium": 0.25}
    runs = {name: run(name, cost) for name, cost in costs.items()}
    first = {name: {"forward": 9 * cost, "both": cost} for name, cost in costs.items()}
    samples = timing.interleaved(runs, 20.0, first, keep=("ours",))
    assert {n: len(s["both"]) for n, s in samples.items()} == {
        "ours": 4,
        "fast": 4,
        "medium": 4,
        "slow": 1,
    }
    assert samples["slow"] == {"forward": [45e3], "both": [5e3]}, "that of before"
    assert samples["fast"]["both"] == pytest.approx([20] * 4), "those of now, of one run"
    assert calls == 4 * ["ours", "fast", "fast", "fast", "medium"], (
        "what takes less than a block is repeated"
    )


def test_a_ratio_is_that_of_turns_side_by_side():
    # The machine is three times as slow in every other round: of either median that says nothing.
    base, mine = [1.0, 3.0, 1.0, 3.0, 3.0], [2.0, 6.0, 2.0, 6.0, 2.0]
    assert timing.ratio(mine, base, True) == 2
    assert timing.ratio(mine, base, False) == pytest.approx(2 / 3)


def test_a_budget_hands_on_what_is_left_over(clock):
    clock.step = 0
    budget = timing.Budget(30, 3, least=1)
    assert budget.share() == 10
    clock.now += 2
    assert budget.share() == 14
    clock.now += 40
    assert budget.share() == 1, "however late"
    large_first = timing.Budget(30, 1 + 5)
    assert large_first.share(5) == 25


def test_gpu_timing_repeats_the_backward_pass_on_saved_forwards(monkeypatch):
    # do_bench calls a function again and again: gradients of one forward must survive that, in place excepted.
    case, calls = one_case(), []

    def do_bench(run, rep, return_mode):
        calls.append([run() for _ in range(3)])
        return [1.0, 2.0, 6.0]

    pytest.importorskip("triton")
    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    case.device = "a GPU"  # only read to keep the graph for the next call
    ours, inplace = case.ours()
    timed = timing.Run(ours.call, case.backward, case.inputs(ours), True)
    samples = timing.phases_gpu(timed)
    assert {phase: timing.median(s) for phase, s in samples.items()} == {
        "forward": 2,
        "backward": 2,
        "both": 2,
    }
    first, second, third = calls[1]
    assert torch.equal(first, third), "input sets take turns"
    assert not torch.equal(first, second)
    once = timing.phases_gpu(timing.Run(inplace.call, case.backward, case.inputs(inplace), False))
    assert set(once) == {"forward", "both"}


@pytest.mark.slow
def test_peak_memory_counts_what_is_held_at_once():
    size = 32 << 20
    x = torch.ones(size, dtype=torch.uint8)
    assert machine.peak_extra_bytes(lambda: x + 1, "cpu") == pytest.approx(size, rel=0.1)
    assert machine.peak_extra_bytes(lambda: (x + 1).float(), "cpu") == pytest.approx(
        5 * size, rel=0.1
    )
    assert (
        machine.peak_extra_bytes(lambda: [x[: size // 8] + 1 for _ in range(8)][0].max(), "cpu")
        < 1.5 * size
    )
