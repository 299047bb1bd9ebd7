"""Time, memory and error of token_logprobs, token_kl and gae beside the installed peers.

    python bench/kernels.py --device cpu
    python bench/kernels.py --dtype bf16 --shapes 8192x151936 --peers "plain torch,TRL"

Every answer is checked against fp64 before anything is timed: an op of ours that fails is not timed, a peer that is
wrong is timed and its row says by how much. Bytes are those the operation cannot avoid, the same for every row of a
case; so GB/s and the share of the copy bandwidth compare implementations, not how much they waste.
"""

import functools
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

import fused_rl
from bench import measure, peers

# layout, shape, dtypes, fraction of the tokens that the mask drops. "rows" is (N, V); "shift" is (B, T, V) scored
# against targets[:, 1:], which others do with the copy logits[:, :-1].
CPU = [
    ("rows", (1024, 32000), ("bf16", "fp32"), 0.0),
    ("rows", (256, 151936), ("bf16", "fp32"), 0.0),
    ("rows", (512, 50257), ("bf16",), 0.0),
    ("rows", (256, 128256), ("bf16",), 0.0),
    ("rows", (128, 262144), ("bf16",), 0.0),
    ("rows", (1024, 32000), ("bf16",), 0.5),
    ("rows", (1024, 32000), ("bf16",), 0.9),
    ("shift", (4, 257, 32000), ("bf16",), 0.0),
]
GPU = [
    ("rows", (8192, 151936), ("bf16", "fp32"), 0.0),
    ("rows", (8192, 50257), ("bf16",), 0.0),
    ("rows", (16384, 32000), ("bf16",), 0.0),
    ("rows", (4096, 128256), ("bf16",), 0.0),
    ("rows", (2048, 262144), ("bf16",), 0.0),
    ("rows", (1024, 151936), ("bf16",), 0.0),
    ("rows", (8192, 151936), ("bf16",), 0.5),
    ("rows", (8192, 151936), ("bf16",), 0.9),
    ("shift", (8, 1025, 151936), ("bf16",), 0.0),
]
KL_CPU = [("rows", (1024, 32000), ("bf16", "fp32"), 0.0), ("rows", (256, 151936), ("bf16",), 0.0)]
KL_GPU = [("rows", (8192, 151936), ("bf16",), 0.0), ("rows", (8192, 50257), ("bf16",), 0.0)]
GAE_CPU = [(64, 1024), (16, 16384), (4, 131072)]
GAE_GPU = [(512, 1024), (64, 16384), (16, 131072)]
LONGEST_LOOP = 16384  # T beyond which the loop over T is left out: seconds per call

COLUMNS = ["implementation", "fwd ms", "bwd ms", "both ms", "GB/s", "% copy", "extra/logits", "time/ours",
           "value err", "entropy err", "grad err", "note"]  # fmt: skip
WRONG_NATS, WRONG_GRADIENT = 1e-3, 1e-2  # from here a peer's row says that it is wrong


def dropped(shape, fraction, generator, device):
    """A mask that drops this fraction at random, or None."""
    if not fraction:
        return None
    return (torch.rand(shape, generator=generator) >= fraction).to(device)


class Case:
    """Inputs, reference and byte counts of one row-statistics case; `refs` is how many logits tensors it reads."""

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

    def errors(self, peer) -> dict:
        """Largest error of outputs and gradient against fp64 on some rows, from the same rounded logits."""
        x = self.inputs(peer)[0]
        outputs = peer.call(x)
        gradient = self.backward(outputs, x)
        at = tuple(i.to(self.device) for i in self.rows_to_check())
        exact = self.logits[0][at].double().requires_grad_()
        keep = torch.ones(len(exact), dtype=torch.bool, device=self.device) if self.mask is None else self.mask[at]
        logp = torch.log_softmax(exact, -1)
        if self.op == "token_kl":
            ref = torch.log_softmax(self.ref_logits[at].double(), -1)
            truth = {"kl": (logp.exp() * (logp - ref)).sum(-1)}
        else:
            scored = self.targets[:, 1:] if self.layout == "shift" else self.targets
            chosen = logp.gather(-1, scored[at][:, None])[:, 0]
            truth = {"logprob": chosen, "entropy": -(logp.exp() * logp).sum(-1)}
        truth = {name: torch.where(keep, value, 0) for name, value in truth.items()}
        weights = [
            torch.zeros_like(keep) if o is None else g[at] if o.dim() else torch.ones_like(keep)
            for o, g in zip(outputs, self.upstream, strict=True)
        ]
        total = sum((w * t).sum() for w, t in zip(weights, truth.values(), strict=True))
        exact_gradient = torch.autograd.grad(total, exact)[0]
        found = {}
        for (name, value), output in zip(truth.items(), outputs, strict=True):
            if output is not None and output.dim():
                found[name] = (output[at].double() - value).abs().max().item()
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


