"""From rows to the prompts that are rolled out."""

from collections.abc import Sequence

from fused_rl.trainers.data import encode
from fused_rl.trainers.data.rows import Rows, tell_dropped
from fused_rl.trainers.rollouts.types import Prompt, Scorer


def prompts_of(
    rows: Rows, encoder: encode.Encoder, scorers: Sequence[Scorer], *, column: str | None, max_length: int
) -> list[Prompt]:
    """A prompt for every row that is short enough; `column` as the option prompt_column."""
    kept = []
    for i, row in enumerate(rows.rows):
        for scorer in scorers:
            with rows.at(i):
                scorer.check(row)  # a row that it cannot score must not stop the run hours later
        ids = encoder.prompt(rows, i, column)
        if len(ids) <= max_length:
            kept.append(Prompt(ids, row, rows.where(i), column))
    tell_dropped(rows, len(kept), "longer than max_prompt_length")
    return kept
