"""Time, memory and error of a policy-gradient step through the output head, beside the three GEMMs alone and the peers.

    python bench/linear.py --device cpu
    python bench/linear.py --device cpu --dtype bf16 --shapes 2048x1024x32000 --peers TRL

Shapes are rows x hidden x vocabulary. Every implementation takes hidden states, the head's weight, targets and one
advantage per sequence, and gives the on-policy GRPO loss with the gradients of hidden states and weight. They take
turns; times are medians; what has no time to repeat keeps its first run. The floor is logits = h w', dh = logits w,
dw = logits' h in the inputs' dtype. Bytes are those that nobody can avoid: hidden states and weight are read once
forward, and once backward, where their gradients are written. Memory is the peak of the resident set (CPU) or of the
allocator (GPU) beyond the inputs and the two gradients. Errors are those of loss and gradients against fp64, of the
gradients on some rows, relative to the largest element.
"""

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F

import fused_rl
from bench import measure, peers
from fused_rl.linear import WORKSPACE_MB

# rows x hidden x vocabulary, dtypes
CPU = [((2048, 1024, 32000), ("bf16", "fp32")), ((512, 896, 151936), ("bf16", "fp32"))]
GPU = [((8192, 4096, 128256), ("bf16",)), ((8192, 896, 151936), ("bf16",)), ((16384, 2048, 32000), ("bf16",)),
       ((4096, 896, 151936), ("fp32",))]  # fmt: skip
BUDGET = 200  # seconds, all cases together
SEQUENCE = 128  # tokens per sequence: what shares an advantage, and the smallest piece Liger can cut
FLOOR = "three GEMMs"
BYTES = "hidden states and weight read forward; read and their gradients written backward"
OURS = ("fused_rl one pass", "fused_rl recompute")
COLUMNS = ["implementation", "fwd ms", "both ms", "runs", "/ GEMMs", "/ ours", "GB/s", "% copy", "extra MB", "loss err",
           "dhidden err", "dweight err", "note"]  # fmt: skip


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
    return peers.Peer(
        "torch.compile", measure.version("torch"), torch.compile(plain, dynamic=True), "no entropy", compiles=True
    )


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
        # Its documentation: chunks pay from as many rows as hidden units on; below, the whole logits are cheaper.
        chunked = torch.nn.LinearCrossEntropyOptions() if len(hidden) >= hidden.shape[1] else None
        return F.linear_cross_entropy(hidden, weight, targets, options=chunked)

    return peers.Peer("F.linear_cross_entropy", measure.version("torch"), call, "all advantages 1, no entropy")


def _cut_cross_entropy(device, interpreted):
    function = peers.import_peer("cut_cross_entropy").linear_cross_entropy
    implementation = "torch_compile" if device == "cpu" else "cce"
    if device == "cpu":
        peers._compiled(device, interpreted)

    def call(hidden, weight, targets, advantages):
        logprobs = -function(hidden, weight, targets, reduction="none", impl=implementation)
        return policy_gradient(logprobs, None, _rows_of(advantages)).mean()

    note = "no entropy; its torch_compile: its kernels need a GPU" if device == "cpu" else "no entropy"
    return peers.Peer("cut-cross-entropy", measure.version("cut-cross-entropy"), call, note, compiles=device == "cpu")