def contenders(case, known, args):
    """A Peer for ours and for each other that can run, its `call` taking logits alone; why the others cannot."""
    version = fused_rl.__version__
    found = [peers.Peer("fused_rl", version, case.ours)]
    if case.op == "token_logprobs":
        inplace = functools.partial(case.ours, inplace=True)
        found.append(peers.Peer("fused_rl inplace", version, inplace, "gradient in the logits", overwrites=True))
    running, missing = peers.find(known, args.device, args.peers)
    found += [peer._replace(call=case.peer(peer.call, peer.name)) for peer in running]
    return found, missing


def run_case(case, known, args, copy_bytes_per_s, seconds):
    """Check, measure and describe every implementation of one case; what raises is listed with the reason."""
    rows, runs = [], {}
    found, missing = contenders(case, known, args)
    amount = case.bytes()
    for peer in found:
        name = peer.name
        ours, errors, failed = name.startswith("fused_rl"), {}, ""
        try:
            errors = case.errors(peer)
            failed = case.failure(errors) if ours else ""
        except (peers.Unavailable, ArithmeticError, AttributeError, LookupError, RuntimeError, ValueError) as reason:
            told = f"{type(reason).__name__}: {reason}".splitlines()[0].replace("Unavailable: ", "")
            if not ours:
                missing[name] = told
                continue
            failed = told
        row = {
            "op": case.op,
            "layout": case.layout,
            "shape": list(case.shape),
            "dtype": case.dtype,
            "masked": case.fraction,
            "implementation": name,
            "version": peer.version,
            "bytes": {k: v for k, v in amount.items() if k != "text"},
            "bytes_text": amount["text"],
            "error": errors,
            "note": "; ".join(
                t for t in (f"FAILED, not timed: {failed}" if failed else "", wrong(errors), peer.note) if t
            ),
        }
        rows.append(row)
        if not failed:
            runs[name] = peer
    time_rows(case, rows, runs, args, copy_bytes_per_s, seconds)
    return rows, missing


def time_rows(case, rows, runs, args, copy_bytes_per_s, seconds):
    """Fill in memory, samples, medians and ratios."""
    samples, memory, timed = {}, {}, {}
    for name, peer in runs.items():
        inputs, run = case.inputs(peer), peer.call
        memory[name] = measure.peak_extra_bytes(lambda: case.backward(run(inputs[0]), inputs[0]), args.device)  # noqa: B023
        if args.device == "cpu":
            timed[name] = measure.phases_cpu(run, case.backward, inputs)
        else:
            samples[name] = measure.phases_gpu(run, case.backward, inputs, twice=not peer.overwrites)
    samples = samples or measure.interleaved(timed, seconds)
    medians = {n: {phase: measure.median(s) for phase, s in phases.items()} for n, phases in samples.items()}
    for row in rows:
        name = row["implementation"]
        if name not in medians:
            continue
        ms = medians[name]
        row["ms"], row["samples_ms"], row["extra_bytes"] = ms, samples[name], memory[name]
        row["gb_per_s"] = {phase: row["bytes"][phase] / t / 1e6 for phase, t in ms.items()}
        row["copy_fraction"] = {phase: row["bytes"][phase] / (1e-3 * t) / copy_bytes_per_s for phase, t in ms.items()}
        if "fused_rl" in medians:
            row["time_over_ours"] = ms["both"] / medians["fused_rl"]["both"]


def show(rows, missing, copy_bytes_per_s):
    first = rows[0]
    shape = " x ".join(str(n) for n in first["shape"])
    masked = f", {first['masked']:.0%} masked" if first.get("masked") else ""
    print(f"\n{first['op']} {first['layout']} {shape} {first['dtype']}{masked}; bytes: {first['bytes_text']} "
          f"= {first['bytes']['both'] / 1e9:.3g} GB; copy {copy_bytes_per_s / 1e9:.1f} GB/s")  # fmt: skip
    lines = []
    for row in rows:
        ms, error = row.get("ms", {}), row["error"]
        memory = row.get("extra_bytes")
        lines.append(
            [
                row["implementation"],
                ms.get("forward"),
                ms.get("backward"),
                ms.get("both"),
                row.get("gb_per_s", {}).get("both"),
                100 * row["copy_fraction"]["both"] if ms else None,
                None if memory is None else memory / row["bytes"]["logits"],
                row.get("time_over_ours"),
                error.get("logprob", error.get("kl", error.get("advantages"))),
                error.get("entropy"),
                error.get("gradient"),
                row["note"],
            ]
        )
    print(measure.table(COLUMNS, lines))
    for name, reason in missing.items():
        print(f"  not run: {name}: {reason}")


# ------------------------------------------------------------------ gae


