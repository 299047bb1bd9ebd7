"""Entropy that goes negative: its error and its smallest value, over gap and offset, for our op and for common forms.

    python bench/repro/entropy.py            prints the table and draws docs/entropy.png

One token stands `gap` above the rest, all logits stand `offset` higher; entropy does not depend on the offset. What a
form returns is compared with fp64 of the same rounded logits.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import fused_rl
from bench.measure import ROOT, table

GAPS, OFFSETS, VOCABULARY = (0, 10, 20, 30, 40, 60), (0, 20, 1000, -1000), 50304
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def difference(x):
    """lse - sum p x: one pass, and a difference of two large numbers (verl, OpenRLHF, kernels that keep both sums)."""
    return torch.logsumexp(x, -1) - (torch.softmax(x, -1) * x).sum(-1)


def log_softmax(x):
    """-sum exp(logp) logp, as TRL's entropy_from_logits."""
    logp = torch.log_softmax(x, -1)
    return -(logp.exp() * logp).sum(-1)


def naive(x):
    """-sum p log p of a softmax: NaN once a probability underflows to 0."""
    p = torch.softmax(x, -1)
    return -(p * p.log()).sum(-1)


def exact_statistics(x):
    """fp64 without cancellation: s = x - max, rest = sum e^s without the maximum itself, spread = -sum p s, entropy."""
    x = x.double()
    m, at = x.max(-1, keepdim=True)
    s = x - m
    weights = s.exp().scatter(-1, at, 0)
    rest = weights.sum(-1, keepdim=True)
    spread = -(weights * torch.where(weights > 0, s, 0)).sum(-1, keepdim=True) / (1 + rest)
    return s, rest, spread, (rest.log1p() + spread)[..., 0]


FORMS = {
    "fused_rl": lambda x: fused_rl.token_logprobs(x, torch.zeros(len(x), dtype=torch.int64)).entropy,
    "lse - sum(p x), logits' dtype": difference,
    "lse - sum(p x), fp32": lambda x: difference(x.float()),
    "log_softmax (TRL), logits' dtype": log_softmax,
    "log_softmax (TRL), fp32": lambda x: log_softmax(x.float()),
    "-sum(p log p), fp32": lambda x: naive(x.float()),
}


def logits(gap, offset, dtype, rows=8, vocabulary=VOCABULARY):
    """(rows, vocabulary): standard normal, one token `gap` above the rest, plus `offset` + row / rows."""
    x = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    if gap:
        x[:, 7] = x.amax(1) + gap
    return (x + offset + torch.arange(rows)[:, None] / rows).to(dtype)


def sweep(dtypes=DTYPES, gaps=GAPS, offsets=OFFSETS):
    """Per form, dtype, offset and gap: smallest value, largest error in nats, and the exact entropy."""
    for name, dtype in dtypes.items():
        for offset in offsets:
            for gap in gaps:
                x = logits(gap, offset, dtype)
                exact = exact_statistics(x)[3]
                for form, function in FORMS.items():
                    got = function(x).double()
                    yield {
                        "form": form,
                        "dtype": name,
                        "offset": offset,
                        "gap": gap,
                        "exact": exact.mean().item(),
                        "value": got.mean().item(),
                        "smallest": got.min().item(),  # NaN if any is NaN
                        "error": (got - exact).abs().max().item(),
                    }


def summary(rows):
    """Per dtype and form: smallest value and largest error over everything swept, and where the error was largest."""
    lines = []
    for dtype in DTYPES:
        for form in FORMS:
            own = [r for r in rows if r["form"] == form and r["dtype"] == dtype]
            broken = [r for r in own if r["error"] != r["error"]]
            worst = broken[0] if broken else max(own, key=lambda r: r["error"])
            smallest = float("nan") if broken else min(r["smallest"] for r in own)
            lines.append([dtype, form, smallest, worst["error"], f"gap {worst['gap']}, offset {worst['offset']}"])
    return lines


def draw(rows, path):
    """Left: entropy of bf16 logits while only their offset changes. Right: largest error of the whole sweep."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # Okabe and Ito's colours, told apart with any colour vision.
    colours = dict(zip(FORMS, ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#56B4E9"), strict=True))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(1.15, 1), layout="constrained")
    offsets = range(-300, 301, 10)
    inputs = [logits(11, offset, torch.bfloat16, rows=32) for offset in offsets]
    for form in ("lse - sum(p x), logits' dtype", "log_softmax (TRL), logits' dtype", "fused_rl"):
        values = [FORMS[form](x).min().item() for x in inputs]
        left.plot(offsets, values, color=colours[form], label=form, lw=3.5 if form == "fused_rl" else 1.5)
    left.plot(offsets, [exact_statistics(x)[3].min().item() for x in inputs], "k--", lw=1.2, label="exact (fp64)")
    left.set_ylim(left.get_ylim())
    left.axhspan(left.get_ylim()[0], 0, color="0.92", zorder=0)
    left.text(-300, left.get_ylim()[0], "below 0: impossible", va="bottom", color="0.35", fontsize=9)
    left.set(xlabel="offset added to every logit", ylabel="nats", title="smallest entropy of 32 rows, bf16 logits")
    left.legend(fontsize=8, frameon=False, loc="lower center")
    for shift, (dtype, hatch) in zip((0.2, -0.2), (("bf16", ""), ("fp32", "//")), strict=True):
        lines = [line for line in summary(rows) if line[0] == dtype]
        errors = [line[3] if line[3] == line[3] else 1e3 for line in lines]
        where = [i + shift for i in range(len(lines))]
        right.barh(where, errors, 0.36, color=[colours[line[1]] for line in lines], hatch=hatch, edgecolor="white")
        for y, line in zip(where, lines, strict=True):
            text = "NaN" if line[3] != line[3] else f"{line[3]:.0e}"
            right.text(line[3] * 1.4 if line[3] == line[3] else 1.4e3, y, f"{text} ({dtype})", va="center", fontsize=7)
    right.set_yticks(range(len(FORMS)), list(FORMS), fontsize=8)
    right.invert_yaxis()
    right.set(xscale="log", xlim=(1e-8, 1e4), xlabel="nats", title="largest error over all gaps and offsets")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    print(f"drew {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", default=str(ROOT / "docs" / "entropy.png"), help="where to draw; empty: nowhere")
    args = parser.parse_args()
    rows = list(sweep())
    print(f"entropy of (8, {VOCABULARY}) logits: error and smallest value in nats, against fp64 of the same logits\n")
    print(table(["dtype", "form", "offset", "gap", "exact", "smallest", "error"],
                [[r["dtype"], r["form"], r["offset"], r["gap"], r["exact"], r["smallest"], r["error"]]
                 for r in rows]))  # fmt: skip
    print("\nover all of it\n")
    print(table(["dtype", "form", "smallest value", "largest error", "at"], summary(rows)))
    if args.png:
        draw(rows, args.png)


if __name__ == "__main__":
    main()
