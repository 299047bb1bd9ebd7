"""Errors against fp64 of the same rounded logits: ours, plain torch's and the peers'; the table of docs/benchmarks.md.

    python -m bench numerics

On a CPU, Triton kernels (ours and the peers') run in Triton's interpreter, which rounds as a GPU does:
only the last bit of exp2 and log2 differs there.
"""

import itertools
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is first imported

import fused_rl
from bench import machine, options, peers, plain, results
from bench.repro import entropy as forms
from tests.tools import interpreter

ROWS, VOCABULARY = 6, 32000
# Two kinds of logits: what a model returns, and what breaks formulas that subtract large numbers.
GROUPS = {
    "usual": [("normal", 0)],
    "hard": [
        *itertools.product((10, 20, 30), (0, 1000)),
        ("normal", 1000),
    ],
}


def logits(kind, offset, dtype, device):
    """(6, V) logits: normal with deviation 3, or one token a gap above the rest; (6,) targets."""
    if kind == "normal":
        x = plain.normal(1, ROWS, VOCABULARY)
        x = x.mul_(3).add_(offset).to(dtype)
    else:
        x = forms.logits(kind, offset, dtype, rows=ROWS, vocabulary=VOCABULARY)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=plain.seeded(2))
    targets[0] = 7  # the token that a gap lifts
    return x.to(device), targets.to(device)


def in_dtype(x, targets, mask=None):
    """Plain torch in the logits' own dtype."""
    logp = torch.log_softmax(x, -1)
    return plain.chosen(logp, targets), plain.entropy(logp)


def one_pass(x, targets, mask=None):
    """lse - sum p x in fp32."""
    x = x.float()
    return plain.chosen(x, targets) - torch.logsumexp(x, -1), forms.difference(x)


CPU_PATH = "fused_rl on CPU"


def ours(x, targets, mask=None):
    return fused_rl.token_logprobs(x, targets)[:2]


def implementations(args):
    """Peers, ours first, and rows of those that cannot run."""
    cpu = args.device == "cpu"
    version, torch_version = fused_rl.__version__, machine.version("torch")
    found = [peers.Peer("fused_rl kernels", version, ours)]
    if cpu:
        found.append(peers.Peer(CPU_PATH, version, ours))
    found.append(peers.Peer("plain torch, logits' dtype", torch_version, in_dtype))
    found.append(peers.Peer("one pass, lse - sum(p x), fp32", torch_version, one_pass))
    running, missing = peers.find(
        peers.LOGPROBS, args.device, args.peers, interpreted=cpu, op="token_logprobs"
    )
    for peer in running:
        name = "plain torch, fp32" if peer.name == "plain torch" else peer.name
        found.append(peer._replace(name=name))
    return found, missing


def exact(x, targets, dlogprobs, dentropy):
    """logprobs, entropy and, for these upstream gradients (or None), the gradient, in fp64 without cancellation."""
    s, rest, spread, entropy = forms.exact_statistics(x)
    logp = s - rest.log1p()
    p, at = logp.exp(), targets[:, None]
    gradient = torch.zeros_like(p)
    if dlogprobs is not None:
        # 1 - p of the likeliest token is rest / (1 + rest)
        likeliest = s.gather(-1, at) == 0
        others = -torch.expm1(logp.gather(-1, at))
        kept = torch.where(likeliest, rest / (1 + rest), others)
        gradient += dlogprobs.double()[:, None] * (-p).scatter(-1, at, kept)
    if dentropy is not None:
        gradient -= dentropy.double()[:, None] * p * (s + spread)  # log p + H
    return logp.gather(-1, at)[:, 0], entropy, gradient


def called(peer, x, targets):
    """(outputs, which rows they are of); one that takes (1, T, V) scores all rows but the last."""
    if not peer.whole:
        return peer.call(x, targets), slice(ROWS)
    logprobs, entropy = peer.call(x[None], targets[None, :-1])
    return (logprobs[0], entropy), slice(ROWS - 1)


