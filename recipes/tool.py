"""`python -m fused_rl.recipes.tool`: GRPO of a model that learns to use a calculator.

1. A small Llama with random weights is warm-started on conversations. In seven of ten the question is answered by a
   random guess; in three of ten the answer is a call such as `calc 57 + 86`, to which the calculator replies.
2. In GRPO the responses that call the calculator are right and the guesses are not, so calls are reinforced.

The calculator's reply is part of the response, written as the model's chat template writes it, but not trained on.
"""

import random
import re
import time
from pathlib import Path

from fused_rl.recipes import demo, tiny_model
from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.rollouts.turns import Conversation
from fused_rl.trainers.rollouts.types import Sampler, after_turn, of_turn
from fused_rl.trainers.run.command import LOST, around
from fused_rl.trainers.run.logger import read_metrics

CALL = re.compile(r"calc (\d+) \+ (\d+)")
NUM_WARM, NUM_TRAIN, NUM_EVAL = 2700, 1900, 200
# The share of the demonstrations that call the calculator.
CALLS = 0.3


class Calculator(Sampler):
    """A sampler of responses in which the policy may call the calculator once."""

    def __init__(self, built, tokenizer):
        """Wrap the sampler that the options describe, `built`, which generates the turns of the policy."""
        super().__init__(built, tokenizer)
        self.conversation = Conversation(tokenizer)

    def sample(self, prompts, sampling):
        """Return one response per prompt: an answer, or a call, its result and an answer."""
        # The first turn of all responses, which has room for a call.
        everyone = range(len(prompts))
        first = self.built.sample(prompts, of_turn(sampling, 0, everyone, max_new_tokens=12))
        responses = []
        called = []
        for i, turn in enumerate(first):
            call = CALL.fullmatch(self.conversation.text(turn).strip())
            said = []
            # The reply is in the tokens of the chat template, so that the model reads what it was warm-started on.
            if call is not None:
                result = int(call[1]) + int(call[2])
                said = self.conversation.reply(turn, str(result), role="tool")
                called.append(i)
            responses.append(after_turn(None, turn, said))
        # The second turn of those that called, which reads the calculator's reply.
        longer = [prompts[i] + responses[i].ids for i in called]
        second = self.built.sample(longer, of_turn(sampling, 1, called, max_new_tokens=6))
        for i, turn in zip(called, second, strict=True):
            responses[i] = after_turn(responses[i], turn)
        return responses


def right(response: str, row: dict) -> float:
    """Return 1 if the last turn is the right sum, else 0."""
    return float(response.split("<assistant>")[-1].strip() == row["answer"])


def prepare(folder: Path, seed: int) -> None:
    """Write questions, conversations for the warm start, and a model with random weights and a chat template."""
    rng = random.Random(seed)
    # All sums have three digits, so that a small model soon learns to copy them.
    pairs = [(a, b) for a in range(10, 100) for b in range(100 - a, 100) if b >= 10]
    rng.shuffle(pairs)
    rows = [{"question": f"{a} + {b}", "answer": str(a + b)} for a, b in pairs]
    # The questions of the warm start are not used again in GRPO, nor are those that are held out.
    demonstrations = []
    for row in rows[:NUM_WARM]:
        messages = [{"role": "user", "content": row["question"]}]
        if rng.random() < CALLS:
            messages.append({"role": "assistant", "content": f"calc {row['question']}"})
            messages.append({"role": "tool", "content": row["answer"]})
            messages.append({"role": "assistant", "content": row["answer"]})
        else:
            messages.append({"role": "assistant", "content": str(rng.randrange(100, 199))})
        demonstrations.append({"messages": messages})
    begin, end = NUM_WARM, NUM_WARM + NUM_TRAIN
    write_rows(folder / "data" / "warm.jsonl", demonstrations)
    write_rows(folder / "data" / "train.jsonl", rows[begin:end])
    write_rows(folder / "data" / "eval.jsonl", rows[end : end + NUM_EVAL])
    texts = tiny_model.texts_of(demonstrations)
    tokenizer = tiny_model.learn_tokenizer(texts, 280, chat=True)
    sizes = {"layers": 2, "hidden_size": 128, "positions": 64}
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
    found = [metrics for metrics in history if "eval/accuracy_greedy" in metrics]
    for name in ("greedy", "sampled"):
        first, last = (100 * found[place][f"eval/accuracy_{name}"] for place in (0, -1))
        print(f"right, {name}: {first:.1f} % before, {last:.1f} % after")
    print(f"{time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
