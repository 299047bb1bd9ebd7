"""token_logprobs of K targets per row, and the gradient of the K log-probabilities."""

import functools

import torch

import fused_rl
from bench import peers
from bench.cases.case import Spec, own
from bench.cases.rows import RowsCase

COUNTS = (1, 8, 64, 1000)


class TopkCase(RowsCase):
    """K different tokens of each row, as a teacher names them; the layout of its specs says how many: "K=8"."""

    op = "token_logprobs"
    known = peers.TOPK
    reads = 1
    outputs = ("logprob",)
    cpu = [Spec((1024, 32000), "bf16", layout=f"K={count}") for count in COUNTS]
    cpu += [Spec((1024, 32000), "fp32", layout=f"K={count}") for count in COUNTS]
    cpu += [Spec((128, 151936), "bf16", layout=f"K={count}") for count in COUNTS]
    gpu = [Spec((8192, 151936), "bf16", layout=f"K={count}") for count in COUNTS]
    gpu += [Spec((8192, 50257), "bf16", layout=f"K={count}") for count in COUNTS]

    def __init__(self, spec, device):
        super().__init__(spec, device)
        count = min(int(self.layout.removeprefix("K=")), spec.shape[-1])
        # strides through the vocabulary from a token of each row: no id twice
        ids = self.targets[..., None] + torch.arange(count, device=device) * max(spec.shape[-1] // count, 1)
        self.targets = ids % spec.shape[-1]
        generator = torch.Generator().manual_seed(0)
        self.upstream = [torch.randn(self.targets.shape, generator=generator).to(device)]

    @classmethod
    def specs(cls, args):
        found = super().specs(args)
        if not args.shapes:
            return found
        whole = [spec for spec in found if not spec.masked]
        return [spec._replace(layout=f"K={count}") for spec in whole for count in COUNTS]

    @classmethod
    def warm_ups(cls, specs, device):
        return super().warm_ups(list(dict.fromkeys(spec._replace(layout="K=8") for spec in specs)), device)

    def label(self):
        return f"{super().label()}, {self.layout}"

    def call(self, x, inplace=False):
        return (fused_rl.token_logprobs(x, self.targets, inplace=inplace).logprobs,)

    def ours(self):
        inplace = functools.partial(self.call, inplace=True)
        return [
            own("fused_rl", self.call, note="entropy and lse too"),
            own("fused_rl inplace", inplace, note="gradient in the logits", overwrites=True),
        ]

    def adapted(self, peer):
        return lambda x: (peer.call(x, self.targets),)

    def values(self, logits, at):
        return {"logprob": torch.log_softmax(logits, -1).gather(-1, self.targets[at])}

    def truth(self):
        """As of every case on rows; the one gradient is that for the upstream gradients of all K."""
        if self.exact is None:
            at = self.checked_rows()
            x = self.logits[0][at].double().requires_grad_()
            value = self.values(x, at)["logprob"]
            gradient = torch.autograd.grad((value * self.upstream[0][at].double()).sum(), x)[0]
            self.exact = at, {"logprob": value.detach()}, [gradient]
        return self.exact

    def errors(self, peer, outputs, gradient):
        at, values, (exact,) = self.truth()
        off = (gradient[at].double() - exact).abs().max() / exact.abs().max()
        return {"logprob": (outputs[0][at].double() - values["logprob"]).abs().max().item(), "gradient": off.item()}
