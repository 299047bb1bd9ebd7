"""Time: runs that take turns, ratios of what ran side by side, a budget shared among parts; on CPU and GPU."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Budget:
    """Seconds, shared out by weight among the parts to come: what one leaves over, the next ones get.

    Args:
        seconds: in all, from now on.
        weights: of all parts together.
        least: seconds that each part has in any case.
    """

    def __init__(self, seconds: float, weights: float = 1.0, least: float = 0.0):
        self.end = time.perf_counter() + seconds
        self.weights = weights
        self.least = least

    def share(self, weight: float = 1.0) -> float:
        """Seconds for the next part."""
        seconds = (self.end - time.perf_counter()) * weight / max(weight, self.weights)
        self.weights -= weight
        return max(self.least, seconds)


class Run(NamedTuple):
    """What is timed: `forward(x)`, then `backward(outputs, x)`, over each of the input sets in turn."""

    forward: Callable
    backward: Callable | None
    inputs: list
    repeats: bool  # whether the backward pass can be run again on one forward pass


LEAST = 3  # turns of each; what has no time for them says so
MOST = 9
BLOCK = 0.03  # seconds that a run is repeated for in its turn: of microseconds alone a clock says little


def interleaved(runs: dict, budget_s: float, first: dict, keep=(), end: float = math.inf) -> dict:
    """Samples in ms of each run: name -> {phase: [ms, ...]}, one for each of its turns.

    Each run is a function that returns {phase: seconds}; `first` holds what it returned when it ran before. In every
    round each has its turn, so that what slows the machine slows all, and sample i of one stands beside sample i of
    another. What has no time for `LEAST` turns keeps its first sample, the slowest first; those in `keep`, to which
    others are compared, have theirs in any case, unless it is `end` by the clock.
    """
    times = {name: max(1, int(BLOCK / max(1e-9, whole(first[name])))) for name in runs}
    costs = {name: times[name] * whole(first[name]) for name in runs}
    turning = sorted(runs, key=lambda name: (name not in keep, costs[name]))
    while (
        turning
        and turning[-1] not in keep
        and LEAST * sum(costs[name] for name in turning) > budget_s
    ):
        turning.pop()
    # A whole number stays one.
    fit = int(budget_s / max(1e-9, sum(costs[name] for name in turning)) + 1e-6)
    rounds = min(MOST, max(LEAST, fit)) if turning else 0

    # The rounds. The machine may have become slower since.
    samples = {name: {} for name in runs}
    started = time.perf_counter()
    for turn in range(rounds):
        taken = time.perf_counter() - started
        if turn >= LEAST and taken > budget_s:
            break
        late = taken > 2 * budget_s
        for name in runs:
            in_time = time.perf_counter() < end and (name in keep or not late)
            if name in turning and in_time:
                add_turn(samples[name], runs[name], times[name])

    # What never ran again is known from before.
    for name, found in samples.items():
        if not found:
            samples[name] = {phase: [1e3 * seconds] for phase, seconds in first[name].items()}
    return samples


def add_turn(samples: dict, run: Callable, times: int) -> None:
    """Run some times, and add the mean of each phase in ms to its samples."""
    total = {}
    for _ in range(times):
        for phase, seconds in run().items():
            total[phase] = total.get(phase, 0.0) + seconds
    for phase, seconds in total.items():
        samples.setdefault(phase, []).append(1e3 * seconds / times)


def ratio(samples: list, base: list, side_by_side: bool) -> float:
    """How many times longer one took than another: the median over rounds, or of the medians where there are none."""
    if not side_by_side:
        return median(samples) / median(base)
    return median([mine / other for mine, other in zip(samples, base, strict=False)])


def whole(phases: dict) -> float:
    """Time of a whole run, in the unit of its phases."""
    return phases.get("both", phases["forward"])


def alone(run: Run, ms: float) -> dict:
    """{phase: [ms, ...]} of one run on a GPU, about `ms` ms of each phase."""
    try:
        return phases_gpu(run, int(ms))
    except torch.OutOfMemoryError:  # several input sets, each with its graph, are more than one
        torch.cuda.empty_cache()
    return phases_gpu(run._replace(inputs=run.inputs[:1]), int(ms))


def phases_cpu(run: Run) -> Callable[[], dict]:
    """A function for `interleaved`: one forward and backward pass, each timed."""
    turns = itertools.cycle(run.inputs)

    def once():
        x = next(turns)
        t0 = time.perf_counter()
        outputs = run.forward(x)
        t1 = time.perf_counter()
        if run.backward is None:
            return {"forward": t1 - t0}
        gradient = run.backward(outputs, x)
        t2 = time.perf_counter()
        del outputs, gradient
        return {"forward": t1 - t0, "backward": t2 - t1, "both": t2 - t0}

    return once


def phases_gpu(run: Run, ms: int = 100) -> dict:
    """{phase: [ms, ...]} by triton's do_bench, which empties the L2 cache before each run; input sets take turns.

    A backward pass that cannot be repeated on one forward pass is not timed alone.
    """
    from triton.testing import do_bench

    turns = itertools.cycle(run.inputs)

    def timed(call):
        return do_bench(call, rep=ms, return_mode="all")

    samples = {"forward": timed(lambda: run.forward(next(turns)))}
    if run.backward is None:
        return samples
    if run.repeats:
        saved = [(run.forward(x), x) for x in run.inputs]
        of_saved = itertools.cycle(saved)
        samples["backward"] = timed(lambda: run.backward(*next(of_saved)))
        del saved, of_saved  # their graphs hold memory that the next runs may need

    def both():
        x = next(turns)
        run.backward(run.forward(x), x)

    samples["both"] = timed(both)
    return samples


def host(run: Run, times: int = 3) -> dict[str, float]:
    """{phase: ms} that a call on a GPU keeps the host busy, which waits for nothing meanwhile."""

    def busy(call):
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        return 1e3 * (time.perf_counter() - began) / times

    x = run.inputs[0]
    found = {"forward": busy(lambda: run.forward(x))}
    if run.backward is not None:
        found["both"] = busy(lambda: run.backward(run.forward(x), x))
    return found


def in_a_graph(run: Run) -> float | None:
    """The ms of a forward pass within a CUDA graph, without the host's part; None where it cannot be captured."""
    from triton.testing import do_bench_cudagraph

    try:
        return do_bench_cudagraph(lambda: run.forward(run.inputs[0]), return_mode="median")
    except RuntimeError:
        return None


def cpu_seconds(ways: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median CPU seconds of functions that take turns; a first round, which compiles and loads, does not count."""
    samples = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            began = time.process_time()
            run()
            samples[name].append(time.process_time() - began)
    return {name: median(found[1:]) for name, found in samples.items()}


def median(samples: list) -> float:
    return statistics.median(samples)
