"""The doctor on small runs that are broken in known ways, and on healthy ones: `make test-doctor`.

    python -m tests.trainers.doctor_corpus [NAME...]    # the cases whose names begin so; all without

At most two broken runs may be without the right finding, and no healthy run may have one; at most one healthy run may
be without a "yes". Each run is a process of its own, because some of them die.
"""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from pathlib import Path

import torch

from fused_rl.trainers import cli
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.commands import doctor
from tests.trainers import figures, reward_runs, tiny

MODULE = "tests.trainers.doctor_corpus"
GRADED, RIGHT = f"{MODULE}:odd_digits", f"{MODULE}:begins_odd"
ALL = {"steps": 30, "eval_size": 16, "eval_every": 10, "save_every": 0, "dtype": "float32"}
ALL |= {"micro_batch_size": 8}
SAMPLED = {"max_new_tokens": 6, "lr": 0.003}
OPTIONS = {
    "sft": {"completion_column": "answer", "batch_size": 8, "lr": 0.01},
    "dpo": {"batch_size": 8, "lr": 0.003},
    "kto": {"batch_size": 8, "lr": 0.003},
    "reward": {"batch_size": 8, "lr": 0.003},
    "distill": SAMPLED | {"prompts_per_step": 8},
    "grpo": SAMPLED | {"prompts_per_step": 4, "group_size": 4, "eval_samples": 4, "verifiers": GRADED},
    "ppo": SAMPLED | {"prompts_per_step": 16, "eval_samples": 4, "verifiers": GRADED},
}  # fmt: skip

# Name -> what is changed, and the first finding of the doctor.
LR0, SMALL, WORSE = "learning-rate", "not-learned", "held-out-worse"
LARGE = "exploding|not-finite|kl-high|entropy-collapsed"
BROKEN = {
    "sft-lr-0": ({"lr": 0}, LR0),
    "sft-lr-large": ({"lr": 30}, LARGE),
    "sft-few-rows": ({"dataset": "few.jsonl", "batch_size": 3, "steps": 100}, f"{WORSE}|{SMALL}"),
    "dpo-lr-large": ({"lr": 0.3}, "displaced"),
    "kto-lr-large": ({"lr": 0.3}, f"displaced|{LARGE}"),
    "dpo-swapped": ({"dataset": "swapped.jsonl"}, WORSE),
    "reward-lr-small": ({"lr": 1e-9}, SMALL),
    "reward-swapped": ({"dataset": "swapped.jsonl"}, WORSE),
    "distill-lr-large": ({"lr": 10}, LARGE),
    "grpo-lr-0": ({"lr": 0}, LR0),
    "grpo-lr-large": ({"lr": 3}, LARGE),
    "grpo-constant": ({"verifiers": f"{MODULE}:constant"}, "same-score"),
    "grpo-solved": ({"verifiers": f"{MODULE}:ones"}, "all-solved"),
    "grpo-none": ({"verifiers": f"{MODULE}:none"}, "scores-none"),
    "grpo-cut": ({"verifiers": "exact_match", "max_new_tokens": 1}, "length-limit"),
    "grpo-kl": ({"kl_coef": 1000, "minibatches": 2}, SMALL),
    "ppo-few-steps": ({"steps": 3, "lr": 1e-6}, SMALL),
}
HEALTHY = {
    "sft": {},
    "sft-lora": {"lora_rank": 4, "lr": 0.02},
    "dpo": {},
    "dpo-simpo": {"loss_type": "simpo"},
    "reward": {},
    "kto": {},
    "distill": {},
    "grpo": {},
    "grpo-right": {"verifiers": RIGHT, "steps": 40},
    "grpo-dapo": {"preset": "dapo"},
    "grpo-kl": {"kl_coef": 0.01},
    "ppo": {"steps": 40},
}


def odd_digits(completions, **columns):
    """The share of odd digits: a scorer that grades."""
    return [sum(c in "13579" for c in text) / max(len(text), 1) for text in completions]


def begins_odd(completions, **columns):
    """Right or wrong."""
    return [float(text[:1] in [*"13579"]) for text in completions]


def constant(completions, **columns):
    return [0.3] * len(completions)


def ones(completions, **columns):
    return [1.0] * len(completions)


def none(completions, **columns):
    return [None] * len(completions)


