"""What other pages quote of the results, each between `<!-- measured: name -->` and `<!-- end -->`.

`python -m bench report` writes it there, so that no figure outlives the code that it was measured on. Each function
takes {file name without its ending: result} and returns Markdown, or None where its results are not there.
"""

import statistics

from bench import pages, results

NOT_YET = "Not measured yet: `make bench`."


def where(result: dict) -> str:
    """Machine, commit and command of a result, for a sentence."""
    facts = result["environment"]
    return f"{facts['cpu']}, {facts['cores']} cores, commit {facts['commit'][:7]}, `{facts['command']}`"


def span(values: list[float], digits: int = 2) -> str:
    """The smallest and the largest."""
    ends = [results.number(value, digits) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def timed(result: dict, implementation: str, op: str) -> list[dict]:
    """Its rows of an operation that were timed."""
    rows = results.measured(result["rows"])
    return [row for row in rows if row["implementation"] == implementation and row["op"] == op and "ms" in row]


def bytes_moved(found: dict) -> str | None:
    if "traffic-cpu" not in found:
        return None
    moved = {}
    for row in results.measured(found["traffic-cpu"]["rows"]):
        if row["op"] == "token_logprobs":
            moved[row["implementation"]] = f"{row['forward'] + row['backward']:.0f}"
    return (
        "On a GPU the kernels read each logit once; counted in bytes, forward and backward move "
        f"{moved['fused_rl']} times the logits' size where TRL's functions move {moved['TRL']} and plain torch "
        f"{moved['plain torch']} (`python -m bench traffic`)."
    )


def beside_trl(found: dict) -> str | None:
    """From logits TRL's two functions, from hidden states its chunked head, over what ours take; of large shapes."""
    if not {"kernels-cpu", "linear-cpu"} <= found.keys():
        return None

    # From logits.
    kernels = found["kernels-cpu"]
    functions = []
    for row in timed(kernels, "TRL", "token_logprobs"):
        if row["shape"][-1] >= 32000 and row["layout"] == "rows" and not row["masked"]:
            functions.append(row)
    shapes = dict.fromkeys(results.sizes(row["shape"], " × ") for row in functions)
    times = span([row["time_over"]["fused_rl"] for row in functions])
    ours = timed(kernels, "fused_rl", "token_logprobs")
    memory = [row["extra_bytes"] / row["bytes"]["logits"] for row in ours if row["shape"][-1] >= 32000]

    # From hidden states.
    heads = [row for row in timed(found["linear-cpu"], "TRL chunked head", "linear") if row["shape"][-1] >= 32000]
    of_heads = span([row["time_over"]["fused_rl one pass"] for row in heads])
    return (
        f"On a CPU ({where(kernels)}), forward and backward of log-probability and entropy took TRL's two functions "
        f"{times} times as long at {', '.join(shapes)}, and ours at most {max(memory):.2f} times the logits in extra "
        "memory, gradient included. Of TRL 1.16's trainers the experimental ones call these two; GRPO, RLOO, DPO, KTO "
        f"and SFT call its chunked head, which from hidden states to gradients took {of_heads} times as long as ours."
    )


def to_quality(found: dict) -> str | None:
    """What a user gains: CPU seconds until both trainers are as good, medians over seeds."""
    if "quality-cpu" not in found:
        return None
    result = found["quality-cpu"]
    told = []
    for op, kinds in pages.by_kind(result["rows"]).items():
        wanted, times = pages.reaching(kinds)
        (peer,) = times.keys() - {"fused_rl"}
        ours, theirs = statistics.median(times["fused_rl"]), statistics.median(times[peer])
        what = {"grpo": "GRPO", "reward": "a reward model"}[op]
        told.append(f"{what} {100 * wanted:.0f} % after {ours:.0f} where {peer} takes {theirs:.0f}")
    return (
        f"The same held-out accuracy in fewer CPU seconds of training: {', '.join(told)} (same start, rows, order and "
        f"hyperparameters, one thread, medians of three seeds; {where(result)})."
    )


def kept_sets(found: dict) -> str | None:
    """What a log-probability over kept sets costs beside the whole head, and beside masking all logits."""
    if "support-cpu" not in found:
        return None
    result = found["support-cpu"]
    cases = {}
    for row in results.measured(result["rows"]):
        case = row["op"], results.sizes(row["shape"], " × "), row["dtype"], row["layout"]
        cases.setdefault(case, {})[row["implementation"]] = row
    lines = []
    for (op, shape, dtype, layout), rows in cases.items():
        ms = rows["fused_rl"]["ms"]
        others = []
        for name in ("fused_rl whole head", "masked full logits"):
            over = rows.get(name, {}).get("time_over", {}).get("fused_rl")
            others.append(f"{results.number(over)} ×" if over else None)
        source = "hidden states" if op.startswith("linear") else "logits"
        extra = rows["fused_rl"]["extra_bytes"] / 1e6
        lines.append([source, shape, dtype, layout, ms["forward"], ms["both"], extra, *others])
    columns = ["from", "shape", "dtype", "sets", "forward ms", "both ms", "extra MB"]
    columns += ["the whole head takes", "masking all logits takes"]
    return f"{where(result)}:\n\n{results.table(columns, lines, markdown=True)}"


# page -> {name of a place: what stands there}
QUOTED = {
    "README.md": {"to quality": to_quality, "bytes": bytes_moved, "beside TRL": beside_trl},
    "docs/sampling_replay.md": {"kept sets": kept_sets},
}


def filled(text: str, name: str, inner: str) -> str:
    """The page's text with this between the markers of that name; ValueError where it has none."""
    begin, end = f"<!-- measured: {name} -->\n", "<!-- end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"no place for {name!r}")
    return f"{before}{begin}{results.prose(inner.rstrip())}\n{end}{after}"
