"""Log-probability and entropy over kept sets, from logits and from hidden states, beside masking full logits.

A case's layout is the size of its sets: `K=8`, or `mixture`, sizes as top-p sampling leaves them (45 % singletons, mean
8, 99th percentile 82). Ids are drawn evenly from the vocabulary, which is the worst case for the head's gradient: real
sets share their ids. The peer does what trainers do today: full fp32 logits, -inf outside the sets, log-softmax.
"""

import random

import torch

import fused_rl
from bench import peers, plain
from bench.cases.case import Spec, own
from bench.cases.linear import LinearCase
from bench.cases.logprobs import LogprobsCase
from fused_rl import TokenSupport, reference

MASKED = "masked full logits"
HEAD = "fused_rl whole head"
SETS = ("K=1", "K=2", "K=8", "K=82", "K=1000", "mixture")
FEW = ("K=8", "K=1000", "mixture")


def sizes_of(layout: str, n: int) -> list[int]:
    """How many ids each of n rows keeps."""
    if layout != "mixture":
        return [int(layout.removeprefix("K="))] * n
    generator = random.Random(0)
    # a log-normal, so that mean and 99th percentile of all come out as said
    others = [int(generator.lognormvariate(1.905, 1.193) + 0.5) for _ in range(n)]
    return [1 if generator.random() < 0.45 else min(max(2, size), 1000) for size in others]


