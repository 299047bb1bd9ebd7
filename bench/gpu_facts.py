"""The first facts of a GPU: what it is, whether every op is right there, and what its users' speed depends on.

Each fact is a line of JSON, written when it is known: what a later one breaks, or no time is left for, costs none of
those before it. `bench/gpu.py` asks a worker for one row of `FACTS` after another. All of them run on a CPU too, at
sizes that take no time (`tests/bench/test_gpu.py`): what has never run would meet the GPU with its slips.
"""

import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import fused_rl
from bench import gpu_right, machine, timing
from bench.gpu_right import OPS, Facts, at, rows


def milliseconds(call: Callable, device: str, ms: int = 60) -> float:
    """Median of one call, with an empty L2 cache."""
    return timing.median(timing.alone(timing.Run(lambda _: call(), None, [None], False), device, ms)["forward"])


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
    names = ("transformers", "deepspeed", "pydantic", "datasets", "trl", "peft", "flash_attn", "liger_kernel")
    yield {"installed": {name: machine.version(name.replace("_", "-")) for name in names}}
    began = time.perf_counter()
    x, targets = rows(4, 5000, "bf16", device)
    x = x.detach().requires_grad_()
    fused_rl.token_logprobs(x, targets).logprobs.sum().backward()
    yield {"first_launches_s": time.perf_counter() - began, "finite": bool(x.grad.isfinite().all())}


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
    x, targets = rows(at(device, 4096, 3), vocab, "bf16", device)  # a program per row, but for the last wave's
    shipped = [fused_rl.token_logprobs(*given) for given in ((x, targets), (x[:2], targets[:2]))]
    for name in launch.VARIANTS:
        with launch.variant(name):
            found = [fused_rl.token_logprobs(*given) for given in ((x, targets), (x[:2], targets[:2]))]
            same = [all(map(torch.equal, *pair)) for pair in zip(found, shipped, strict=True)]
            yield {"variant": name, "same": all(same)}
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
    yield {"packed tokens": tokens, "activations_and_mask_mb_per_layer": (kept[3] - kept[1]) / 2e6, "attention": found}


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


FACTS = {
    "environment": Fact(environment, 45),
    "right: rows": Fact(gpu_right.right_rows, 75),
    "right: in place": Fact(gpu_right.right_in_place, 10),
    "right: pairs": Fact(gpu_right.right_pairs, 30),
    "right: head": Fact(gpu_right.right_head, 20),
    "right: gae": Fact(gpu_right.right_gae, 10),
    "bits": Fact(gpu_right.bits, 10),
    **{f"graph: {name}": Fact(gpu_right.graph, 12, (name,)) for name in OPS},
    **{f"compiled: {name}": Fact(gpu_right.compiled, 20, (name,)) for name in OPS[::3] + OPS[-1:]},
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
