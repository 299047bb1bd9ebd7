"""Time, memory and error of operations beside the installed peers: kernels, linear, support, topk and kl.

    python -m bench kernels --device cpu
    python -m bench kernels --dtype bf16 --shapes 8192x151936 --peers "plain torch,TRL"
    python -m bench topk --device cpu --dtype bf16
    python -m bench linear --device cpu --dtype bf16 --shapes 2048x1024x32000 --peers "TRL chunked head"

Every answer is checked against fp64 before anything is timed: an op of ours that fails is not timed, a peer that is
wrong is timed and its row says by how much. Implementations take turns, three each at least; times are medians, and
how many times longer one takes than ours is the median over the turns, each beside ours of the same round. A group
keeps to its time with all that it does: a row without three turns says why. On a machine so slow that a case takes a
minute more than its time, the case ends after the call that runs, and its other rows say that it ran out of time.
Bytes are those the operation cannot avoid, the same for every row of a case; so GB/s and the share of the copy
bandwidth compare implementations, not how much they waste.
"""

import contextlib
import math
import sys
import time
from typing import NamedTuple

import torch

from bench import machine, options, peers, results, timing
from bench.cases.case import Case
from bench.cases.host import HostHead, HostKL, HostLogprobs
from bench.cases.kl import KLCase
from bench.cases.linear import ExactHead, LinearCase
from bench.cases.logprobs import LogprobsCase, TopkCase
from bench.cases.support import KeptHead, KeptLogits
from bench.groups import GROUPS

CASES = {
    "host": (HostLogprobs, HostKL, HostHead),
    "kernels": (LogprobsCase,),
    "linear": (ExactHead, LinearCase),
    "support": (KeptLogits, KeptHead),
    "topk": (TopkCase,),
    "kl": (KLCase,),
}
IMPORTS = 5  # seconds until a group begins
SHORT = 0.1  # ms of a forward pass, below which the host may be what is timed
LONG = 5.0  # ms of a forward pass, from which the host's part does not matter
OF_A_CASE = 5.0  # seconds that each case has, however late it is
GRACE = 60.0  # seconds beyond those of a case, after which no call of it begins


class Once(NamedTuple):
    """One forward and backward pass."""

    outputs: object
    gradient: object
    seconds: dict  # by phase
    extra_bytes: int | None  # peak, beyond inputs and what is returned


def run_once(case: Case, peer: peers.Peer) -> Once:
    """One pass on the first input set, watched."""
    x = case.inputs(peer)[0]
    backward = case.backward_of(peer)
    kept = {"gradient": None}

    def forward(x):
        kept["outputs"] = peer.call(x)
        return kept["outputs"]

    def keeping_backward(outputs, x):
        kept["gradient"] = backward(outputs, x)

    run = timing.Run(forward, keeping_backward if backward else None, [x], False)
    once = timing.phases_cpu(run)
    seconds = {}
    extra = machine.peak_extra_bytes(lambda: seconds.update(once()), case.device)
    if extra is not None:
        extra -= case.returned_bytes()
    return Once(kept["outputs"], kept["gradient"], seconds, extra)


def judged(case: Case, peer: peers.Peer, errors: dict) -> dict:
    """Status and reason of an answer with these errors; one that is NaN is wrong."""
    limits, over = case.limits(peer), []
    for name, error in errors.items():
        limit, unit = limits[name]
        if not error <= limit:
            over.append(f"{name} off by {error:.2g}{unit}")
    if not over:
        return {"status": results.OK}
    status = results.FAILED_CHECK if peer.role == "ours" else results.WRONG
    return {"status": status, "reason": ", ".join(over)}


