"""Whether every op is right on a GPU: against fp64, to the bit where that is promised, in graphs, under torch.compile.

Each function yields facts for `bench/gpu_facts.py`, at sizes that take no time where the device is a CPU.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator

import torch

import fused_rl
from bench import plain
from bench.cases.support import make_sets
from fused_rl import reference

OPS = ("token_logprobs", "token_logprobs, 2 targets", "token_logprobs, support")
OPS += ("token_kl", "token_kl, jensen-shannon", "linear_token_logprobs")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VALUE = 3e-5  # that an output may be off, relative to 1 + itself
GRADIENT = {"bf16": 2**-8, "fp16": 2**-10, "fp32": 5e-5}  # of its largest element
Facts = Iterator[dict]


def at(device: str, real, tiny):
    """A size on a GPU, and one that takes no time."""
    return tiny if device == "cpu" else real


def rows(n: int, vocab: int, dtype: str, device: str, aside: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, vocab) logits N(0, 4^2), `aside` elements after the start of a wider row, and targets."""
    torch.manual_seed(0)
    wide = torch.empty(n, vocab + aside, dtype=DTYPES[dtype], device=device).normal_(0, 4)
    return wide[:, aside:], torch.randint(vocab, (n,), device=device)


# ------------------------------------------------------------------ right


