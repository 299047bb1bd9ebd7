"""A process of its own, as TRL must not see a process group: a few steps of both trainers, on tiny models.

python -m tests.trainers.bench_pairs
"""

import functools
import json

from bench import trainers


def main() -> None:
    tiny = functools.partial(trainers.large_grpo, vocabulary=200, hidden_size=64, dtype="float32")
    rows = []
    for op, make in (("sft", trainers.demo_sft), ("reward", trainers.demo_rewards), ("grpo", tiny)):
        *_, found = trainers.run_task(op, "tiny", trainers.Task(make, 3, 0), [1])
        rows += found
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
