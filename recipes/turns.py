"""`python -m fused_rl.recipes.turns`: GRPO of a model that learns to guess a digit in three turns.

After each guess the environment, which is this file, says whether the digit is smaller (<), larger (>) or the one (=).
Its answer is in the response, where the next guess reads it, and is not trained. A model of random weights finds the
digit in one game of six; guessing the middle finds it in seven of ten.
"""

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

import torch

from fused_rl.recipes import demo
from fused_rl.trainers import grpo
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.rollouts.types import Sampler, after_turn, of_turn
from fused_rl.trainers.run.command import LOST, around
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.run.parse import parse

TURNS = 3


class Guessing(Sampler):
    """A sampler of whole games: the policy guesses, one token a turn, and the environment answers."""

    def sample(self, prompts, sampling):
        """One game per prompt; those of one prompt are about one digit."""
        digits = [random.Random(str(prompt)).randrange(10) for prompt in prompts]
        games = [None] * len(prompts)
        going = list(range(len(prompts)))
        for turn in range(TURNS):
            contexts = [prompts[i] + (games[i].ids if turn else []) for i in going]
            guesses = self.built.sample(contexts, of_turn(sampling, turn, going, max_new_tokens=1))
            over = set()
            for i, guess in zip(going, guesses, strict=True):
                said = answer(self.tokenizer.decode(guess.ids), digits[i])
                games[i] = after_turn(
                    games[i], guess, self.tokenizer(said, add_special_tokens=False).input_ids
                )
                over |= {i} if said == "=" else set()
            going = [i for i in going if i not in over]
        return [replace(game, finish="stop") for game in games]


def answer(guess: str, digit: int) -> str:
    """Return the environment's answer to a guess."""
    if guess not in set("0123456789"):
        return "?"
    return "=" if int(guess) == digit else "<" if digit < int(guess) else ">"


def won(response: str, row: dict) -> float:
    """1 where the digit was found: every second character is the environment's, whatever the policy says."""
    return float("=" in response[1::2])


def prepare(folder: Path, seed: int) -> None:
    """Games, which have a number and no digit that could be read off it, and a model of random weights."""
    numbers = [{"prompt": f"{number:04d}"} for number in range(2000)]
    random.Random(seed).shuffle(numbers)
    write_rows(folder / "data" / "train.jsonl", numbers[:1800])
    write_rows(folder / "data" / "eval.jsonl", numbers[1800:])
    demo.build_model(folder / "init", list("0123456789<>=?"), seed)


@around("turns", LOST)
def main(argv: list[str] | None = None) -> None:
    """`python -m fused_rl.recipes.turns`."""
    parser = argparse.ArgumentParser(prog="turns", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/turns"))
    options = parser.parse_args(argv)
    began, folder = time.monotonic(), options.output_dir
    engine.quiet()
    torch.set_num_threads(1)  # of so small a model two threads win little
    prepare(folder, options.seed)
    grpo.train(config_of(folder, options.seed))
    found = [
        m for m in read_metrics(folder / "grpo" / "metrics.jsonl") if "eval/accuracy_sampled" in m
    ]
    first, last = (f"{100 * found[at]['eval/accuracy_sampled']:.1f} %" for at in (0, -1))
    print(
        f"found in three guesses: {first} before, {last} after; {time.monotonic() - began:.0f} seconds"
    )


def config_of(folder: Path, seed: int) -> grpo.GRPOConfig:
    """The recipe on what `prepare` has left in `folder`."""
    data = folder / "data"
    paths = {
        "model": folder / "init",
        "dataset": data / "train.jsonl",
        "eval_dataset": data / "eval.jsonl",
    }
    paths["output_dir"] = folder / "grpo"
    return parse(grpo.GRPOConfig, demo.arguments("turns_grpo.yaml", seed, paths))


if __name__ == "__main__":
    main()