def off(call: Callable, leaves: list[torch.Tensor], module) -> tuple[list, list]:
    """Outputs, and gradients of their sum with weights 1, 2, 3, ..."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outputs = call(module, *leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
    total = sum((i + 1) * output.double().sum() for i, output in enumerate(outputs))
    return [output.detach().double() for output in outputs], torch.autograd.grad(total, leaves)


def errors(call: Callable, leaves: list[torch.Tensor]) -> tuple[float, float]:
    """Of values relative to 1 + themselves, and of gradients relative to their largest, against fp64."""
    ours, gradients = off(call, leaves, fused_rl)
    exact, best = off(call, [leaf.double() for leaf in leaves], reference)
    values = [((a - b).abs() / (1 + b.abs())).max().item() for a, b in zip(ours, exact, strict=True)]
    relative = [plain.relative(a, b) for a, b in zip(gradients, best, strict=True)]
    return max(values), max(relative)


def compared(what: str, cases: Iterator[tuple]) -> Facts:
    """Cases of (name, dtype, call, leaves, looser): each that is wrong is a fact, and so is the worst of a dtype."""
    worst, count = {}, 0
    for name, dtype, call, leaves, looser in cases:
        value, gradient = errors(call, leaves)
        if not (value < looser * VALUE and gradient < looser * GRADIENT[dtype]):
            yield {"op": what, "wrong": f"{name}, {dtype}", "value": value, "gradient": gradient}
        worst[dtype] = [max(pair) for pair in zip(worst.get(dtype, (0, 0)), (value, gradient), strict=True)]
        count += 1
    yield {"op": what, "cases": count, "worst value and gradient": worst}


def row_shapes(device: str) -> list[tuple[int, int, int]]:
    """Rows, vocabulary, elements aside: one block, odd, aligned or not, split over programs or not."""
    few = [(2, 7, 0), (3, 513, 5)]
    many = [(3, 50257, 0), (3, 9001, 5), (2, 151936, 0), (140, 32000, 0), (300, 50257, 3), (1, 262144, 1)]
    return few + at(device, many, [])


def right_rows(device: str) -> Facts:
    """token_logprobs with each of its options."""

    def cases(dtype):
        for n, vocab, aside in row_shapes(device):
            x, targets = rows(n, vocab, dtype, device, aside)
            per_row = torch.linspace(0.5, 1.5, n, device=device)
            several = torch.randint(vocab, (n, 5), device=device)
            support, kept = make_sets("K=5", n, vocab, device)
            options_of = {
                "plain": (targets, {}),
                "mask": (targets, {"mask": per_row > 0.9}),
                "support": (kept, {"support": support}),
                "5 targets": (several, {}),
                "softcap": (targets, {"softcap": 30.0}),
                "temperature": (targets, {"temperature": 0.7}),
                "temperature per row": (targets, {"temperature": per_row}),
            }
            few = ("plain", "mask") if dtype == "fp16" else options_of  # what remains is the same code, compiled again
            for name in few:
                call = functools.partial(_logprobs, *options_of[name])
                yield f"{name} at {n} x {vocab}, {aside} aside", dtype, call, [x], 1

    for dtype in DTYPES:
        yield from compared("token_logprobs", cases(dtype))


def _logprobs(targets, options, module, x):
    return module.token_logprobs(x, targets, **options)


def right_in_place(device: str) -> Facts:
    """The in-place gradient is that of the others, to the bit."""
    x, targets = rows(at(device, 140, 3), at(device, 50257, 513), "bf16", device)
    leaf, other = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
    fused_rl.token_logprobs(leaf, targets).logprobs.sum().backward()
    fused_rl.token_logprobs(other * 1, targets, inplace=True).logprobs.sum().backward()
    yield {"op": "token_logprobs, in place", "same": torch.equal(leaf.grad, other.grad)}


def right_pairs(device: str) -> Facts:
    """The divergences of two tensors of logits, and of K tokens and a tail."""

    def cases(dtype):
        for n, vocab, aside in row_shapes(device)[1:]:
            x, _ = rows(n, vocab, dtype, device, aside)
            y = (x.float() + 0.3 * torch.randn(x.shape, device=device)).to(x.dtype)
            ids = torch.randint(vocab, (n, 1), device=device) + torch.arange(8, device=device) * (vocab // 8)
            for direction in ("reverse", "forward", "jensen-shannon"):
                name = f"{direction} at {n} x {vocab}"
                yield name, dtype, functools.partial(_kl, direction), [x, y], 4
                if dtype == "fp32":
                    yield f"topk, {name}", dtype, functools.partial(_topk, ids % vocab, direction), [x, y], 4

    for dtype in ("bf16", "fp32"):
        yield from compared("token_kl", cases(dtype))


def _kl(direction, module, x, y):
    return module.token_kl(x, y, direction=direction)


def _topk(ids, direction, module, x, y):
    logprobs = [module.token_logprobs(z, ids).logprobs for z in (x, y)]
    return module.topk_kl(*logprobs, direction=direction)


def right_head(device: str) -> Facts:
    """The linear ops: products of bf16 with fp32 sums, in several tiles."""
    if device != "cpu":
        a = torch.randn(64, 32, device=device, dtype=torch.bfloat16)
        total = torch.full((64, 64), math.nan, device=device)
        torch.addmm(total, a, a.t(), beta=0, out_dtype=torch.float32, out=total)
        yield {"addmm, beta 0": bool(total.isfinite().all()), "off": plain.largest(total, a.double() @ a.double().t())}

    def cases():
        n, width, vocab = at(device, (300, 512, 32003), (9, 16, 131))
        for dtype in ("bf16", "fp32"):
            hidden = plain.normal(0, n, width, device=device).to(DTYPES[dtype])
            weight = (plain.normal(1, vocab, width, device=device) * 2 * width**-0.5).to(DTYPES[dtype])
            targets = torch.randint(vocab, (n,), device=device)
            mask = torch.rand(n, device=device) < 0.7
            looser = 8 if dtype == "fp32" else 2  # sums over the width, whose order is the library's
            for name, options in {"plain": {}, "softcap": {"softcap": 30.0}, "mask": {"mask": mask}}.items():
                call = functools.partial(_head, targets, options)
                yield f"logprobs, {name}", dtype, call, [hidden, weight], looser
            ref = hidden + 0.1 * torch.randn_like(hidden)
            yield "kl", dtype, functools.partial(_head_kl, ref, weight), [hidden, weight], 2 * looser

    yield from compared("linear_token_logprobs", cases())


def _head(targets, options, module, hidden, weight):
    exact = {"logits_dtype": torch.float32} if module is fused_rl else {}
    return module.linear_token_logprobs(hidden, weight, targets, **options, **exact)


def _head_kl(ref_hidden, ref_weight, module, hidden, weight):
    ref = [x.to(hidden.dtype) for x in (ref_hidden, ref_weight)]
    exact = {"logits_dtype": torch.float32} if module is fused_rl else {}
    return module.linear_token_kl(hidden, weight, *ref, **exact)


def right_gae(device: str) -> Facts:
    b, t = at(device, (64, 20000), (3, 200))
    rewards, values = plain.normal(0, 2, b, t, device=device)
    mask = torch.rand(b, t, device=device) < 0.8
    found = fused_rl.gae(rewards, values, mask, gamma=0.999, gae_lambda=0.95)
    on_cpu = [x[:2].double().cpu() for x in (rewards, values)]
    exact = reference.gae(*on_cpu, mask[:2].cpu(), gamma=0.999, gae_lambda=0.95)
    yield {"op": "gae", "off": [plain.relative(a[:2].cpu(), b) for a, b in zip(found, exact, strict=True)]}


def bits(device: str) -> Facts:
    """The same twice; and a row's own bits alone, where it is split, and beside others."""
    x, targets = rows(at(device, 2000, 5), at(device, 50257, 4099), "bf16", device)
    once, again = fused_rl.token_logprobs(x, targets), fused_rl.token_logprobs(x, targets)
    yield {"bits": "twice the same", "same": all(map(torch.equal, once, again))}
    for begin, end in at(device, ((7, 8), (7, 140), (7, 700)), ((3, 4),)):
        part = fused_rl.token_logprobs(x[begin:end], targets[begin:end])
        same = all(torch.equal(a[begin:end], b) for a, b in zip(once, part, strict=True))
        yield {"bits": f"rows {begin} to {end} alone", "same": same}


