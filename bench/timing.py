"""Time: runs that take turns, a budget shared among parts, samples of forward and backward on CPU and GPU."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Budget:
    """Seconds of wall time, shared out among the parts to come: what one leaves over, the next ones get."""

    def __init__(self, seconds: float, parts: int):
        self.end = time.perf_counter() + seconds
        self.parts = parts

    def left(self) -> float:
        """Seconds until the end; negative beyond it."""
        return self.end - time.perf_counter()

    def share(self) -> float:
        """Seconds for the next part."""
        seconds = max(0.0, self.left()) / max(1, self.parts)
        self.parts -= 1
        return seconds


class Run(NamedTuple):
    """What is timed: `forward(x)`, then `backward(outputs, x)`, over each of the input sets in turn."""

    forward: Callable
    backward: Callable | None
    inputs: list
    repeats: bool  # whether the backward pass can be run again on one forward pass


def interleaved(
    runs: dict,
    budget_s: float,
    first: dict,
    keep=(),
    most: int = 40,
) -> dict:
    """Samples in ms of each run: name -> {phase: [ms, ...]}.

    Each run is a function that returns {phase: seconds}; `first` holds what it returned when it ran before. They take
    turns, so that what slows the machine slows all, and each repeats as often as its equal part of the time allows: a
    slow one less often, spread over the rounds. Where there is time for three of each, nobody gets fewer; else one that
    has no time to repeat at all keeps its first sample, and only those in `keep`, to which others are compared, run
    three times.
    """
    # How often each fits into its part of the time.
    three_of_each = 3 * sum(map(whole, first.values()))
    least = 3 if three_of_each <= budget_s else 0
    part = (budget_s - least * three_of_each / 3) / max(1, len(runs))
    counts = {}
    for name in runs:
        fits = least + int(part / max(1e-6, whole(first[name])) + 1e-6)  # a whole number stays one
        counts[name] = max(3 * (name in keep), min(most, fits))
    rounds = max(counts.values(), default=0)

    # The rounds: a run is due when its share of them has come.
    samples = {name: {} for name in runs}
    started = time.perf_counter()
    for turn in range(rounds):
        late = time.perf_counter() - started > 1.5 * budget_s  # the machine has become slower since
        for name, run in runs.items():
            due = (turn + 1) * counts[name] // rounds > turn * counts[name] // rounds
            if not due or (late and name not in keep):
                continue
            for phase, seconds in run().items():
                samples[name].setdefault(phase, []).append(1e3 * seconds)

    # What never ran again is known from before.
    for name, found in samples.items():
        if not found:
            samples[name] = {phase: [1e3 * seconds] for phase, seconds in first[name].items()}
    return samples


def whole(phases: dict) -> float:
    """Time of a whole run, in the unit of its phases."""
    return phases.get("both", phases["forward"])


def sampled(
    runs: dict[str, Run],
    budget_s: float,
    first: dict,
    keep=(),
) -> dict:
    """{name: {phase: [ms, ...]}} of runs on a CPU, within about `budget_s` seconds; `first` and `keep` as above."""
    timed = {name: phases_cpu(run) for name, run in runs.items()}
    return interleaved(timed, budget_s, first, keep)


def alone(run: Run, device: str, ms: float) -> dict:
    """{phase: [ms, ...]} of one run, about `ms` ms of each phase."""
    if device == "cpu":  # what is asked of a GPU's worker, where there is none
        once = phases_cpu(run)
        return {phase: [1e3 * seconds] for phase, seconds in once().items()}
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
