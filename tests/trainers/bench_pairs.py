"""A process of its own, as TRL must not see a process group: each of its trainers beside ours for two steps.

python -m tests.trainers.bench_pairs FOLDER
"""

import json
import sys
from functools import partial
from pathlib import Path

from bench import trainer_peers, trainer_tasks, trainers
from bench.trainer_ours import SFT, Reward
from bench.trainer_steps import GRPO

SIZES = {"vocabulary": 200, "hidden": 128, "layers": 1, "prompt": 6, "dtype": "float32"}


def pairs():
    """(name, class of ours, what makes its config)."""
    yield "sft", SFT, partial(trainer_tasks.qwen_sft, completion=5, **SIZES)
    yield "reward", Reward, trainer_tasks.demo_rewards
    yield "grpo", GRPO, partial(trainer_tasks.qwen, response=4, prompts=2, **SIZES)


def changed(run) -> dict[str, list]:
    """The same trainer's dataset, a row of which has another token."""
    columns = dict(run.rows())
    name = next(iter(columns))
    first = columns[name][0]
    columns[name][0] = [2, *first[1:]] if isinstance(first, list) else f"w2 {first}"
    return columns


def main() -> None:
    trainers.prepare()
    found = {}
    for name, kind, make in pairs():
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        run = kind(make(folder).changed(lr=1e-3, steps=4))
        peer = trainer_peers.of(name, run, str(folder / "trl"))
        parts = [run.step() | peer.step() for _ in range(2)]
        peer.close()
        found[name] = trainers.compared(peer) | {"losses": len(peer.losses), "parts": sorted(parts[1])}

        # One that is given other ids is found out.
        class Other(type(peer)):
            def rows(self):
                return changed(super())

        run.close()
        other = Other(run, str(folder / "other"))
        other.step()
        other.close()
        found[name]["other_is_seen"] = not other.same_ids()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
