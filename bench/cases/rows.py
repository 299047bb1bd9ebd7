"""What operations on rows of logits share: inputs, gradients, fp64 truth on some rows, bytes."""

import math

import torch

from bench import options, plain
from bench.cases.case import Case

CHECKED = 6  # rows that are compared with fp64
WRONG_NATS, WRONG_GRADIENT = 1e-3, 1e-2  # from here a peer's row says that it is wrong


def dropped(shape, fraction, generator, device):
    """A mask that drops this fraction at random, or None."""
    if not fraction:
        return None
    return (torch.rand(shape, generator=generator) >= fraction).to(device)


class RowsCase(Case):
    """Logits (N, V), or (B, T, V) scored against targets[:, 1:], which others do with the copy logits[:, :-1]."""

    reads: int  # tensors of logits that a pass reads
    outputs: tuple[str, ...]
    columns = {
        "forward ms": "forward",
        "backward ms": "backward",
        "both ms": "both",
        "host ms": "host",
        "runs": "runs",
        "GB/s": "rate",
        "of copy": "share",
        "extra memory": "extra/logits",
        "time / ours": "over fused_rl",
        "log-prob error": "logprob error",
        "KL error": "kl error",
        "relative error": "advantages error",
        "entropy error": "entropy error",
        "gradient error": "gradient error",
    }

    def __init__(self, spec, device):
        super().__init__(spec, device)
        shape, dtype, masked, self.layout = spec
        lead, vocab = shape[:-1], shape[-1]
        self.scored = (*lead[:-1], lead[-1] - 1) if self.layout == "shift" else lead

        # Two sets of logits, so that one pass does not find those of the last one in a cache.
        self.logits = []
        for seed in range(2):
            torch.manual_seed(seed)
            made = torch.empty(shape, dtype=options.DTYPES[dtype], device=device)
            self.logits.append(made.normal_(0, 3))
        self.more_inputs()

        generator = plain.seeded(0)
        self.targets = torch.randint(vocab, lead, generator=generator).to(device)
        self.mask = dropped(self.scored, masked, generator, device)
        self.upstream = []
        for _ in self.outputs:
            made = torch.randn(self.scored, generator=generator)
            self.upstream.append(made.to(device))
        self.exact = None

    def more_inputs(self):
        """What an operation reads beside logits, drawn after them."""

    @classmethod
    def specs(cls, args):
        return cls.listed(args, masked=(0.0, 0.5))

    @classmethod
    def warm_ups(cls, specs, device):
        small = []
        for spec in specs:
            shape = (2, 9, 2048) if spec.layout == "shift" else (16, 2048)
            masked = 0.5 if spec.masked else 0.0
            small.append(spec._replace(shape=shape, masked=masked))
        return list(dict.fromkeys(small))

    def bytes(self):
        element = self.logits[0].element_size()
        size = self.logits[0].numel() * element
        scored = math.prod(self.scored) * self.spec.shape[-1] * element
        kept = 1.0 if self.mask is None else self.mask.float().mean().item()
        forward = self.reads * kept * scored
        backward = forward + size
        moved = {
            "forward": forward,
            "backward": backward,
            "both": forward + backward,
            "logits": size,
        }
        text = f"{self.reads} read forward, {self.reads} read + 1 write backward"
        return moved, text + ("" if kept == 1 else f"; {kept:.0%} of the rows read")

    def inputs(self, peer):
        """Logits for it to run on: shared, unless its gradient overwrites them, which a leaf forbids."""
        if not peer.overwrites:
            return [x.detach().requires_grad_() for x in self.logits]
        # neither a leaf nor a view of one, which no gradient may overwrite
        zero = self.logits[0].new_zeros((), requires_grad=True)
        return [self.logits[0].clone().add_(zero)]

    def backward_of(self, peer):
        return self.backward

    def backward(self, outputs, x):
        """The gradient of logits for random gradients of the outputs."""
        given, grads = [], []
        for output, upstream in zip(outputs, self.upstream, strict=True):
            if output is None:
                continue
            given.append(output)
            # One number for all rows can only be weighted as one.
            grads.append(upstream.to(output.dtype) if output.dim() else torch.ones_like(output))
        return torch.autograd.grad(given, x, grads, retain_graph=self.device != "cpu")[0]

    def values(self, logits, at) -> dict:
        """{output: value (n,)} of (n, V) fp64 logits that stand at the indices `at`."""
        raise NotImplementedError

    def checked_rows(self) -> tuple:
        """The indices of those that are compared with fp64."""
        n = math.prod(self.scored)
        picked = torch.linspace(0, n - 1, min(n, CHECKED)).long()
        picked = torch.unravel_index(picked, self.scored)
        return tuple(index.to(self.device) for index in picked)

    def truth(self):
        """fp64 on some rows of the same rounded logits: their indices, the leaf, {output: value}; computed once."""
        if self.exact is None:
            at = self.checked_rows()
            x = self.logits[0][at].double().requires_grad_()
            values = self.values(x, at)
            if self.mask is not None:
                keep = self.mask[at]
                values = {name: torch.where(keep, value, 0) for name, value in values.items()}
            self.exact = at, x, values
        return self.exact

    def errors(self, peer, outputs, gradient):
        """Of each output that it has, and of the gradient for random gradients of these."""
        at, x, values = self.truth()
        found, loss = {}, 0.0
        for name, output, upstream in zip(values, outputs, self.upstream, strict=True):
            if output is None:
                continue
            weights = 1.0  # of one number for all rows
            if output.dim():
                found[name] = plain.largest(output[at], values[name])
                weights = upstream[at].double()
            loss = loss + (values[name] * weights).sum()
        (exact,) = torch.autograd.grad(loss, x, retain_graph=True)
        found["gradient"] = plain.relative(gradient[at], exact)
        return found

    def limits(self, peer):
        nats = WRONG_NATS
        of_gradient = WRONG_GRADIENT
        if peer.role == "ours":  # tighter than for any peer
            # fp32 results of sums over V terms; a gradient in the logits' dtype is half an ulp off its largest element
            nats = 5e-5
            of_gradient = 5e-5 if self.spec.dtype == "fp32" else 2**-8
        limits = dict.fromkeys(self.outputs, (nats, " nats"))
        return limits | {"gradient": (of_gradient, " of its largest")}
