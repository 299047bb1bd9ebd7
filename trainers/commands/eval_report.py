"""What `fused-rl eval` tells of the responses that it has drawn: figures (docs/evaluation.md), a table, files."""

import json
from pathlib import Path

import torch

from fused_rl.trainers.base.files import as_json, storing, write_atomically, write_rows
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.rollouts.solved import outcome_sums, outcomes, pass_at

LINES = {
    "score": "mean score",
    "mean_length": "length, tokens",
    "mean_length_solved": "    of solved responses",
    "mean_length_unsolved": "    of unsolved responses",
    "clipped_ratio": "cut at max_new_tokens",
}
FRACTIONS = ("clipped_ratio",)


def summarize(greedy: list[dict], sampled: list[dict], k: int | None = None) -> dict[str, object]:
    """The figures of an evaluation.

    Args:
        greedy: one response per problem, as `responses.jsonl` has them.
        sampled: n per problem, those to one problem adjacent; may be empty.
        k: of pass@k; None takes the usual ones. Of what is solved nothing is told where nobody says it.
    """
    figures: dict[str, object] = {"problems": len(greedy)}
    if _is_known(greedy + sampled):
        figures["accuracy_greedy"] = _over_problems([float(row["solved"] or 0) for row in greedy])
    if sampled and "accuracy_greedy" in figures:
        right = torch.tensor([bool(row["solved"]) for row in sampled]).view(len(greedy), -1)
        figures |= {name: _over_problems(of_problems.tolist()) for name, of_problems in pass_at(right, k).items()}
    drawn = {"greedy": greedy, "sampled": sampled}
    return figures | {name: _described(rows) for name, rows in drawn.items() if rows}


def _is_known(rows: list[dict]) -> bool:
    """Whether anybody said of any of them whether it solves its problem."""
    return any(row["solved"] is not None for row in rows)


def _over_problems(values: list[float]) -> dict[str, float]:
    """The mean over problems and its standard error, which is 0 for a single problem."""
    found = torch.tensor(values, dtype=torch.float64)
    error = found.std().item() / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": found.mean().item(), "standard_error": error}


def _described(rows: list[dict]) -> dict[str, object]:
    """Scores, lengths and truncation of responses."""
    solved = torch.tensor([bool(row["solved"]) for row in rows])
    lengths = torch.tensor([row["tokens"] for row in rows])
    stopped = torch.tensor([row["finish"] == "stop" for row in rows])
    sums = {name: value.item() for name, value in outcome_sums(solved, lengths, stopped).items()}
    found = {"score": sum(row["score"] for row in rows) / len(rows), "scores": {}}
    for name in rows[0]["scores"]:
        scores = [row["scores"][name] for row in rows]
        applying = [score for score in scores if score is not None]
        found["scores"][name] = sum(applying) / len(applying) if applying else None
    return found | outcomes(sums, _is_known(rows))


def table(figures: dict[str, object], samples: int) -> str:
    """The figures in columns, of the greedy response to a problem and of the `samples` sampled ones."""
    lines = [("", "greedy", f"{samples} samples" if samples else "")]
    if "accuracy_greedy" in figures:
        lines.append(("solved", _percent(figures["accuracy_greedy"]), ""))
    for key, value in figures.items():
        if key.startswith("pass_at_"):
            lines.append((f"pass@{key.removeprefix('pass_at_')}", "", _percent(value)))
    columns = [figures["greedy"], figures.get("sampled", {})]
    for key, title in LINES.items():
        lines.append((title, *(_cell(column.get(key), fraction=key in FRACTIONS) for column in columns)))
        if key == "score" and len(columns[0]["scores"]) > 1:
            for name in columns[0]["scores"]:
                cells = [_cell(column.get("scores", {}).get(name)) for column in columns]
                lines.append((f"    {name}", *cells))
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    shown = [f"{line[0]:<{widths[0]}}  {line[1]:>{widths[1]}}  {line[2]:>{widths[2]}}".rstrip() for line in lines]
    end = f"{figures['problems']} problems, {figures['tokens_per_second']:.0f} tokens/s"
    return "\n".join([*shown, end])


def _percent(value: dict[str, float]) -> str:
    return f"{100 * value['mean']:.1f} ± {100 * value['standard_error']:.1f} %"


def _cell(value: float | None, *, fraction: bool = False) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if fraction else f"{value:.4g}"


def is_of_an_evaluation(path: Path) -> bool:
    """Whether `write` made this `responses.jsonl` or `summary.json`, by what is in it."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return "drawn" in json.loads(text.partition("\n")[0])
        return "options" in json.loads(text)
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def write(folder: Path, drawn: dict[str, list[dict]], figures: dict[str, object], options: dict[str, object]) -> None:
    """`responses.jsonl`, a line for each response, and `summary.json`, the figures and the options."""
    rows = []
    for name, responses in drawn.items():
        rows += [{"drawn": name, **row} for row in responses]
    with storing("the evaluation", folder):
        write_rows(folder / "responses.jsonl", rows)
        write_atomically(folder / "summary.json", as_json(figures | {"options": options}, indent=2) + "\n")
    tell(f"responses: {folder / 'responses.jsonl'}, figures: {folder / 'summary.json'}")
