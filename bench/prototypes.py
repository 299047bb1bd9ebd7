"""Three ways to write the row statistics, to check on a GPU what counting instructions predicted; then our own kernels.

    python -m bench prototypes --shapes 8192x151936,8192x50257

Each reads a row once and keeps (maximum, sum, weighted sum); they differ in what the maximum costs:
obvious loop        one maximum per row: two reductions over the program and a barrier per tile, every load masked
lane tile           one maximum per lane, merged once at the end; no mask and no barrier in the main loop
integer reference   per lane again, but rounded to whole powers of two, so that rescaling needs no exponential
The prediction is a model: instructions per element that one H200 (132 SMs, 4.3 TB/s copy) can issue while an element
streams in, over those that the compiled loop holds (sm_90, V a multiple of 16). At most 100 %.
"""

import torch
import triton
import triton.language as tl

import fused_rl
from bench import machine, options, results, timing

SHAPES = [(8192, 151936), (8192, 50257)]
LN2, LOG2E = tl.constexpr(0.6931471805599453), tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e6)  # stands for -inf: differences stay finite, and small enough for MAGIC
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds an fp32 to the nearest integer


@triton.jit
def _store(logprobs_ptr, entropy_ptr, row, target, scale, m, total, weighted):
    tl.store(logprobs_ptr + row, (target * scale - m - tl.log2(total)) * LN2)
    tl.store(entropy_ptr + row, (tl.log2(total) - weighted / total) * LN2)


@triton.jit
def _merge(m, total, weighted):  # (LANES,) each -> the row's
    top = tl.max(m, 0)
    shift = m - top
    factor = tl.exp2(shift)
    weighted = (weighted + total * shift) * factor
    return top, tl.sum(total * factor, 0), tl.sum(weighted, 0)


