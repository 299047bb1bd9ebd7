"""Bytes that each operation loads and stores, counted launch by launch, as multiples of the logits' size.

    python -m bench traffic
    python -m bench traffic --shapes 2x8x4099        batch x time x vocabulary

Triton kernels run in Triton's interpreter, which sees every unmasked lane of every load and store. Eager PyTorch is
counted by its ATen operators: every operand read once, every result written once, so what an operator reads twice
inside counts once, which favours it. Counts need no GPU and do not depend on the machine.
"""

import contextlib
import os

os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is first imported

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import fused_rl
from bench import options, peers, results
from tests.tools import interpreter

# B, T, V: an odd vocabulary, so that an aligned window that reads too much would show.
SHAPE = (
    2,
    8,
    50257,
)

# Operators that touch no memory, those that only write, and those that read no more than they return.
EMPTY = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
}
FILLS = {
    "zero_",
    "fill_",
    "zeros_like",
    "zeros",
    "new_zeros",
    "full",
    "full_like",
    "ones_like",
    "new_ones",
}
SPARSE = {"gather", "index", "index_select", "nll_loss_forward"}


class AtenTraffic(TorchDispatchMode):
    """Sums the bytes that eager operators read and write while it is active, but not those of interpreted kernels."""

    def __init__(self):
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        registered = OPDEFS.get(f"{func.namespace}::{name}")
        # Our own operator: what it calls counts, a copy of the logits above all.
        if registered is not None:
            with self:
                return registered._init_fn(*args, **kwargs)
        outputs = func(*args, **kwargs)
        if func.namespace == "aten" and name not in EMPTY and not _is_view(func, args, outputs):
            given = _bytes(outputs)
            self.read += _bytes_read(name, args, kwargs, given)
            self.written += given
        return outputs


def _bytes_read(name, args, kwargs, given) -> int:
    """Bytes that an operator reads, which returns `given` bytes."""
    if name in FILLS:
        return 0
    if name in SPARSE:
        return given
    if name == "copy_":
        return _bytes(args[1])
    if name == "scatter":  # copies its input and writes the chosen elements
        return given
    return _bytes((args, kwargs))


def _tensors(tree) -> list:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_view(func, args, outputs) -> bool:
    """Whether an operator that writes into nothing gave back storage that it was given."""
    given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
    found = {tensor.untyped_storage().data_ptr() for tensor in _tensors(outputs)}
    return not func._schema.is_mutable and found <= given


def _bytes(tree) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tree))


@contextlib.contextmanager
def counted():
    """A list that holds, at the end, (read, written) bytes of everything that ran: launches and eager operators."""
    from triton.runtime.interpreter import GridExecutor

    total = []
    original = GridExecutor.__call__

    # The interpreter copies tensors to and fro: its own work, not the kernel's.
    def unseen(self, *args, **kwargs):
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    GridExecutor.__call__ = unseen
    try:
        with interpreter.count_traffic() as launches, AtenTraffic() as eager:
            yield total
    finally:
        GridExecutor.__call__ = original
    read, written = eager.read, eager.written
    for launch in launches:
        of_launch = launch.bytes()
        read += of_launch[0]
        written += of_launch[1]
    total += [read, written]


def count(run, logits) -> dict:
    """{"forward": (read, written), "backward": ...} of `run(logits) -> outputs`, in multiples of the logits' size."""
    # neither a leaf nor a view of one, which no gradient may overwrite
    logits = logits.clone().add_(logits.new_zeros((), requires_grad=True))
    size = logits.numel() * logits.element_size()
    with counted() as forward:
        outputs = run(logits)
    outputs = [output for output in outputs if output is not None and output.requires_grad]
    upstream = [torch.rand_like(output) for output in outputs]
    with counted() as backward:
        torch.autograd.grad(outputs, logits, upstream)
    phases = {"forward": forward, "backward": backward}
    return {phase: [moved / size for moved in found] for phase, found in phases.items()}


# ------------------------------------------------------------------ what is counted


def inputs(shape=SHAPE):
    """(B, T, V) bf16 logits, (B, T) targets."""
    torch.manual_seed(0)
    logits = torch.randn(shape).mul_(3).to(torch.bfloat16)
    targets = torch.randint(shape[-1], shape[:-1])
    return logits, targets


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
        return loss(
            logits,
            old,
            None,
            chosen,
            ones,
            temperature=1.0,
            beta=0.0,
            importance_sampling_level=level,
        )[:1]

    return run


