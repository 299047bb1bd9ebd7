"""Bytes that each operation loads and stores, counted launch by launch, as multiples of the logits' size.

    python bench/traffic.py
    python bench/traffic.py --shapes 2x8x4099        batch x time x vocabulary

Triton kernels run in Triton's interpreter, which sees every unmasked lane of every load and store. Eager PyTorch is
counted by its ATen operators: every operand read once, every result written once, so what an operator reads twice
inside counts once, which favours it. Counts need no GPU and do not depend on the machine.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is first imported
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import contextlib

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import fused_rl
from bench import measure, peers
from tests import interpreter

SHAPE = (2, 8, 50257)  # B, T, V: an odd vocabulary, so that an aligned window that reads too much would show

# Operators that touch no memory, those that only write, and those that read no more than they return.
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"}
FILLS = {"zero_", "fill_", "zeros_like", "zeros", "new_zeros", "full", "full_like", "ones_like", "new_ones"}
SPARSE = {"gather", "index", "index_select", "nll_loss_forward"}


class AtenTraffic(TorchDispatchMode):
    """Sums the bytes that eager operators read and write while it is active, but not those of interpreted kernels."""

    def __init__(self):
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        registered = OPDEFS.get(f"{func.namespace}::{func.overloadpacket.__name__}")
        if registered is not None:  # our own operator: what it calls counts, a copy of the logits above all
            with self:
                return registered._init_fn(*args, **(kwargs or {}))
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in EMPTY and not _is_view(func, args, results):
            taken, given = _bytes((args, kwargs)), _bytes(results)
            if name in FILLS:
                taken = 0
            elif name in SPARSE:
                taken = given
            elif name == "copy_":
                taken = _bytes(args[1])
            elif name == "scatter":  # copies its input and writes the chosen elements
                taken = given
            self.read, self.written = self.read + taken, self.written + given
        return results


def _is_view(func, args, results) -> bool:
    """Whether an operator that writes into nothing gave back storage that it was given."""
    given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
    found = {t.untyped_storage().data_ptr() for t in tree_leaves(results) if isinstance(t, torch.Tensor)}
    return not func._schema.is_mutable and found <= given


def _bytes(tree) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


@contextlib.contextmanager
def counted():
    """A list that holds, at the end, (read, written) bytes of everything that ran: launches and eager operators."""
    from triton.runtime.interpreter import GridExecutor

    total = []
    original = GridExecutor.__call__

    def unseen(self, *args, **kwargs):  # the interpreter copies tensors to and fro: its own work, not the kernel's
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    GridExecutor.__call__ = unseen
    try:
        with interpreter.count_traffic() as launches, AtenTraffic() as eager:
            yield total
    finally:
        GridExecutor.__call__ = original
    launched = [launch.bytes() for launch in launches]
    total += [eager.read + sum(read for read, _ in launched), eager.written + sum(written for _, written in launched)]


def count(run, logits) -> dict:
    """{"forward": (read, written), "backward": ...} of `run(logits) -> outputs`, in multiples of the logits' size."""
    logits = logits.clone().requires_grad_()
    size = logits.numel() * logits.element_size()
    with counted() as forward:
        outputs = run(logits.view_as(logits))  # not a leaf, which a gradient in place could not overwrite
    outputs = [o for o in outputs if o is not None and o.requires_grad]
    upstream = [torch.rand_like(o) for o in outputs]
    with counted() as backward:
        torch.autograd.grad(outputs, logits, upstream)
    return {"forward": [b / size for b in forward], "backward": [b / size for b in backward]}


# ------------------------------------------------------------------ what is counted


def inputs(shape=SHAPE):
    """(B, T, V) bf16 logits, (B, T) targets."""
    torch.manual_seed(0)
    return torch.randn(shape).mul_(3).to(torch.bfloat16), torch.randint(shape[-1], shape[:-1])


def policy(logits, targets, level):
    """A GRPO loss on our log-probabilities: the ratio per token, or per sequence as GSPO."""
    logprobs, entropy, _ = fused_rl.token_logprobs(logits, targets)
    mask = torch.ones_like(targets, dtype=torch.bool)
    advantages = torch.ones_like(logprobs)
    old = logprobs.detach() - 0.01
    return fused_rl.policy_loss(logprobs, old, advantages, mask, ratio_level=level)[:1]


