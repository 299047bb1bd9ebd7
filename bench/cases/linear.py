"""A policy-gradient step through the output head, beside the three GEMMs alone and the peers.

Shapes are rows x hidden x vocabulary. Every implementation takes hidden states, the head's weight, targets and one
advantage per sequence, and gives the on-policy GRPO loss with the gradients of hidden states and weight. The floor is
logits = h w', dh = logits w, dw = logits' h in the inputs' dtype. Bytes are those that nobody can avoid: hidden states
and weight are read once forward, and once backward, where their gradients are written. Memory is the peak beyond the
inputs and the two gradients. Errors are those of loss and gradients against fp64, of the gradients on some rows,
relative to the largest element.

The exact head has fp32 logits of 16-bit operands; there log-probability and entropy of each row are compared, with
random gradients of both.
"""

import torch

import fused_rl
from bench import options, peers, plain, results
from bench.cases.case import Case, Spec, own

FLOOR = "three GEMMs"
OURS = ("fused_rl one pass", "fused_rl recompute")
BYTES = "hidden states and weight read forward; read and their gradients written backward"
CHECKED = 16  # rows of hidden states, and of the weight beside the targets, whose gradients are compared with fp64


FP32_LOGITS = "fused_rl fp32 logits"
ROUNDED = "fused_rl 16-bit logits"


def one_pass(hidden, weight, targets, advantages):
    weights = peers.per_row(advantages) / len(targets)
    return fused_rl.linear_token_loss(hidden, weight, targets, peers.policy_gradient, weights).loss


def recomputed(hidden, weight, targets, advantages):
    logprobs = fused_rl.linear_token_logprobs(hidden, weight, targets).logprobs
    return peers.policy_gradient(logprobs, None, peers.per_row(advantages)).mean()


