"""Which forms of rows which trainer trains on: the table of docs/data.md, `python -m tests.tools.forms` writes it."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fused_rl.trainers import distill, dpo, grpo, kto, ppo, reward, sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.marked import marked_rows
from fused_rl.trainers.data.preferences import pairs_of
from fused_rl.trainers.data.rows import BadRow, Rows
from fused_rl.trainers.rollouts.roll_out import prompts_of
from fused_rl.trainers.scorers.load import load_scorers
from tests.trainers import tiny

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "data.md"
# What stands between these is made by this file.
BEGIN, END = "<!-- forms: begin -->", "<!-- forms: end -->"
# The page's examples: a heading or a label of a form in bold, and its row in a block of JSON.
EXAMPLE = re.compile(r"^\*\*(.+?)\*\*.*?^```json\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Trainer(NamedTuple):
    """A trainer's column of the table."""

    name: str
    module: object
    options: dict
    read: Callable
    """(config, rows, encoder) -> what the trainer makes of rows."""


# A template of all that the examples say.
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<end>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def prompts(config, rows: Rows, encoder: Encoder) -> list:
    """Return the prompts of rows, which every scorer has checked."""
    scorers = load_scorers(config) if config.verifiers else []
    return prompts_of(
        rows,
        encoder,
        scorers,
        config.check_row,
        column=config.prompt_column,
        max_length=config.max_prompt_length,
        completion_column=config.trained_column,
    )


# Scorers that compare with an answer need one beside the prompt.
SCORED = {"verifiers": ["format"]}
TRAINERS = (
    Trainer("sft", sft, {}, sft.encoded),
    Trainer("dpo", dpo, {}, pairs_of),
    Trainer("reward", reward, {}, pairs_of),
    Trainer("kto", kto, {}, marked_rows),
    Trainer("grpo", grpo, SCORED, prompts),
    Trainer("ppo", ppo, SCORED, prompts),
    Trainer("distill", distill, {"teacher": "t"}, prompts),
    Trainer("distill, `on_policy` below 1", distill, {"teacher": "t", "on_policy": 0.5}, prompts),
)


def encoder() -> Encoder:
    """Return an encoder with a chat template that writes tools and calls."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Encoder(tokenizer)


def examples(page: str) -> dict[str, dict]:
    """Return the page's rows by the names of their forms."""
    return {name: json.loads(row) for name, row in EXAMPLE.findall(page)}


def refusal(trainer: Trainer, row: dict, encoder: Encoder) -> str | None:
    """Return why a trainer cannot use a row; None if it trains on it."""
    config = trainer.module.main.args[0](model="m", dataset="d", output_dir="o", **trainer.options)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            trainer.read(config, Rows([row], "rows.jsonl"), encoder)
        except BadRow as error:
            return error.reason
        except InputError as error:
            return str(error)
    return None


def table(page: str) -> str:
    """Return the table of the page's examples, and the reasons that its cells name by number."""
    writes_all = encoder()
    reasons: dict[str, int] = {}
    alike: dict[tuple[str, ...], list[str]] = {}
    lines = [
        "| form | " + " | ".join(trainer.name for trainer in TRAINERS) + " |",
        "|---|" + "---|" * len(TRAINERS),
    ]
    for name, row in examples(page).items():
        cells = []
        for trainer in TRAINERS:
            reason = refusal(trainer, row, writes_all)
            number = None if reason is None else reasons.setdefault(reason, len(reasons) + 1)
            cells.append("trains" if number is None else f"({number})")
        alike.setdefault((*cells,), []).append(name)
    lines += [f"| {'; '.join(names)} | {' | '.join(cells)} |" for cells, names in alike.items()]
    lines.append("")
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return the page with the table as the code makes it now."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table(page)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
