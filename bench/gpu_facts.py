"""The first facts of a GPU: what it is, whether every op is right there, and what its users' speed depends on.

Each fact is a line of JSON, written when it is known: what a later one breaks, or no time is left for, costs none of
those before it. `bench/gpu.py` asks a worker for one row of `FACTS` after another. All of them run on a CPU too, at
sizes that take no time (`tests/bench/test_gpu.py`): what has never run would meet the GPU with its slips.
"""

import functools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import fused_rl
from bench import machine, plain, timing
from bench.cases.support import make_sets
from fused_rl import reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VALUE = 3e-5  # that an output may be off, relative to 1 + itself
GRADIENT = {"bf16": 2**-8, "fp16": 2**-10, "fp32": 5e-5}  # of its largest element
Facts = Iterator[dict]


def at(device: str, real, tiny):
    """A size on a GPU, and one that takes no time."""
    return tiny if device == "cpu" else real


def milliseconds(call: Callable, device: str, ms: int = 60) -> float:
    """Median of one call, with an empty L2 cache."""
    return timing.median(timing.alone(timing.Run(lambda _: call(), None, [None], False), device, ms)["forward"])


def rows(n: int, vocab: int, dtype: str, device: str, aside: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, vocab) logits N(0, 4^2), `aside` elements after the start of a wider row, and targets."""
    torch.manual_seed(0)
    wide = torch.empty(n, vocab + aside, dtype=DTYPES[dtype], device=device).normal_(0, 4)
    return wide[:, aside:], torch.randint(vocab, (n,), device=device)


# ------------------------------------------------------------------ what is here


def environment(device: str) -> Facts:
    """The machine, what is installed, and whether Triton can make a kernel and launch it."""
    yield machine.environment(device)
    if device != "cpu":
        found = torch.cuda.get_device_properties(0)
        yield {
            "capability": list(torch.cuda.get_device_capability()),
            "multiprocessors": found.multi_processor_count,
            "memory_gib": round(found.total_memory / 2**30, 1),
        }
    compilers = {name: shutil.which(name) for name in ("cc", "gcc", "clang", "g++", "nvcc", "ncu")}
    yield {"compilers": compilers, "CC": os.environ.get("CC"), "cpus": os.cpu_count()}
    names = ("transformers", "deepspeed", "jsonargparse", "datasets", "trl", "peft", "flash_attn", "liger_kernel")
    yield {"installed": {name: machine.version(name.replace("_", "-")) for name in names}}
    began = time.perf_counter()
    x, targets = rows(4, 5000, "bf16", device)
    x = x.detach().requires_grad_()
    fused_rl.token_logprobs(x, targets).logprobs.sum().backward()
    yield {"first_launches_s": time.perf_counter() - began, "finite": bool(x.grad.isfinite().all())}


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


# ------------------------------------------------------------------ speed


@functools.cache
def copy_rate(device: str) -> float:
    """Bytes per ms of a copy, read and written."""
    return machine.copy_bandwidth(device) / 1e3


def passes(n: int, vocab: int, dtype: str, device: str, **options) -> dict:
    """Forward and backward of token_logprobs, in ms and in % of a copy of as many bytes."""
    x, targets = rows(n, vocab, dtype, device)
    x = x.detach().requires_grad_()
    out = fused_rl.token_logprobs(x, targets, **options)
    upstream = [torch.ones_like(out.logprobs), torch.ones_like(out.entropy)]
    forward = milliseconds(lambda: fused_rl.token_logprobs(x.detach(), targets, **options), device)
    backward = milliseconds(lambda: torch.autograd.grad(out[:2], x, upstream, retain_graph=True), device)
    return {
        "shape": [n, vocab, dtype],
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_of_copy": x.nbytes / forward / copy_rate(device),
        "backward_of_copy": 2 * x.nbytes / backward / copy_rate(device),
    }


def speed(device: str) -> Facts:
    """From a full machine down to fewer rows than multiprocessors; options that take arithmetic; other vocabularies."""
    yield {"copy_gb_per_s": copy_rate(device) / 1e6}
    vocab = at(device, 151936, 4099)
    for n in at(device, (8192, 1024, 512, 256, 140, 64, 16), (2,)):
        yield {"op": "token_logprobs"} | passes(n, vocab, "bf16", device)
        torch.cuda.empty_cache()
    n = at(device, 8192, 2)
    yield {"op": "token_logprobs, softcap"} | passes(n, vocab, "bf16", device, softcap=30.0)
    for n, vocab, dtype in at(device, ((8192, 50257, "bf16"), (16384, 32000, "bf16"), (4096, 151936, "fp32")), ()):
        yield {"op": "token_logprobs"} | passes(n, vocab, dtype, device)
        torch.cuda.empty_cache()


def speed_kl(device: str) -> Facts:
    """Two reads forward; two reads and a write backward."""
    for n in at(device, (8192, 1024, 256, 64), (2,)):
        x, _ = rows(n, at(device, 151936, 4099), "bf16", device)
        y, x = x + 0.5, x.detach().requires_grad_()
        for direction in ("reverse", "jensen-shannon"):
            kl = fused_rl.token_kl(x, y, direction=direction)
            forward = milliseconds(functools.partial(fused_rl.token_kl, x.detach(), y, direction=direction), device)
            total = kl.sum()
            backward = milliseconds(functools.partial(torch.autograd.grad, total, x, retain_graph=True), device)
            yield {
                "op": f"token_kl, {direction}",
                "shape": list(x.shape),
                "forward_of_copy": 2 * x.nbytes / forward / copy_rate(device),
                "backward_of_copy": 3 * x.nbytes / backward / copy_rate(device),
            }
        del x, y, kl, total
        torch.cuda.empty_cache()


def variants(device: str) -> Facts:
    """Ways to stream the forward pass, each with the bits of the one that ships, and its time."""
    from fused_rl.kernels import launch

    vocab = at(device, 151936, 4099)
    x, targets = rows(2, vocab, "bf16", device)
    shipped = fused_rl.token_logprobs(x, targets)
    for name in launch.VARIANTS:
        with launch.variant(name):
            same = all(map(torch.equal, fused_rl.token_logprobs(x, targets), shipped))
            yield {"variant": name, "same": same}
            for n in at(device, (8192, 256), (2,)):
                yield {"variant": name} | passes(n, vocab, "bf16", device)


# ------------------------------------------------------------------ models


def qwen(device: str, layers: int, vocab: int = 151936):
    """A randomly initialised model of the sizes of Qwen2.5-0.5B, of so many layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    real = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=at(device, vocab, 300),
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        **at(device, real, tiny),
    )
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