class LinearCase(Case):
    op = "linear"
    known = peers.LINEAR
    baselines = (FLOOR, OURS[0])
    backward_repeats = False  # a gradient that was formed in the forward pass is returned once
    columns = {
        "forward ms": "forward",
        "both ms": "both",
        "runs": "runs",
        "/ GEMMs": f"over {FLOOR}",
        "/ ours": f"over {OURS[0]}",
        "GB/s": "rate",
        "of copy": "finer share",
        "extra MB": "extra MB",
        "loss error": "loss error",
        "dhidden error": "dhidden error",
        "dweight error": "dweight error",
    }
    # Cheap ones first, so that they leave their time to the others.
    cpu = [
        Spec((256, 256, 8000), "fp32"),
        Spec((512, 896, 32000), "bf16"),
    ]
    gpu = [
        Spec((8192, 896, 151936), "bf16"),
        Spec((8192, 2048, 151936), "bf16"),
        Spec((8192, 4096, 128256), "bf16"),
        Spec((16384, 2048, 32000), "bf16"),
        Spec((4096, 896, 151936), "fp32"),
    ]

    def __init__(self, spec, device):
        """Hidden states of unit variance, a weight that makes logits of variance 4, advantages per sequence."""
        super().__init__(spec, device)
        n, width, vocab = spec.shape
        dtype = options.DTYPES[spec.dtype]
        self.hidden = plain.normal(0, n, width, device=device).to(dtype).requires_grad_()
        weight = plain.normal(1, vocab, width, device=device).mul_(2 * width**-0.5)
        self.weight = weight.to(dtype).requires_grad_()
        self.targets = torch.randint(vocab, (n,), generator=plain.seeded(2)).to(device)
        self.advantages = plain.normal(3, n // peers.SEQUENCE, device=device)
        self.exact = None

    @classmethod
    def specs(cls, args):
        least = 2 * peers.SEQUENCE
        for shape in args.shapes or ():
            if len(shape) != 3 or shape[0] % peers.SEQUENCE or shape[0] < least:
                wanted = f"rows x hidden x vocabulary, rows a multiple of {peers.SEQUENCE}, {least} or more"
                raise SystemExit(f"--shapes: {wanted}; got {results.sizes(shape)}")
        return cls.listed(args)

    @classmethod
    def warm_ups(cls, specs, device):
        return list(
            dict.fromkeys(spec._replace(shape=(2 * peers.SEQUENCE, 64, 2048)) for spec in specs)
        )

    def facts(self, peer):
        shape, dtype, *_ = self.spec
        return {"op": self.op, "shape": list(shape), "dtype": dtype}

    def title(self, rows, copy_bytes_per_s):
        n, width, vocab = self.spec.shape
        flop = 6 * n * width * vocab
        work = f"{flop / 1e9:.0f} GFLOP"
        for row in rows:
            if row["implementation"] == FLOOR and "ms" in row:
                work += f", {flop / row['ms']['both'] / 1e6:.0f} GFLOP/s by the GEMMs"
        return f"{super().title(rows, copy_bytes_per_s)}; {work}"

    def returned_bytes(self):
        return self.hidden.nbytes + self.weight.nbytes

    def bytes(self):
        size = self.returned_bytes()  # of hidden states and weight, and so of their gradients
        return {"forward": size, "both": 3 * size}, BYTES

    def ours(self):
        hidden = self.hidden.detach()
        weight = self.weight.detach()
        floor = peers.Peer(
            FLOOR,
            torch.__version__,
            lambda _: hidden @ weight.t(),
            role="floor",
            backward=lambda logits, _: (logits @ weight, logits.t() @ hidden),
        )
        calls = zip(OURS, (one_pass, recomputed), strict=True)
        return [floor, *[own(name, self._on_inputs(call)) for name, call in calls]]

    def _on_inputs(self, call):
        return lambda _: call(self.hidden, self.weight, self.targets, self.advantages)

    def adapted(self, peer):
        return self._on_inputs(peer.call)

    def backward_of(self, peer):
        return peer.backward or self.backward

    def backward(self, loss, _):
        """The gradients of hidden states and weight."""
        return torch.autograd.grad(loss, (self.hidden, self.weight))

    def errors(self, peer, outputs, gradient):
        if peer.role == "floor":
            return {}
        if self.exact is None:
            self.exact = Truth(self)
        return self.of_loss(outputs, *gradient, unweighted=peer.unweighted)

    def of_loss(self, loss, dhidden, dweight, unweighted: bool) -> dict[str, float]:
        """Largest errors; `unweighted`: of a plain cross-entropy, by a peer that takes no advantages."""
        advantages = torch.ones_like(self.advantages) if unweighted else self.advantages
        weights = peers.per_row(advantages).double() / len(self.targets)
        # On-policy the ratio is 1, with the gradient of the log-probability.
        value = -(weights * self.exact.logprobs).sum() if unweighted else -weights.sum()
        found = self.exact.of_gradients([-weights], dhidden, dweight)
        return {"loss": plain.relative(loss.detach(), value, least=1e-3)} | found

    def limits(self, peer):
        # Gradients: a few rounding steps of their largest element.
        gradient = 1e-4 if self.spec.dtype == "fp32" else 0.02
        return {"loss": (1e-3, ""), "dhidden": (gradient, ""), "dweight": (gradient, "")}


class ExactHead(LinearCase):
    """Log-probability and entropy of each row by fp32 logits of 16-bit operands."""

    op = "exact head"
    known = peers.EXACT
    baselines = (FP32_LOGITS,)
    columns = {
        "forward ms": "forward",
        "both ms": "both",
        "runs": "runs",
        "/ ours": f"over {FP32_LOGITS}",
        "extra MB": "extra MB",
        "log-prob error": "logprob error",
        "entropy error": "entropy error",
        "dhidden error": "dhidden error",
        "dweight error": "dweight error",
    }
    cpu = [Spec((256, 896, 32000), "bf16")]
    gpu = [Spec((8192, 896, 151936), "bf16")]

    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.upstream = [plain.normal(seed, spec.shape[0]).to(device) for seed in (4, 5)]

    @classmethod
    def specs(cls, args):
        return [spec for spec in super().specs(args) if spec.dtype != "fp32"]

    def call(self, logits_dtype):
        out = fused_rl.linear_token_logprobs(
            self.hidden, self.weight, self.targets, logits_dtype=logits_dtype
        )
        return out.logprobs, out.entropy

    def ours(self):
        return [
            own(FP32_LOGITS, lambda _: self.call(torch.float32)),
            own(
                ROUNDED,
                lambda _: self.call(self.weight.dtype),
                note="logits rounded to the operands' dtype",
            ),
        ]

    def adapted(self, peer):
        return lambda _: peer.call(self.hidden, self.weight, self.targets)

    def backward(self, outputs, _):
        return torch.autograd.grad(outputs, (self.hidden, self.weight), self.upstream)

    def errors(self, peer, outputs, gradient):
        if self.exact is None:
            self.exact = Truth(self)
        logprobs, entropy = outputs
        found = {"logprob": plain.largest(logprobs, self.exact.logprobs)}
        found["entropy"] = plain.largest(entropy, self.exact.entropy)
        upstream = [d.double() for d in self.upstream]
        return found | self.exact.of_gradients(upstream, *gradient)

    def limits(self, peer):
        nats = {FP32_LOGITS: 5e-5, ROUNDED: 0.5}.get(peer.name, 1e-3)
        return super().limits(peer) | dict.fromkeys(("logprob", "entropy"), (nats, " nats"))


class Truth:
    """fp64 of one case: log-probabilities, entropies, and gradients of both.

    Of these, those by the rows `tokens` of the hidden states, and by the logits of the `words`.
    """

    def __init__(self, case: LinearCase):
        device = case.device
        targets = case.targets
        with torch.no_grad():
            # Rows to compare; the weight's gradient is largest where a word is a target.
            last = len(targets) - 1
            self.tokens = torch.linspace(0, last, CHECKED, device=device).long()
            spread = torch.linspace(0, len(case.weight) - 1, CHECKED).to(targets)
            self.words = torch.cat([targets[self.tokens], spread]).unique()

            # 512 rows at a time: no more fp64 logits than that.
            width = case.hidden.shape[1]
            self.of_tokens = torch.empty(2, CHECKED, width, dtype=torch.float64, device=device)
            parts = []
            for rows in torch.arange(len(targets), device=device).split(512):
                parts.append(self._piece(case, rows))
            logprobs, entropy, of_words, hidden = zip(*parts, strict=True)
            self.logprobs = torch.cat(logprobs)
            self.entropy = torch.cat(entropy)
            self.of_words = torch.cat(of_words, 1)
            self.hidden = torch.cat(hidden)

    def _piece(self, case, rows):
        """Log-probability and entropy of these rows, gradients of both by the words' logits; fills `of_tokens`."""
        hidden = case.hidden[rows].double()
        columns = case.weight.split(16384)
        logits = torch.cat([hidden @ w.double().t() for w in columns], 1)
        logp = logits.sub_(logits.logsumexp(1, keepdim=True))
        p = logp.exp()
        entropy = -(p * logp).sum(1)

        # By the logits: 1 at the target less p; and -p (log p + H).
        of_entropy = -p * (logp + entropy[:, None])
        targets = case.targets[rows]
        of_logprob = p.neg_()
        of_logprob[torch.arange(len(rows)), targets] += 1
        here = (self.tokens >= rows[0]) & (self.tokens <= rows[-1])
        for at in here.nonzero()[:, 0]:
            row = self.tokens[at] - rows[0]
            of_token = torch.stack([of_logprob[row], of_entropy[row]]).split(16384, 1)
            products = [part @ w.double() for part, w in zip(of_token, columns, strict=True)]
            self.of_tokens[:, at] = sum(products)
        of_words = torch.stack([of_logprob[:, self.words], of_entropy[:, self.words]])
        return plain.chosen(logp, targets), entropy, of_words, hidden

    def of_gradients(self, upstream: list, dhidden, dweight) -> dict[str, float]:
        """Largest errors of gradients, for upstream gradients (N,) of the log-probability, and of the entropy."""
        exact_dhidden = exact_dlogits = 0.0
        for d, of_tokens, of_words in zip(upstream, self.of_tokens, self.of_words, strict=False):
            exact_dhidden = exact_dhidden + of_tokens * d[self.tokens, None]
            exact_dlogits = exact_dlogits + of_words * d[:, None]
        return {
            "dhidden": plain.relative(dhidden[self.tokens], exact_dhidden),
            "dweight": plain.relative(dweight[self.words], exact_dlogits.t() @ self.hidden),
        }
