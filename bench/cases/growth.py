"""How time and memory grow with the rows N, the vocabulary V and the length T: slopes on a log-log plot.

A case is a series, its implementations are sizes. A slope of 1 is linear. From some thousand rows on, a program holds
its logits a chunk at a time, or never (the linear op); so N grows to a quarter of a million by chunks of one buffer,
and what may grow is what is kept per row.
"""

import math

import torch

import fused_rl
from bench import peers, results
from bench.cases.case import Case, Spec

CHUNK = 4096  # rows of logits that exist at once while N grows
EXPONENTS = (10, 12, 14, 16, 18)  # sizes are powers of 2


def bf16(*shape, device):
    """Standard normal numbers that want a gradient."""
    return torch.randn(*shape, device=device).to(torch.bfloat16).requires_grad_()


def rows_by_chunks(n, device, vocab=512):
    """logprob and entropy, forward and backward, of n rows that pass through one buffer of logits."""
    logits = bf16(min(n, CHUNK), vocab, device=device)
    targets = torch.randint(vocab, (len(logits),), device=device)

    def run(_):
        kept = []
        for start in range(0, n, CHUNK):
            rows = min(n - start, CHUNK)
            out = fused_rl.token_logprobs(logits[:rows], targets[:rows])
            loss = out.logprobs.sum() + out.entropy.sum()
            torch.autograd.grad(loss, logits)
            kept.append(out.logprobs.detach())
        return torch.cat(kept)

    return run


def vocabulary(v, device, n=64):
    """logprob and entropy, forward and backward, of 64 rows over v tokens."""
    logits = bf16(n, v, device=device)
    targets = torch.randint(v, (n,), device=device)

    def run(_):
        out = fused_rl.token_logprobs(logits, targets)
        loss = out.logprobs.sum() + out.entropy.sum()
        return torch.autograd.grad(loss, logits)

    return run


def linear_rows(n, device, hidden=32, vocab=512):
    """The same from n hidden states: logits exist a tile at a time."""
    states = bf16(n, hidden, device=device)
    weight = bf16(vocab, hidden, device=device)
    targets = torch.randint(vocab, (n,), device=device)

    def run(_):
        out = fused_rl.linear_token_logprobs(states, weight, targets, workspace_mb=16)
        loss = out.logprobs.sum() + out.entropy.sum()
        return torch.autograd.grad(loss, (states, weight))

    return run


def length(t, device, b=16):
    """gae of 16 sequences of t steps."""
    rewards = torch.randn(b, t, device=device)
    values = torch.randn(b, t, device=device)
    mask = torch.ones(b, t, dtype=torch.bool, device=device)
    return lambda _: fused_rl.gae(rewards, values, mask, gamma=0.99, gae_lambda=0.95)


# op -> (axis, function that makes its run, exponents of the sizes)
SERIES = {
    "token_logprobs over N, by chunks": ("N", rows_by_chunks, EXPONENTS),
    "token_logprobs over V": ("V", vocabulary, EXPONENTS),
    "linear_token_logprobs over N": ("N", linear_rows, EXPONENTS),
    "gae over T": ("T", length, (10, 12, 14, 16, 17)),
}


class GrowthCase(Case):
    known = {}
    baselines = ()
    columns = {"ms": "both", "runs": "runs", "extra MB": "extra MB"}

    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.op = spec.layout
        self.axis, self.make, _ = SERIES[self.op]
        self.sizes = {}  # of implementations by name

    @classmethod
    def specs(cls, args):
        found = []
        for op, (_, _, exponents) in SERIES.items():
            sizes = tuple(1 << exponent for exponent in exponents)
            found.append(Spec(sizes, layout=op))
        return found

    @classmethod
    def warm_ups(cls, specs, device):
        return [spec._replace(shape=(1 << 14,)) for spec in specs]

    def facts(self, peer):
        return {"op": self.op, "axis": self.axis, "size": self.sizes[peer.name]}

    def label(self):
        return self.op

    def title(self, rows, copy_bytes_per_s):
        found = slopes(rows)
        if found is None:
            return self.op
        of_time, of_memory = found
        return f"{self.op}: time grows with {self.axis}^{of_time:.2f}, extra memory with {self.axis}^{of_memory:.2f}"

    def bytes(self):
        return {}, ""

    def contenders(self, wanted):
        found = []
        for size in self.spec.shape:
            torch.manual_seed(0)
            call = self.make(size, self.device)
            name = f"fused_rl, {self.axis} = {size}"
            # Its first call does not count; a size that is slow runs once more.
            self.sizes[name] = size
            found.append(peers.Peer(name, fused_rl.__version__, call, compiles=True))
        return found, []


def slope(xs, ys) -> float:
    """Least-squares slope of log y over log x."""
    xs = [math.log(x) for x in xs]
    ys = [math.log(max(y, 1e-9)) for y in ys]
    mean_x = sum(xs) / len(xs)
    mean_y = sum(ys) / len(ys)
    covariance, variance = 0.0, 0.0
    for x, y in zip(xs, ys, strict=True):
        covariance += (x - mean_x) * (y - mean_y)
        variance += (x - mean_x) ** 2
    return covariance / variance


def slopes(rows: list[dict]) -> tuple[float, float] | None:
    """Of time and of memory, over the upper half of the sizes: the smallest measure the call, not the growth."""
    upper = rows[max(0, len(rows) // 2 - 1) :]
    if len(upper) < 2:
        return None
    sizes = [row["size"] for row in upper]
    of_time = slope(sizes, [results.whole_ms(row) for row in upper])
    return of_time, slope(sizes, [row["extra_bytes"] or 1 for row in upper])
