"""Which responses of a run are looked at: drawn by a generator of their own, so that the run's stay as they are."""

import random
from typing import NamedTuple

from fused_rl.trainers.rollouts.types import Rollout, Sample


class Shown(NamedTuple):
    """A response, and what it earned."""

    sample: Sample
    reward: float


def drawn_from(rollout: Rollout, count: int, seed: object, among: int | None = None) -> list[Shown]:
    """`count` of a rollout's samples, or all, each at most once; equal seeds are equal places, the first ones first.

    `among` the first so many of them; None is all.
    """
    among = len(rollout.samples) if among is None else among
    places = random.Random(str(seed)).sample(range(among), min(count, among))
    return [Shown(rollout.samples[i], rollout.rewards[i].item()) for i in places]


def as_rows(of: str, shown: list[Shown], tokenizer) -> list[dict[str, object]]:
    """Lines of samples.jsonl: where they are `of`, and their text, special tokens included."""
    rows = []
    for sample, reward in shown:
        texts = {"prompt": tokenizer.decode(sample.prompt_ids), "response": tokenizer.decode(sample.response.ids)}
        rows.append({"of": of, **texts, "reward": reward})
    return rows
