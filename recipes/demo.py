"""`make demo`: from nothing to a small model that GRPO teaches to add and subtract, in minutes on two CPU cores.

1. It makes problems of reasoning-gym's chain_sum (three one-digit numbers), and holds some of them out.
2. A small Llama with random weights is warm-started by `fused-rl sft` on the answers of a teacher who miscounts in most
   subtractions. Half of the demonstrations are wrong, and the model learns to miscount too.
3. `fused-rl grpo` trains it on its own sampled answers, scored by reasoning-gym's `score_answer`, without any
   demonstrations. From its right answers the model must learn what its teacher mostly got wrong.
"""

import random
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from fused_rl.recipes import tiny_model
from fused_rl.recipes.gym import import_reasoning_gym
from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.run.command import LOST, around
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.run.parse import parse

RECIPES = Path(__file__).parent
NUM_TRAIN, NUM_EVAL = 3000, 256
# The probability with which the teacher miscounts in a subtraction.
MISCOUNTS = 0.6


def problems(seed: int, count: int) -> list[dict]:
    """Return distinct problems as reasoning-gym makes them, each with question, answer and metadata."""
    gym = import_reasoning_gym()
    options = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    # The generator repeats itself, so many more problems are generated than are returned. They are made one at a time,
    # and the loop ends as soon as there are enough.
    distinct: dict[str, dict] = {}
    for entry in gym.create_dataset(
        "chain_sum", size=100 * count, seed=seed * 1_000_003, **options
    ):
        distinct.setdefault(entry["question"], entry)
        if len(distinct) == count:
            return list(distinct.values())
    raise ValueError(
        f"chain_sum makes only {len(distinct)} distinct problems of this kind, not {count}"
    )


def careless_answer(entry: dict, rng: random.Random) -> str:
    """Return the teacher's answer, which is one too large for each subtraction in which the teacher miscounts.

    Such a mistake is to count back from 8 by 3 as "8, 7, 6", which makes 8 - 3 equal to 6.
    """
    subtractions = entry["metadata"]["expression"].count("-")
    too_many = sum(rng.random() < MISCOUNTS for _ in range(subtractions))
    return str(int(entry["answer"]) + too_many)


def build_model(folder: Path, texts: list[str], seed: int, layers: int = 2) -> str:
    """Write a small Llama with random weights and a tokenizer that is learned from `texts`, and return its folder."""
    tokenizer = tiny_model.learn_tokenizer(texts, 192, chat=False)
    tiny_model.save_llama(folder, tokenizer, seed, layers=layers, hidden_size=128, positions=64)
    return str(folder)


def prepare(folder: Path, seed: int) -> None:
    """Write the problems, the demonstrations, and the untrained model with its tokenizer into a folder."""
    made = problems(seed, NUM_TRAIN + NUM_EVAL)
    # All problems are distinct, so none that is held out is trained on.
    train = made[:NUM_TRAIN]
    held_out = made[NUM_TRAIN:]
    rng = random.Random(seed)
    demonstrations = [{**entry, "demonstration": careless_answer(entry, rng)} for entry in train]
    write_rows(folder / "data" / "train.jsonl", train)
    write_rows(folder / "data" / "eval.jsonl", held_out)
    write_rows(folder / "data" / "demonstrations.jsonl", demonstrations)
    build_model(folder / "init", [entry["question"] + entry["answer"] for entry in made], seed)
    right = sum(row["demonstration"] == row["answer"] for row in demonstrations) / len(
        demonstrations
    )
    print(
        f"{len(train)} problems, {len(held_out)} held out; {right:.0%} of the demonstrations are right"
    )


