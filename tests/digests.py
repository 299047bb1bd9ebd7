"""Ten-step runs of every trainer, and what pins their behaviour: a hash of the weights, and each metric's mean.

    python -m tests.digests --write    # after a change that was meant to change numbers; tests/test_golden.py compares

Runs start from the command line, as a user starts them. On the CPU path where a case was written its results are
equal. Elsewhere a GEMM rounds otherwise, and they agree within 5e-6: a Xeon's grpo-zero2 is 1.2e-6 from an EPYC's.
Probabilities of kept sets are divided by sums that differ too, so those agree within 1e-4 (1.5e-5 on three CPUs); with
bfloat16 weights an argmax may flip, and they agree within 0.05. Adam's epsilon is large, so that a gradient of
rounding size moves no weight by a whole learning rate.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.distributed import PROCESSES, run_distributed
from tests.trainers import figures, reward_runs, tiny

STORED = Path(__file__).with_suffix(".json")
SCORER = "tests.digests:odd_characters"
SAMPLED = {"verifiers": SCORER, "max_new_tokens": 6, "eval_samples": 2}
GRPO = SAMPLED | {"prompts_per_step": 4, "group_size": 4, "minibatches": 2, "kl_coef": 0.05}
PPO = {"max_new_tokens": 6, "eval_samples": 2, "prompts_per_step": 8, "minibatches": 2, "epochs": 2}
PPO |= {"missing_eos_penalty": 0.5, "kl_coef": 0.05}
SFT = {"completion_column": "answer", "batch_size": 8, "weight_decay": 0.1}
REWARD = {"batch_size": 8, "centering": 0.01, "label_smoothing": 0.05, "normalize_pairs": 6}
PARTITIONED = {"zero_stage": 3, "stage3_param_persistence_threshold": 0}
DISTILL = {
    "max_new_tokens": 6,
    "prompts_per_step": 8,
    "on_policy": 0.5,
    "completion_column": "answer",
}
DPO = {"batch_size": 8, "label_smoothing": 0.05, "nll_coef": 0.1}
KTO = {"batch_size": 8, "desirable_weight": 1.5}
LORA = {"lora_rank": 4}
ADAPTIVE = {"kl_target": 0.05, "kl_horizon": 50, "tf_adam": True, "critic_warmup_steps": 2}
SYNCED = {
    "ref_sync_every": 2,
    "ref_mixup_alpha": 0.6,
    "kl_in": "reward",
    "advantage": "group-mean-batch-std",
}
REFILLED = {"preset": "dapo", "zero_variance": "refill", "overlong_buffer": 2}
KEPT = {"top_p": 0.8, "top_k": 20, "temperature": 0.7}

# Name -> (command, options beside those that all have, processes).
CASES = {
    "sft-zero1": ("sft", SFT | {"zero_stage": 1, "micro_batch_size": 3}, 1),
    "sft-zero2": ("sft", SFT | {"zero_stage": 2, "dtype": "bfloat16"}, 1),
    "sft-packed": ("sft", SFT | {"zero_stage": 2, "packing": True}, 1),
    "reward-zero0": ("reward", REWARD | {"zero_stage": 0}, 1),
    "reward-zero3": ("reward", REWARD | PARTITIONED, 1),
    "grpo-zero0": ("grpo", GRPO | {"zero_stage": 0, "epochs": 2}, 1),
    "grpo-zero1": ("grpo", GRPO | REFILLED | {"zero_stage": 1}, 1),
    "grpo-zero2": ("grpo", GRPO | {"zero_stage": 2, "preset": "gspo", "loss_from": "logits"}, 1),
    "grpo-synced": ("grpo", GRPO | SYNCED | {"zero_stage": 2}, 1),
    "grpo-lag2": ("grpo", GRPO | {"zero_stage": 0, "lag": 2, "preset": "rloo"}, 1),
    "grpo-lora": ("grpo", GRPO | LORA | {"zero_stage": 2}, 1),
    "grpo-kept-sets": ("grpo", GRPO | KEPT | {"zero_stage": 2}, 1),
    "grpo-ranks-zero3": ("grpo", GRPO | REFILLED | PARTITIONED, 2),
    "ppo-zero0": ("ppo", PPO | ADAPTIVE | {"zero_stage": 0}, 1),
    "ppo-zero2": ("ppo", PPO | KEPT | {"zero_stage": 2}, 1),
    "ppo-lora": ("ppo", PPO | LORA | {"zero_stage": 2, "lag": 1}, 1),
    "distill-zero0": ("distill", DISTILL | {"zero_stage": 0, "packing": True}, 1),
    "distill-ranks-zero3": (
        "distill",
        DISTILL | PARTITIONED | {"direction": "jensen-shannon", "jsd_beta": 0.3},
        2,
    ),
    "dpo-zero0": ("dpo", DPO | {"zero_stage": 0, "micro_batch_size": 3}, 1),
    "kto-zero0": ("kto", KTO | {"zero_stage": 0, "micro_batch_size": 3}, 1),
    "dpo-lora": ("dpo", DPO | LORA | {"zero_stage": 2, "loss_type": "simpo"}, 1),
}


def odd_characters(completions, **columns) -> list[float]:
    """The fraction of characters with odd codes, which random weights vary."""
    return [sum(ord(c) % 2 for c in text) / max(len(text), 1) for text in completions]


def make_files(folder: Path) -> None:
    """The models and rows that all cases read."""
    model = tiny.model_folder(folder / "model", pad_is_eos=True)
    tiny.reward_folder(folder / "reward", model)
    tiny.model_folder(folder / "teacher", pad_is_eos=True, seed=1)
    tiny.jsonl(folder / "rows.jsonl", tiny.sums(40))
    (folder / "pairs").mkdir()
    reward_runs.make_model(folder / "pairs" / "model")
    reward_runs.write_pairs(folder / "pairs" / "pairs.jsonl", 40)


def words_of(command: str, options: dict, folder: Path, output_dir: Path) -> list[str]:
    """The command line of a case."""
    pairs = command in ("reward", "dpo", "kto")
    model, rows = ("pairs/model", "pairs/pairs.jsonl") if pairs else ("model", "rows.jsonl")
    given = {"model": folder / model, "dataset": folder / rows, "output_dir": output_dir}
    given |= {"steps": 10, "eval_size": 4, "eval_every": 5, "save_every": 0, "dtype": "float32"}
    given |= {
        "lr": 0.01 if command in ("sft", "grpo") else 0.001,
        "adam_eps": 1e-3,
        "micro_batch_size": 8,
    }
    if command == "ppo":
        given |= {
            "verifiers": f"[reward_model:{folder / 'reward'}, {SCORER}]",
            "verifier_weights": "[1, 0]",
        }
        given |= {"critic": folder / "reward"}
    if command == "distill":
        given["teacher"] = folder / "teacher"
    given |= options
    words = []
    for name, value in given.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def run(command: str, options: dict, world: int, words: list[str]) -> None:
    """Train a case; ZeRO 3 in a process of its own, whose gigabytes of address space DeepSpeed keeps, and bf16 too."""
    if world > 1:
        run_distributed(train, world, command, words, timeout=500)
    elif options.get("zero_stage") == 3 or options.get("dtype") == "bfloat16":
        process = PROCESSES.Process(target=train_alone, args=(dict(os.environ), command, words))
        process.start()
        process.join()
        assert process.exitcode == 0, command
    else:
        train(0, 1, command, words)


def train_alone(environment: dict[str, str], command: str, words: list[str]) -> None:
    """Train in a new process, which has the caller's environment."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    train(0, 1, command, words)


