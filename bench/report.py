"""bench/results -> docs/benchmarks.md with its plots: measured rows only.

python -m bench report
"""

import argparse
import itertools
import math
import statistics

from bench import plots, results
from bench.results import RESULTS

HEAD = """# Benchmarks

`python -m bench report` writes this page from the raw samples in `bench/results/*.json`, and `make bench` repeats the
measurements. Every answer was checked against fp64 before it was timed.

Compare implementations within a row. A cell shows the median time and then the extra memory with the gradient, as a
multiple of the logits or in MB. "10.1 ×" means 10.1 times as long as ours: the median over the turns that both took. †
marks a wrong answer: a log-probability or KL that is off by more than 0.001 nats, or a gradient by more than 1 % of its
largest element. Empty cells were not measured; versions that a table does not name are those above. The figures
for a GPU are of one H100 in bf16, so far only for some operations.
"""
TIMED = {
    "kernels": "Forward and backward of log-probability and entropy. With few rows and a vocabulary below about 2,000 "
    "tokens most of the time is the call itself: on one thread with AVX2, 8 × 64 takes 1.2 to 1.5 times plain torch's "
    "time, 64 × 2000 0.4 to 0.9 times.",
    "kernels, gpu": "At that commit a call cost the host 0.2 ms, with the backward pass 0.7 ms; beside a model's pass "
    "that is hidden.",
    "kl": "Forward and backward of `token_kl`, the KL of two logits tensors.",
    "linear": "From hidden states to loss and gradients (rows × hidden × vocabulary). Memory is in MB.",
}
TRAFFIC = (
    "Bytes that each operation loads and stores, counted in Triton's interpreter and by ATen operators, as multiples "
    "of the logits' size. A loss on whole `(B, T, V)` logits leaves out the last position, so it reads a little less."
)
ACCURACY = (
    "Largest errors against fp64 of the same rounded logits over 32000 tokens. Usual logits are normal with deviation "
    "3; hard ones have one token 10, 20 or 30 above the rest, at offsets 0 and 1000. Log-probability and entropy are "
    "in nats, gradients relative to the largest element of their row. [Numerics](numerics.md) has the promises."
)
TRAINERS = (
    "CPU time of one thread: medians over the steps of three seeds, without each run's first. Our first GRPO row is "
    "the recipe, which measures the exact KL at each step; the second leaves it out, as TRL does. The large head has "
    "Qwen2.5-0.5B's width and vocabulary over two layers, in bf16, where ours keeps fp32 masters and TRL does not; "
    "most of that step is page faults here."
)
QUALITY = (
    "Held-out accuracy over the CPU seconds of the training steps. Both trainers begin with the same weights and take "
    "the same rows with the same hyperparameters. Lines are medians over three seeds, and dots are single seeds. The "
    "table shows the CPU seconds until the accuracy that every run reached."
)
REAL = (
    "Every trainer runs SmolLM2-135M-Instruct in fp32 on eight questions (`tests/real/tasks.py`). The time includes "
    "TRL's first step on the same rows and checks of the saved model. Token ids equal TRL's, without the newline that "
    "TRL trains after ChatML's end token.\n\n"
    "Differences from TRL are those of the first step: loss, gradient norm (relative), and the largest of a "
    "log-probability in nats, where TRL's embedding of the token it pads with has its gradient too. TRL 1.16 has no "
    "PPO. GRPO's run, killed and resumed, had the same bits."
)
# What an implementation of the figure of a GPU leaves out.
NAMES = {"F.cross_entropy": "F.cross_entropy\n(no entropy)"}
ALGORITHMS = {
    "grpo": "GRPO: greedy answers that are right",
    "reward": "reward model: pairs ordered rightly",
}


def table(columns, rows) -> str:
    return results.table(columns, rows, markdown=True)


def machine(result, known: set[str]) -> str:
    """Return how and where a table was measured, without versions that are all `known`, which are added to."""
    facts = result["environment"]
    changed = " with local changes" if facts["modified"] else ""
    plural = "" if facts["threads"] == 1 else "s"
    threads = f", {facts['threads']} thread{plural}" if facts["device"].startswith("CPU") else ""
    versions = [f"{name} {version}" for name, version in facts["versions"].items()]
    new = "" if known.issuperset(versions) else f"; {', '.join(versions)}"
    known.update(versions)
    when = f"commit {facts['commit'][:7]}{changed}, {facts['date'][:10]}"
    return f"`{facts['command']}`, {when}. {facts['device']}{threads}{new}.\n"


def label(row) -> str:
    """Return an implementation's name, ours in bold."""
    name = row["implementation"]
    return f"**{name}**" if results.ours(row) else name


