"""What `--dry_run` prints: the resolved config as YAML, and as comments the batch arithmetic and one example.

A dry run is the run itself up to its first pass, with models that have no weights. `--config` reads the text back.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from ..base import ranks
from ..base.text import escaped
from ..data.examples import Examples
from ..options import RunConfig, to_yaml

# Only the first and the last tokens of a sequence that is longer than this are printed.
MOST_TOKENS = 200


def described(
    config: RunConfig,
    batch_plan: Mapping[str, object],
    examples: Examples,
    tokenizer: Any,
    scorers_read: Mapping[str, object],
) -> str:
    """Return what a dry run prints: the `batch_plan` of the batch, by title, and the first example."""
    batch_plan = dict(batch_plan)
    if config.sequence_parallel > 1:
        together = f"groups of {config.sequence_parallel}, each of which counts as one below"
        batch_plan["processes"] = f"{ranks.processes()}, in {batch_plan['processes']} {together}"
    lines = [f"# {key}: {value}" for key, value in batch_plan.items()]
    lines += ["#", *example_lines(examples, tokenizer)]
    for name, value in scorers_read.items():
        lines.append(f"# {name}, which scorers read: {escaped(value):.200}")
    everything = config.dry_run == "all"
    title = "# the options that were given or follow from others; --dry_run all prints all of them"
    options = to_yaml(config, everything=everything)
    return "\n".join([*([] if everything else [title]), options, "# batch arithmetic", *lines])


def example_lines(examples: Examples, tokenizer: Any) -> list[str]:
    """Return the first example as comment lines, with the tokens of its prompts and those that are trained.

    On a terminal the two have different colours.
    """
    colors = {"prompt": "\x1b[36m", "trained": "\x1b[32m"} if sys.stdout.isatty() else {}
    lines = [f"# one example: {examples.where(0)}, its tokens between bars"]
    record = examples.record(0)
    ids_of_example, other_content = record["ids"], json.loads(record["beside"])
    if isinstance(other_content, int | float):
        lines.append(f"# beside its tokens: {other_content}")
    names = ["chosen, ", "rejected, "] if len(ids_of_example) > 3 else [""]
    labels = [name + kind for name in names for kind in ("prompt", "trained")]
    # Of several turns in one sequence only some tokens are trained.
    flags = ids_of_example[2] if len(ids_of_example) == 3 else []
    for label, ids in zip(labels, ids_of_example, strict=False):
        if not ids:
            continue
        texts = [escaped(tokenizer.decode(i)) for i in ids]
        count = str(len(ids))
        if flags and label == "trained":
            texts = [text if flag else f"({text})" for text, flag in zip(texts, flags, strict=True)]
            count = f"{sum(flags)} of {count}"
        if len(texts) > MOST_TOKENS:
            left_out = len(texts) - MOST_TOKENS
            half = MOST_TOKENS // 2
            texts = [*texts[:half], f"… {left_out} more …", *texts[-half:]]
        color = colors.get(label.split()[-1], "")
        end = "\x1b[0m" if color else ""
        lines.append(f"# {label} ({count} tokens): {color}{'|'.join(texts)}{end}")
    return lines
