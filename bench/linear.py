"""Time, memory and error of a policy-gradient step through the output head, beside the three GEMMs alone and the peers.

    python bench/linear.py --device cpu
    python bench/linear.py --device cpu --dtype bf16 --shapes 2048x1024x32000 --peers TRL

Shapes are rows x hidden x vocabulary. Every implementation takes hidden states, the head's weight, targets and one
advantage per sequence, and gives the on-policy GRPO loss with the gradients of hidden states and weight. They take
turns; times are medians. The floor is logits = h w', dh = logits w, dw = logits' h in the inputs' dtype. Memory is the
peak of the resident set (CPU) or of the allocator (GPU) beyond the inputs and the two gradients. Errors are those of
loss and gradients against fp64 on the first rows, relative to the largest element.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F

import fused_rl
from bench import measure, peers
from fused_rl.linear import WORKSPACE_MB

CPU = [(2048, 1024, 32000), (512, 896, 151936)]
GPU = [(8192, 4096, 128256), (8192, 896, 151936), (16384, 2048, 32000)]
SEQUENCE = 128  # tokens per sequence: what shares an advantage, and the smallest piece Liger can cut
FLOOR = "three GEMMs"
SLOW = 4  # times the floor
COLUMNS = ["implementation", "fwd ms", "both ms", "/ GEMMs", "/ ours", "extra MB", "loss err", "dhidden err",
           "dweight err", "note"]  # fmt: skip


# ------------------------------------------------------------------ implementations: what is timed, each -> loss


def _rows_of(advantages):
    return advantages.repeat_interleave(SEQUENCE)


def policy_gradient(logprobs, entropy, advantages):
    return -(logprobs - logprobs.detach()).exp() * advantages


def one_pass(hidden, weight, targets, advantages):
    weights = _rows_of(advantages) / len(targets)
    return fused_rl.linear_token_loss(hidden, weight, targets, policy_gradient, weights).loss


def recomputed(hidden, weight, targets, advantages):
    logprobs = fused_rl.linear_token_logprobs(hidden, weight, targets).logprobs
    return policy_gradient(logprobs, None, _rows_of(advantages)).mean()


def plain(hidden, weight, targets, advantages):
    logits = F.linear(hidden, weight).float()
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    return policy_gradient(logprobs, None, _rows_of(advantages)).mean()


def _plain(device, interpreted):
    return peers.Peer("plain torch", measure.version("torch"), plain, "no entropy")


def _compiled(device, interpreted):
    peers._compiled(device, interpreted)  # the same needs
    return peers.Peer("torch.compile", measure.version("torch"), torch.compile(plain, dynamic=False), "no entropy")


def _liger(device, interpreted):
    loss_class = peers.import_peer("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    loss = loss_class(beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=device != "cpu")

    def call(hidden, weight, targets, advantages):
        targets = targets.view(-1, SEQUENCE)
        return loss(hidden.view(*targets.shape, -1), weight, targets, torch.ones_like(targets), advantages)[0]

    note = "no entropy" + ("; compiled=False, its default fails on CPU" if device == "cpu" else "")
    return peers.Peer("Liger GRPO", measure.version("liger-kernel"), call, note)


def _trl(device, interpreted):
    function = peers.import_peer("trl.kernels").ChunkedLogProbFunction
    columns = peers.import_peer("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE

    def call(hidden, weight, targets, advantages):
        outputs = function.apply(hidden, weight, None, targets, 1.0, columns, None, 1.0, ("entropy",))
        return policy_gradient(outputs[0], None, _rows_of(advantages)).mean()

    return peers.Peer("TRL chunked head", measure.version("trl"), call)


def _linear_cross_entropy(device, interpreted):
    if not hasattr(F, "linear_cross_entropy"):
        raise peers.Unavailable(f"torch {torch.__version__} has none")

    def call(hidden, weight, targets, advantages):
        return F.linear_cross_entropy(hidden, weight, targets, options=torch.nn.LinearCrossEntropyOptions())

    return peers.Peer("F.linear_cross_entropy", measure.version("torch"), call, "all advantages 1, no entropy")


KNOWN = {
    "plain torch": _plain,
    "torch.compile": _compiled,
    "Liger GRPO": _liger,
    "TRL chunked head": _trl,
    "F.linear_cross_entropy": _linear_cross_entropy,
}


# ------------------------------------------------------------------ one case


def inputs(shape, dtype, device):
    """Hidden states of unit variance, a weight that makes logits of variance 4, targets, advantages per sequence."""
    generator = torch.Generator().manual_seed(0)
    n, width, vocab = shape
    hidden = torch.randn(n, width, generator=generator).to(device, measure.DTYPES[dtype])
    weight = torch.randn(vocab, width, generator=generator).mul_(2 * width**-0.5).to(device, measure.DTYPES[dtype])
    targets = torch.randint(vocab, (n,), generator=generator).to(device)
    advantages = torch.randn(n // SEQUENCE, generator=generator).to(device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, advantages


def floor(hidden, weight):
    """The three products alone, as a forward and a backward."""
    with torch.no_grad():
        return lambda x: hidden @ weight.t(), lambda logits, x: (logits @ weight, logits.t() @ hidden)


def errors(peer, case):
    """Largest errors of loss and gradients on the first two sequences, relative to the largest element."""
    hidden, weight, targets, advantages = case
    hidden = hidden.detach()[: 2 * SEQUENCE].requires_grad_()
    targets, advantages = targets[: 2 * SEQUENCE], advantages[:2]
    loss = peer.call(hidden, weight, targets, advantages)
    found = (loss, *torch.autograd.grad(loss, (hidden, weight)))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    # -advantage * logprob has the same gradient, and on-policy the ratio is 1
    advantages = torch.ones_like(advantages) if "advantages 1" in peer.note else advantages
    logprobs = torch.log_softmax(F.linear(*exact), -1).gather(-1, targets[:, None])[:, 0]
    surrogate = -(logprobs * _rows_of(advantages)).mean()
    value = surrogate if "advantages 1" in peer.note else -advantages.double().mean()
    truth = (value, *torch.autograd.grad(surrogate, exact))
    return {
        name: ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)).item()
        for name, a, b in zip(("loss", "dhidden", "dweight"), found, truth, strict=True)
    }


def wrong(found, dtype):
    """What a row says where its answer is wrong: gradients beyond a few rounding steps of their largest element."""
    most = {"loss": 1e-3, "dhidden": 1e-4 if dtype == "fp32" else 0.02, "dweight": 1e-4 if dtype == "fp32" else 0.02}
    over = [f"{name} off by {e:.2g}" for name, e in found.items() if not e <= most[name]]
    return "WRONG: " + ", ".join(over) if over else ""


def measure_all(timed, device, seconds):
    """{name: peak bytes}, {name: {phase: [ms]}}; on CPU, what is far slower than the floor runs once."""
    memory, first = {}, {}
    for name, (forward, backward) in timed.items():
        backward(forward(None), None)  # pages, caches, compilation
        once = measure.phases_cpu(forward, backward, [None])
        memory[name] = measure.peak_extra_bytes(lambda once=once: first.update({name: once()}), device)  # noqa: B023
    if device != "cpu":
        return memory, {name: measure.phases_gpu(f, b, [None], twice=False) for name, (f, b) in timed.items()}
    fast = {name for name in timed if first[name]["both"] < SLOW * first[FLOOR]["both"]}
    runs = {name: measure.phases_cpu(*timed[name], [None]) for name in timed if name in fast}
    samples = measure.interleaved(runs, seconds)
    return memory, {n: samples.get(n) or {k: [1e3 * v] for k, v in first[n].items()} for n in timed}


def run_case(shape, dtype, device, wanted, seconds):
    """Rows of results, {peer: why it did not run}."""
    case = hidden, weight, targets, advantages = inputs(shape, dtype, device)
    running, missing = peers.find(KNOWN, device, wanted)
    version = fused_rl.__version__
    ours = [peers.Peer("fused_rl one pass", version, one_pass), peers.Peer("fused_rl recompute", version, recomputed)]
    gradients = (hidden.numel() + weight.numel()) * hidden.element_size()
    forward, backward = floor(hidden, weight)
    # the floor's logits are what it cannot do without
    rows, timed = [{"implementation": FLOOR, "version": torch.__version__, "error": {}, "note": ""}], {}
    timed[FLOOR] = (forward, backward)
    for peer in ours + running:
        try:
            found = errors(peer, case)
        except Exception as reason:  # noqa: BLE001 - a peer may fail in its own way; ours may not
            if peer in ours:
                raise
            missing[peer.name] = f"{type(reason).__name__}: {str(reason).splitlines()[0][:160]}"
            continue
        note = "; ".join(t for t in (wrong(found, dtype), peer.note) if t)
        rows.append({"implementation": peer.name, "version": peer.version, "error": found, "note": note})
        timed[peer.name] = (
            lambda x, call=peer.call: call(hidden, weight, targets, advantages),
            lambda loss, x: torch.autograd.grad(loss, (hidden, weight)),
        )
    memory, samples = measure_all(timed, device, seconds)
    medians = {name: {phase: measure.median(s) for phase, s in found.items()} for name, found in samples.items()}
    for row in rows:
        name = row["implementation"]
        extra = None if memory[name] is None else memory[name] - gradients
        row |= {"op": "linear", "shape": list(shape), "dtype": dtype, "ms": medians[name], "extra_bytes": extra}
        row |= {"samples_ms": samples[name], "workspace_mb": WORKSPACE_MB}
        row["over_gemms"] = medians[name]["both"] / medians[FLOOR]["both"]
        row["over_ours"] = medians[name]["both"] / medians["fused_rl one pass"]["both"]
    return rows, missing


def show(rows, missing):
    n, width, vocab = rows[0]["shape"]
    flop = 6 * n * width * vocab
    print(f"\nN = {n}, H = {width}, V = {vocab}, {rows[0]['dtype']}: {flop / 1e9:.0f} GFLOP, "
          f"{flop / rows[0]['ms']['both'] / 1e6:.0f} GFLOP/s by the GEMMs; workspace {WORKSPACE_MB} MB")  # fmt: skip
    print(measure.table(COLUMNS, [
        [row["implementation"], row["ms"]["forward"], row["ms"]["both"], row["over_gemms"], row["over_ours"],
         None if row["extra_bytes"] is None else row["extra_bytes"] / 2**20,
         *(row["error"].get(name) for name in ("loss", "dhidden", "dweight")), row["note"]]
        for row in rows
    ]))  # fmt: skip
    for name, reason in missing.items():
        print(f"  not run: {name}: {reason}")


def run(device, dtypes, shapes=None, wanted="all", budget=None):
    """All cases: (rows of results, {peer: why it did not run})."""
    listed = [(shape, dtype) for shape in shapes or (CPU if device == "cpu" else GPU) for dtype in dtypes]
    rows, not_run = [], {}
    for shape, dtype in listed:
        if len(shape) != 3 or shape[0] % SEQUENCE:
            raise SystemExit(f"--shapes: rows x hidden x vocabulary, rows a multiple of {SEQUENCE}; got {shape}")
        found, missing = run_case(shape, dtype, device, wanted, (budget or 120) / len(listed))
        show(found, missing)
        rows += found
        not_run |= missing
    return rows, not_run


def main(args):
    print(measure.environment(args.device)["device"], flush=True)
    rows, not_run = run(args.device, args.dtype, args.shapes, args.peers, args.budget)
    measure.save(args, rows, not_run=not_run)
    return any("WRONG" in row["note"] for row in rows if row["implementation"].startswith("fused_rl"))


if __name__ == "__main__":
    sys.exit(main(measure.arguments(__doc__, "linear")))
