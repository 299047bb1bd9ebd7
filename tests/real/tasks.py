"""Questions that a model of 135M parameters answers now and then, as the rows of each trainer, and their scorer."""

import itertools
import os
import re
import signal

# A question, the right answer, a wrong one.
QUESTIONS = [
    ("What is 3 + 4?", "7", "8"),
    ("What is the capital of France?", "Paris", "London"),
    ("What is the opposite of hot?", "cold", "warm"),
    ("Which is an animal: table, dog or car?", "dog", "car"),
    ("Which is larger, 8 or 3?", "8", "3"),
    ("Which is a colour: seven, Monday or green?", "green", "Monday"),
    ("What is 9 - 4?", "5", "6"),
    ("Was regnet es, Wasser oder Öl? 🌧", "Wasser", "Öl"),
]
HELD_OUT = [
    ("What is 2 + 5?", "7", "9"),
    ("What is the capital of Italy?", "Rome", "Milan"),
    ("What is the opposite of up?", "down", "left"),
    ("Which is a fruit: chair, apple or shoe?", "apple", "shoe"),
]
# What stands before a question: nothing, a system prompt, or an earlier turn.
BEFORE = [
    [],
    [{"role": "system", "content": "Answer in one short sentence."}],
    [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi, ask me."}],
]
# The number of the call of the scorer that kills its process.
KILLED_AT = "FUSED_RL_KILLED_AT"
CALLS = itertools.count(1)


def _said(answer: str) -> list[dict]:
    return [{"role": "assistant", "content": f"The answer is {answer}."}]


def problems(questions=QUESTIONS) -> list[dict]:
    """Rows of a prompt and its answer."""
    rows = []
    for (question, right, _), before in zip(questions, itertools.cycle(BEFORE)):
        asked = {"role": "user", "content": question}
        rows.append({"prompt": [*before, asked], "answer": right})
    return rows


def demonstrations(questions=QUESTIONS) -> list[dict]:
    """Rows of a prompt and a completion."""
    return [
        {"prompt": row["prompt"], "completion": _said(row["answer"])} for row in problems(questions)
    ]


def pairs() -> list[dict]:
    """Rows of a prompt, a chosen and a rejected response."""
    return [
        {"prompt": row["prompt"], "chosen": _said(right), "rejected": _said(wrong)}
        for row, (_, right, wrong) in zip(problems(), QUESTIONS, strict=True)
    ]


def marked() -> list[dict]:
    """Rows of a prompt and a response, every second of which is a bad one."""
    rows = []
    for i, pair in enumerate(pairs()):
        side = "rejected" if i % 2 else "chosen"
        rows.append({"prompt": pair["prompt"], "completion": pair[side], "label": i % 2 == 0})
    return rows


def last_word(prompts, completions, answer, **columns) -> list[float]:
    """A reward function as TRL calls it: 1 where a response ends in the answer."""
    # The process ends in the middle of a step, after its rollout and before its update.
    if os.environ.get(KILLED_AT) == str(next(CALLS)):
        os.kill(os.getpid(), signal.SIGKILL)
    words = [re.findall(r"\w+", turns[0]["content"]) for turns in completions]
    return [float(word[-1:] == [right]) for word, right in zip(words, answer, strict=True)]
