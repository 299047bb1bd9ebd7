"""Log-probability and entropy over kept sets, from logits and from hidden states, beside masking full logits.

A case's layout is the size of its sets: `K=8`, or `mixture`, sizes as top-p sampling leaves them (45 % singletons, mean
8, 99th percentile 82). Ids are drawn evenly from the vocabulary, which is the worst case for the head's gradient: real
sets share their ids. The peer does what trainers do today: full fp32 logits, -inf outside the sets, log-softmax.
"""

import random

import torch

import fused_rl
from bench import options, peers, results
from bench.cases.case import Case, Spec, own
from bench.cases.rows import RowsCase
from fused_rl import TokenSupport, reference
from fused_rl.linear import WORKSPACE_MB

MASKED = "masked full logits"
HEAD = "fused_rl whole head"
CHECKED = 4  # rows whose gradients are compared with fp64
SETS = ("K=1", "K=2", "K=8", "K=82", "K=1000", "mixture")


def sizes_of(layout: str, n: int) -> list[int]:
    """How many ids each of n rows keeps."""
    if layout != "mixture":
        return [int(layout.removeprefix("K="))] * n
    generator = random.Random(0)
    # a log-normal, so that mean and 99th percentile of all come out as said
    others = [int(generator.lognormvariate(1.905, 1.193) + 0.5) for _ in range(n)]
    return [1 if generator.random() < 0.45 else min(max(2, size), 1000) for size in others]


