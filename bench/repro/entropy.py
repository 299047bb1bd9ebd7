"""Entropy that goes negative: its error and its smallest value, over gap and offset, for our op and for common forms.

    python -m bench.repro.entropy            prints the table and draws docs/entropy.svg

One token stands `gap` above the rest, all logits stand `offset` higher; entropy does not depend on the offset. What a
form returns is compared with fp64 of the same rounded logits.
"""

import argparse
import itertools
import math

import torch

import fused_rl
from bench import plain, plots, results

GAPS = (0, 10, 20, 30, 40, 60)
OFFSETS = (0, 20, 1000, -1000)
VOCABULARY = 50304
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def difference(x):
    """lse - sum p x: one pass, and a difference of two large numbers (verl, OpenRLHF, kernels that keep both sums)."""
    p = torch.softmax(x, -1)
    return torch.logsumexp(x, -1) - (p * x).sum(-1)


def log_softmax(x):
    """-sum exp(logp) logp, as TRL's entropy_from_logits."""
    return plain.entropy(torch.log_softmax(x, -1))


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
    terms = weights * torch.where(weights > 0, s, 0)
    spread = -terms.sum(-1, keepdim=True) / (1 + rest)
    return s, rest, spread, (rest.log1p() + spread)[..., 0]


FORMS = {
    "fused_rl": lambda x: (
        fused_rl.token_logprobs(x, torch.zeros(len(x), dtype=torch.int64)).entropy
    ),
    "lse - sum(p x), logits' dtype": difference,
    "lse - sum(p x), fp32": lambda x: difference(x.float()),
    "log_softmax (TRL), logits' dtype": log_softmax,
    "log_softmax (TRL), fp32": lambda x: log_softmax(x.float()),
    "-sum(p log p), fp32": lambda x: naive(x.float()),
}


def logits(gap, offset, dtype, rows=8, vocabulary=VOCABULARY):
    """(rows, vocabulary): standard normal, one token `gap` above the rest, plus `offset` + row / rows."""
    x = plain.normal(0, rows, vocabulary)
    if gap:
        x[:, 7] = x.amax(1) + gap
    return (x + offset + torch.arange(rows)[:, None] / rows).to(dtype)


def sweep(dtypes=DTYPES, gaps=GAPS, offsets=OFFSETS):
    """Per form, dtype, offset and gap: smallest value, largest error in nats, and the exact entropy."""
    for (name, dtype), offset, gap in itertools.product(dtypes.items(), offsets, gaps):
        x = logits(gap, offset, dtype)
        exact = exact_statistics(x)[3]
        for form, function in FORMS.items():
            got = function(x).double()
            yield {
                "dtype": name,
                "form": form,
                "offset": offset,
                "gap": gap,
                "exact": exact.mean().item(),
                "smallest": got.min().item(),  # NaN if any is NaN
                "error": plain.largest(got, exact),
            }


def summary(rows):
    """Per dtype and form: smallest value and largest error over everything swept, and where the error was largest."""
    for dtype, form in itertools.product(DTYPES, FORMS):
        own = [row for row in rows if row["form"] == form and row["dtype"] == dtype]
        broken = [row for row in own if math.isnan(row["error"])]
        worst = broken[0] if broken else max(own, key=lambda row: row["error"])
        yield {
            "dtype": dtype,
            "form": form,
            "smallest value": math.nan if broken else min(row["smallest"] for row in own),
            "largest error": worst["error"],
            "at": f"gap {worst['gap']}, offset {worst['offset']}",
        }


def draw_offsets(axes):
    """The smallest entropy of 32 rows over the offset: three forms, and the truth."""
    offsets = range(-300, 301, 10)
    inputs = [logits(11, offset, torch.bfloat16, rows=32) for offset in offsets]
    exact = [exact_statistics(x)[3].min().item() for x in inputs]
    for form, function in FORMS.items():
        if not form.endswith("fp32"):
            colour, _ = plots.LOOKS[list(FORMS).index(form)]
            found = [function(x).min().item() for x in inputs]
            is_hidden = (
                form != "fused_rl"
                and max(abs(a - b) for a, b in zip(found, exact, strict=True)) < 0.1
            )
            label = f"{form}: below fused_rl's line" if is_hidden else form
            axes.plot(
                offsets, found, color=colour, label=label, lw=2, zorder=2 + (form == "fused_rl")
            )
    axes.plot(offsets, exact, "k--", lw=1.2, label="exact (fp64)", zorder=4)
    axes.axhline(0, color="black", lw=0.6)
    axes.set(
        xlabel="offset added to every logit",
        ylabel="nats",
        title="smallest entropy of 32 rows, bf16 logits",
    )


def draw_errors(axes, lines):
    """A pair of bars per form, bf16 above fp32; NaN reaches beyond every number."""
    for line in lines:
        nan = math.isnan(line["largest error"])
        length = 1e3 if nan else line["largest error"]
        text = "NaN" if nan else f"{length:.0e}"
        shift, hatch = (0.2, "") if line["dtype"] == "bf16" else (-0.2, "//")
        y = list(FORMS).index(line["form"]) + shift
        colour, _ = plots.LOOKS[list(FORMS).index(line["form"])]
        axes.barh(y, length, 0.36, color=colour, hatch=hatch, edgecolor="white")
        axes.text(1.4 * length, y, f"{text} ({line['dtype']})", va="center", fontsize=9)
    axes.set_yticks(range(len(FORMS)), list(FORMS))
    axes.invert_yaxis()
    axes.set(
        xscale="log",
        xlim=(1e-8, 1e3),
        xlabel="nats",
        title="largest error over all gaps and offsets",
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--png", default=plots.DOCS / "entropy.svg", help="where to draw")
    args = parser.parse_args()
    rows = list(sweep())
    lines = list(summary(rows))
    print(
        f"entropy of (8, {VOCABULARY}) logits: error and smallest value in nats, against fp64 of the same logits\n"
    )
    print(results.table_of(rows))
    print(f"\nover all of it\n\n{results.table_of(lines)}")

    # Above: entropy of bf16 logits while only their offset changes. Below: largest error of the whole sweep.
    figure, (above, below) = plots.column([1, 1], (7.5, 7))
    draw_offsets(above)
    draw_errors(below, lines)
    plots.save(figure, args.png)
    print(f"drew {args.png}")


if __name__ == "__main__":
    main()
