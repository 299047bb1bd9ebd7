"""The pictures of docs/benchmarks.md."""

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


def panels(count: int, size: tuple[float, float], **options):
    """A figure that is drawn into a file, and its axes beside one another."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False, **options)[0]


def column(heights: list[int], size: tuple[float, float]):
    """Return a figure and its axes below one another, whose heights are in these proportions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    return figure, axes[:, 0]


def save(figure, name):
    """Into docs or to a path, without the frames' upper and right sides; legends where lines have names."""
    import matplotlib

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[1] and not (axes.get_legend() or figure.legends):
            axes.legend(fontsize=7, frameon=False)
    # Neither the date nor random names of its parts, so that a figure of the same results is the same file.
    stable = {"metadata": {"Date": None}} if str(name).endswith(".svg") else {}
    with matplotlib.rc_context({"svg.hashsalt": str(name)}):
        figure.savefig(DOCS / name, dpi=120, **stable)


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
    figure, (axes,) = panels(1, (10, 2.5 + 0.36 * len(shown)))

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
    axes.text(roof[0], -0.5, f"{roof[1]} ", ha="right", va="bottom", fontsize=8)
    lines = range(len(shown))
    axes.hlines(lines, 0, roof[0], color="0.85", lw=0.8, zorder=1)
    axes.set_yticks(range(len(shown)), list(shown), fontsize=8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel=label)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=5)
    save(figure, name)