def attempt(case: Case, peer: peers.Peer, end: float) -> tuple[dict, Once | None]:
    """The row of one implementation, with its errors or what it raised; how the run went, where it may be timed."""
    try:
        once = run_once(case, peer)
        # ours compiles, too
        if (peer.role == "ours" or peer.compiles) and time.perf_counter() < end:
            once = run_once(case, peer)
        errors = case.errors(peer, once.outputs, once.gradient)
    except Exception as reason:  # noqa: BLE001 - each fails in its own way; ours makes the group fail
        status, message = results.failure(reason)
        return results.not_run(peer.name, status, message, case.op, case.label()), None
    moved, text = case.bytes()
    row = case.facts(peer)
    row |= {"implementation": peer.name, "version": peer.version, "note": peer.note}
    row |= {"bytes": moved, "bytes_text": text, "error": errors}
    row |= judged(case, peer, errors)
    if row["status"] == results.FAILED_CHECK:
        return row, None
    # Their memory is needed for the next one.
    return row, once._replace(outputs=None, gradient=None)


def run_case(case: Case, wanted: str, copy_bytes_per_s: float, seconds: float) -> list[dict]:
    """The rows of every implementation of one case, checked, then measured within about these seconds."""
    started = time.perf_counter()
    end = started + seconds + GRACE
    found, rows = case.contenders(wanted)

    # Each once: its errors, its memory, and how long it takes.
    runs = {}
    first = {}
    memory = {}
    kept = []
    for peer in found:
        now = time.perf_counter()
        if now > end or (peer.role == "peer" and now - started > seconds):
            reason = "left out for time; --budget gives more"
            if now > end:
                reason = f"ran out of time: the case has taken {now - started:.0f} s"
            row = results.not_run(peer.name, results.NO_TIME, reason, case.op, case.label())
            rows.append(row)
            continue
        row, once = attempt(case, peer, end)
        rows.append(row)
        if once is None:
            continue
        repeats = case.backward_repeats and not peer.overwrites
        runs[peer.name] = timing.Run(peer.call, case.backward_of(peer), case.inputs(peer), repeats)
        first[peer.name] = once.seconds
        memory[peer.name] = once.extra_bytes
        if peer.role != "peer":
            kept.append(peer.name)

    # Then in turns; on a GPU, whose clock needs no turns, one after the other.
    left = seconds - (time.perf_counter() - started)
    on_cpu, facts = case.device == "cpu", {}
    if on_cpu:
        turns = {name: timing.phases_cpu(run) for name, run in runs.items()}
        samples = timing.interleaved(turns, left, first, kept, end)
    else:
        # Ours alone come first, and leave time for the peers.
        most = 50.0 if wanted == "none" else 200.0
        ms = min(most, max(20.0, 1e3 * left / max(1, len(runs)) / 4))
        samples = {}
        for name, run in runs.items():
            # Its row says how right it is, without a time.
            with contextlib.suppress(torch.OutOfMemoryError):
                samples[name] = timing.alone(run, ms)
            facts[name] = {"clocks": machine.clocks()}
            taken = timing.median(samples.get(name, {"forward": [math.inf]})["forward"])
            if taken < SHORT:
                facts[name]["graph_ms"] = timing.in_a_graph(run)
            if taken < LONG:
                facts[name]["host_ms"] = timing.host(run)
    for row in rows:
        if row["implementation"] in samples:
            row["extra_bytes"] = memory[row["implementation"]]
            row |= facts.get(row["implementation"], {})
    describe(rows, samples, copy_bytes_per_s, case.baselines, side_by_side=on_cpu)
    return rows