def _verl(device, interpreted):
    peers._gpu_only(device, False)
    function = peers.import_peer("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def call(hidden, weight, targets, advantages):
        logprobs, entropy = function(hidden, weight, targets, 1.0, "none")
        return policy_gradient(logprobs, entropy, _rows_of(advantages)).mean()

    return peers.Peer("verl fused head", measure.version("verl"), call)


KNOWN = {
    "plain torch": _plain,
    "torch.compile": _compiled,
    "Liger GRPO": _liger,
    "TRL chunked head": _trl,
    "cut-cross-entropy": _cut_cross_entropy,
    "verl": _verl,
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


class Truth:
    """fp64 of one case: the loss, and of the gradients the rows `tokens` of hidden states and `words` of the weight."""

    def __init__(self, case):
        hidden, weight, targets, self.advantages = case
        self.tokens = torch.linspace(0, len(hidden) - 1, 16, device=hidden.device).long()
        # largest where a word is a target
        self.words = torch.cat([targets[self.tokens], torch.linspace(0, len(weight) - 1, 16).to(targets)]).unique()
        self.of_tokens = torch.empty(16, hidden.shape[1], dtype=torch.float64, device=hidden.device)
        self.nll, of_words = [], []
        with torch.no_grad():
            for rows in torch.arange(len(hidden), device=hidden.device).split(512):  # no more fp64 logits at once
                x = hidden[rows].double()
                p = torch.cat([x @ w.double().t() for w in weight.split(16384)], 1)
                lse = p.logsumexp(1, keepdim=True)
                self.nll.append((lse - p.gather(1, targets[rows, None]))[:, 0])
                p.sub_(lse).exp_()  # the gradient of -logprob is p, less 1 at the target
                p[torch.arange(len(rows)), targets[rows]] -= 1
                of_words.append((p[:, self.words], x))
                here = (self.tokens >= rows[0]) & (self.tokens <= rows[-1])
                for at in here.nonzero()[:, 0]:
                    parts = zip(p[self.tokens[at] - rows[0]].split(16384), weight.split(16384), strict=True)
                    self.of_tokens[at] = sum(part @ w.double() for part, w in parts)
        self.of_words = torch.cat([p for p, _ in of_words]), torch.cat([x for _, x in of_words])
        self.nll = torch.cat(self.nll)

    def errors(self, loss, dhidden, dweight, likelihood):
        """Largest errors; `likelihood`: of a plain cross-entropy, for a peer that takes no advantages."""
        advantages = torch.ones_like(self.advantages) if likelihood else self.advantages
        weights = _rows_of(advantages).double() / len(self.nll)  # on-policy the ratio is 1, with logprob's gradient
        value = (weights * self.nll).sum() if likelihood else -weights.sum()
        p, x = self.of_words
        pairs = {
            "loss": (loss.detach(), value),
            "dhidden": (dhidden[self.tokens], self.of_tokens * weights[self.tokens, None]),
            "dweight": (dweight[self.words], (p * weights[:, None]).t() @ x),
        }
        return {n: ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3 * (n == "loss"))).item()
                for n, (a, b) in pairs.items()}  # fmt: skip


def wrong(found, dtype):
    """What a row says where its answer is wrong: gradients beyond a few rounding steps of their largest element."""
    most = {"loss": 1e-3, "dhidden": 1e-4 if dtype == "fp32" else 0.02, "dweight": 1e-4 if dtype == "fp32" else 0.02}
    over = [f"{name} off by {e:.2g}" for name, e in found.items() if not e <= most[name]]
    return "WRONG: " + ", ".join(over) if over else ""


def run_once(peer, case, device):
    """((loss, dhidden, dweight), {phase: seconds}, peak extra bytes) of one forward and backward."""
    hidden, weight, *_ = case
    if peer.compiles:
        torch.autograd.grad(peer.call(*case), (hidden, weight))
    kept, seconds = [], {}

    def backward(loss, x):
        kept.extend((loss, *torch.autograd.grad(loss, (hidden, weight))))

    once = measure.phases_cpu(lambda x: peer.call(*case), backward, [None])
    extra = measure.peak_extra_bytes(lambda: seconds.update(once()), device)
    return kept, seconds, extra


def _size(case):
    """Bytes of hidden states and weight, and so of their gradients."""
    return sum(t.numel() * t.element_size() for t in case[:2])


def implementations(device, wanted):
    running, missing = peers.find(KNOWN, device, wanted)
    version = fused_rl.__version__
    return [
        peers.Peer(n, version, call) for n, call in zip(OURS, (one_pass, recomputed), strict=True)
    ] + running, missing


def check(case, shape, dtype, device, wanted, seconds):
    """Run each once: rows with errors, {name: forward and backward}, first times, peak memory, {peer: why not}."""
    found, missing = implementations(device, wanted)
    started, truth = time.perf_counter(), Truth(case)
    rows, timed, once, memory = [], {}, {}, {}
    gradients = _size(case)
    for peer in found:
        name, ours = peer.name, peer.name in OURS
        if not ours and time.perf_counter() - started > seconds:
            missing[f"{name} at {' x '.join(map(str, shape))} {dtype}"] = "left out for time; --budget gives more"
            continue
        try:
            outputs, once[name], extra = run_once(peer, case, device)
        except Exception as reason:  # noqa: BLE001 - a peer may fail in its own way; ours may not
            if ours:
                raise
            told = f"{type(reason).__name__}: {str(reason).strip() or 'no message'}".splitlines()[0][:160]
            missing[f"{name} at {' x '.join(map(str, shape))} {dtype}"] = told
            continue
        errors = truth.errors(*outputs, likelihood="advantages 1" in peer.note)
        del outputs
        memory[name] = None if extra is None else extra - gradients
        note = "; ".join(t for t in (wrong(errors, dtype), peer.note) if t)
        rows.append({"implementation": name, "version": peer.version, "error": errors, "note": note})
        timed[name] = (
            lambda x, call=peer.call: call(*case),
            lambda loss, x: torch.autograd.grad(loss, case[:2]),
            [None],
            False,
        )
    return rows, timed, once, memory, missing