def make_sets(layout: str, n: int, vocab: int, device: str) -> tuple[TokenSupport, torch.Tensor]:
    """Sets of n rows and a target in each; a row's ids are evenly spaced from one that is drawn."""
    sizes = torch.tensor(sizes_of(layout, n)).clamp(max=vocab)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    row = torch.repeat_interleave(sizes)
    step = torch.arange(len(row)) - offsets[row]
    first = torch.randint(vocab, (n,), generator=plain.seeded(1))
    ids = (first[row] + step * (vocab // sizes)[row]) % vocab
    targets = ids[offsets[:-1] + sizes // 2]
    return TokenSupport(ids, offsets).to(device), targets.to(device)


def masked_logprobs(logits, targets, support):
    """Log-probability and entropy of logits (N, V) filled with -inf outside the sets."""
    allowed = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    row = torch.repeat_interleave(support.offsets.diff())
    allowed[row, support.ids] = True
    logp = torch.log_softmax(logits.float().masked_fill(~allowed, -torch.inf), -1)
    entropy = -(logp.exp() * logp.masked_fill(~allowed, 0)).sum(-1)
    return plain.chosen(logp, targets), entropy


def _masked(device, interpreted):
    return peers.Peer(MASKED, torch.__version__, masked_logprobs)


class KeptLogits(LogprobsCase):
    op = "token_logprobs, kept sets"
    known = {MASKED: _masked}
    reads = 0
    cpu = [Spec((128, 151936), "bf16", layout=layout) for layout in FEW]
    gpu = [Spec((8192, 151936), "bf16", layout=layout) for layout in SETS]

    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.support, self.targets = make_sets(spec.layout, *spec.shape, device)

    @classmethod
    def specs(cls, args):
        return [spec for spec in cls.listed(args, SETS) if len(spec.shape) == 2]

    @classmethod
    def warm_ups(cls, specs, device):
        return [spec._replace(shape=(16, 2048)) for spec in specs[:1]]

    def bytes(self):
        element = self.logits[0].element_size()
        size = self.logits[0].numel() * element
        read = 32 * len(self.support.ids)
        moved = {"forward": read, "backward": size, "both": read + size, "logits": size}
        return (
            moved,
            "a sector of 32 bytes per id forward, zeros and values of the gradient backward",
        )

    def call(self, x, inplace=False):
        out = fused_rl.token_logprobs(x, self.targets, support=self.support, inplace=inplace)
        return out.logprobs, out.entropy

    def adapted(self, peer):
        return lambda x: peer.call(x, self.targets, self.support)

    def values(self, logits, at):
        rows = self.support.select(at[0])
        out = reference.token_logprobs(logits, self.targets[at], support=rows)
        return {"logprob": out.logprobs, "entropy": out.entropy}


class KeptHead(LinearCase):
    """From hidden states (N, H) and the head (V, H), with random gradients of both outputs."""

    op = "linear_token_logprobs, kept sets"
    known = {MASKED: _masked}
    baselines = ("fused_rl", HEAD)
    columns = LinearCase.columns | {
        "/ ours": "over fused_rl",
        "/ whole head": f"over {HEAD}",
        "value error": "value error",
    }
    cpu = [
        *[Spec((64, 896, 32000), "bf16", layout=layout) for layout in FEW],
        Spec((64, 896, 151936), "bf16", layout="mixture"),
    ]
    gpu = [Spec((8192, 4096, 151936), "bf16", layout=layout) for layout in SETS]

    def __init__(self, spec, device):
        super().__init__(spec, device)
        n, _, vocab = spec.shape
        self.support, self.targets = make_sets(spec.layout, n, vocab, device)
        self.upstream = [plain.normal(seed, n, device=device) for seed in (4, 5)]

    @classmethod
    def specs(cls, args):
        return [spec for spec in cls.listed(args, SETS) if len(spec.shape) == 3]

    @classmethod
    def warm_ups(cls, specs, device):
        return super().warm_ups(specs[:1], device)

    def facts(self, peer):
        return super().facts(peer) | {"layout": self.spec.layout}

    def bytes(self):
        row = self.weight.shape[1] * self.weight.element_size()
        read = len(self.support.ids) * row + self.hidden.nbytes
        moved = {"forward": read, "both": 3 * read + self.weight.nbytes}
        return (
            moved,
            "kept rows of the head and hidden states read; read again, their gradients and zeros written",
        )

    def call(self, support):
        out = fused_rl.linear_token_logprobs(
            self.hidden, self.weight, self.targets, support=support
        )
        return out.logprobs, out.entropy

    def ours(self):
        return [
            own("fused_rl", lambda _: self.call(self.support)),
            own(HEAD, lambda _: self.call(None), note="no sets"),
        ]

    def adapted(self, peer):
        def call(_):
            logits = self.hidden @ self.weight.t()
            return peer.call(logits, self.targets, self.support)

        return call

    def backward(self, outputs, _):
        return torch.autograd.grad(outputs, (self.hidden, self.weight), self.upstream)

    def errors(self, peer, outputs, gradient):
        if peer.name == HEAD:  # of another quantity
            return {}
        if self.exact is None:
            self.exact = self.truth()
        values, words, dhidden, dweight = self.exact
        return {
            "value": plain.largest(torch.stack(outputs), values),
            "dhidden": plain.relative(gradient[0], dhidden),
            "dweight": plain.relative(gradient[1][words], dweight),
        }

    def truth(self):
        """fp64: (2, N) outputs; ids that some set keeps; gradients of hidden states and of these rows of the head."""
        words, ids = self.support.ids.unique(return_inverse=True)
        support = TokenSupport(ids, self.support.offsets)
        targets = torch.searchsorted(words, self.targets)
        hidden = self.hidden.detach().double().requires_grad_()
        head = self.weight.detach()[words].double().requires_grad_()
        upstream = torch.stack(self.upstream).double()

        # Some rows at a time: no more fp64 logits than that.
        values = torch.empty_like(upstream)
        for rows in torch.arange(len(hidden), device=hidden.device).split(64):
            logits = hidden[rows] @ head.t()
            out = reference.token_logprobs(logits, targets[rows], support=support.select(rows))
            found = torch.stack([out.logprobs, out.entropy])
            found.backward(upstream[:, rows])
            values[:, rows] = found.detach()
        return values, words, hidden.grad, head.grad

    def limits(self, peer):
        low = self.spec.dtype != "fp32"
        value = 0.1 if low else 5e-5  # rounded logits, where they are formed
        of_gradient = 2**-6 if low else 1e-4
        return {
            "value": (value, " nats"),
            "dhidden": (of_gradient, ""),
            "dweight": (of_gradient, ""),
        }
