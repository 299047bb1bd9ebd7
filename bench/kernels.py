"""Time, memory and error of token_logprobs, token_kl and gae beside the installed peers.

    python bench/kernels.py --device cpu
    python bench/kernels.py --dtype bf16 --shapes 8192x151936 --peers "plain torch,TRL"

Every answer is checked against fp64 before anything is timed: an op of ours that fails is not timed, a peer that is
wrong is timed and its row says by how much. Bytes are those the operation cannot avoid, the same for every row of a
case; so GB/s and the share of the copy bandwidth compare implementations, not how much they waste.
"""

import contextlib
import functools
import sys
import time
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

import fused_rl
from bench import measure, peers
from bench.case import Case, wrong
from fused_rl.cpu import compiled

# layout, shape, dtypes, fraction of the tokens that the mask drops. "rows" is (N, V); "shift" is (B, T, V) scored
# against targets[:, 1:], which others do with the copy logits[:, :-1].
CPU = [
    ("rows", (1024, 32000), ("bf16", "fp32"), 0.0),
    ("rows", (256, 151936), ("bf16", "fp32"), 0.0),
    ("rows", (512, 50257), ("bf16",), 0.0),
    ("rows", (256, 128256), ("bf16",), 0.0),
    ("rows", (128, 262144), ("bf16",), 0.0),
    ("rows", (1024, 32000), ("bf16",), 0.5),
    ("rows", (1024, 32000), ("bf16",), 0.9),
    ("shift", (4, 257, 32000), ("bf16",), 0.0),
]
GPU = [
    ("rows", (8192, 151936), ("bf16", "fp32"), 0.0),
    ("rows", (8192, 50257), ("bf16",), 0.0),
    ("rows", (16384, 32000), ("bf16",), 0.0),
    ("rows", (4096, 128256), ("bf16",), 0.0),
    ("rows", (2048, 262144), ("bf16",), 0.0),
    ("rows", (1024, 151936), ("bf16",), 0.0),
    ("rows", (8192, 151936), ("bf16",), 0.5),
    ("rows", (8192, 151936), ("bf16",), 0.9),
    ("shift", (8, 1025, 151936), ("bf16",), 0.0),
]
KL_CPU = [("rows", (1024, 32000), ("bf16", "fp32"), 0.0), ("rows", (256, 151936), ("bf16",), 0.0)]
KL_GPU = [("rows", (8192, 151936), ("bf16",), 0.0), ("rows", (8192, 50257), ("bf16",), 0.0)]
GAE_CPU = [(64, 1024), (16, 16384), (4, 131072)]
GAE_GPU = [(512, 1024), (64, 16384), (16, 131072)]
BUDGET = 230  # seconds, all cases together
LONGEST_LOOP = 16384  # T beyond which the loop over T is left out: seconds per call

COLUMNS = ["implementation", "fwd ms", "bwd ms", "both ms", "runs", "GB/s", "% copy", "extra/logits", "time/ours",
           "value err", "entropy err", "grad err", "note"]  # fmt: skip
NO_TIME = "left out for time; --budget gives more"


def contenders(case, known, args):
    """A Peer for ours and for each other that can run, its `call` taking logits alone; why the others cannot."""
    version = fused_rl.__version__
    found = [peers.Peer("fused_rl", version, case.ours)]
    if case.op == "token_logprobs":
        inplace = functools.partial(case.ours, inplace=True)
        found.append(peers.Peer("fused_rl inplace", version, inplace, "gradient in the logits", overwrites=True))
    running, missing = peers.find(known, args.device, args.peers)
    found += [peer._replace(call=case.peer(peer.call, peer.name)) for peer in running]
    return found, missing