# ------------------------------------------------------------------ graphs and torch.compile


def ops(device: str) -> dict[str, tuple[Callable, list[torch.Tensor]]]:
    """Every op as a step calls it: name -> (call, leaves)."""
    n, vocab, width = at(device, (512, 50257, 256), (5, 513, 16))
    x, targets = rows(n, vocab, "bf16", device)
    y = (x + 0.5).detach()
    support, kept = make_sets("K=8", n, vocab, device)
    hidden = plain.normal(0, n, width, device=device).bfloat16()
    weight = (plain.normal(1, vocab, width, device=device) * 2 * width**-0.5).bfloat16()
    several = torch.stack([targets, (targets + 1) % vocab], 1)
    return {
        "token_logprobs": (lambda x: fused_rl.token_logprobs(x, targets)[:2], [x]),
        "token_logprobs, 2 targets": (lambda x: fused_rl.token_logprobs(x, several)[:2], [x]),
        "token_logprobs, support": (lambda x: fused_rl.token_logprobs(x, kept, support=support)[:2], [x]),
        "token_kl": (lambda x: (fused_rl.token_kl(x, y),), [x]),
        "token_kl, jensen-shannon": (lambda x: (fused_rl.token_kl(x, y, direction="jensen-shannon"),), [x]),
        "linear_token_logprobs": (lambda h, w: fused_rl.linear_token_logprobs(h, w, targets)[:2], [hidden, weight]),
    }


def summed(call: Callable, *leaves) -> list[torch.Tensor]:
    """The outputs' sum, and the gradients."""
    total = sum(output.sum() for output in call(*leaves))
    return [total, *torch.autograd.grad(total, leaves)]


def graph(device: str, name: str) -> Facts:
    """Forward and backward captured, then replayed on other logits: the bits of a call."""
    call, leaves = ops(device)[name]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    step = functools.partial(summed, call, *leaves)
    replay, kept = captured(step) if device != "cpu" else (None, None)
    with torch.no_grad():
        leaves[0].add_(1)
        leaves[0][0].mul_(0.5)
    if replay is not None:
        replay()
    expected = step()
    kept = kept or step()
    yield {"graph": name, "same": all(map(torch.equal, kept, expected))}


def captured(step: Callable) -> tuple[Callable, list[torch.Tensor]]:
    """What replays a step, and where its results stand."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    kept = torch.cuda.CUDAGraph()
    with torch.cuda.graph(kept):
        results = step()

    def replay():
        kept.replay()
        torch.cuda.synchronize()

    return replay, results


def compiled(device: str, name: str) -> Facts:
    """torch.compile(mode="reduce-overhead"), which captures what it compiles."""
    call, leaves = ops(device)[name]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    how = at(device, {"mode": "reduce-overhead"}, {"backend": "eager"})
    whole = name.startswith("token")  # the linear ops look at their targets, where those are checked
    fast = torch.compile(lambda *leaves: sum(output.sum() for output in call(*leaves)), fullgraph=whole, **how)
    began, found = time.perf_counter(), None
    for _ in range(4):
        total = fast(*leaves)
        found = [total.detach().clone(), *[g.clone() for g in torch.autograd.grad(total, leaves)]]
    seconds = time.perf_counter() - began
    off = [plain.relative(a, b.double()) for a, b in zip(found, summed(call, *leaves), strict=True)]
    yield {"reduce-overhead": name, "off": off, "seconds": seconds}
