"""The groups of `make gpu` on a clock that does not run: what is measured in their budgets, on a quick and a cold GPU.

    python -m tests.bench.virtual_clock

The suite's own loop, cases and budgets; in place of a call its seconds, by the bytes that an implementation moves at
3 TB/s and its FLOP at 650 TFLOP/s. Seconds to compile ours, and by Inductor at first and again, are assumed.
"""

import contextlib
import io
import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from bench import gpu, machine, peers, results, run, timing
from bench.cases.case import Case


class Machine(NamedTuple):
    """Seconds to import, to compile one of ours, and one by Inductor: the first, and later ones."""

    imports: float
    ours: float
    inductor: float
    again: float


MACHINES = {"quick": Machine(5, 2, 8, 4), "cold": Machine(10, 4, 18, 9)}
# kind -> {implementation: bytes per byte of its logits}; those of ours first, "compile" stands for Inductor
KINDS = {
    "LogprobsCase": {"fused_rl": 3, "fused_rl inplace": 3, "plain torch": 40, "torch.compile": 8, "F.cross_entropy": 7},
    "TopkCase": {"fused_rl": 3, "fused_rl inplace": 3, "plain torch": 40},
    "KLCase": {"fused_rl": 6, "plain torch": 80, "torch.compile": 16},
    "KeptLogits": {"fused_rl": 3, "fused_rl inplace": 3, "masked full logits": 50},
    "KeptHead": {"fused_rl": 18, "fused_rl whole head": 18, "masked full logits": 50},
    "LinearCase": {"three GEMMs": 6, "fused_rl one pass": 18, "fused_rl recompute": 18, "plain torch": 60,
                   "torch.compile": 18},
    "ExactHead": {"fused_rl fp32 logits": 18, "fused_rl 16-bit logits": 18, "plain torch": 60, "torch.compile": 18},
}  # fmt: skip
# What the host is measured on is what the others are, in small.
KINDS |= {
    "HostLogprobs": KINDS["LogprobsCase"],
    "HostKL": KINDS["KLCase"],
    "HostHead": KINDS["LinearCase"],
}
HEADS = ("HostHead", "KeptHead", "LinearCase", "ExactHead")


class Clock:
    """Seconds since a process began, and what it has compiled."""

    def __init__(self, of: Machine):
        self.of, self.now, self.compiled, self.case = of, of.imports, set(), None

    def seconds(self, case: Case, name: str) -> float:
        """Return those of one call."""
        shape = case.spec.shape
        logits = math.prod(shape[:-1]) * shape[-1]
        flop = 0
        if type(case).__name__ in HEADS:
            logits, flop = shape[0] * shape[2], 6 * math.prod(shape)
        size = logits * (4 if case.spec.dtype == "fp32" else 2)
        return KINDS[type(case).__name__][name] * size / 3e12 + flop / 650e12 + 1e-4

    def attempt(self, case: Case, peer: peers.Peer, end: float):
        """Pass the time of `run.attempt`: to compile, to draw and to check."""
        key = (type(case).__name__, case.spec.dtype, case.spec.masked > 0, peer.name)
        if key not in self.compiled and "compile" in peer.name:
            first = not any("compile" in name for *_, name in self.compiled)
            self.now += self.of.inductor if first else self.of.again
        elif key not in self.compiled and peer.role == "ours":
            self.now += self.of.ours
        self.compiled.add(key)
        if case is not self.case:  # its tensors are drawn
            self.now += 1.4 if type(case).__name__ in HEADS else 0.6
        self.case = case
        self.now += 0.2 + 2 * self.seconds(case, peer.name)
        row = {
            "implementation": peer.name,
            "op": case.op,
            "where": case.label(),
            "status": results.OK,
        }
        return row, run.Once(None, None, {"forward": 1.0}, 0)

    def alone(self, timed: timing.Run, ms: float) -> dict:
        """Pass the time of `timing.alone`, of three phases."""
        seconds = self.seconds(*timed.forward)
        self.now += 3 * max(ms / 1e3 + 0.03 + 6 * seconds, 7 * seconds)
        return {"forward": [1e3 * seconds]}

    def host(self, timed: timing.Run) -> dict:
        """Pass the time of `timing.host`, whose calls end before the next implementation begins."""
        seconds = 8 * self.seconds(*timed.forward)
        self.now += seconds
        return {"forward": 1e3 * seconds / 8}


def virtual(kind: type[Case]) -> type[Case]:
    """Return a kind of cases without tensors, which has the specs, weights and warm-ups of the real one."""

    def contenders(self, wanted):
        names = KINDS[kind.__name__]
        found = []
        for name in names:
            role = (
                "ours"
                if name.startswith("fused_rl")
                else "floor"
                if name == "three GEMMs"
                else "peer"
            )
            if wanted != "none" or role != "peer":
                found.append(
                    peers.Peer(name, "", (self, name), role=role, compiles="compile" in name)
                )
        return found, []

    members = {
        "__init__": Case.__init__,
        "contenders": contenders,
        "inputs": Case.inputs,
        "label": Case.label,
    }
    return type(kind.__name__, (kind,), members | {"backward_of": Case.backward_of})


def measured(step: gpu.Step, of: Machine) -> tuple[set, set]:
    """Return (case, implementation) of all rows of a group, and of those that are measured before its limit."""
    clock, rows = Clock(of), {}
    kinds = [virtual(kind) for kind in run.CASES[step.name]]

    def save(args, found, **more):
        if clock.now <= step.limit:
            rows["measured"] = {
                (row["where"], row["implementation"])
                for row in found
                if row["status"] == results.OK
            }

    now = SimpleNamespace(perf_counter=lambda: clock.now)
    nothing = {"copy_bandwidth": 3e12, "read_bandwidth": 3e12, "heading": "", "clocks": {}}
    args = SimpleNamespace(
        device="cuda",
        dtype=["bf16", "fp32"],
        shapes=None,
        peers="all",
        budget=step.budget,
        out=None,
    )
    patches = [
        *((machine, name, lambda *_, value=value: value) for name, value in nothing.items()),
        (run, "time", now), (timing, "time", now), (run, "attempt", clock.attempt), (timing, "alone", clock.alone),
        (timing, "host", clock.host),
        (run, "run_once", lambda case, peer: clock.attempt(case, peer, math.inf)),
        (timing, "in_a_graph", lambda timed: None),
        (run, "describe", lambda *_, **__: None), (run, "show", lambda *_: None), (results, "save", save),
        (run.options, "arguments", lambda *_: args), (peers, "find", lambda *_, **__: ([], [])),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(run.CASES, {step.name: kinds}))
        for owner, name, function in patches:
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        run.command(step.name, [])
    every = {
        (kind(spec, "cuda").label(), name)
        for kind in kinds
        for spec in kind.specs(args)
        for name in KINDS[kind.__name__]
    }
    return every, rows.get("measured", set())


def is_ours(row: tuple) -> bool:
    """Return True for a row of this library or of the floor it is compared with."""
    return not row[1].startswith(("plain", "torch", "F.", "masked"))


def main() -> None:
    lines = []
    for minutes, (name, of) in itertools.product((10, 30), MACHINES.items()):
        for step in gpu.parse(["--minutes", str(minutes)])[1][1:]:
            every, found = measured(step, of)
            counts = [f"{sum(map(is_ours, rows))}" for rows in (found, every)]
            lines.append(
                [minutes, name, step.name, f"{len(found)} of {len(every)}", " of ".join(counts)]
            )
    print(results.table(["minutes", "machine", "group", "rows measured", "of ours"], lines))


if __name__ == "__main__":
    main()