def run_case(case, known, args, copy_bytes_per_s, seconds):
    """Check, measure and describe every implementation of one case; what raises is listed with the reason."""
    rows, runs, once, memory, started = [], {}, {}, {}, time.perf_counter()
    found, missing = contenders(case, known, args)
    amount = case.bytes()
    for peer in found:
        name = peer.name
        ours, errors, failed = name.startswith("fused_rl"), {}, ""  # ours compiles, too
        if not ours and time.perf_counter() - started > seconds:
            missing[f"{name} at {label(case)}"] = NO_TIME
            continue
        try:
            if ours or peer.compiles:
                case.run_once(peer)
            outputs, gradient, once[name], memory[name] = case.run_once(peer)
            errors = case.errors(outputs, gradient)
            del outputs, gradient
            failed = case.failure(errors) if ours else ""
        except Exception as reason:  # noqa: BLE001 - a peer fails in its own way; ours is listed as failed
            told = f"{type(reason).__name__}: {reason}".splitlines()[0]
            if isinstance(reason, peers.Unavailable):
                missing[name] = str(reason)
            elif not ours:
                missing[f"{name} at {label(case)}"] = told
            if not ours:
                continue
            failed = told
        notes = (f"FAILED, not timed: {failed}" if failed else "", wrong(errors), peer.note)
        rows.append(row_of(case, amount, peer, errors, "; ".join(note for note in notes if note)))
        if not failed:
            runs[name] = (peer.call, case.backward, case.inputs(peer), not peer.overwrites)
    samples = measure.sampled(runs, args.device, seconds - (time.perf_counter() - started), once, ours_of(runs))
    describe(rows, samples, memory, copy_bytes_per_s)
    return rows, missing


def row_of(case, amount, peer, errors, note):
    return {
        "op": case.op,
        "layout": case.layout,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "masked": case.fraction,
        "implementation": peer.name,
        "version": peer.version,
        "bytes": {k: v for k, v in amount.items() if k != "text"},
        "bytes_text": amount["text"],
        "error": errors,
        "note": note,
    }


def ours_of(names):
    return [name for name in names if name.startswith("fused_rl")]


def label(case) -> str:
    masked = f", {case.fraction:.0%} masked" if case.fraction else ""
    return f"{case.op} {' x '.join(map(str, case.shape))} {case.dtype}{masked}"


def describe(rows, samples, memory, copy_bytes_per_s):
    """Fill in memory, samples, medians and ratios of the rows that were timed."""
    medians = {n: {phase: measure.median(s) for phase, s in phases.items()} for n, phases in samples.items()}
    for row in rows:
        name = row["implementation"]
        if name not in medians:
            continue
        ms = medians[name] | {"both": medians[name].get("both", medians[name]["forward"])}
        row["ms"], row["samples_ms"], row["extra_bytes"] = ms, samples[name], memory[name]
        row["gb_per_s"] = {phase: row["bytes"][phase] / t / 1e6 for phase, t in ms.items()}
        row["copy_fraction"] = {phase: row["bytes"][phase] / (1e-3 * t) / copy_bytes_per_s for phase, t in ms.items()}
        if "fused_rl" in medians:
            row["time_over_ours"] = measure.sum_of(ms) / measure.sum_of(medians["fused_rl"])


def show(rows, missing, copy_bytes_per_s):
    first = rows[0]
    shape = " x ".join(str(n) for n in first["shape"])
    masked = f", {first['masked']:.0%} masked" if first.get("masked") else ""
    print(f"\n{first['op']} {first['layout']} {shape} {first['dtype']}{masked}; bytes: {first['bytes_text']} "
          f"= {first['bytes']['both'] / 1e9:.3g} GB; copy {copy_bytes_per_s / 1e9:.1f} GB/s")  # fmt: skip
    lines = []
    for row in rows:
        ms, error = row.get("ms", {}), row["error"]
        memory = row.get("extra_bytes")
        lines.append(
            [
                row["implementation"],
                ms.get("forward"),
                ms.get("backward"),
                ms.get("both"),
                measure.repeats(row),
                row.get("gb_per_s", {}).get("both"),
                100 * row["copy_fraction"]["both"] if ms else None,
                None if memory is None else memory / row["bytes"]["logits"],
                row.get("time_over_ours"),
                error.get("logprob", error.get("kl", error.get("advantages"))),
                error.get("entropy"),
                error.get("gradient"),
                row["note"],
            ]
        )
    print(measure.table(COLUMNS, lines))
    for name, reason in missing.items():
        print(f"  not run: {name}: {reason}")


# ------------------------------------------------------------------ gae