def run_gae(shape, args, copy_bytes_per_s, seconds):
    """gae beside the loop over T; bytes: rewards, values and mask read, advantages and returns written."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(shape, generator=generator).to(args.device) for _ in range(2))
    lengths = torch.randint(shape[1] // 2, shape[1] + 1, (shape[0], 1), generator=generator)
    mask = (torch.arange(shape[1]) < lengths).to(args.device)
    # fp64 by the loop on the processor: a device's launch per step would take longer than everything else
    exact = peers.loop_gae(rewards.double().cpu(), values.double().cpu(), mask.cpu(), 0.999, 0.95)[0]
    runs = {"fused_rl": lambda _: fused_rl.gae(rewards, values, mask, gamma=0.999, gae_lambda=0.95)}
    running, missing = peers.find(peers.GAE, args.device, args.peers)
    for peer in running:
        if shape[1] > LONGEST_LOOP:
            missing[peer.name] = f"T = {shape[1]} takes it seconds per call; left out beyond {LONGEST_LOOP}"
        else:
            runs[peer.name] = lambda _, call=peer.call: call(rewards, values, mask, 0.999, 0.95)
    moved = rewards.numel() * (4 * 4 + 1)
    rows, timed = [], {}
    for name, run in runs.items():
        error = (run(None)[0].double().cpu() - exact).abs().max().item() / exact.abs().max().item()
        failed = name == "fused_rl" and not error <= 1e-6
        rows.append(
            {
                "op": "gae",
                "layout": "(B, T)",
                "shape": list(shape),
                "dtype": "fp32",
                "implementation": name,
                "version": fused_rl.__version__ if name == "fused_rl" else torch.__version__,
                "bytes": {"forward": moved, "both": moved, "logits": rewards.numel() * 4},
                "bytes_text": "2 reads + mask + 2 writes",
                "error": {"advantages": error},
                "note": f"FAILED, not timed: {error:.1e}" if failed else "",
            }
        )
        if not failed:
            timed[name] = run
    memory = {n: measure.peak_extra_bytes(lambda run=run: run(None), args.device) for n, run in timed.items()}
    if args.device == "cpu":
        samples = measure.interleaved({n: measure.phases_cpu(r, None, [None]) for n, r in timed.items()}, seconds)
    else:
        samples = {n: measure.phases_gpu(r, None, [None]) for n, r in timed.items()}
    medians = {n: measure.median(s["forward"]) for n, s in samples.items()}
    for row in rows:
        name = row["implementation"]
        if name in medians:
            ms = medians[name]
            row["ms"], row["extra_bytes"] = {"forward": ms, "both": ms}, memory[name]
            row["samples_ms"] = samples[name]
            row["gb_per_s"] = {"forward": moved / ms / 1e6, "both": moved / ms / 1e6}
            row["copy_fraction"] = {phase: g * 1e9 / copy_bytes_per_s for phase, g in row["gb_per_s"].items()}
            if "fused_rl" in medians:
                row["time_over_ours"] = ms / medians["fused_rl"]
    return rows, missing


# ------------------------------------------------------------------ the group


def cases(args):
    """(op, layout, shape, dtype, masked fraction) of this run."""
    cpu = args.device == "cpu"
    for op, listed in (("token_logprobs", CPU if cpu else GPU), ("token_kl", KL_CPU if cpu else KL_GPU)):
        if args.shapes:
            listed = [("rows", shape, args.dtype, fraction) for shape in args.shapes for fraction in (0.0, 0.5)]
        for layout, shape, dtypes, fraction in listed:
            for dtype in dtypes:
                if dtype in args.dtype:
                    yield op, layout, shape, dtype, fraction


def main(args):
    copy = measure.copy_bandwidth(args.device)
    print(f"{measure.environment(args.device)['device']}: copy {copy / 1e9:.1f} GB/s (bytes read + bytes written)")
    todo = list(cases(args))
    gae_shapes = [] if args.shapes else (GAE_CPU if args.device == "cpu" else GAE_GPU)
    seconds = (args.budget or 100) / (len(todo) + len(gae_shapes))
    rows, not_run = [], {}
    for op, *case in todo:
        known = peers.LOGPROBS if op == "token_logprobs" else peers.KL
        found, missing = run_case(Case(op, *case, args.device), known, args, copy, seconds)
        show(found, missing, copy)
        rows += found
        not_run |= {f"{op}: {name}": reason for name, reason in missing.items()}
        measure.save(args, rows, copy_bytes_per_s=copy, not_run=not_run)
    for shape in gae_shapes:
        found, missing = run_gae(shape, args, copy, seconds)
        show(found, missing, copy)
        rows += found
    measure.save(args, rows, copy_bytes_per_s=copy, not_run=not_run)
    return any("FAILED" in row["note"] for row in rows)


if __name__ == "__main__":
    sys.exit(main(measure.arguments(__doc__, "kernels")))
