"""Sampling, and steps of trainers, on a GPU, of a model with Qwen2.5-0.5B's dimensions and random weights: nothing is
downloaded.

    python -m bench trainers --device cuda

First come tokens per second of 256 responses of 256 tokens: by captured steps, by the same steps launched one by one,
and by transformers' generate. Then each trainer runs in a process of its own, which logs what the table shows: seconds
by phase, tokens per second, peak memory. Of TRL, if it is installed, the seconds of a step with the same options and
rows. What comes first is what only a GPU can rank; with --budget the rest is left out.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench import machine, peers, results, trainers
from fused_rl.trainers import ppo
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.run.parse import parse

QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "tie_word_embeddings": True,
}
WORDS = 1000  # of the tokenizer
SECONDS = 240  # of a trainer; its first step of four is not counted: it compiles
COMMON = ["--steps", "4", "--eval_size", "0", "--save_every", "0", "--dtype", "auto", "--overwrite"]
SAMPLED = [
    "--verifiers",
    "bench.trainers:odd_words",
    "--prompt_column",
    "prompt",
    "--prompts_per_step",
    "32",
]
COMPILED = ["--torch_compile", "true"]
SFT = ["--batch_size", "64"]
GRPO = [*SAMPLED, "--group_size", "8", "--kl_coef", "0.001"]
# What is measured -> the trainer and its options; a step of grpo and ppo has 256 responses.
RUNS = {
    "grpo": ("grpo", GRPO),
    "sft": ("sft", SFT),
    "grpo, compiled": ("grpo", [*GRPO, *COMPILED]),
    "sft, compiled": ("sft", [*SFT, *COMPILED]),
    "grpo, padded": ("grpo", [*GRPO, "--share_prompts", "false"]),
    "sft, padded": ("sft", [*SFT, "--packing", "false"]),
    "ppo": ("ppo", [*SAMPLED, "--group_size", "8"]),
    "reward": ("reward", ["--batch_size", "32"]),
}
BESIDE_TRL = ("grpo", "sft", "reward")


def prepare(folder: Path, sizes: dict, length: int) -> list[str]:
    """Write a model of these sizes and rows of about `length` words a side; return the options that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    trainers.save_model(folder / "model", sizes, WORDS)

    # Each row has what any of the trainers reads.
    rng = random.Random(0)

    def text() -> str:
        return " ".join(
            f"w{rng.randrange(2, WORDS)}" for _ in range(rng.randint(length // 2, length))
        )

    rows = [
        {name: text() for name in ("prompt", "completion", "chosen", "rejected")}
        for _ in range(512)
    ]
    write_rows(folder / "rows.jsonl", rows)
    return ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl")]


def measured(op: str, folder: Path) -> dict:
    """Return the row of one of our runs: means over all steps but the first, as it logged them."""
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in logged if "optim/grad_norm" in row][1:]
    names = sorted({name for row in steps for name in row if name.startswith(("time/", "perf/"))})
    means = {name: sum(row.get(name, 0.0) for row in steps) / len(steps) for name in names}
    return {"op": op, "implementation": "fused_rl", "status": results.OK} | means


def sample(model: str, count: int, length: int) -> list[dict]:
    """Return a row for each way to sample `count` responses of `length` tokens, with its tokens per second."""
    from transformers import AutoModelForCausalLM

    from fused_rl.trainers.rollouts.generate import TransformersSampler
    from fused_rl.trainers.rollouts.sampling import Sampling

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    sampling = Sampling(temperature=1.0, max_new_tokens=length, stop_ids=())
    prompts = [[2 + i // 8] * 64 for i in range(count)]
    rows = []
    for name in ("captured", "launched", "generate"):
        sampler = TransformersSampler(lm, pad_id=0, batch_size=count)
        sampler.graphs.is_on &= name == "captured"
        sampler.is_in_place &= name != "generate"
        # The first time kernels are compiled, and captured steps compared with others.
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            sampler.sample(prompts, sampling)
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        tokens = count * length / seconds
        is_captured = name != "captured" or sampler.graphs.is_on
        name = name if is_captured else "captured, which failed"
        row = {"op": "sampling", "implementation": name, "status": results.OK}
        rows.append(row | {"perf/tokens_per_second": tokens})
    return rows


def train(op: str, words: list[str]) -> list[dict]:
    """Train with ours, then with TRL what ours has trained; return a row for each."""
    beside_trl = op in BESIDE_TRL
    op = RUNS[op][0]
    module = {"ppo": ppo, **trainers.MODULES}[op]
    config = parse(
        getattr(module, f"{op.upper()}Config" if op != "reward" else "RewardConfig"), words
    )
    if not beside_trl:
        module.train(config)
        return [measured(op, Path(config.output_dir))]
    ours = trainers.run_ours(op, config)
    rows = [measured(op, Path(config.output_dir)) | {"time/step": trainers.median_step(ours)}]
    name = f"TRL {trainers.TRAINERS[op]}"
    try:
        theirs = trainers.run_trl(ours, Path(config.output_dir) / "trl")
    except peers.Unavailable as reason:
        return [*rows, results.not_run(name, reason.status, str(reason), op)]
    except torch.OutOfMemoryError as reason:
        return [*rows, results.not_run(name, *results.failure(reason), op)]
    return [
        *rows,
        {
            "op": op,
            "implementation": name,
            "status": results.OK,
            "time/step": trainers.median_step(theirs),
        },
    ]


def command(args, sizes: dict = QWEN, length: int = 256) -> int:
    """Measure each trainer in a process, and print; 1 where one of ours fails."""
    folder = machine.ROOT / "runs" / "bench-gpu"
    rows, words = [], prepare(folder, sizes, length)
    end = time.monotonic() + (args.budget or float("inf"))
    for op, (_, own) in {"sampling": ("", []), **RUNS}.items():
        if time.monotonic() > end:
            rows.append(results.not_run("fused_rl", results.NO_TIME, "no time is left", op))
            continue
        given = [*words, *COMMON, *own, "--output_dir", str(folder / op.replace(", ", "-"))]
        given += ["--max_new_tokens", str(length)] if "--verifiers" in own else []
        if op == "sampling":
            given = [str(folder / "model"), "256", str(length)]
        limit = max(20, int(min(SECONDS, end - time.monotonic())))
        run = ["timeout", str(limit), sys.executable, "-m", "bench.gpu_trainers", op, *given]
        done = subprocess.run(run, cwd=machine.ROOT, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
            rows.append(
                results.not_run(
                    "fused_rl", results.FAILED, f"exit status {done.returncode}: {last}", op
                )
            )
        else:
            rows += json.loads(done.stdout.splitlines()[-1])
        results.save(args, rows)
    # An empty column is left out.
    lines = [row | {"status": None} for row in results.measured(rows)]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    print(results.table(columns, [[line.get(name) for name in columns] for line in lines]))
    results.show_missing(rows)
    return results.failed(rows)


if __name__ == "__main__":
    trainers.prepare()
    op, *words = sys.argv[1:]
    found = sample(words[0], *map(int, words[1:])) if op == "sampling" else train(op, words)
    for row in found:
        row["op"] = op
    print(json.dumps(found))
