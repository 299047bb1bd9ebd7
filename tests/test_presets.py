"""The table of known algorithms: equal to the documentation's, row by row, and no row twice."""

import itertools
import re
from pathlib import Path

import pytest

import fused_rl
from fused_rl import PRESETS, PolicyLossOptions
from fused_rl.surrogates import SURROGATES

HEADER = [
    "preset",
    "loss",
    "ratio level",
    "surrogate",
    "aggregation",
    "clip_low, clip_high",
    "advantages",
    "paper",
]
UNCLIPPED = {"sapo", "vespo", "policy-gradient"}  # surrogates without a bound: the table has a dash


def documented():
    """Of docs/losses.md: name -> (ratio level, surrogate, aggregation, clip bounds or None, advantages, paper)."""
    text = (Path(__file__).parent.parent / "docs" / "losses.md").read_text()
    section = text.split("## Presets")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == HEADER
    assert all(len(row) == len(HEADER) for row in rows)
    table = {}
    for name, _, level, surrogate, loss_agg, clips, advantage, paper in rows[2:]:
        bounds = None if clips == "—" else tuple(float(x) for x in re.match(r"(\S+), (\S+)", clips).groups())
        paper = re.sub(r"\[(\S+)\]\(https://arxiv.org/abs/\1\)", r"arXiv:\1", paper)
        assert name.strip("`") not in table, name
        table[name.strip("`")] = (level, surrogate, loss_agg, bounds, advantage, paper)
    return table


def chosen(name):
    preset = PRESETS[name]
    o = PolicyLossOptions(**preset.options)
    clips = None if o.surrogate in UNCLIPPED else (o.clip_low, o.clip_high)
    return o.ratio_level, o.surrogate, o.loss_agg, clips, preset.advantage, preset.paper


def test_the_documentation_has_the_table():
    assert documented() == {name: chosen(name) for name in PRESETS}
    assert set(SURROGATES) >= UNCLIPPED


def test_no_two_presets_are_the_same():
    """As algorithms: what they optimise, and with which advantages."""
    rows = {name: chosen(name)[:5] for name in PRESETS}
    twins = [(a, b) for a, b in itertools.combinations(rows, 2) if rows[a] == rows[b]]
    assert not twins


@pytest.mark.parametrize("name", PRESETS)
def test_every_advantage_has_a_name(name):
    assert PRESETS[name].advantage in fused_rl.ADVANTAGES
