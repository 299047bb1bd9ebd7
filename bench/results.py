"""Results: the rows of a group, each with its status, as JSON files and as text tables.

A row is a dict. Every row has a `status`; one that did not come to `ok` has a `reason` too:

    ok              the answer is right (or there is none to check), and was measured
    wrong           a peer's answer is wrong, by as much as the reason says; it was measured
    failed check    our answer is wrong: it was not timed
    failed          it raised; the reason is the error
    out of memory   it raised that
    not installed   its package is not here
    cannot run      it needs what this machine or this case does not have
    skipped: budget there was no time left for it
    skipped: slow   it would take seconds per call

`note` is what an implementation does not do, and says nothing of how it went.
"""

import json
from pathlib import Path

from bench import machine

RESULTS = machine.ROOT / "bench" / "results"
OK, WRONG, FAILED_CHECK = "ok", "wrong", "failed check"
FAILED, OUT_OF_MEMORY = "failed", "out of memory"
NOT_INSTALLED, CANNOT_RUN = "not installed", "cannot run"
NO_TIME, SLOW = "skipped: budget", "skipped: slow"
RAN = (OK, WRONG, FAILED_CHECK)  # the rows of tables; the others are listed below them
BROKEN = (FAILED_CHECK, FAILED, OUT_OF_MEMORY)  # a run in which ours ends so has failed


def not_run(implementation: str, status: str, reason: str, op: str | None = None, where: str = "") -> dict:
    """The row of an implementation that was not measured; `where`: at which case, empty for all of them."""
    return {"op": op, "implementation": implementation, "where": where, "status": status, "reason": reason}


def ours(row: dict) -> bool:
    """Whether a row is of this library."""
    return row["implementation"].startswith("fused_rl")


def measured(rows: list[dict]) -> list[dict]:
    """Those that stand in tables."""
    return [row for row in rows if row["status"] in RAN]


def missing(rows: list[dict]) -> list[dict]:
    """Those that are listed below a table, with their reasons."""
    return [row for row in rows if row["status"] not in RAN]


def name_of(row: dict) -> str:
    """An implementation that did not run, and where."""
    return row["implementation"] + (f" at {row['where']}" if row["where"] else "")


def remarks(row: dict) -> str:
    """How it went, where that is not well, and what the implementation does not do."""
    told = {
        WRONG: f"WRONG: {row.get('reason')}",
        FAILED_CHECK: f"FAILED: {row.get('reason')}",
    }
    parts = (told.get(row["status"], ""), row.get("note", ""))
    return "; ".join(filter(None, parts))


def repeats(row: dict) -> int | None:
    """How many times a row was timed."""
    if "samples_ms" not in row:
        return None
    return len(next(iter(row["samples_ms"].values())))


def sizes(shape, by: str = " x ") -> str:
    return by.join(map(str, shape))


def figures(row: dict) -> dict:
    """What a table may show of a row, by name; what it does not have is left out. Times in ms, errors as measured."""
    error, found = row.get("error", {}), dict(row.get("ms", {}))
    found |= {f"{name} error": value for name, value in error.items()}
    value = [error[name] for name in ("logprob", "kl", "advantages") if name in error]
    if value:
        found["value error"] = value[0]
    found |= {f"over {name}": ratio for name, ratio in row.get("time_over", {}).items()}
    if "ms" in row:
        found["runs"] = repeats(row)
        found["rate"] = row["gb_per_s"]["both"]
        found["share"] = 100 * row["copy_fraction"]["both"]
    extra = row.get("extra_bytes")
    if extra is not None:
        found["extra MB"] = extra / 1e6
        if "logits" in row["bytes"]:
            found["extra/logits"] = extra / row["bytes"]["logits"]
    return found


def save(args, rows: list[dict], **more) -> Path | None:
    """Write {environment, rows, more} as JSON into the folder args.out; after each case, lest time runs out."""
    if args.out is None:
        return None
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    kind = "cpu" if args.device == "cpu" else "gpu"
    path = folder / f"{args.group}-{kind}.json"
    result = {"group": args.group, "environment": machine.environment(args.device), **more, "rows": rows}
    part = path.with_suffix(".part")  # a run that is stopped while it writes leaves the last result whole
    part.write_text(dumps(result))
    part.replace(path)
    return path


def load(path: Path) -> dict:
    """A result file; ValueError, KeyError or TypeError where it is none."""
    result = json.loads(path.read_text())
    if not (result["rows"] and result["group"] and result["environment"]):
        raise ValueError("it holds no rows")
    for row in result["rows"]:
        row["status"]  # a KeyError names what is missing
    return result


def dumps(result: dict) -> str:
    """JSON with one row per line and 5 significant digits, so that a result is small and its diff readable."""
    head = {key: value for key, value in result.items() if key != "rows"}
    head = json.dumps(_short(head), indent=1)
    lines = ["  " + json.dumps(_short(row)) for row in result["rows"]]
    rows = ",\n".join(lines)
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def _short(value):
    """5 significant digits of every float inside; NaN and infinities as text, which JSON does not know."""
    if isinstance(value, float):
        finite = abs(value) < float("inf")
        return float(f"{value:.5g}") if finite else str(value)
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_short(inner) for inner in value]
    return value


def table(columns: list[str], rows: list[list]) -> str:
    """Text table, columns as wide as their contents, numbers to the right."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [len(name) for name in columns]
    for row in texts:
        widths = [max(width, len(text)) for width, text in zip(widths, row, strict=True)]
    numeric = [_numeric(column) for column in zip(*rows, strict=True)] or [False] * len(columns)

    def line(row):
        padded = []
        for text, width, right in zip(row, widths, numeric, strict=True):
            padded.append(text.rjust(width) if right else text.ljust(width))
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(columns), rule, *map(line, texts)])


def _cell(value) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else f"{value:.4g}"


def _numeric(column) -> bool:
    return not any(isinstance(value, str) for value in column)
