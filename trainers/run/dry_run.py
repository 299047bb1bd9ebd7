"""What `--dry_run` prints: the resolved config as YAML, and as comments the batch arithmetic and one example.

A dry run is the run itself, up to where all but the models that are trained has been read. `--config` reads the text
back.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import escaped
from fused_rl.trainers.data.encode import Encoded
from fused_rl.trainers.options import RunConfig, to_yaml

# Only the first and the last tokens of a sequence that is longer than this are printed.
MOST_TOKENS = 200


class Encodable(Protocol):
    """What a trainer makes of a row: token sequences that know where they come from."""

    @property
    def where(self) -> str:
        """The file and line of the row."""
        ...

    def sequences(self) -> dict[str, Encoded]:
        """Return the token ids of prompt and response of each sequence, by the name of the sequence."""
        ...


class DryRun(Exception):
    """Ends a dry run with what it prints."""


def described(
    config: RunConfig,
    divided: Mapping[str, object],
    examples: Sequence[Encodable],
    tokenizer: Any,
    scorers_read: Mapping[str, object],
) -> str:
    """Return what a dry run prints: how the batch is `divided`, by title, and the first example."""
    divided = dict(divided)
    if config.sequence_parallel > 1:
        together = f"groups of {config.sequence_parallel}, each of which counts as one below"
        divided["processes"] = f"{ranks.processes()}, in {divided['processes']} {together}"
    lines = [f"# {key}: {value}" for key, value in divided.items()]
    updates = divided.get("optimizer updates in the run", divided.get("optimizer steps"))
    for name in ("warmup_steps", "critic_warmup_steps"):
        rising = getattr(config, name, None)
        if rising and isinstance(updates, int) and rising >= updates:
            lines.append(
                f"# {name}: {rising} is not below the run's {updates} updates, so the learning rate rises to the end"
            )
    lines += ["#", *example_lines(examples[0], tokenizer)]
    for name, value in scorers_read.items():
        lines.append(f"# {name}, which scorers read: {escaped(value):.200}")
    everything = config.dry_run == "all"
    title = "# the options that were given or follow from others; --dry_run all prints all of them"
    options = to_yaml(config, everything=everything)
    return "\n".join([*([] if everything else [title]), options, "# batch arithmetic", *lines])


def example_lines(example: Encodable, tokenizer: Any) -> list[str]:
    """Return an example as comment lines, with the tokens of its prompt and those that are trained.

    On a terminal the two have different colours.
    """
    colors = {"prompt": "\x1b[36m", "trained": "\x1b[32m"} if sys.stdout.isatty() else {}
    lines = [f"# one example: {example.where}, its tokens between bars"]
    for name, (prompt, response) in example.sequences().items():
        parts = {"prompt": prompt, "trained": response}
        for part, ids in parts.items():
            if not ids:
                continue
            texts = [escaped(tokenizer.decode(i)) for i in ids]
            if len(texts) > MOST_TOKENS:
                left_out = len(texts) - MOST_TOKENS
                half = MOST_TOKENS // 2
                texts = [*texts[:half], f"… {left_out} more …", *texts[-half:]]
            label = part if name == "prompt" else f"{name}, {part}"
            color = colors.get(part, "")
            end = "\x1b[0m" if color else ""
            lines.append(f"# {label} ({len(ids)} tokens): {color}{'|'.join(texts)}{end}")
    return lines
