"""`python -m fused_rl.recipes.tool`: GRPO of a model that plays with an environment, which is a number to be guessed.

A small Llama with random weights is warm-started on games, in seven of ten of which each guess is random. In GRPO the
games that are won within three guesses are reinforced, so the model learns to halve what is left.
"""

import random
import time
from pathlib import Path

from transformers.utils.chat_template_utils import get_json_schema

from fused_rl.recipes import demo, tiny_model
from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.run.command import LOST, around
from fused_rl.trainers.run.logger import read_metrics

NUMBERS, GUESSES = range(1, 8), 3
# The share of the games of the warm start in which guesses make sense.
SENSIBLE = 0.3
# A tool is its name and its description, and a call its name and its arguments.
TEMPLATE = (
    "{% for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}{% endfor %}"
    "{% for message in messages %}{{ '<' + message.role + '>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<call>' + call.function.name + ' ' + call.function.arguments | tojson }}{% endfor %}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESPONSE = {
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>\w+) ",
            "close": "<eos>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}


class Number:
    """The number of a row, to be guessed."""

    def reset(self, secret: int, **row) -> None:
        """Begin a game."""
        self.secret, self.guesses = secret, []

    def get_reward(self) -> float:
        """Return 1 if the number was found in time, else 0."""
        return float(self.secret in self.guesses[:GUESSES])

    def guess(self, number: int) -> str:
        """Guess it.

        Args:
            number: The guess.
        """
        self.guesses.append(number)
        return "right" if number == self.secret else "more" if number < self.secret else "less"


def game(secret: int, rng: random.Random) -> dict:
    """Return a game as a conversation, in which each guess is random, or all of them make sense."""
    number, messages = Number(), [{"role": "user", "content": "Play"}]
    number.reset(secret)
    makes_sense, left = rng.random() < SENSIBLE, [*NUMBERS]
    while len(number.guesses) < GUESSES and secret not in number.guesses:
        guess = left[len(left) // 2] if makes_sense else rng.choice(NUMBERS)
        call = {"type": "function", "function": {"name": "guess", "arguments": {"number": guess}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "guess", "content": number.guess(guess)})
        left = [other for other in left if (other < guess) == (secret < guess) and other != guess]
    messages.append({"role": "assistant", "content": "over"})
    return {"messages": messages, "tools": [get_json_schema(number.guess)]}


def prepare(folder: Path, seed: int) -> None:
    """Write games for the warm start, numbers to be guessed, and a model with random weights and a chat template."""
    rng = random.Random(seed)
    games = [game(rng.choice(NUMBERS), rng) for _ in range(2000)]
    write_rows(folder / "data" / "warm.jsonl", games)
    rows = [{"prompt": "Play", "secret": number} for number in NUMBERS]
    write_rows(folder / "data" / "train.jsonl", rows * 100)
    write_rows(folder / "data" / "eval.jsonl", rows * 10)
    tokenizer = tiny_model.learn_tokenizer(tiny_model.texts_of(games), 320, chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "<call>"]})
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    sizes = {"layers": 2, "hidden_size": 128, "positions": 128}
    tiny_model.save_llama(folder / "init", tokenizer, seed, **sizes)


@around("tool", LOST)
def main(argv: list[str] | None = None) -> None:
    """Run `python -m fused_rl.recipes.tool`."""
    folder, seed = demo.begin("tool", __doc__, argv)
    began = time.process_time()
    prepare(folder, seed)
    sft.train(demo.sft_config(folder, seed, "tool_sft.yaml", rows="warm.jsonl"))
    grpo.train(demo.grpo_config(folder, seed, "tool_grpo.yaml"))
    history = read_metrics(folder / "grpo" / "metrics.jsonl")
    curve = [m["eval/accuracy_sampled"] for m in history if "eval/accuracy_sampled" in m]
    print("found in three guesses, sampled:", ", ".join(f"{100 * share:.1f} %" for share in curve))
    print(f"{time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
