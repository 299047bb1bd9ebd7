"""A scorer for the problems of reasoning-gym: `--verifiers fused_rl.recipes.gym:score`.

The rows are those of `reasoning_gym.create_dataset(…)`, which have question, answer and metadata.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable

from fused_rl.trainers.base.text import InputError


def import_reasoning_gym():
    """Return the module reasoning_gym, whose import takes over a second; raise `InputError` if it is not installed."""
    # One of its generators of puzzles needs pycosat, which has no wheels and must be compiled. An empty module in its
    # place lets all the others be imported.
    if importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = types.ModuleType("pycosat")
    try:
        import reasoning_gym
    except ImportError as error:
        remedy = "pip install reasoning-gym==0.1.25"
        raise InputError(f"reasoning_gym cannot be imported ({error}); {remedy}") from error
    return reasoning_gym


@functools.cache
def judge_of(dataset: str) -> Callable[..., float]:
    """Return the function `score_answer` of one of reasoning_gym's datasets, by the name of the dataset.

    It is cached, because reasoning_gym makes the whole dataset to return its function.
    """
    gym = import_reasoning_gym()
    if dataset not in gym.factory.DATASETS:
        raise InputError(f"reasoning_gym has no dataset {dataset!r:.80}")
    return gym.get_score_answer_fn(dataset)


def score(response: str, row: dict) -> float:
    """Return the score of a response, from 0 to 1, by the generator that made the row's problem.

    Raises:
        InputError: the row does not say which dataset it is from, or reasoning_gym has no dataset of that name.
    """
    dataset = (row.get("metadata") or {}).get("source_dataset")
    if not dataset:
        what = "metadata.source_dataset is missing, by which reasoning_gym's datasets are found"
        raise InputError(f"{what}; the row has {sorted(row)}")
    judge = judge_of(dataset)
    try:
        return float(judge(response.strip(), row))
    # The generator's own code may fail on a response that makes no sense, and such a response is a wrong answer.
    except Exception:
        return 0.0