def ours(shape=SHAPE):
    """{what: run(logits, targets)} of our ops, with what they may cost at most (forward, backward)."""
    scored = 1 - 1 / shape[1]  # shift leaves the last position out, but writes its gradient

    def logprobs(**options):
        return lambda logits, targets: fused_rl.token_logprobs(logits, targets, **options)[:2]

    def loss(level):
        return lambda logits, targets: policy(logits, targets, level)

    nothing = torch.zeros(shape[:-1], dtype=torch.bool)
    # Where rows do not begin at 16 bytes, each 16 bytes are asked for twice, of which the cache has the second. To hand
    # them from thread to thread instead takes 37.1 instructions per logit and not 30.6, which a GPU would wait for.
    kl_reads = 2.0 if shape[-1] % 8 == 0 else 4.0
    return {
        "token_logprobs": (logprobs(), 1.0, 2.0),
        "token_logprobs, every row masked": (logprobs(mask=nothing), 0.0, 1.0),
        "token_logprobs, in place": (logprobs(inplace=True), 1.0, 2.0),
        "token_logprobs, shift": (logprobs(shift=True), scored, 1 + scored),
        "+ policy_loss, ratio per token": (loss("token"), 1.0, 2.0),
        "+ policy_loss, ratio per sequence": (loss("sequence"), 1.0, 2.0),
        "token_logprobs, 8 targets per row": (several(shape), 1.0, 2.0),
        "token_kl": (of_two(fused_rl.token_kl, shape), kl_reads, 3.0),
    }


def several(shape, count=8):
    """run(logits, targets) of token_logprobs for more targets beside each."""
    more = torch.randint(shape[-1], (*shape[:-1], count - 1))

    def run(logits, targets):
        whole = torch.cat([targets[..., None], more], -1)
        return fused_rl.token_logprobs(logits, whole)[:2]

    return run


def of_two(kl, shape):
    """run(logits, targets) of a KL from other logits."""
    ref = torch.randn(shape).to(torch.bfloat16)
    return lambda logits, targets: (kl(logits, ref),)


def others(wanted="all", shape=SHAPE):
    """[(what, peer, run)] and rows of those that are missing."""
    found = []
    running, missing = peers.find(
        peers.LOGPROBS, "cpu", wanted, interpreted=True, op="token_logprobs"
    )
    for peer in running:
        if not peer.whole:
            found.append(("token_logprobs", peer, peer.call))
            continue
        for level in ("token", "sequence"):
            found.append((f"GRPO loss, ratio per {level}", peer, liger_grpo(level)))
    running, absent = peers.find(peers.KL, "cpu", wanted, interpreted=True, op="token_kl")
    for peer in running:
        found.append(("token_kl", peer, of_two(peer.call, shape)))
    return found, missing + absent


def counted_row(op, peer, run, logits, targets, most=None) -> dict:
    """The row of one implementation; `most`: (forward, backward) that ours may cost."""
    try:
        counts = count(lambda x: run(x, targets), logits)
    except Exception as reason:  # noqa: BLE001 - each fails in its own way; ours makes the group fail
        return results.not_run(peer.name, *results.failure(reason), op)
    (read, written) = counts["forward"]
    (read_back, written_back) = counts["backward"]
    row = {
        "op": op,
        "implementation": peer.name,
        "version": peer.version,
        "forward": read + written,
        "backward": read_back + written_back,
        "read": [read, read_back],
        "written": [written, written_back],
        "note": peer.note,
        "status": results.OK,
    }
    if most is not None:
        forward, backward = most
        if row["forward"] > forward + 0.05 or row["backward"] > backward + 0.05:
            row["status"] = results.FAILED_CHECK
            row["reason"] = f"more than {forward:.2f} / {backward:.2f}"
    return row


def command(name: str, words: list[str] | None = None) -> int:
    """Count and print; 1 where ours cost more than they may, or raise."""
    args = options.arguments(__doc__, name, words)
    args.device = "cpu"
    interpreter.fix_numerics()
    shape = args.shapes[0] if args.shapes else SHAPE
    logits, targets = inputs(shape)

    # Ours, the others, and those that are not here.
    found, missing = others(args.peers, shape)
    rows = []
    for what, (run, *most) in ours(shape).items():
        peer = peers.Peer("fused_rl", fused_rl.__version__, run, role="ours")
        rows.append(counted_row(what, peer, run, logits, targets, most))
    for what, peer, run in found:
        rows.append(counted_row(what, peer, run, logits, targets))
    rows += missing

    print(f"logits {shape} bf16, multiples of {logits.nbytes / 1e6:.2f} MB; read + written\n")
    lines = []
    for row in results.measured(rows):
        counts = row["forward"], row["backward"], row["forward"] + row["backward"]
        lines.append([row["op"], row["implementation"], *counts, results.remarks(row)])
    print(
        results.table(["operation", "implementation", "forward", "backward", "both", "note"], lines)
    )
    results.show_missing(rows, "counted")
    results.save(args, rows, shape=list(shape))
    return results.failed(rows)