def run_case(shape, dtype, device, wanted, copy_bytes_per_s, seconds):
    """Rows of results, {peer: why it did not run}."""
    started = time.perf_counter()
    case = hidden, weight, *_ = inputs(shape, dtype, device)
    rows, timed, once, memory, missing = check(case, shape, dtype, device, wanted, seconds)
    forward, backward = floor(hidden, weight)
    # the floor's logits are what it cannot do without
    rows.insert(0, {"implementation": FLOOR, "version": torch.__version__, "error": {}, "note": ""})
    timed[FLOOR] = (forward, backward, [None], False)
    first = measure.phases_cpu(*timed[FLOOR][:3])
    size = _size(case)
    extra = measure.peak_extra_bytes(lambda: once.update({FLOOR: first()}), device)
    memory[FLOOR] = None if extra is None else extra - size
    seconds -= time.perf_counter() - started
    samples = measure.sampled(timed, device, seconds, once, keep=(FLOOR, *OURS))
    medians = {name: {phase: measure.median(s) for phase, s in found.items()} for name, found in samples.items()}
    moved = {"forward": size, "both": 3 * size}
    for row in rows:
        name = row["implementation"]
        ms = medians[name]
        row |= {"op": "linear", "shape": list(shape), "dtype": dtype, "ms": ms, "extra_bytes": memory[name]}
        row |= {"samples_ms": samples[name], "workspace_mb": WORKSPACE_MB, "bytes": moved, "bytes_text": BYTES}
        row["over_gemms"] = ms["both"] / medians[FLOOR]["both"]
        row["over_ours"] = ms["both"] / medians[OURS[0]]["both"]
        row["gb_per_s"] = {phase: n / ms[phase] / 1e6 for phase, n in moved.items()}
        row["copy_fraction"] = {phase: 1e9 * rate / copy_bytes_per_s for phase, rate in row["gb_per_s"].items()}
    return rows, missing


def show(rows, missing, copy_bytes_per_s):
    n, width, vocab = rows[0]["shape"]
    flop = 6 * n * width * vocab
    print(f"\nN = {n}, H = {width}, V = {vocab}, {rows[0]['dtype']}: {flop / 1e9:.0f} GFLOP, "
          f"{flop / rows[0]['ms']['both'] / 1e6:.0f} GFLOP/s by the GEMMs; workspace {WORKSPACE_MB} MB; "
          f"copy {copy_bytes_per_s / 1e9:.1f} GB/s")  # fmt: skip
    print(f"bytes: {BYTES} = {rows[0]['bytes']['both'] / 1e9:.3g} GB")
    print(measure.table(COLUMNS, [
        [row["implementation"], row["ms"]["forward"], row["ms"]["both"], measure.repeats(row), row["over_gemms"],
         row["over_ours"], row["gb_per_s"]["both"], 100 * row["copy_fraction"]["both"],
         None if row["extra_bytes"] is None else row["extra_bytes"] / 2**20,
         *(row["error"].get(name) for name in ("loss", "dhidden", "dweight")), row["note"]]
        for row in rows
    ]))  # fmt: skip
    for name, reason in missing.items():
        print(f"  not run: {name}: {reason}")
    sys.stdout.flush()


def cases(args):
    """[(shape, dtype)] of this run: those that are cheap first, so that they leave their time to the others."""
    listed = [(shape, args.dtype) for shape in args.shapes or ()] or (CPU if args.device == "cpu" else GPU)
    for shape, _ in listed:
        if len(shape) != 3 or shape[0] % SEQUENCE or shape[0] < 2 * SEQUENCE:
            raise SystemExit(
                f"--shapes: rows x hidden x vocabulary, rows a multiple of {SEQUENCE}, not one; got {shape}"
            )
    return [(shape, dtype) for dtype in args.dtype for shape, dtypes in listed if dtype in dtypes]


def main(args):
    copy = measure.copy_bandwidth(args.device)
    print(f"{measure.heading(args.device)}: copy {copy / 1e9:.1f} GB/s (bytes read + bytes written)", flush=True)
    todo, rows, not_run = cases(args), [], {}
    budget = measure.Budget(args.budget or BUDGET, len(todo))
    for shape, dtype in todo:
        found, missing = run_case(shape, dtype, args.device, args.peers, copy, budget.share())
        show(found, missing, copy)
        rows += found
        not_run |= missing
        measure.save(args, rows, copy_bytes_per_s=copy, not_run=not_run)
    return any("WRONG" in row["note"] for row in rows if row["implementation"] in OURS)


if __name__ == "__main__":
    sys.exit(main(measure.arguments(__doc__, "linear")))