def liger_grpo(level):
    """Liger's GRPO loss kernel; it takes (B, L + 1, V), so one position of each sequence is read by nobody."""
    loss = peers.import_peer("liger_kernel.transformers.grpo_loss").triton_grpo_loss

    def run(logits, targets):
        chosen = targets[:, 1:].contiguous()
        old = torch.full(chosen.shape, -11.0)
        ones = torch.ones(len(logits))
        return loss(logits, old, None, chosen, ones, temperature=1.0, beta=0.0, importance_sampling_level=level)[:1]

    return run


def ours(shape=SHAPE):
    """{what: run(logits, targets)} of our ops, with what they may cost at most (forward, backward)."""
    scored = 1 - 1 / shape[1]  # shift leaves the last position out, but writes its gradient

    def logprobs(logits, targets, **options):
        return fused_rl.token_logprobs(logits, targets, **options)[:2]

    nothing = torch.zeros(shape[:-1], dtype=torch.bool)
    ref = torch.randn(shape).to(torch.bfloat16)
    return {
        "token_logprobs": (logprobs, 1.0, 2.0),
        "token_logprobs, every row masked": (lambda x, t: logprobs(x, t, mask=nothing), 0.0, 1.0),
        "token_logprobs, in place": (lambda x, t: logprobs(x, t, inplace=True), 1.0, 2.0),
        "token_logprobs, shift": (lambda x, t: logprobs(x, t, shift=True), scored, 1 + scored),
        "+ policy_loss, ratio per token": (lambda x, t: policy(x, t, "token"), 1.0, 2.0),
        "+ policy_loss, ratio per sequence": (lambda x, t: policy(x, t, "sequence"), 1.0, 2.0),
        "token_kl": (lambda x, t: (fused_rl.token_kl(x, ref),), 2.0, 3.0),
    }


def others(wanted="all", shape=SHAPE):
    """[(what, peer, run)] and why others are missing."""
    found, missing = [], {}
    for known in (peers.LOGPROBS, peers.KL):
        running, absent = peers.find(known, "cpu", wanted, interpreted=True)
        missing |= {f"{'token_kl' if known is peers.KL else 'token_logprobs'}: {n}": r for n, r in absent.items()}
        for peer in running:
            if known is peers.KL:
                ref = torch.randn(shape).to(torch.bfloat16)
                found.append(("token_kl", peer, lambda x, t, call=peer.call, ref=ref: (call(x, ref),)))
            elif peer.name != "Liger GRPO loss":
                found.append(("token_logprobs", peer, peer.call))
            else:
                for level in ("token", "sequence"):
                    found.append((f"GRPO loss, ratio per {level}", peer, liger_grpo(level)))
    return found, missing


def main(args):
    interpreter.fix_numerics()
    shape = args.shapes[0] if args.shapes else SHAPE
    logits, targets = inputs(shape)
    rows, failed = [], False
    found, missing = others(args.peers, shape)

    def add(what, name, version, run, note="", most=None):
        nonlocal failed
        try:
            counts = count(lambda x: run(x, targets), logits)
        except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError) as reason:
            missing[f"{what}: {name}"] = f"{type(reason).__name__}: {reason}".splitlines()[0]
            failed = failed or name == "fused_rl"
            return
        forward, backward = sum(counts["forward"]), sum(counts["backward"])
        if most is not None and (forward > most[0] + 0.05 or backward > most[1] + 0.05):
            failed, note = True, f"MORE than {most[0]:.2f} / {most[1]:.2f}"
        rows.append(
            {
                "op": what,
                "implementation": name,
                "version": version,
                "forward": forward,
                "backward": backward,
                "read": [counts["forward"][0], counts["backward"][0]],
                "written": [counts["forward"][1], counts["backward"][1]],
                "note": note,
            }
        )

    for what, (run, *most) in ours(shape).items():
        add(what, "fused_rl", fused_rl.__version__, run, most=most)
    for what, peer, run in found:
        add(what, peer.name, peer.version, run, peer.note)
    print(f"logits {tuple(shape)} bf16, multiples of {logits.numel() * 2 / 1e6:.2f} MB; read + written\n")
    print(measure.table(
        ["operation", "implementation", "version", "forward", "backward", "both", "note"],
        [[r["op"], r["implementation"], r["version"], f"{r['forward']:.2f}", f"{r['backward']:.2f}",
          f"{r['forward'] + r['backward']:.2f}", r["note"]] for r in rows],
    ))  # fmt: skip
    for name, reason in missing.items():
        print(f"  not counted: {name}: {reason}")
    args.device = "cpu"
    measure.save(args, rows, not_run=missing, shape=list(shape))
    return failed


if __name__ == "__main__":
    sys.exit(main(measure.arguments(__doc__, "traffic")))
