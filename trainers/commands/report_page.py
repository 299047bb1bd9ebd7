"""The HTML of a report: pictures as SVG inside the page, text of models and datasets as text and nothing else."""

import base64
import io
from collections.abc import Callable
from typing import NamedTuple

Histories = dict[str, list[dict]]
"""Name of a run -> the lines of its metrics.jsonl."""


class Panel(NamedTuple):
    """A picture."""

    title: str
    told: str
    """What is drawn, in words."""
    svg: str
    """Base64."""


def colour(i: int) -> str:
    """Of the i-th run, in every picture; they come again after ten."""
    return f"C{i % 10}"


def over_steps(key: str, told: str, histories: Histories) -> Panel:
    """A metric over the steps that have it, of each run."""
    figure, axes = _empty("step", "")
    for i, history in enumerate(histories.values()):
        points = [(entry["step"], entry[key]) for entry in history if isinstance(entry.get(key), (int, float))]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour(i), lw=1.2, marker="." if len(points) < 20 else None)
    return Panel(key, told, _svg(figure))


def against(x: str, y: str, histories: Histories) -> Panel:
    """A point for each step that has both metrics, of each run; later steps are darker."""
    figure, axes = _empty(x, y)
    for i, history in enumerate(histories.values()):
        points = [(entry.get(x), entry.get(y)) for entry in history]
        points = [point for point in points if None not in point]
        if points:
            later = [0.25 + 0.75 * (n + 1) / len(points) for n in range(len(points))]
            axes.scatter(*zip(*points, strict=True), color=colour(i), s=10, alpha=later)
    return Panel(f"{y} over {x}", "a point is a step, later ones are darker", _svg(figure))


def _empty(x: str, y: str):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.5), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.set_xlabel(x, parse_math=False)
    axes.set_ylabel(y, parse_math=False)
    return figure, axes


def _svg(figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()


# Nothing is loaded and nothing runs, whatever text gets in: Content-Security-Policy allows pictures of the page itself.
TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>fused-rl report</title>
<style>
body { font: 15px/1.45 sans-serif; color: #222; max-width: 1400px; margin: 1.5em auto; padding: 0 1em; }
h2 { border-bottom: 1px solid #ccc; margin-top: 1.8em; }
.swatch { display: inline-block; width: 1em; height: 1em; vertical-align: -0.1em; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(20em, 1fr)); gap: 1em; }
figure { margin: 0; }
figure img { width: 100%; }
figcaption b { display: block; }
figcaption { font-size: 0.85em; color: #555; }
table { border-collapse: collapse; font-size: 0.9em; }
th, td { border: 1px solid #ddd; padding: 0.25em 0.6em; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; min-width: 3em; }
.scrolls { max-height: 40em; overflow: auto; }
summary { cursor: pointer; font-weight: bold; margin: 0.5em 0; }
</style>
</head>
<body>
<h1>{{ runs | length }} run{{ "" if runs | length == 1 else "s" }}</h1>
<table>
<tr><th></th><th>run</th><th>command</th><th>last step</th><th>model</th></tr>
{% for run in runs %}
<tr>
<td><span class="swatch" style="background: {{ colours[loop.index0] }}"></span></td>
<td>{{ text(run.name) }}</td><td>{{ text(run.command) }}</td>
<td>{{ run.history[-1].step if run.history else "none yet" }}</td><td>{{ text(run.config.get("model", "")) }}</td>
</tr>
{% endfor %}
</table>
<section id="doctor">
<h2>What the doctor says</h2>
{% for run in runs %}
{% if runs | length > 1 %}<h3>{{ text(run.name) }}</h3>{% endif %}
<ul>{% for line in run.verdict %}<li>{{ text(line) }}</li>{% endfor %}</ul>
{% endfor %}
</section>
{% macro pictures(panels) %}
<div class="panels">
{% for panel in panels %}
<figure><figcaption><b>{{ text(panel.title) }}</b>{{ panel.told }}</figcaption>
<img alt="{{ text(panel.title) }}" src="data:image/svg+xml;base64,{{ panel.svg }}"></figure>
{% endfor %}
</div>
{% endmacro %}
<section id="curves">
<h2>Curves</h2>
{{ pictures(first) }}
{% if others %}
<details><summary>Other metrics: {{ others | length }}</summary>{{ pictures(others) }}</details>
{% endif %}
</section>
{% if runs | selectattr("samples") | list %}
<section id="samples">
<h2>Samples over time</h2>
{% for run in runs if run.samples %}
<details open><summary>{{ text(run.name) }}</summary>
<div class="scrolls"><table>
<tr>{% for column in run.columns %}<th>{{ text(column) }}</th>{% endfor %}</tr>
{% for row in run.samples %}
<tr>{% for column in run.columns %}<td>{{ text(row[column]) if column in row else "" }}</td>{% endfor %}</tr>
{% endfor %}
</table></div></details>
{% endfor %}
</section>
{% endif %}
<section id="configs">
<h2>Configs</h2>
{% if runs | length > 1 %}
<h3>What differs</h3>
<table id="differences">
<tr><th>option</th>{% for run in runs %}<th>{{ text(run.name) }}</th>{% endfor %}</tr>
{% for name, row in differences.items() %}
<tr><th>{{ text(name) }}</th>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
{% for name, config in configs.items() %}
<details><summary>{{ text(name) }}</summary>
<table>{% for option, value in config.items() %}
<tr><th>{{ text(option) }}</th><td>{{ value }}</td></tr>{% endfor %}
</table></details>
{% endfor %}
</section>
</body>
</html>
"""


def page(
    runs: list,
    first: list[Panel],
    others: list[Panel],
    differences: dict[str, list[str]],
    configs: dict[str, dict[str, str]],
    text: Callable[[object], str],
) -> str:
    """The page.

    Args:
        runs: with the fields of `report.RunRead`.
        first, others: pictures that are seen at once, and those behind a fold.
        differences: option -> its value in each run, as text.
        configs: run -> option -> value, as text.
        text: what a value of anybody's is shown as; it is escaped here.
    """
    import jinja2
    from matplotlib.colors import to_hex

    colours = [to_hex(colour(i)) for i in range(len(runs))]
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE)
    shown = {"runs": runs, "first": first, "others": others, "differences": differences, "configs": configs}
    return template.render(**shown, colours=colours, text=text)
