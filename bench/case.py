"""One case of the kernels group: inputs, how implementations are called, fp64 truth, the bytes it cannot avoid."""

import torch

import fused_rl
from bench import measure

WRONG_NATS, WRONG_GRADIENT = 1e-3, 1e-2  # from here a peer's row says that it is wrong


def dropped(shape, fraction, generator, device):
    """A mask that drops this fraction at random, or None."""
    if not fraction:
        return None
    return (torch.rand(shape, generator=generator) >= fraction).to(device)


class Case:
    """Inputs, reference and byte counts of one row-statistics case."""

    def __init__(self, op, layout, shape, dtype, fraction, device):
        self.op, self.layout, self.shape, self.dtype, self.fraction = op, layout, shape, dtype, fraction
        self.device, generator = device, torch.Generator().manual_seed(0)
        lead, vocab = shape[:-1], shape[-1]
        self.scored = (*lead[:-1], lead[-1] - 1) if layout == "shift" else lead
        sets = 2
        self.logits = [torch.empty(shape, dtype=measure.DTYPES[dtype], device=device) for _ in range(sets)]
        for i, x in enumerate(self.logits):
            torch.manual_seed(i)
            x.normal_(0, 3)
        self.ref_logits = None
        if op == "token_kl":
            self.ref_logits = torch.empty_like(self.logits[0]).normal_().mul_(0.5).add_(self.logits[0])
        self.targets = torch.randint(vocab, lead, generator=generator).to(device)
        self.mask = dropped(self.scored, fraction, generator, device)
        outputs = 2 if op == "token_logprobs" else 1
        self.exact = None
        self.upstream = [torch.randn(self.scored, generator=generator).to(device) for _ in range(outputs)]

    def bytes(self) -> dict:
        """Bytes of logits that each phase must move, and the count spelled out."""
        size = self.logits[0].numel() * self.logits[0].element_size()
        scored = torch.Size(self.scored).numel() * self.shape[-1] * self.logits[0].element_size()
        kept = 1.0 if self.mask is None else self.mask.float().mean().item()
        reads = 2 if self.op == "token_kl" else 1
        forward, backward = reads * kept * scored, reads * kept * scored + size
        text = f"{reads} read forward, {reads} read + 1 write backward"
        text += "" if kept == 1 else f"; {kept:.0%} of the rows read"
        return {"forward": forward, "backward": backward, "both": forward + backward, "text": text, "logits": size}

    # How each implementation is called: with what a trainer has in hand, so a slice counts where a peer needs one.
    def ours(self, x, inplace=False):
        if self.op == "token_kl":
            return (fused_rl.token_kl(x, self.ref_logits, mask=self.mask),)
        out = fused_rl.token_logprobs(x, self.targets, mask=self.mask, shift=self.layout == "shift", inplace=inplace)
        return out.logprobs, out.entropy

    def peer(self, call, name):
        def run(x):
            if self.op == "token_kl":
                return (call(x, self.ref_logits, self.mask),)
            if self.layout == "shift":
                whole = name == "Liger GRPO loss"
                return call(x if whole else x[:, :-1], self.targets[:, 1:], self.mask)
            return call(x, self.targets, self.mask)

        return run

    def backward(self, outputs, x):
        pairs = [(o, g) for o, g in zip(outputs, self.upstream, strict=True) if o is not None]
        # One number for all rows can only be weighted as one.
        grads = [g.to(o.dtype) if o.dim() else torch.ones_like(o) for o, g in pairs]
        return torch.autograd.grad([o for o, _ in pairs], x, grads, retain_graph=self.device != "cpu")[0]

    def rows_to_check(self):
        """Up to 6 scored rows, spread, as an index per leading dimension."""
        n = torch.Size(self.scored).numel()
        picked = torch.linspace(0, n - 1, min(n, 6)).long()
        return torch.unravel_index(picked, self.scored) if len(self.scored) > 1 else (picked,)

    def inputs(self, peer) -> list:
        """Logits for it to run on: shared, unless its gradient overwrites them, which a leaf forbids."""
        if not peer.overwrites:
            return [x.detach().requires_grad_() for x in self.logits]
        leaf = self.logits[0].clone().requires_grad_()
        return [leaf.view_as(leaf)]

    def run_once(self, peer):
        """(outputs, gradient, {phase: seconds}, peak extra bytes) of one forward and backward."""
        (x, *_), kept = self.inputs(peer), []

        def backward(outputs, x):
            kept.extend((outputs, self.backward(outputs, x)))

        once, seconds = measure.phases_cpu(peer.call, backward, [x]), {}
        extra = measure.peak_extra_bytes(lambda: seconds.update(once()), self.device)
        return *kept, seconds, extra

    def truth(self):
        """fp64 on some rows of the same rounded logits: {output: value}, {output: its gradient}, computed once."""
        if self.exact is None:
            at = tuple(i.to(self.device) for i in self.rows_to_check())
            x = self.logits[0][at].double().requires_grad_()
            logp = torch.log_softmax(x, -1)
            if self.op == "token_kl":
                ref = torch.log_softmax(self.ref_logits[at].double(), -1)
                values = {"kl": (logp.exp() * (logp - ref)).sum(-1)}
            else:
                scored = self.targets[:, 1:] if self.layout == "shift" else self.targets
                chosen = logp.gather(-1, scored[at][:, None])[:, 0]
                values = {"logprob": chosen, "entropy": -(logp.exp() * logp).sum(-1)}
            keep = torch.ones(len(x), dtype=torch.bool, device=self.device) if self.mask is None else self.mask[at]
            values = {name: torch.where(keep, value, 0) for name, value in values.items()}
            ones = torch.ones(len(x), dtype=torch.float64, device=self.device)
            gradients = [torch.autograd.grad(v, x, ones, retain_graph=True)[0] for v in values.values()]
            self.exact = at, {name: value.detach() for name, value in values.items()}, gradients
        return self.exact

    def errors(self, outputs, gradient) -> dict:
        """Largest error of outputs and gradient against fp64 on some rows."""
        at, values, gradients = self.truth()
        found, exact_gradient = {}, torch.zeros_like(gradients[0])
        for (name, value), output, upstream, own in zip(values.items(), outputs, self.upstream, gradients, strict=True):
            if output is None:
                continue
            if output.dim():
                found[name] = (output[at].double() - value).abs().max().item()
            # One number for all rows can only be weighted as one.
            exact_gradient += own * (upstream[at].double()[:, None] if output.dim() else 1)
        scale = exact_gradient.abs().max().clamp(min=1e-30)
        found["gradient"] = ((gradient[at].double() - exact_gradient).abs().max() / scale).item()
        return found

    def failure(self, errors: dict) -> str:
        """Why our own op may not be timed; empty when it is right: tighter than any peer is asked to be."""
        # fp32 results of sums over V terms; a gradient in the logits' dtype can be half an ulp off its largest element.
        most = {"logprob": 5e-5, "entropy": 5e-5, "kl": 5e-5, "gradient": 5e-5 if self.dtype == "fp32" else 2**-8}
        over = [f"{name} off by {e:.1e}" for name, e in errors.items() if not e <= most[name]]
        return ", ".join(over)


def wrong(errors: dict) -> str:
    """What a peer's row says where its answer is wrong, and by how much."""
    over = [
        f"{name} off by {e:.2g}" + (" of its largest" if name == "gradient" else " nats")
        for name, e in errors.items()
        if not e <= (WRONG_GRADIENT if name == "gradient" else WRONG_NATS)
    ]
    return "WRONG: " + ", ".join(over) if over else ""