def attention(device: str) -> Facts:
    """Sequences packed in one row under a mask of their own: the kernels, and what each layer keeps of it."""
    from fused_rl.trainers.data.batch import make_batch
    from fused_rl.trainers.models import packing

    length, count = at(device, (1024, 8), (6, 2))
    prompts = [list(range(1, 4)) for _ in range(count)]
    responses = [[5 + i] * (length - 3) for i in range(count)]
    packed = packing.pack_whole(make_batch(prompts, responses, 0, device), [list(range(count))])
    kept = {}
    for layers in (1, 3):
        lm = qwen(device, layers, vocab=1000)
        inputs = packing.inputs_of(lm, packed)
        lm.base_model(**inputs, use_cache=False)  # what is made once
        before = torch.cuda.memory_allocated()
        with torch.profiler.profile() as profile:
            states = lm.base_model(**inputs, use_cache=False).last_hidden_state
            machine.synchronize(device)
        kept[layers] = torch.cuda.memory_allocated() - before
        del states
    names = [event.key for event in profile.key_averages()]
    found = [name[:90] for name in names if any(word in name for word in ("attention", "fmha", "flash", "sdp"))]
    tokens = packed.input_ids.numel()
    yield {"packed tokens": tokens, "kept_mb_per_layer": (kept[3] - kept[1]) / 2e6, "attention": found}


def sampling(device: str, batch: int) -> Facts:
    """The sampler in this process: tokens per second, 8 responses to each prompt."""
    from fused_rl.trainers.rollouts.generate import TransformersSampler
    from fused_rl.trainers.rollouts.sampling import Sampling

    lm = qwen(device, at(device, 24, 1))
    sampler = TransformersSampler(lm, pad_id=0, batch_size=batch)
    wanted = Sampling(temperature=1.0, max_new_tokens=at(device, 128, 4), stop_ids=(151643,))
    prompts = []
    for i in range(max(1, batch // 8)):
        prompts += 8 * [list(range(5, 69 + i % 7))]
    for _ in range(2):  # the first call makes what later ones use
        machine.synchronize(device)
        began = time.perf_counter()
        responses = sampler.sample(prompts, wanted)
        machine.synchronize(device)
        seconds = time.perf_counter() - began
    tokens = sum(len(response.ids) for response in responses)
    step = 1e3 * seconds / wanted.max_new_tokens
    yield {"sampling": batch, "tokens_per_s": tokens / seconds, "ms_per_step": step}


# ------------------------------------------------------------------ one after the other


class Fact(NamedTuple):
    make: Callable[..., Facts]
    limit: int  # seconds, with what is compiled
    args: tuple = ()


OPS = ("token_logprobs", "token_logprobs, 2 targets", "token_logprobs, support")
OPS += ("token_kl", "token_kl, jensen-shannon", "linear_token_logprobs")
FACTS = {
    "environment": Fact(environment, 45),
    "right: rows": Fact(right_rows, 75),
    "right: in place": Fact(right_in_place, 10),
    "right: pairs": Fact(right_pairs, 30),
    "right: head": Fact(right_head, 20),
    "right: gae": Fact(right_gae, 10),
    "bits": Fact(bits, 10),
    **{f"graph: {name}": Fact(graph, 12, (name,)) for name in OPS},
    **{f"compiled: {name}": Fact(compiled, 20, (name,)) for name in OPS[::3] + OPS[-1:]},
    "speed": Fact(speed, 25),
    "speed: kl": Fact(speed_kl, 15),
    "variants": Fact(variants, 30),
    "attention": Fact(attention, 20),
    **{f"sampling: {batch}": Fact(sampling, 30, (batch,)) for batch in (64, 256)},
}


def tell(name: str, device: str, path: str) -> int:
    """Write and print the facts of a row of `FACTS` as they become known; how many of them say that ours is wrong."""
    wrong = 0
    fact = FACTS[name]
    with Path(path).open("a") as file:
        for found in fact.make(device, *fact.args):
            say(file, {"fact": name} | found)
            wrong += "wrong" in found or found.get("same") is False
    return wrong


def say(file, found: dict) -> None:
    """One line, whole and at once."""
    line = json.dumps(found, default=str)
    file.write(line + "\n")
    file.flush()
    print(line, flush=True)