def run_gae(shape, args, copy_bytes_per_s, seconds):
    """gae beside the loop over T; bytes: rewards, values and mask read, advantages and returns written."""
    generator, started = torch.Generator().manual_seed(0), time.perf_counter()
    rewards, values = (torch.randn(shape, generator=generator).to(args.device) for _ in range(2))
    lengths = torch.randint(shape[1] // 2, shape[1] + 1, (shape[0], 1), generator=generator)
    mask = (torch.arange(shape[1]) < lengths).to(args.device)
    # fp64 by the loop on the processor: a device's launch per step would take longer than everything else
    exact = peers.loop_gae(rewards.double().cpu(), values.double().cpu(), mask.cpu(), 0.999, 0.95)[0]
    runs = {"fused_rl": lambda _: fused_rl.gae(rewards, values, mask, gamma=0.999, gae_lambda=0.95)}
    running, missing = peers.find(peers.GAE, args.device, args.peers)
    for peer in running:
        if shape[1] > LONGEST_LOOP:
            missing[f"{peer.name} at T = {shape[1]}"] = f"seconds per call; left out beyond {LONGEST_LOOP}"
        else:
            runs[peer.name] = lambda _, call=peer.call: call(rewards, values, mask, 0.999, 0.95)
    moved = rewards.numel() * (4 * 4 + 1)
    rows, timed, once, memory = [], {}, {}, {}
    case = SimpleNamespace(op="gae", layout="(B, T)", shape=shape, dtype="fp32", fraction=0.0)
    amount = {"forward": moved, "both": moved, "logits": 4 * rewards.numel(), "text": "2 reads + mask + 2 writes"}
    for name, run in runs.items():
        error = (run(None)[0].double().cpu() - exact).abs().max().item() / exact.abs().max().item()
        failed = name == "fused_rl" and not error <= 1e-6
        peer = peers.Peer(name, fused_rl.__version__ if name == "fused_rl" else torch.__version__, run)
        note = f"FAILED, not timed: {error:.1e}" if failed else ""
        rows.append(row_of(case, amount, peer, {"advantages": error}, note))
        if not failed:
            timed[name] = (run, None, [None], False)
            first = measure.phases_cpu(*timed[name][:3])
            memory[name] = measure.peak_extra_bytes(lambda: once.update({name: first()}), args.device)  # noqa: B023
    samples = measure.sampled(timed, args.device, seconds - (time.perf_counter() - started), once, ours_of(timed))
    describe(rows, samples, memory, copy_bytes_per_s)
    return rows, missing


# ------------------------------------------------------------------ the group


def cases(args):
    """(op, layout, shape, dtype, masked fraction) of this run."""
    cpu = args.device == "cpu"
    for op, listed in (("token_logprobs", CPU if cpu else GPU), ("token_kl", KL_CPU if cpu else KL_GPU)):
        if args.shapes:
            listed = [("rows", shape, args.dtype, fraction) for shape in args.shapes for fraction in (0.0, 0.5)]
        for layout, shape, dtypes, fraction in listed:
            for dtype in dtypes:
                if dtype in args.dtype:
                    yield op, layout, shape, dtype, fraction


def warm_up(todo, args):
    """Import and compile what the cases need, so that the first case has as much time as the others."""
    rows = compiled.WORTH_COMPILING // 2048 if args.device == "cpu" else 16  # below it, ours would not compile
    for op, layout, dtype, masked in dict.fromkeys((op, layout, dtype, f > 0) for op, layout, _, dtype, f in todo):
        shape = (2, rows // 2 + 1, 2048) if layout == "shift" else (rows, 2048)
        case = Case(op, layout, shape, dtype, 0.5 * masked, args.device)
        for peer in contenders(case, peers.LOGPROBS if op == "token_logprobs" else peers.KL, args)[0]:
            if peer.compiles or peer.name.startswith("fused_rl"):
                with contextlib.suppress(Exception):  # the case itself will say what is wrong
                    case.run_once(peer)


def main(args):
    copy = measure.copy_bandwidth(args.device)
    print(f"{measure.heading(args.device)}: copy {copy / 1e9:.1f} GB/s (bytes read + bytes written)")
    todo = list(cases(args))
    gae_shapes = [] if args.shapes else (GAE_CPU if args.device == "cpu" else GAE_GPU)
    budget = measure.Budget(args.budget or BUDGET, len(todo) + len(gae_shapes))
    warm_up(todo, args)
    rows, not_run = [], {}
    for op, *case in todo:
        known = peers.LOGPROBS if op == "token_logprobs" else peers.KL
        found, missing = run_case(Case(op, *case, args.device), known, args, copy, budget.share())
        show(found, missing, copy)
        rows += found
        not_run |= missing
        measure.save(args, rows, copy_bytes_per_s=copy, not_run=not_run)
    for shape in gae_shapes:
        found, missing = run_gae(shape, args, copy, budget.share())
        show(found, missing, copy)
        rows += found
        not_run |= missing
    measure.save(args, rows, copy_bytes_per_s=copy, not_run=not_run)
    return any("FAILED" in row["note"] for row in rows)


if __name__ == "__main__":
    sys.exit(main(measure.arguments(__doc__, "kernels")))
