"""A group on a GPU: each implementation is checked and timed by a worker, case by case.

What one of them breaks ends the worker, which the next one starts again: no other row is lost by it. Within the worker
implementations of one case share its inputs and its fp64 truth.
"""

import sys
import time

from bench import machine, options, results, run, timing
from bench.cases.case import Case, Spec
from bench.groups import GROUPS
from bench.worker import Answer, Worker, end_in_order

ANSWER_S = 75  # to import, make a case, compile one implementation and measure it
LATE_S = 8  # after its time a group's questions end; its results are written by then
_kept = {}  # in the worker: the case of the last question


# ------------------------------------------------------------------ in the worker


def _case(kind: str, spec: list, device: str) -> Case:
    key = kind, str(spec), device
    if key not in _kept:
        _kept.clear()
        kinds = {case.__name__: case for cases in run.CASES.values() for case in cases}
        shape, *rest = spec
        _kept[key] = kinds[kind](Spec(tuple(shape), *rest), device)
    return _kept[key]


def contenders(*key, wanted: str) -> dict:
    """Names of the implementations that run, ours first, their roles, who compiles; rows of those that cannot."""
    found, missing = _case(*key).contenders(wanted)
    names = [[peer.name, peer.role, peer.role == "ours" or peer.compiles] for peer in found]
    return {"names": names, "missing": missing}


def measured(*key, wanted: str, name: str, ms: float) -> dict:
    """The row of one implementation; its samples of about `ms` ms per phase, and bytes, where it was timed."""
    case = _case(*key)
    peer = next(peer for peer in case.contenders(wanted)[0] if peer.name == name)
    row, once = run.attempt(case, peer, raising=True)
    if once is None:
        return {"row": row}
    repeats = case.backward_repeats and not peer.overwrites
    timed = timing.Run(peer.call, case.backward_of(peer), case.inputs(peer), repeats)
    row["extra_bytes"] = once.extra_bytes
    return {"row": row, "samples": timing.alone(timed, case.device, ms)}


def title(*key, rows: list[dict], copy: float) -> str:
    return _case(*key).title(rows, copy)


# ------------------------------------------------------------------ who asks it


def run_case(worker: Worker, kind: type[Case], spec: Spec, args, copy: float, seconds: float) -> list[dict]:
    """The rows of every implementation of one case, within about these seconds; printed."""
    key = kind.__name__, list(spec), args.device
    where = {"op": getattr(kind, "op", spec.layout), "where": f"{results.sizes(spec.shape)} {spec.dtype} {spec.layout}"}
    budget = timing.Budget(seconds, 1)

    def ask(function: str, limit: float = ANSWER_S, **options) -> Answer:
        return worker.ask(f"bench.apart:{function}", *key, limit=limit, **options)

    known = ask("contenders", wanted=args.peers)
    if known.status:
        return [results.not_run("fused_rl", known.status, known.reason, **where)]
    rows, samples = known.value["missing"], {}
    names = known.value["names"]
    ms = min(200.0, max(20.0, 1e3 * seconds / len(names) / 4))
    for name, role, _ in names:
        if role == "peer" and budget.left() < 0:
            reason = "left out for time; --budget gives more"
            rows.append(results.not_run(name, results.NO_TIME, reason, **where))
            continue
        found = ask("measured", wanted=args.peers, name=name, ms=ms)
        if found.status:
            rows.append(results.not_run(name, found.status, found.reason, **where))
            continue
        rows.append(found.value["row"])
        if "samples" in found.value:
            samples[name] = found.value["samples"]
    run.describe(rows, samples, copy, kind.baselines, side_by_side=False)
    timed = results.measured(rows)
    if timed:
        above = ask("title", rows=timed, copy=copy)
        print("\n" + (above.value or where["where"]))
        print(run.timed_table(kind.columns, timed))
    results.show_missing(rows)
    sys.stdout.flush()
    return rows


def warm_up(worker: Worker, kinds: dict, args) -> None:
    """Import and compile what the first cases need, so that they have as much time as the others."""
    for kind, specs in kinds.items():
        for spec in kind.warm_ups(specs, args.device)[:1]:
            key = kind.__name__, list(spec), args.device
            known = worker.ask("bench.apart:contenders", *key, wanted=args.peers, limit=ANSWER_S)
            for name, _, compiles in (known.value or {"names": []})["names"]:
                if compiles:
                    options = {"wanted": args.peers, "name": name, "ms": 1.0, "limit": ANSWER_S}
                    worker.ask("bench.apart:measured", *key, **options)


def command(group: str, words: list[str] | None = None) -> int:
    """The group by its command line; on a CPU in this process."""
    args = options.arguments(run.__doc__, group, words)
    if args.device == "cpu":
        return run.main(args)
    end_in_order()
    kinds = {kind: kind.specs(args) for kind in run.CASES[group]}
    return main(args, kinds, args.budget or GROUPS[group].seconds)


def main(args, kinds: dict, seconds: float) -> int:
    """Run the cases {kind: specs}; 1 where an answer of ours is wrong or missing."""
    with Worker(end=time.monotonic() + seconds + LATE_S) as worker:
        answer = worker.ask("bench.machine:copy_bandwidth", args.device, limit=ANSWER_S)
        if answer.status:
            print(f"copy: {answer.reason}")
            return 1
        copy = answer.value
        budget = timing.Budget(seconds, sum(map(len, kinds.values())))
        warm_up(worker, kinds, args)
        print(f"{machine.heading(args.device)}: copy {copy / 1e9:.1f} GB/s (bytes read + bytes written)", flush=True)
        rows = []
        for kind, specs in kinds.items():
            for spec in specs:
                found = run_case(worker, kind, spec, args, copy, budget.share())
                rows += [row for row in found if row not in rows]  # what cannot run at any case is told once
                results.save(args, rows, copy_bytes_per_s=copy)
    return results.failed(rows)