def describe(
    rows: list[dict],
    samples: dict,
    copy_bytes_per_s: float,
    baselines: tuple[str, ...],
    side_by_side: bool,
):
    """Fill in samples, medians and ratios of the rows that were timed, in turns with one another or each alone."""
    for row in rows:
        name = row["implementation"]
        if name not in samples or "bytes" not in row:
            continue
        ms = {phase: timing.median(found) for phase, found in samples[name].items()}
        ms["both"] = timing.whole(ms)
        row |= {"ms": ms, "samples_ms": samples[name]}
        row |= {"gb_per_s": {}, "copy_fraction": {}, "time_over": {}}
        turns = results.repeats(row)
        if turns < timing.LEAST:
            row["few"] = (
                f"{turns} of {timing.LEAST} turns, for time: one takes {timing.whole(ms) / 1e3:.2g} s"
            )
        for phase in ms:
            if phase in row["bytes"]:
                rate = row["bytes"][phase] / (1e-3 * ms[phase])
                row["gb_per_s"][phase] = rate / 1e9
                row["copy_fraction"][phase] = rate / copy_bytes_per_s
        for base in baselines:
            if base in samples:
                both, others = (timing.whole(samples[name]) for name in (name, base))
                row["time_over"][base] = timing.ratio(both, others, side_by_side)


def show(case: Case, rows: list[dict], copy_bytes_per_s: float):
    """Print the case's table, and below it what did not run."""
    measured = results.measured(rows)
    if measured:
        print("\n" + case.title(measured, copy_bytes_per_s))
        print(timed_table(case.columns, measured))
    results.show_missing(rows)
    sys.stdout.flush()


def timed_table(
    columns: dict[str, str], rows: list[dict], label=lambda row: row["implementation"], **options
) -> str:
    """The table of rows that were timed: {title: name among results.figures}; options as of results.table."""
    lines = []
    for row in rows:
        figures = results.figures(row)
        cells = [figures.get(name) for name in columns.values()]
        lines.append([label(row), *cells, results.remarks(row)])
    return results.table(["implementation", *columns, "note"], lines, **options)


def warm_up(kinds: dict, device: str, wanted: str):
    """Import and compile what the cases need, so that the first case has as much time as the others."""
    for kind, specs in kinds.items():
        peers.find(kind.known, device, wanted)
        for spec in kind.warm_ups(specs, device):
            case = kind(spec, device)
            for peer in case.contenders(wanted)[0]:
                if peer.role == "ours" or peer.compiles:
                    with contextlib.suppress(Exception):  # the case itself will say what is wrong
                        run_once(case, peer)


def passes(device: str, wanted: str) -> list[str]:
    """Which implementations each pass over the cases measures: on a GPU, whose minutes are few, ours alone at first."""
    return [wanted] if device == "cpu" or wanted == "none" else ["none", wanted]


def command(group: str, words: list[str] | None = None) -> int:
    """Run a group by its command line; 1 where an answer of ours is wrong or missing."""
    args = options.arguments(__doc__, group, words)
    seconds = args.budget or (GROUPS[group].seconds if group in GROUPS else OF_A_CASE)
    copy = machine.copy_bandwidth(args.device)
    roofs = {"copy_bytes_per_s": copy}
    if args.device != "cpu":
        roofs["read_bytes_per_s"] = machine.read_bandwidth()
    print(
        f"{machine.heading(args.device)}: copy {copy / 1e9:.1f} GB/s (bytes read + bytes written)",
        flush=True,
    )

    # Case by case, each with its part of what is left; the time begins when ours is compiled.
    kinds = {kind: kind.specs(args) for kind in CASES[group]}
    weights = sum(sum(map(kind.weight, specs)) for kind, specs in kinds.items())
    rows, budget = {}, None
    order = passes(args.device, args.peers)
    for wanted in order:
        warm_up(kinds, args.device, wanted)
        least = min(OF_A_CASE, seconds)
        budget = budget or timing.Budget(max(1.0, seconds - IMPORTS), len(order) * weights, least)
        for kind, specs in kinds.items():
            for spec in specs:
                ends = time.perf_counter() + budget.share(kind.weight(spec))
                case = kind(spec, args.device)
                found = run_case(case, wanted, copy, ends - time.perf_counter())
                show(case, found, copy)
                for (
                    row
                ) in found:  # the last pass counts; what cannot run at any case is listed once
                    label = case.label() if row.get("where", True) else ""
                    rows[case.op, label, row["implementation"]] = row
                results.save(args, list(rows.values()), **roofs)
    return results.failed(list(rows.values()))