def cases_of(result) -> dict[str, list[dict]]:
    """Return the timed rows of each case, by its name."""
    found = {}
    for row in results.measured(result["rows"]):
        if "ms" not in row:
            continue
        layout = {"shift": "logits[:, :-1]", "rows": "", "(B, T)": ""}.get(
            row.get("layout", ""), row.get("layout", "")
        )
        masked = f"{row['masked']:.0%} masked" if row.get("masked") else ""
        words = [f"{row['op']} {results.sizes(row['shape'], ' × ')} {row['dtype']}", layout, masked]
        found.setdefault(", ".join(filter(None, words)), []).append(row)
    return found


def timed(result) -> str:
    """Return a table with a line per case and a column per implementation; others' times are multiples of ours."""
    cases = cases_of(result)
    rows = itertools.chain.from_iterable(cases.values())
    names = list(dict.fromkeys(map(label, rows)))
    lines = []
    for case, found in cases.items():
        cells = dict.fromkeys(names, "")
        for row in found:
            cells[label(row)] = cell(row)
        lines.append([case, *(cells[name] for name in names)])
    group = result["group"]
    text = TIMED.get(f"{group}, {device(result)}", TIMED[group])
    return f"{text}\n\n{table(['case', *names], lines)}"


def device(result) -> str:
    """Return "gpu" or "cpu"."""
    return "gpu" if "cuda" in result["environment"] else "cpu"


def cell(row) -> str:
    """Return an implementation's time, as a multiple of ours or in ms, and its extra memory."""
    ratios = [ratio for base, ratio in row["time_over"].items() if base.startswith("fused_rl")]
    time = f"{results.number(row['ms']['both'])} ms"
    if ratios and not results.ours(row):
        time = f"{results.number(ratios[0], 2)} ×"
    figures = results.figures(row)
    memory = figures.get("extra/logits", figures.get("extra MB"))
    wrong = " †" if row["status"] == results.WRONG else ""
    return f"{time}, {results.number(memory, 2)}{wrong}"


def kernels(result) -> str:
    if device(result) == "gpu":
        return f"{draw_shares()}\n\n{timed(result)}"
    roof = (result["copy_bytes_per_s"] / 1e9, "a plain copy")
    axis = "GB/s of logits and gradients (right is faster)"
    file = "benchmarks-cpu.svg"
    plots.roofline(cases_of(result), lambda row: row["gb_per_s"]["both"], roof, axis, file)
    picture = f"![GB/s of each implementation against the bandwidth of a copy]({file})"
    return f"{picture}\n\n{timed(result)}"


def draw_shares() -> str:
    """Draw the first, largest case of each op on a GPU beside a copy, for README too; return the picture's line."""
    shown = {}
    for path in (RESULTS / "kernels-gpu.json", RESULTS / "kl-gpu.json"):
        if not path.exists():
            continue
        case = next(iter(cases_of(results.load(path)).values()))
        shown[case[0]["op"]] = {
            NAMES.get(row["implementation"], row["implementation"]): row["copy_fraction"]["both"]
            for row in case
            if row["implementation"] != "fused_rl inplace"
        }
    for op, shares in shown.items():  # the fastest comes first
        shown[op] = dict(sorted(shares.items(), key=lambda item: -item[1]))
    plots.shares_of_a_copy(shown, "benchmarks-gpu.svg")
    return "![Bandwidth of token_logprobs and token_kl on a GPU, as a share of a copy's](benchmarks-gpu.svg)"


def traffic(result) -> str:
    lines = []
    for row in results.measured(result["rows"]):
        lines.append([row["op"], label(row), f"{row['forward']:.2f}", f"{row['backward']:.2f}"])
    return f"{TRAFFIC}\n\n{table(['operation', 'implementation', 'forward', 'backward'], lines)}"


def accuracy(result) -> str:
    lines = {}
    for row in results.measured(result["rows"]):
        if row["dtype"] == "bf16":
            line = lines.setdefault(label(row), {})
            for name in ("logprob", "entropy", "gradient"):
                line[f"{name}, {row['logits']}"] = row[name]
    columns = list(next(iter(lines.values())))
    return f"{ACCURACY}\n\n{table(['bf16 logits', *columns], [[name, *line.values()] for name, line in lines.items()])}"


PHASES = ("rollout", "measure", "update", "step")


def trainers(result) -> str:
    lines = []
    for row in results.measured(result["rows"]):
        faster = sorted(row["steps_over_trl"])
        ratios = [None, ""]
        if faster:
            span = f"{results.number(faster[0])} to {results.number(faster[-1])}"
            ratios = [statistics.median(faster), span]
        times = [row["ms"].get(phase) for phase in PHASES]
        lines.append([f"{row['op']}, {row['task']}", label(row), *times, *ratios])
    titles = ["task", "implementation", *(f"{phase} ms" for phase in PHASES)]
    titles += ["steps / TRL steps", "over seeds"]
    return f"{TRAINERS}\n\n{table(titles, lines)}"