def report(folder: Path, seconds: float) -> None:
    """Print the table at the end: the figures on held-out problems before and after GRPO, and where the files are."""
    import rich
    import rich.table

    # Only steps with an evaluation have these figures: the first one is before training, the last one after it.
    history = read_metrics(folder / "metrics.jsonl")
    evaluations = [metrics for metrics in history if "eval/accuracy_greedy" in metrics]
    table = rich.table.Table(
        "", "before GRPO", "after GRPO", "change", title=f"{NUM_EVAL} held-out problems"
    )

    # First the shares, which are better when larger, and then what they cost, in nats.
    shares = {
        "accuracy, greedy": "eval/accuracy_greedy",
        "accuracy, sampled at temperature 1": "eval/accuracy_sampled",
        "one of 4 samples is right": "eval/pass_at_k",
    }
    nats = {
        "entropy per token": "eval/entropy",
        "exact KL to the reference, per response": "eval/kl_exact",
    }
    for name, key in shares.items():
        before = 100 * evaluations[0][key]
        after = 100 * evaluations[-1][key]
        table.add_row(name, f"{before:.1f} %", f"{after:.1f} %", f"{after - before:+.1f}")
    for name, key in nats.items():
        before = evaluations[0][key]
        after = evaluations[-1][key]
        table.add_row(name, f"{before:.3f} nats", f"{after:.3f} nats", f"{after - before:+.3f}")
    rich.print(table)
    print(
        f"{seconds:.0f} seconds. Curves: {folder / 'curves.png'}  metrics: {folder / 'metrics.jsonl'}"
    )
    print(f"Model: {folder / 'model'}  TensorBoard: tensorboard --logdir {folder / 'tensorboard'}")


@around("fused-rl demo", LOST)
def main(argv: list[str] | None = None) -> None:
    """Run `fused-rl demo`, which `make demo` calls."""
    folder, seed = begin("fused-rl demo", __doc__, argv)
    began = time.monotonic()
    warm_start(folder, seed)
    print("3/3 reinforcement: fused-rl grpo --config recipes/demo_grpo.yaml")
    grpo.train(grpo_config(folder, seed))
    report(folder / "grpo", time.monotonic() - began)


def begin(program: str, description: str | None, argv: list[str] | None) -> tuple[Path, int]:
    """Parse a recipe's command line and limit the process to one thread; return the output folder and the seed."""
    parser = tiny_model.Parser(prog=program, description=str(description).split("\n", 1)[0])
    parser.add_argument(
        "--seed", type=int, default=1, help="of problems, weights, data order and sampling"
    )
    folder = Path("runs") / program.removeprefix("fused-rl ")
    parser.add_argument("--output_dir", type=Path, default=folder)
    options = parser.parse_args(argv)
    engine.silence_libraries()
    # For so small a model a second thread is of little use, and if another process needs one of the two cores, the
    # threads that wait for each other take ten times as long.
    torch.set_num_threads(1)
    return options.output_dir, options.seed


def warm_start(folder: Path, seed: int) -> None:
    """Write the problems to `folder`/data, and train a model on the careless teacher's answers: `folder`/sft/model."""
    print("1/3 problems from reasoning-gym, an untrained model")
    prepare(folder, seed)
    print("2/3 warm start: fused-rl sft --config recipes/demo_sft.yaml")
    sft.train(sft_config(folder, seed))


def sft_config(
    folder: Path, seed: int, recipe: str = "demo_sft.yaml", rows: str = "demonstrations.jsonl"
) -> sft.SFTConfig:
    """Return the recipe of a warm start for the model and the rows that `prepare` has written to `folder`."""
    paths = {
        "model": folder / "init",
        "dataset": folder / "data" / rows,
        "output_dir": folder / "sft",
    }
    return parse(sft.SFTConfig, arguments(recipe, seed, paths))


def grpo_config(
    folder: Path, seed: int, recipe: str = "demo_grpo.yaml", model: str = "sft/model"
) -> grpo.GRPOConfig:
    """Return the recipe of GRPO for the files that `prepare` and the warm start have written to `folder`."""
    paths = {
        "model": folder / model,
        "dataset": folder / "data" / "train.jsonl",
        "eval_dataset": folder / "data" / "eval.jsonl",
        "output_dir": folder / "grpo",
    }
    return parse(grpo.GRPOConfig, arguments(recipe, seed, paths))


def arguments(recipe: str, seed: int, options: Mapping[str, object]) -> list[str]:
    """Return the command line of a recipe, whose paths and seed are replaced by `options` and `seed`."""
    # As on a command line, an option after --config replaces that of the file.
    spelled = [f"--{key}={value}" for key, value in options.items()]
    return ["--config", str(RECIPES / recipe), "--seed", str(seed), *spelled]


if __name__ == "__main__":
    main()