def train(rank: int, world: int, command: str, words: list[str]) -> None:
    """One rank's part of a case."""
    figures.leave_out()
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module(f"fused_rl.trainers.{command}").main(words)


def digest(output_dir: Path) -> dict:
    """Return a hash and the norm of the saved weights, and the mean of each metric over its lines."""
    sha, squares = hashlib.sha256(), 0.0
    for file in sorted(output_dir.glob("*/*.safetensors")):
        tensors = tiny.weights(file.parent) if file.name == "model.safetensors" else load(file)
        for name in sorted(tensors):
            sha.update(f"{file.parent.name}/{name}".encode())
            sha.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
            squares += tensors[name].double().square().sum().item()
    series = {}
    for line in tiny.untimed(tiny.read_metrics(output_dir)):
        for key, value in line.items():
            if isinstance(value, (int, float)):
                series.setdefault(key, []).append(value)
    means = {key: sum(series[key]) / len(series[key]) for key in sorted(series)}
    config = output_dir / "model" / "config.json"  # adapters have none
    config = json.loads(config.read_text()) if config.exists() else {}
    means |= {key: config[key] for key in ("score_mean", "score_std") if key in config}
    return {"weights": sha.hexdigest()[:16], "norm": math.sqrt(squares), "metrics": means}


def load(file: Path) -> dict:
    """The tensors of adapters."""
    from safetensors.torch import load_file

    return load_file(file)


def of_case(name: str, folder: Path) -> dict:
    """Train a case; `folder` has what `make_files` made."""
    command, options, world = CASES[name]
    words = words_of(command, options, folder, folder / "runs" / name)
    run(command, options, world, words)
    return digest(folder / "runs" / name)


def unlike_stored(name: str, found: dict) -> list[str]:
    """Name what of a case's digest is not as it is stored: of this code path the bits, of another near values."""
    stored = json.loads(STORED.read_text())[name]
    exact = stored["code_path"] == code_path()
    return [*differences(stored, found, exact=exact, tolerance=tolerance(name))]


def code_path() -> str:
    """What decides how a GEMM on this CPU rounds."""
    cpu = Path("/proc/cpuinfo")
    names = (
        [line for line in cpu.read_text().splitlines() if "model name" in line]
        if cpu.exists()
        else []
    )
    model = names[0].split(":")[1].strip() if names else platform.machine()
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__.split('+')[0]}"


def tolerance(name: str) -> float:
    """The error that another CPU's rounding may cause."""
    options = CASES[name][1]
    if options.get("dtype") == "bfloat16":
        return 0.05
    return 1e-4 if "top_p" in options else 5e-6


def differences(expected: dict, found: dict, *, exact: bool, tolerance: float) -> Iterator[str]:
    """Name each hash, norm and mean that is not as it was."""
    if exact and expected["weights"] != found["weights"]:
        yield f"weights {expected['weights']} -> {found['weights']}"
    before, after = ({"norm": case["norm"], **case["metrics"]} for case in (expected, found))
    for key in sorted(before.keys() | after.keys()):
        a, b = before.get(key), after.get(key)
        if a is None or b is None:
            yield f"{key}: {a} -> {b}"
        elif not (
            a == b or (not exact and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance))
        ):
            yield f"{key}: {a!r} -> {b!r}"


def main() -> None:
    """Store what the cases give now, after a change that was meant to change numbers."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "cases", nargs="*", default=list(CASES), help="names of cases; all if none is given"
    )
    parser.add_argument(
        "--write", action="store_true", required=True, help="in place of what is stored"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = "0"
    stored = json.loads(STORED.read_text())
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        for name in options.cases:
            found = of_case(name, Path(folder))
            stored[name] = {"code_path": code_path(), **found}
            print(f"{name}: {found['weights']}", flush=True)
    STORED.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
