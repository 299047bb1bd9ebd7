"""Errors against fp64 of the same rounded logits: ours, plain torch's and the peers'; the table of docs/numerics.md.

    python bench/numerics.py

On a CPU, Triton kernels (ours and the peers') run in Triton's interpreter, which rounds as a GPU does:
only the last bit of exp2 and log2 differs there.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is first imported

import fused_rl
from bench import measure, peers
from bench.repro import entropy as forms
from tests import interpreter

VOCABULARY = 32000
# Two kinds of logits: what a model returns, and what breaks formulas that subtract large numbers.
GROUPS = {
    "usual": [("normal", 0)],
    "hard": [(gap, offset) for gap in (10, 20, 30) for offset in (0, 1000)] + [("normal", 1000)],
}


def logits(kind, offset, dtype, device):
    """(6, V) logits: normal with deviation 3, or one token a gap above the rest; (6,) targets."""
    if kind == "normal":
        x = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1)).mul_(3).add_(offset).to(dtype)
    else:
        x = forms.logits(kind, offset, dtype, rows=6, vocabulary=VOCABULARY)
    targets = torch.randint(VOCABULARY, (6,), generator=torch.Generator().manual_seed(2))
    targets[0] = 7
    return x.to(device), targets.to(device)


def in_dtype(x, targets, mask=None):
    """Plain torch in the logits' own dtype."""
    logp = torch.log_softmax(x, -1)
    return logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def one_pass(x, targets, mask=None):
    """lse - sum p x in fp32."""
    x = x.float()
    return x.gather(-1, targets[..., None])[..., 0] - torch.logsumexp(x, -1), forms.difference(x)


