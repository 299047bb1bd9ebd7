"""`python -m fused_rl.recipes.turns`: GRPO of a model that learns to guess a digit in three turns.

After each guess the environment, which is this file, says that the digit is smaller (<), larger (>) or found (=). Its
answer is part of the response, where the next guess can read it, but it is not trained on. A model with random weights
finds the digit in about one game of six; a player who always guesses the middle finds it in seven of ten.
"""

import random
import time
from dataclasses import replace
from pathlib import Path

from fused_rl.recipes import demo
from fused_rl.trainers import grpo
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.rollouts.types import Sampler, after_turn, of_turn
from fused_rl.trainers.run.command import LOST, around
from fused_rl.trainers.run.logger import read_metrics

TURNS = 3


class Guessing(Sampler):
    """A sampler of whole games: in each turn the policy guesses with one token, and the environment answers."""

    def sample(self, prompts, sampling):
        """Return one game per prompt, as a response that has the guesses and the answers.

        Args:
            prompts: lists of token ids; a group's games have equal prompts.
            sampling: the options of the sampling, with a seed per prompt.
        """
        # Games with equal prompts are about the same digit, so a group's rewards compare how well that was guessed.
        digits = [random.Random(str(prompt)).randrange(10) for prompt in prompts]
        games = [None] * len(prompts)
        going = list(range(len(prompts)))
        for turn in range(TURNS):
            # All games that are not over are sampled together, each from its prompt and its turns so far.
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
        # A game ends by its rules, so none of them counts as cut at the length limit.
        return [replace(game, finish="stop") for game in games]


def answer(guess: str, digit: int) -> str:
    """Return the environment's answer to a guess: =, <, >, or ? if the guess is not a digit."""
    if guess not in set("0123456789"):
        return "?"
    return "=" if int(guess) == digit else "<" if digit < int(guess) else ">"


def won(response: str, row: dict) -> float:
    """Return 1 if the digit was found, else 0."""
    # Every second character is the environment's, so a policy that says "=" itself wins nothing.
    return float("=" in response[1::2])


def prepare(folder: Path, seed: int) -> None:
    """Write the rows of the games and a model with random weights into a folder."""
    # The prompt is only the number of the game: the digit is hidden, as it follows from a hash of the prompt.
    numbers = [{"prompt": f"{number:04d}"} for number in range(2000)]
    random.Random(seed).shuffle(numbers)
    write_rows(folder / "data" / "train.jsonl", numbers[:1800])
    write_rows(folder / "data" / "eval.jsonl", numbers[1800:])
    demo.build_model(folder / "init", list("0123456789<>=?"), seed)


@around("turns", LOST)
def main(argv: list[str] | None = None) -> None:
    """Run `python -m fused_rl.recipes.turns`."""
    folder, seed = demo.begin("turns", __doc__, argv)
    began = time.monotonic()
    prepare(folder, seed)
    grpo.train(demo.grpo_config(folder, seed, "turns_grpo.yaml", model="init"))
    found = [
        m for m in read_metrics(folder / "grpo" / "metrics.jsonl") if "eval/accuracy_sampled" in m
    ]
    first, last = (f"{100 * found[at]['eval/accuracy_sampled']:.1f} %" for at in (0, -1))
    print(
        f"found in three guesses: {first} before, {last} after; {time.monotonic() - began:.0f} seconds"
    )


if __name__ == "__main__":
    main()
