"""The pictures of the pages: one style for all, with the colours of dark pages in it."""

import io

from bench import machine

DOCS = machine.ROOT / "docs"
# Okabe and Ito's colours, distinct with any colour vision; a marker each for print. Ours is the blue disc.
LOOKS = [
    ("#0072B2", "o"),
    ("#E69F00", "s"),
    ("#D55E00", "D"),
    ("#009E73", "^"),
    ("#CC79A7", "v"),
    ("#56B4E9", "P"),
    ("#000000", "x"),
    ("#F0E442", "<"),
    ("#999999", ">"),
    ("#117733", "*"),
    ("#882255", "h"),
]

STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # letters of the reader's own fonts
}
# What is black becomes white on a dark page, and blue lighter.
IN_THE_DARK = {
    "#000000": "#f0f6fc",
    "#0072b2": "#56b4e9",
    "#d55e00": "#f0883e",
    "#cccccc": "#3d444d",
    "#ffffff": "#0d1117",
}


def empty(size: tuple[float, float]):
    """Return a figure of this size in inches; a page is about 7 wide."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=size, layout="constrained")


def column(heights: list[int], size: tuple[float, float]):
    """Return a figure and its axes below one another, whose heights are in these proportions."""
    figure = empty(size)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    return figure, axes[:, 0]


def save(figure, name):
    """Write an SVG into docs or to a path; legends where lines have names."""
    import matplotlib

    for axes in figure.axes:
        if axes.get_legend_handles_labels()[1] and not (axes.get_legend() or figure.legends):
            axes.legend()
    # Neither the date nor random names of its parts, so that a figure of the same results is the same file.
    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": str(name)}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    rules = ["text { fill: #f0f6fc }"]
    for colour, other in IN_THE_DARK.items():
        for part in ("fill", "stroke"):
            rules.append(f'[style*="{part}: {colour}"] {{ {part}: {other} !important }}')
    style = "\n".join(["<style>@media (prefers-color-scheme: dark) {", *rules, "}</style>\n"])
    (DOCS / name).write_text(written.getvalue().replace("</defs>", f"</defs>\n{style}", 1))


def shares_of_a_copy(shown: dict[str, dict[str, float]], name: str):
    """Draw {title: {implementation: share of a copy's bandwidth}} as bars, a panel per title, into a file of docs.

    The figure is narrow and its letters are large, because README is read on phones too.
    """
    heights = list(map(len, shown.values()))
    figure, panels = column(heights, (5.6, 0.8 + 0.34 * sum(heights)))
    for axes, (title, shares) in zip(panels, shown.items(), strict=True):
        colours = [
            LOOKS[0][0] if implementation.startswith("fused_rl") else "0.62"
            for implementation in shares
        ]
        bars = axes.barh(list(shares), list(shares.values()), color=colours, height=0.7)
        axes.axvline(1, color="black", lw=1.5, ls="--")
        # A label stands behind its bar, unless the line of a copy would cross it.
        inside = [f"{share:.0%}" if share > 0.8 else "" for share in shares.values()]
        behind = [f"{share:.0%}" if share <= 0.8 else "" for share in shares.values()]
        axes.bar_label(bars, behind, padding=4, fontsize=11)
        axes.bar_label(bars, inside, padding=-36, fontsize=11, color="white")
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        axes.set(xlim=(0, 1.12), xticks=[])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False, labelsize=11)
        axes.invert_yaxis()
    panels[-1].set_xticks([0, 0.5, 1], ["0", "half", "as fast as a copy"])
    save(figure, name)


def roofline(shown: dict, value, roof: tuple[float, str], label: str, name: str):
    """{case: rows} as one line each, a marker per implementation at `value(row)`, below a roof (value, name)."""
    figure, (axes,) = column([1], (8, 2.2 + 0.4 * len(shown)))

    # (value, line) of each implementation.
    points = {}
    for y, rows in enumerate(shown.values()):
        for row in rows:
            points.setdefault(row["implementation"], []).append((value(row), y))
    for i, (implementation, found) in enumerate(points.items()):
        colour, marker = LOOKS[i % len(LOOKS)]
        first = i == 0
        xs, ys = zip(*found, strict=True)
        size, above = (70, 4) if first else (36, 3)
        looks = {"color": colour, "marker": marker, "s": size, "zorder": above}
        axes.scatter(xs, ys, label=implementation, **looks)

    # The roof, and the lines up to it.
    axes.axvline(roof[0], color="black", lw=1.5)
    axes.text(roof[0], len(shown) / 2, f"{roof[1]} ", ha="right", va="center", rotation=90)
    lines = range(len(shown))
    axes.hlines(lines, 0, roof[0], color="#cccccc", lw=0.8, zorder=1)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel=label)
    figure.legend(loc="outside lower center", ncols=4)
    save(figure, name)
