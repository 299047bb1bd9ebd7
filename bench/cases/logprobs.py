"""token_logprobs: log-probability and entropy of each row, or of K targets of it, and the gradient."""

import functools

import torch

import fused_rl
from bench import peers, plain
from bench.cases.case import Spec, own
from bench.cases.rows import RowsCase


class LogprobsCase(RowsCase):
    op = "token_logprobs"
    known = peers.LOGPROBS
    note = ""  # what ours does beside what is compared
    reads = 1
    outputs = ("logprob", "entropy")
    cpu = [
        Spec((8, 1000), "fp32"),
        Spec((256, 8000), "bf16"),
        Spec((1024, 32000), "bf16"),
        Spec((1024, 32000), "fp32"),
        Spec((256, 151936), "bf16"),
        Spec((1024, 32000), "bf16", masked=0.5),
    ]
    gpu = [
        Spec((8192, 151936), "bf16"),
        Spec((16384, 32000), "bf16"),
        Spec((1024, 151936), "bf16"),
        Spec((8192, 50257), "bf16"),
        Spec((8192, 50304), "bf16"),  # the same with rows that begin at 16 bytes
        Spec((8192, 151936), "fp32"),
        Spec((4096, 128256), "bf16"),
        Spec((2048, 262144), "bf16"),
        *[Spec((rows, 151936), "bf16") for rows in (16, 64, 140, 256, 512)],
        Spec((8192, 151936), "bf16", masked=0.5),
        Spec((8192, 151936), "bf16", masked=0.9),
        Spec((8, 1025, 151936), "bf16", layout="shift"),
    ]

    def call(self, x, inplace=False):
        shift = self.layout == "shift"
        out = fused_rl.token_logprobs(x, self.targets, mask=self.mask, shift=shift, inplace=inplace)
        return out.logprobs, out.entropy

    def ours(self):
        inplace = functools.partial(self.call, inplace=True)
        return [
            own("fused_rl", self.call, note=self.note),
            own("fused_rl inplace", inplace, note="gradient in the logits", overwrites=True),
        ]

    def adapted(self, peer):
        """Called with what a trainer has in hand, so a slice counts where a peer needs one."""
        if self.layout != "shift":
            if peer.whole:
                raise peers.Unavailable("takes whole (B, T, V) logits alone")
            return lambda x: peer.call(x, self.targets, self.mask)
        targets = self.targets[:, 1:]
        if peer.whole:
            return lambda x: peer.call(x, targets, self.mask)
        return lambda x: peer.call(x[:, :-1], targets, self.mask)

    def values(self, logits, at):
        logp = torch.log_softmax(logits, -1)
        targets = self.targets[:, 1:] if self.layout == "shift" else self.targets
        return {"logprob": plain.chosen(logp, targets[at]), "entropy": plain.entropy(logp)}


LAYOUTS = ("K=1", "K=8", "K=64", "K=1000")


class TopkCase(LogprobsCase):
    """K different tokens of each row, as a teacher names them; the layout says how many."""

    known = peers.TOPK
    note = "entropy and lse too"
    outputs = ("logprob",)
    cpu = [
        *[Spec((640, 32000), "bf16", layout=layout) for layout in ("K=1", "K=8", "K=1000")],
        Spec((640, 32000), "fp32", layout="K=8"),
        Spec((128, 151936), "bf16", layout="K=8"),
    ]
    gpu = [
        *[Spec((8192, 151936), "bf16", layout=layout) for layout in LAYOUTS],
        *[Spec((8192, 50257), "bf16", layout=layout) for layout in LAYOUTS],
    ]

    def __init__(self, spec, device):
        super().__init__(spec, device)
        vocab = spec.shape[-1]
        count = min(int(self.layout.removeprefix("K=")), vocab)
        # strides through the vocabulary from a token of each row: no id twice
        steps = torch.arange(count, device=device) * max(vocab // count, 1)
        self.targets = (self.targets[..., None] + steps) % vocab
        self.upstream = [plain.normal(0, *self.targets.shape, device=device)]

    @classmethod
    def specs(cls, args):
        return cls.listed(args, LAYOUTS)

    @classmethod
    def warm_ups(cls, specs, device):
        return super().warm_ups([spec._replace(layout="K=8") for spec in specs], device)

    def call(self, x, inplace=False):
        return (fused_rl.token_logprobs(x, self.targets, inplace=inplace).logprobs,)

    def adapted(self, peer):
        return lambda x: (peer.call(x, self.targets),)

    def values(self, logits, at):
        logp = torch.log_softmax(logits, -1)
        return {"logprob": logp.gather(-1, self.targets[at])}
