"""gae: advantages and returns of (B, T) rewards and values; no gradient."""

import torch

import fused_rl
from bench import peers, plain, results
from bench.cases.case import Case, Spec, own
from bench.cases.rows import RowsCase

GAMMA, GAE_LAMBDA = 0.999, 0.95
LONGEST_LOOP = 16384  # T beyond which the loop over T is left out: seconds per call


class GAECase(Case):
    op = "gae"
    known = peers.GAE
    columns = RowsCase.columns
    cpu = [
        Spec((64, 1024), layout="(B, T)"),
        Spec((16, 16384), layout="(B, T)"),
        Spec((4, 131072), layout="(B, T)"),
    ]
    gpu = [
        Spec((512, 1024), layout="(B, T)"),
        Spec((64, 16384), layout="(B, T)"),
        Spec((16, 131072), layout="(B, T)"),
    ]

    def __init__(self, spec, device):
        super().__init__(spec, device)
        sequences, length = spec.shape
        self.rewards = plain.normal(0, sequences, length, device=device)
        self.values = plain.normal(1, sequences, length, device=device)
        lengths = torch.randint(length // 2, length + 1, (sequences, 1), generator=plain.seeded(2))
        self.mask = (torch.arange(length) < lengths).to(device)
        self.exact = None

    @classmethod
    def specs(cls, args):
        if args.shapes:  # rows x vocabulary: none of its own
            return []
        return cls.cpu if args.device == "cpu" else cls.gpu

    def bytes(self):
        n = self.rewards.numel()
        moved = n * (4 * 4 + 1)
        return {"forward": moved, "both": moved, "logits": 4 * n}, "2 reads + mask + 2 writes"

    def ours(self):
        def call(_):
            return fused_rl.gae(self.rewards, self.values, self.mask, gamma=GAMMA, gae_lambda=GAE_LAMBDA)

        return [own("fused_rl", call)]

    def adapted(self, peer):
        return lambda _: peer.call(self.rewards, self.values, self.mask, GAMMA, GAE_LAMBDA)

    def contenders(self, wanted):
        found, missing = super().contenders(wanted)
        length = self.spec.shape[1]
        if length <= LONGEST_LOOP:
            return found, missing
        for peer in found[1:]:
            reason = f"seconds per call; left out beyond {LONGEST_LOOP}"
            missing.append(results.not_run(peer.name, results.SLOW, reason, self.op, f"T = {length}"))
        return found[:1], missing

    def errors(self, peer, outputs, gradient):
        # Of the loop in fp64, on the processor: a device's launch per step would take longer than all.
        if self.exact is None:
            rewards = self.rewards.double().cpu()
            values = self.values.double().cpu()
            self.exact, _ = peers.loop_gae(rewards, values, self.mask.cpu(), GAMMA, GAE_LAMBDA)
        return {"advantages": plain.relative(outputs[0].cpu(), self.exact)}

    def limits(self, peer):
        return {"advantages": (1e-6 if peer.role == "ours" else 1e-3, " of its largest")}