def measured(peer, dtype, cases, device):
    """Largest errors of one implementation over some cases; None where it has no such output, NaN where one is NaN."""
    found = {name: [] for name in ("logprob", "entropy", "relative", "smallest", "gradient")}
    for kind, offset in cases:
        x, targets = logits(kind, offset, dtype, device)
        upstream = [plain.normal(seed, ROWS).to(device) for seed in (3, 4)]

        # What it returns, and the gradient for random gradients of that.
        leaf = x.clone().requires_grad_()
        (logprobs, entropy), rows = called(peer, leaf, targets)
        outputs = [logprobs] if entropy is None else [logprobs, entropy]
        weights = []
        for output, up in zip(outputs, upstream, strict=False):
            weights.append(up[rows].to(output.dtype))
        gradient = torch.autograd.grad(outputs, leaf, weights)[0][rows]

        # Against the truth.
        of_entropy = None if entropy is None else upstream[1]
        exact_logprobs, exact_entropy, exact_gradient = exact(x, targets, upstream[0], of_entropy)
        exact_gradient = exact_gradient[rows]
        scale = exact_gradient.abs().amax(1, keepdim=True).clamp(min=1e-300)
        off = (gradient.double() - exact_gradient).abs()
        found["gradient"].append((off / scale).max())
        off = (logprobs.double() - exact_logprobs[rows]).abs()
        found["logprob"].append(off.max())
        if entropy is not None:
            off = (entropy.double() - exact_entropy).abs()
            found["entropy"].append(off.max())
            found["relative"].append((off / exact_entropy).max())
            found["smallest"].append(-entropy.double().min())

    # torch's maximum of NaN is NaN.
    worst = {}
    for name, values in found.items():
        worst[name] = torch.stack(values).max().item() if values else None
    if entropy is not None:
        worst["smallest"] = -worst["smallest"]
    return worst


def interpret(device: str, on: bool):
    """On a CPU, send our op's calls to the kernels, as a GPU runs them, or to the CPU path; it reads this each time."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = str(int(on))


def table_rows(args) -> list[dict]:
    """Every implementation over every kind of logits, and those that did not run."""
    found, missing = implementations(args)
    rows = []
    for dtype, (group, cases), peer in itertools.product(args.dtype, GROUPS.items(), found):
        interpret(args.device, peer.name != CPU_PATH)
        row = {
            "dtype": dtype,
            "logits": group,
            "implementation": peer.name,
            "version": peer.version,
        }
        try:
            worst = measured(peer, options.DTYPES[dtype], cases, args.device)
        except Exception as reason:  # noqa: BLE001 - each fails in its own way; ours makes the group fail
            failed = results.not_run(peer.name, *results.failure(reason), "token_logprobs")
            missing += [] if failed in missing else [failed]
            continue
        rows.append(row | {"status": results.OK} | worst)
    return rows + missing


def show(title, columns: dict, rows):
    """Print a table: {title: key of a row}."""
    lines = []
    for row in rows:
        lines.append([row[key] for key in columns.values()])
    print(f"{title}\n\n{results.table(list(columns), lines)}\n")


COLUMNS = {
    "logits": "dtype",
    "kind": "logits",
    "implementation": "implementation",
    "log-prob": "logprob",
    "entropy": "entropy",
    "entropy rel.": "relative",
    "smallest entropy": "smallest",
    "gradient": "gradient",
}


def command(name: str, words: list[str]) -> int:
    """Measure and print; 1 where ours raised."""
    args = options.arguments(__doc__, name, words)
    if args.device == "cpu":
        interpreter.fix_numerics()
    rows = table_rows(args)
    title = "largest error: logprob and entropy in nats, entropy relative, gradient relative to its row's largest"
    show(title, COLUMNS, results.measured(rows))
    results.show_missing(rows, "measured")
    results.save(args, rows)
    return results.failed(rows)
