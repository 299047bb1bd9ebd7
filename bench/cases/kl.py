"""token_kl: the KL of each row from a reference's logits, and its gradient."""

import torch

import fused_rl
from bench import peers
from bench.cases.case import Spec, own
from bench.cases.rows import RowsCase


class KLCase(RowsCase):
    op = "token_kl"
    known = peers.KL
    reads = 2
    outputs = ("kl",)
    # Compiling a dtype's kernels takes longer than measuring them.
    cpu = [Spec((640, 32000), "bf16"), Spec((128, 151936), "bf16")]
    gpu = [
        Spec((8192, 151936), "bf16"),
        Spec((8192, 50257), "bf16"),
        Spec((8192, 50304), "bf16"),
    ]

    def more_inputs(self):
        noise = torch.empty_like(self.logits[0]).normal_()
        self.ref_logits = noise.mul_(0.5).add_(self.logits[0])

    def call(self, x):
        kl = fused_rl.token_kl(x, self.ref_logits, mask=self.mask)
        return (kl,)

    def ours(self):
        return [own("fused_rl", self.call)]

    def adapted(self, peer):
        return lambda x: (peer.call(x, self.ref_logits, self.mask),)

    def values(self, logits, at):
        logp = torch.log_softmax(logits, -1)
        ref = torch.log_softmax(self.ref_logits[at].double(), -1)
        kl = (logp.exp() * (logp - ref)).sum(-1)
        return {"kl": kl}