def make_sets(layout: str, n: int, vocab: int) -> tuple[TokenSupport, torch.Tensor]:
    """Sets of n rows and a target in each."""
    generator = random.Random(1)
    lists = [generator.sample(range(vocab), min(size, vocab)) for size in sizes_of(layout, n)]
    return TokenSupport.from_lists(lists), torch.tensor([row[len(row) // 2] for row in lists])


def masked_logprobs(logits, targets, support):
    """Log-probability and entropy of logits (N, V) filled with -inf outside the sets."""
    allowed = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    row = torch.repeat_interleave(support.offsets.diff())
    allowed[row, support.ids] = True
    logp = torch.log_softmax(logits.float().masked_fill(~allowed, -torch.inf), -1)
    entropy = -(logp.exp() * logp.masked_fill(~allowed, 0)).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy


def peer(call) -> peers.Peer:
    return peers.Peer(MASKED, torch.__version__, call)


class KeptLogits(RowsCase):
    op = "token_logprobs, kept sets"
    known = {}
    reads = 0
    outputs = ("logprob", "entropy")
    cpu = [Spec((256, 151936), "bf16", layout=layout) for layout in SETS]
    gpu = [Spec((8192, 151936), "bf16", layout=layout) for layout in SETS]

    def more_inputs(self):
        n, vocab = self.spec.shape
        support, chosen = make_sets(self.spec.layout, n, vocab)
        self.support, self.chosen = support.to(self.device), chosen.to(self.device)

    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.targets = self.chosen

    @classmethod
    def specs(cls, args):
        listed = cls.cpu if args.device == "cpu" else cls.gpu
        shapes = [(shape[0], shape[-1]) for shape in args.shapes or ()]
        if args.shapes:
            listed = [Spec(shape, dtype, layout=kept) for shape in shapes for dtype in args.dtype for kept in SETS]
        return [spec for spec in listed if spec.dtype in args.dtype]

    @classmethod
    def warm_ups(cls, specs, device):
        return [spec._replace(shape=(16, 2048)) for spec in specs[:1]]

    def title(self, rows, copy_bytes_per_s):
        shape, dtype, _, layout = self.spec
        _, text = self.bytes()
        ids = len(self.support.ids)
        return f"{self.op} {results.sizes(shape)} {dtype}, {layout}, {ids} ids; bytes: {text}"

    def bytes(self):
        element, ids = self.logits[0].element_size(), len(self.support.ids)
        size = self.logits[0].numel() * element
        moved = {"forward": 32 * ids, "backward": size, "both": 32 * ids + size, "logits": size}
        return moved, "a sector of 32 bytes per id forward, zeros and values of the gradient backward"

    def call(self, x, inplace=False):
        out = fused_rl.token_logprobs(x, self.targets, support=self.support, inplace=inplace)
        return out.logprobs, out.entropy

    def ours(self):
        def in_place(x):
            return self.call(x, inplace=True)

        return [own("fused_rl", self.call), own("fused_rl inplace", in_place, overwrites=True)]

    def contenders(self, wanted):
        found = self.ours()
        if wanted in ("all", MASKED):
            found.append(peer(lambda x: masked_logprobs(x, self.targets, self.support)))
        return found, []

    def values(self, logits, at):
        rows = self.support.select(at[0])
        out = reference.token_logprobs(logits, self.targets[at], support=rows)
        return {"logprob": out.logprobs, "entropy": out.entropy}


class KeptHead(Case):
    """From hidden states (N, H) and the head (V, H), with random gradients of both outputs."""

    op = "linear_token_logprobs, kept sets"
    known = {}
    baselines = ("fused_rl", HEAD)
    backward_repeats = False
    columns = {
        "fwd ms": "forward",
        "bwd ms": "backward",
        "both ms": "both",
        "runs": "runs",
        "/ ours": "over fused_rl",
        "/ whole head": f"over {HEAD}",
        "extra MB": "extra MB",
        "value err": "value error",
        "dhidden err": "dhidden error",
        "dweight err": "dweight error",
    }
    cpu = [Spec((64, 1024, 151936), "fp32", layout=layout) for layout in SETS]
    cpu += [Spec((64, 1024, 151936), "bf16", layout="mixture")]
    gpu = [Spec((8192, 4096, 151936), "bf16", layout=layout) for layout in SETS]

    def __init__(self, spec, device):
        super().__init__(spec, device)
        n, width, vocab = spec.shape
        dtype = options.DTYPES[spec.dtype]
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(n, width, generator=generator).to(device, dtype).requires_grad_()
        weight = torch.randn(vocab, width, generator=generator).mul_(2 * width**-0.5)
        self.weight = weight.to(device, dtype).requires_grad_()
        support, targets = make_sets(spec.layout, n, vocab)
        self.support, self.targets = support.to(device), targets.to(device)
        self.upstream = [torch.randn(n, generator=generator).to(device) for _ in range(2)]
        self.exact = None

    @classmethod
    def specs(cls, args):
        listed = cls.cpu if args.device == "cpu" else cls.gpu
        shapes = [shape for shape in args.shapes or () if len(shape) == 3]
        if args.shapes:
            listed = [Spec(shape, dtype, layout=kept) for shape in shapes for dtype in args.dtype for kept in SETS]
        return [spec for spec in listed if spec.dtype in args.dtype]

    def title(self, rows, copy_bytes_per_s):
        n, width, vocab = self.spec.shape
        ids = len(self.support.ids)
        return f"{self.op} N = {n}, H = {width}, V = {vocab}, {self.spec.dtype}, {self.spec.layout}: {ids} ids"

    def returned_bytes(self):
        return self.hidden.nbytes + self.weight.nbytes

    def bytes(self):
        row = self.weight.shape[1] * self.weight.element_size()
        read = len(self.support.ids) * row + self.hidden.nbytes
        moved = {"forward": read, "both": 3 * read + self.weight.nbytes}
        return moved, "kept rows of the head and hidden states read; read again, their gradients and zeros written"

    def call(self, _):
        out = fused_rl.linear_token_logprobs(self.hidden, self.weight, self.targets, support=self.support)
        return out.logprobs, out.entropy

    def whole(self, _):
        out = fused_rl.linear_token_logprobs(self.hidden, self.weight, self.targets)
        return out.logprobs, out.entropy

    def masked(self, _):
        return masked_logprobs(self.hidden @ self.weight.t(), self.targets, self.support)

    def ours(self):
        return [own("fused_rl", self.call), own(HEAD, self.whole, note=f"no sets; workspace {WORKSPACE_MB} MB")]

    def contenders(self, wanted):
        found = self.ours()
        if wanted in ("all", MASKED):
            found.append(peer(self.masked))
        return found, []

    def backward_of(self, peer):
        return self.backward

    def backward(self, outputs, _):
        return torch.autograd.grad(outputs, (self.hidden, self.weight), self.upstream)

    def errors(self, peer, outputs, gradient):
        if peer.name == HEAD:  # of another quantity
            return {}
        if self.exact is None:
            self.exact = self.truth()
        logprobs, entropy, dhidden, words, dweight = self.exact
        off = max((outputs[0].double() - logprobs).abs().max(), (outputs[1].double() - entropy).abs().max())
        return {
            "value": off.item(),
            "dhidden": relative(gradient[0][:CHECKED], dhidden),
            "dweight": relative(gradient[1][words], dweight),
        }

    @torch.no_grad()
    def truth(self):
        """fp64: both outputs, the gradients of some hidden states, and those of the head's rows of their targets."""
        words = self.targets[:CHECKED].unique()
        dweight = torch.zeros(len(words), self.hidden.shape[1], dtype=torch.float64, device=words.device)
        logprobs, entropies, dhidden = [], [], []
        for i, (begin, end) in enumerate(zip(self.support.offsets[:-1], self.support.offsets[1:], strict=True)):
            ids, h = self.support.ids[begin:end], self.hidden[i].double()
            head = self.weight[ids].double()
            logp = (head @ h).log_softmax(0)
            p, own_id = logp.exp(), (ids == self.targets[i]).double()
            entropy = -(p * logp).sum()
            logprobs.append((logp * own_id).sum())
            entropies.append(entropy)
            dx = self.upstream[0][i] * (own_id - p) - self.upstream[1][i] * p * (logp + entropy)
            if i < CHECKED:
                dhidden.append(dx @ head)
            dweight += ((words[:, None] == ids).double() @ dx)[:, None] * h
        return torch.stack(logprobs), torch.stack(entropies), torch.stack(dhidden), words, dweight

    def limits(self, peer):
        low = self.spec.dtype != "fp32"
        value = 0.1 if low else 5e-5  # rounded logits, where they are formed
        of_gradient = 2**-6 if low else 1e-4
        return {"value": (value, " nats"), "dhidden": (of_gradient, ""), "dweight": (of_gradient, "")}


def relative(found, exact) -> float:
    """Largest difference over the largest exact element; of zeros the difference itself."""
    scale = exact.abs().max()
    return ((found.double() - exact).abs().max() / torch.where(scale > 0, scale, 1)).item()
