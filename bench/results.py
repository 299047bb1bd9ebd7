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

import itertools
import json
import math
import statistics
import textwrap
from pathlib import Path

import torch

from bench import machine

RESULTS = machine.ROOT / "bench" / "results"
OK = "ok"
WRONG = "wrong"
FAILED_CHECK = "failed check"
FAILED = "failed"
OUT_OF_MEMORY = "out of memory"
NOT_INSTALLED = "not installed"
CANNOT_RUN = "cannot run"
NO_TIME = "skipped: budget"
SLOW = "skipped: slow"
RAN = (OK, WRONG, FAILED_CHECK)  # the rows of tables; the others are listed below them
BROKEN = (FAILED_CHECK, FAILED, OUT_OF_MEMORY)  # a run in which ours ends so has failed


def not_run(
    implementation: str, status: str, reason: str, op: str | None = None, where: str = ""
) -> dict:
    """The row of an implementation that was not measured; `where`: at which case, empty for all of them."""
    return {
        "op": op,
        "implementation": implementation,
        "where": where,
        "status": status,
        "reason": reason,
    }


def failure(error: Exception) -> tuple[str, str]:
    """Status and reason of what raised."""
    text = str(error).strip() or "no message"
    status = OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else FAILED
    return status, f"{type(error).__name__}: {text}".splitlines()[0][:160]


def ours(row: dict) -> bool:
    """Whether a row is of this library."""
    return row["implementation"].startswith("fused_rl")


def measured(rows: list[dict]) -> list[dict]:
    """Those that stand in tables."""
    return [row for row in rows if row["status"] in RAN]


def missing(rows: list[dict]) -> list[dict]:
    """Those that are listed below a table, with their reasons."""
    return [row for row in rows if row["status"] not in RAN]


def remarks(row: dict) -> str:
    """How it went, where that is not well, why it was timed but once, and what the implementation does not do."""
    word = {WRONG: "WRONG", FAILED_CHECK: "FAILED"}.get(row["status"])
    words = f"{word}: {row['reason']}" if word else ""
    return "; ".join(filter(None, [words, row.get("few"), row.get("note")]))


def repeats(row: dict) -> int | None:
    """How many times a row was timed."""
    if "samples_ms" not in row:
        return None
    return len(next(iter(row["samples_ms"].values())))


def sizes(shape, by: str = " x ") -> str:
    return by.join(map(str, shape))


def figures(row: dict) -> dict:
    """What a table may show of a row, by name; what it does not have is left out. Times in ms, errors as measured."""
    found = dict(row.get("ms", {}))
    for name, value in row.get("error", {}).items():
        found[f"{name} error"] = value
    for name, ratio in row.get("time_over", {}).items():
        found[f"over {name}"] = ratio
    if "ms" in row:
        found["runs"] = repeats(row)
    if "both" in row.get("gb_per_s", {}):
        share = 100 * row["copy_fraction"]["both"]
        found["rate"] = row["gb_per_s"]["both"]
        found["share"] = f"{share:.0f} %"
        found["finer share"] = f"{share:.1f} %"
    if "host_ms" in row:
        found["host"] = row["host_ms"].get("both", row["host_ms"]["forward"])
    extra = row.get("extra_bytes")
    if extra is not None:
        found["extra MB"] = extra / 1e6
        if "logits" in row["bytes"]:
            found["extra/logits"] = extra / row["bytes"]["logits"]
    return found


def steps(
    rows: list[dict], label=lambda row: row["implementation"]
) -> tuple[list[str], list[list]]:
    """Titles and cells of a table of training steps."""
    parts = list(dict.fromkeys(itertools.chain.from_iterable(row["ms"] for row in rows)))
    needed = list(rows[0].get("over_needed", {}))
    titles = [
        "implementation",
        *(f"{part} ms" for part in parts),
        *(f"{part} / needed" for part in needed),
    ]
    lines = []
    for row in rows:
        cells = [label(row), *(row["ms"].get(part) for part in parts)]
        cells += [row.get("over_needed", {}).get(part) for part in needed]
        of_seeds = sorted(row["steps_over_trl"])
        span = (
            " to ".join(number(ratio) for ratio in (of_seeds[0], of_seeds[-1])) if of_seeds else ""
        )
        middle = statistics.median(of_seeds) if of_seeds else None
        lines.append([*cells, middle, span, len(row["samples_ms"]["step"]), remarks(row)])
    return [*titles, "steps / TRL steps", "over seeds", "runs", "note"], lines


def save(args, rows: list[dict], **more) -> Path | None:
    """Write {environment, rows, more} as JSON into the folder args.out; after each case, lest time runs out."""
    if args.out is None:
        return None
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    kind = "cpu" if args.device == "cpu" else "gpu"
    path = folder / f"{args.group}-{kind}.json"
    result = {
        "group": args.group,
        "environment": machine.environment(args.device),
        **more,
        "rows": rows,
    }
    # A run that is stopped while it writes leaves the last result whole.
    part = path.with_suffix(".part")
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


def number(value, digits: int = 3) -> str:
    """A cell: 3 significant digits, no exponent where it reads badly."""
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def table(columns: list[str], rows: list[list], markdown: bool = False) -> str:
    """A table, for a terminal or as Markdown; columns that are empty in every row are left out."""
    lines = [columns]
    for row in rows:
        lines.append([number(value) for value in row])
    filled = [any(column[1:]) for column in zip(*lines, strict=True)]
    lines = [list(itertools.compress(line, filled)) for line in lines]
    if markdown:
        texts = ["| " + " | ".join(line) + " |" for line in lines]
        texts.insert(1, "|" + "---|" * sum(filled))
        return "\n".join(texts) + "\n"
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    texts = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph or an item of a list, in lines of at most 120 columns; `indent` is that of its later lines."""
    return textwrap.fill(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def prose(text: str) -> str:
    """Markdown whose paragraphs are wrapped; a row of a table is a line, however long."""
    return "\n".join(line if line.startswith("|") else wrapped(line) for line in text.split("\n"))


def table_of(rows: list[dict], markdown: bool = False) -> str:
    """The table of rows {title: cell}."""
    cells = [list(row.values()) for row in rows]
    return table(list(rows[0]), cells, markdown)


def show_missing(rows: list[dict], verb: str = "run") -> None:
    """Print what did not run, and why."""
    for row in missing(rows):
        where = f" at {row['where']}" if row["where"] else ""
        print(f"  not {verb}: {row['implementation']}{where}: {row['reason']}")


def failed(rows: list[dict]) -> int:
    """The exit status of a group: 1 where an answer of ours is wrong or missing."""
    return int(any(ours(row) and row["status"] in BROKEN for row in rows))