CPU_PATH = "fused_rl on CPU"
# How far the reference's logits are from the policy's; the KL of the first row is about scale² / 2 nats.
KL_SCALES = (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


def ours(x, targets, mask=None):
    return fused_rl.token_logprobs(x, targets)[:2]


def implementations(args):
    """Peers, ours first, and the reasons of those that cannot run."""
    cpu = args.device == "cpu"
    version = fused_rl.__version__
    found = [peers.Peer("fused_rl kernels", version, ours)]
    if cpu:
        found.append(peers.Peer(CPU_PATH, version, ours))
    found.append(peers.Peer("plain torch, logits' dtype", measure.version("torch"), in_dtype))
    found.append(peers.Peer("one pass, lse - sum(p x), fp32", measure.version("torch"), one_pass))
    running, missing = peers.find(peers.LOGPROBS, args.device, args.peers, interpreted=cpu)
    renamed = {"plain torch": "plain torch, fp32"}
    for peer in running:
        found.append(peer._replace(name=renamed.get(peer.name, peer.name)))
    return found, missing


def exact(x, targets, dlogprobs, dentropy):
    """logprobs, entropy and, for these upstream gradients (or None), the gradient, in fp64 without cancellation."""
    s, rest, spread, entropy = forms.exact_statistics(x)
    logp = s - rest.log1p()
    p, at = logp.exp(), targets[:, None]
    gradient = torch.zeros_like(p)
    if dlogprobs is not None:
        # 1 - p of the likeliest token is rest / (1 + rest)
        kept = torch.where(s.gather(-1, at) == 0, rest / (1 + rest), -torch.expm1(logp.gather(-1, at)))
        gradient += dlogprobs.double()[:, None] * (-p).scatter(-1, at, kept)
    if dentropy is not None:
        gradient -= dentropy.double()[:, None] * p * (s + spread)  # log p + H
    return logp.gather(-1, at)[:, 0], entropy, gradient


def measured(peer, dtype, cases, device):
    """Largest errors of one implementation over some cases; None where it has no such output."""
    worst = {"logprob": 0.0, "entropy": None, "relative": None, "smallest": None, "gradient": 0.0}
    for kind, offset in cases:
        x, targets = logits(kind, offset, dtype, device)
        upstream = [torch.randn(6, generator=torch.Generator().manual_seed(i)).to(device) for i in (3, 4)]
        given = x.clone().requires_grad_()
        whole = peer.name == "Liger GRPO loss"  # takes (1, 6, V) and scores the first five rows
        if whole:
            logprobs, h = peer.call(given[None], targets[None, :-1])
            logprobs = logprobs[0]
            rows = slice(0, 5)
        else:
            logprobs, h = peer.call(given, targets)
            rows = slice(0, 6)
        pairs = [(o, u[rows]) for o, u in zip((logprobs, h), upstream, strict=True) if o is not None]
        gradient = torch.autograd.grad([o for o, _ in pairs], given, [u.to(o.dtype) for o, u in pairs])[0][rows]
        *truth, true_gradient = exact(x, targets, upstream[0], None if h is None else upstream[1])
        true_gradient = true_gradient[rows]
        scale = true_gradient.abs().amax(1, keepdim=True).clamp(min=1e-300)
        error = ((gradient.double() - true_gradient).abs() / scale).max().item()
        worst["gradient"] = _most(worst["gradient"], error)
        worst["logprob"] = _most(worst["logprob"], (logprobs.double() - truth[0][rows]).abs().max().item())
        if h is not None:
            off = (h.double() - truth[1]).abs()
            worst["entropy"] = _most(worst["entropy"], off.max().item())
            worst["relative"] = _most(worst["relative"], (off / truth[1]).max().item())
            worst["smallest"] = h.min().item() if worst["smallest"] is None else min(worst["smallest"], h.min().item())
    return worst


def exact_kl(x, ref):
    """Reverse KL in fp64 as a sum of terms that are all >= 0, so that close distributions lose nothing."""
    logp, logq = torch.log_softmax(x.double(), -1), torch.log_softmax(ref.double(), -1)
    delta = logp - logq
    # e^-d - 1 + d: its series where the difference would lose digits
    series = delta**2 * (1 / 2 - delta * (1 / 6 - delta * (1 / 24 - delta / 120)))
    terms = torch.where(delta.abs() < 1e-2, series, torch.expm1(-delta) + delta)
    return (logp.exp() * terms).sum(-1)


def kl_rows(device):
    """token_kl and plain fp32 torch at distances that shrink: worst relative error, and the smallest value."""
    found = []
    for scale in KL_SCALES:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(6, VOCABULARY, generator=generator).mul_(3)
        ref = (x + scale * torch.randn(6, VOCABULARY, generator=generator)).to(device)
        x = x.to(device)
        exact = exact_kl(x, ref)
        calls = {"fused_rl": lambda x, ref: fused_rl.token_kl(x, ref), "plain torch, fp32": peers.plain_kl}
        for name, call in calls.items():
            value = call(x, ref).double()
            version = fused_rl.__version__ if name == "fused_rl" else measure.version("torch")
            found.append({"table": "kl", "implementation": name, "version": version, "exact": exact.mean().item(),
                          "relative": ((value - exact).abs() / exact).max().item(),
                          "smallest": value.min().item()})  # fmt: skip
    return found


def _most(a, b):
    """The larger; NaN wins."""
    return b if a is None or not b <= a else a


def main(args):
    if args.device == "cpu":
        interpreter.fix_numerics()
    found, missing = implementations(args)
    rows = []
    for dtype in args.dtype:
        for group, cases in GROUPS.items():
            for peer in found:
                if args.device == "cpu":  # our op reads it at each call
                    os.environ["TRITON_INTERPRET"] = "0" if peer.name == CPU_PATH else "1"
                try:
                    worst = measured(peer, measure.DTYPES[dtype], cases, args.device)
                except (ArithmeticError, AttributeError, LookupError, RuntimeError, ValueError, ImportError) as reason:
                    missing[peer.name] = f"{type(reason).__name__}: {reason}".splitlines()[0]
                    continue
                rows.append(
                    {"dtype": dtype, "logits": group, "implementation": peer.name, "version": peer.version, **worst}
                )
    columns = ["logprob", "entropy", "relative", "smallest", "gradient"]
    print("largest error: logprob and entropy in nats, entropy relative, gradient relative to its row's largest\n")
    print(measure.table(["dtype", "logits", "implementation", "version", "logprob", "entropy", "entropy rel.",
                         "smallest entropy", "gradient"],
                        [[r["dtype"], r["logits"], r["implementation"], r["version"], *(r[c] for c in columns)]
                         for r in rows]))  # fmt: skip
    for name, reason in missing.items():
        print(f"  not measured: {name}: {reason}")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # the kernel, as a GPU runs it
    of_kl = kl_rows(args.device)
    print("\nreverse KL of fp32 logits that come closer: largest relative error, and the smallest value\n")
    print(measure.table(["exact KL (nats)", "implementation", "relative error", "smallest value"],
                        [[r["exact"], r["implementation"], r["relative"], r["smallest"]] for r in of_kl]))  # fmt: skip
    measure.save(args, rows + of_kl, not_run=missing)
    return any(name.startswith("fused_rl") for name in missing)


if __name__ == "__main__":
    sys.exit(main(measure.arguments(__doc__, "numerics")))