@triton.jit
def obvious_loop(
    logits_ptr,  # (N, V)
    targets_ptr,  # (N,) int64
    logprobs_ptr,  # (N,) fp32
    entropy_ptr,  # (N,) fp32
    stride,
    vocab,
    scale,  # log2(e) / temperature
    K: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    columns = tl.arange(0, K * LANES)
    m = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for start in range(0, vocab, K * LANES):
        at = start + columns
        x = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        y = tl.maximum(x * scale, LOWEST)
        m_new = tl.maximum(m, tl.max(y, 0))
        factor = tl.exp2(m - m_new)
        s = y - m_new
        p = tl.exp2(s)
        weighted = (weighted + total * (m - m_new)) * factor + tl.sum(p * s, 0)
        total = total * factor + tl.sum(p, 0)
        m = m_new
    target = tl.load(logits_ptr + tl.load(targets_ptr + row)).to(tl.float32)
    _store(logprobs_ptr, entropy_ptr, row, target, scale, m, total, weighted)


@triton.jit
def _lane_step(x, scale, m, total, weighted):
    x = tl.maximum(x, LOWEST)
    m_new = tl.maximum(m, tl.max(x, 0) * scale)
    shift = m - m_new
    factor = tl.exp2(shift)
    s = x * scale - m_new[None, :]
    p = tl.exp2(s)
    weighted = (weighted + total * shift) * factor + tl.sum(p * s, 0)
    total = total * factor + tl.sum(p, 0)
    return m_new, total, weighted


@triton.jit
def _integer_step(x, scale, m, total, weighted):
    # m carries MAGIC: its low bits are the integer itself, so 2^(m - m_new) is integer arithmetic on the exponent.
    x = tl.maximum(x, LOWEST)
    m_new = tl.maximum(m, tl.max(x, 0) * scale + MAGIC)
    difference = m.to(tl.int32, bitcast=True) - m_new.to(tl.int32, bitcast=True)
    exponent = tl.maximum(difference + 127, 0)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    s = x * scale - (m_new - MAGIC)[None, :]
    p = tl.exp2(s)
    weighted = (weighted + total * (m - m_new)) * factor + tl.sum(p * s, 0)
    total = total * factor + tl.sum(p, 0)
    return m_new, total, weighted


@triton.jit
def lanes(
    logits_ptr,  # (N, V)
    targets_ptr,  # (N,) int64
    logprobs_ptr,  # (N,) fp32
    entropy_ptr,  # (N,) fp32
    stride,
    vocab,
    scale,  # log2(e) / temperature
    K: tl.constexpr,
    LANES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    lane = tl.arange(0, LANES)[None, :]
    columns = tl.arange(0, K)[:, None] * LANES + lane
    bias = MAGIC if INTEGER else 0.0
    m = tl.full((LANES,), LOWEST, tl.float32) + bias
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    whole = vocab // (K * LANES) * (K * LANES)
    for start in tl.range(0, whole, K * LANES, num_stages=1):
        x = tl.load(logits_ptr + start + columns).to(tl.float32)
        if INTEGER:
            m, total, weighted = _integer_step(x, scale, m, total, weighted)
        else:
            m, total, weighted = _lane_step(x, scale, m, total, weighted)
    if whole < vocab:
        at = whole + columns
        x = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        if INTEGER:
            m, total, weighted = _integer_step(x, scale, m, total, weighted)
        else:
            m, total, weighted = _lane_step(x, scale, m, total, weighted)
    top, total_row, weighted_row = _merge(m - bias, total, weighted)
    target = tl.load(logits_ptr + tl.load(targets_ptr + row)).to(tl.float32)
    _store(logprobs_ptr, entropy_ptr, row, target, scale, top, total_row, weighted_row)


def launch(name, logits, targets, logprobs, entropy):
    """One prototype on (N, V) logits; fills logprobs and entropy, (N,) fp32."""
    lanes_of = 256 if name == "obvious loop" else 32 * 4 * (16 // logits.element_size())
    tile = {"K": 8, "LANES": lanes_of, "num_warps": 4, "num_stages": 1}
    tensors = (logits, targets, logprobs, entropy)
    arguments = (*tensors, logits.stride(0), logits.shape[1], LOG2E.value)
    if name == "obvious loop":
        obvious_loop[(len(logits),)](*arguments, **tile)
    else:
        lanes[(len(logits),)](*arguments, **tile, INTEGER=name == "integer reference")


# Instructions per element of the compiled main loop (sm_90, triton 3.7.1): V a multiple of 16, and odd V
COUNTED = {"obvious loop": (14.4, 17.5), "lane tile": (8.5, 9.2), "integer reference": (8.9, 9.6)}
BUDGET = 13.8
WRONG = 1e-3  # nats, from which a kernel is not timed


def predicted(name, vocab):
    """% of the copy bandwidth that the model expects."""
    if name not in COUNTED:  # our kernels, whose headroom bench/compiled/codegen.py counts: 1.36 and more
        return 100.0
    return min(100.0, 100 * BUDGET / COUNTED[name][vocab % 16 != 0])


def error(logits, targets, logprobs, entropy):
    """Largest error in nats over some rows, against fp64."""
    at = torch.linspace(0, len(logits) - 1, 6, device=logits.device).long()
    logp = torch.log_softmax(logits[at].double(), -1)
    chosen = logp.gather(-1, targets[at, None])[:, 0]
    exact_entropy = -(logp.exp() * logp).sum(-1)
    off = torch.stack([logprobs[at] - chosen, entropy[at] - exact_entropy])
    return off.abs().max().item()


def candidates(logits, targets):
    """{name: (run, bytes)}; `run` returns what `error` checks, or None for a gradient."""
    size = logits.numel() * logits.element_size()
    out = [torch.empty(len(logits), device=logits.device) for _ in range(2)]

    def prototype(name):
        def run():
            launch(name, logits, targets, *out)
            return out

        return run

    leaf = logits.detach().requires_grad_()
    ours = fused_rl.token_logprobs(leaf, targets)
    upstream = [torch.ones_like(o) for o in ours[:2]]

    def forward():
        return fused_rl.token_logprobs(logits, targets)[:2]

    def backward():
        torch.autograd.grad(ours[:2], leaf, upstream, retain_graph=True)

    found = {name: (prototype(name), size) for name in COUNTED}
    return found | {"fused_rl forward": (forward, size), "fused_rl backward": (backward, 2 * size)}


def measured(name, run, size, logits, targets, copy_bytes_per_s) -> dict:
    """The row of one kernel: checked, where it returns something, and timed unless it is wrong."""
    row = {"op": name, "implementation": name, "shape": list(logits.shape)}
    row |= {"dtype": "bf16", "bytes": size}
    outputs = run()
    off = None if outputs is None else error(logits, targets, *outputs)
    row |= {"error": off, "predicted_percent": predicted(name, logits.shape[1]), "status": results.OK}
    if off is not None and not off < WRONG:
        return row | {"status": results.FAILED_CHECK, "reason": f"off by {off:.1e} nats"}
    timed = timing.Run(lambda _: run(), None, [None], False)
    samples = timing.phases_gpu(timed)["forward"]
    ms = timing.median(samples)
    share = 100 * size / (1e-3 * ms) / copy_bytes_per_s
    return row | {"ms": ms, "samples_ms": samples[:50], "copy_percent": share}


def command(name: str, words: list[str]) -> int:
    return main(options.arguments(__doc__, name, words))


def main(args) -> int:
    """Check and time every kernel at every shape; 1 where one is wrong."""
    copy = machine.copy_bandwidth(args.device)
    print(f"{machine.environment(args.device)['device']}: copy {copy / 1e9:.0f} GB/s")
    rows = []
    for n, vocab in args.shapes or SHAPES:
        logits = torch.randn(n, vocab, device=args.device, dtype=torch.bfloat16)
        logits.mul_(3)
        targets = torch.randint(vocab, (n,), device=args.device)
        found = []
        for name, (run, size) in candidates(logits, targets).items():
            found.append(measured(name, run, size, logits, targets, copy))
        print(f"\n{n} x {vocab} bf16: 1 read forward, 1 read + 1 write backward")
        names = ("op", "ms", "copy_percent", "predicted_percent", "error")
        lines = [[row.get(name) for name in names] for row in found]
        print(results.table(["kernel", "ms", "% of copy", "predicted %", "error"], lines), flush=True)
        rows += found
        results.save(args, rows, copy_bytes_per_s=copy)
    broken = [row for row in rows if row["status"] != results.OK]
    return int(bool(broken))