def words_of(command: str, options: dict, folder: Path, name: str) -> list[str]:
    """The command line of a run."""
    model = {"sft": "model", "distill": "half-warm", "grpo": "warm", "ppo": "warm"}.get(command)
    given = ALL | OPTIONS[command] | {"model": model or "pairs"}
    given |= {"dataset": "rows.jsonl", "eval_dataset": "held_out.jsonl"}
    if model is None:
        given |= {"dataset": "pairs.jsonl", "eval_dataset": "held_out_pairs.jsonl"}
    if command == "distill":
        given["teacher"] = folder / "warm"
    given |= options
    for key in ("model", "dataset", "eval_dataset"):
        given[key] = folder / given[key]
    words = []
    for key, value in (given | {"output_dir": folder / "runs" / name}).items():
        words += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def train(command: str, words: list[str], output: Path) -> None:
    """Train in this process, with what it prints in a file; the error that ends it stands there as well."""
    torch.set_num_threads(1)
    figures.leave_out()
    with output.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        importlib.import_module(f"fused_rl.trainers.{command}").main(words)


def trained(command: str, options: dict, folder: Path, name: str) -> Path:
    """Train in a process of its own; return the run's folder."""
    words = words_of(command, options, folder, name)
    arguments = command, words, folder / f"{name}.txt"
    process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
    process.start()
    process.join()
    return folder / "runs" / name


def make_files(folder: Path) -> None:
    """Sums and pairs, models of random weights, and two that answer sums with digits and then end, one more often."""
    # Numbers of two digits.
    sums = [{"question": f"{i}+{i % 7}?", "answer": str(i + i % 7)} for i in range(10, 80)]
    held_out, rows = sums[::4], [row for i, row in enumerate(sums) if i % 4]
    for name, part in (("rows", rows), ("few", rows[:4]), ("held_out", held_out)):
        tiny.jsonl(folder / f"{name}.jsonl", part)
    reward_runs.write_pairs(folder / "pairs.jsonl", 40)
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    tiny.jsonl(folder / "held_out_pairs.jsonl", pairs[24:])
    tiny.jsonl(folder / "pairs.jsonl", pairs[:24])
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs[:24]]
    tiny.jsonl(folder / "swapped.jsonl", swapped)
    reward_runs.make_model(folder / "pairs")
    tiny.model_folder(folder / "model", pad_is_eos=True)
    for name, steps in (("half-warm", 30), ("warm", 60)):
        run = trained("sft", {"steps": steps, "eval_size": 0}, folder, f"start-{name}")
        (run / "model").rename(folder / name)


def says(run: Path) -> str:
    """What the doctor says of a run."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            doctor.report_run(run)
        except InputError as error:  # the run was refused
            print(error)
    return said.getvalue()


def main(names: list[str]) -> int:
    """Run the cases, and print a line for each; return 1 if too many of a kind are missed."""
    cases = [("broken", name, *case) for name, case in BROKEN.items()]
    cases += [("healthy", name, options, "") for name, options in HEALTHY.items()]
    missed, flagged = {"broken": 0, "healthy": 0}, 0
    # Imported once, before the processes fork.
    for command in cli.TRAINERS:
        importlib.import_module(f"fused_rl.trainers.{command}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_files(folder)
        for kind, name, options, cause in cases:
            title = f"{kind}-{name}"
            if names and not title.startswith(tuple(names)):
                continue
            report = says(trained(name.partition("-")[0], options, folder, title))
            findings = re.findall(r"^  finding: step \d+: ([\w-]+): \S+ ", report, re.MULTILINE)
            seen = bool(findings and re.fullmatch(cause, findings[0]))
            if kind == "healthy":
                seen = "did it learn? yes" in report and not findings
                flagged += bool(findings)
            missed[kind] += not seen
            print(f"{title}: {'seen' if seen else 'MISSED'} {' '.join(findings)}", flush=True)
            if not seen:
                output = (folder / f"{title}.txt").read_text(errors="replace")
                print(f"{report}  the run's last lines:\n{output[-600:]}", flush=True)
    print(f"missed: {missed['broken']} of the broken runs, {missed['healthy']} of the healthy ones")
    return int(missed["broken"] > 2 or missed["healthy"] > 1 or flagged > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