def real(result) -> str:
    columns = {
        "CPU s": "cpu_s",
        "first loss": "loss",
        "loss differs by": "loss_difference",
        "gradient norm by": "gradient_difference",
        "log-probabilities by": "logprob_difference",
    }
    rows = results.measured(result["rows"])
    rows.append({"op": "together", "cpu_s": sum(row["cpu_s"] for row in rows)})
    lines = [[row["op"].replace("_", " "), *map(row.get, columns.values())] for row in rows]
    return f"{REAL}\n\n{table(['run', *columns], lines)}"


# ------------------------------------------------------------------ time to quality


def seconds_to(row: dict, wanted: float) -> float:
    """CPU seconds until a run first had this accuracy, between its evaluations by a straight line."""
    before = row["accuracy"][0]
    for point in row["accuracy"]:
        if point[2] >= wanted:
            rise = point[2] - before[2]
            share = (wanted - before[2]) / rise if rise > 0 else 1.0
            return before[1] + share * (point[1] - before[1])
        before = point
    raise ValueError(f"it never came to {wanted}")


def quality(result) -> str:
    kinds = {}
    for row in result["rows"]:
        kinds.setdefault(row["op"], {}).setdefault(row["implementation"], []).append(row)
    draw_quality(kinds)
    lines = []
    for op, found in kinds.items():
        # The accuracy, a whole percent, that every run reached.
        best = [
            max(point[2] for point in row["accuracy"])
            for row in itertools.chain.from_iterable(found.values())
        ]
        wanted = math.floor(100 * min(best) + 1e-9) / 100
        for name, rows in found.items():
            spent = sorted(seconds_to(row, wanted) for row in rows)
            last = statistics.median(row["accuracy"][-1][2] for row in rows)
            span = f"{results.number(spent[0])} to {results.number(spent[-1])}"
            lines.append([op, name, f"{wanted:.0%}", statistics.median(spent), span, f"{last:.1%}"])
    columns = ["", "implementation", "accuracy", "CPU s to it", "over seeds", "accuracy at the end"]
    picture = "![Held-out accuracy over CPU seconds, ours and TRL's](time-to-quality.svg)"
    return f"{QUALITY}\n\n{picture}\n\n{table(columns, lines)}"


def draw_quality(kinds: dict[str, dict[str, list[dict]]]) -> None:
    """Draw a panel per algorithm: a line per implementation, a dot per seed and evaluation."""
    figure, panels = plots.column([1] * len(kinds), (5.6, 2.6 * len(kinds)))
    for axes, (op, found) in zip(panels, kinds.items(), strict=True):
        for (implementation, rows), (colour, marker) in zip(
            found.items(), plots.LOOKS, strict=False
        ):
            for row in rows:
                _, seconds, accuracies = zip(*row["accuracy"], strict=True)
                axes.scatter(
                    seconds, accuracies, color=colour, marker=marker, s=22, alpha=0.5, linewidths=0
                )
            points = list(zip(*(row["accuracy"] for row in rows), strict=True))
            middle = [
                [statistics.median(point[at] for point in step) for step in points] for at in (1, 2)
            ]
            axes.plot(*middle, color=colour, label=implementation)
        axes.set(title=ALGORITHMS[op], ylabel="held-out accuracy")
    panels[-1].set_xlabel("CPU seconds of training")
    plots.save(figure, "time-to-quality.svg")


# group -> (title, what makes the section), in the order of the page
SECTIONS = {
    "quality": ("Time to the same accuracy", quality),
    "trainers": ("A training step", trainers),
    "real": ("A real model", real),
    "kernels": ("Log-probability and entropy", kernels),
    "linear": ("Heads", timed),
    "kl": ("KL", timed),
    "traffic": ("Bytes moved", traffic),
    "numerics": ("Accuracy", accuracy),
}


def command(name: str, words: list[str]) -> int:
    """Write the page; 1 if there is nothing to write, or a result cannot be read."""
    argparse.ArgumentParser(description=__doc__).parse_args(words)
    text, known, broken = HEAD, set(), False
    for (group, (title, section)), kind in itertools.product(SECTIONS.items(), ("cpu", "gpu")):
        path = RESULTS / f"{group}-{kind}.json"
        if not path.exists():
            continue
        try:
            result = results.load(path)
            body, measured = section(result), machine(result, known)
            heading = title
            if kind == "gpu":
                heading += f", on a GPU ({result['environment']['date'][:10]})"
            text += f"\n## {heading}\n\n{measured}\n{body}"
        except (ValueError, KeyError, TypeError) as reason:
            print(f"left out: {path.name}: {type(reason).__name__}: {reason}")
            broken = True
    if text == HEAD:
        print(
            f"no results in {RESULTS}: run python -m bench first; docs/benchmarks.md stays as it is"
        )
        return 1
    (plots.DOCS / "benchmarks.md").write_text(results.prose(text))
    print("wrote docs/benchmarks.md")
    return int(broken)
