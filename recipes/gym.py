"""reasoning-gym's problems and their scores: `--verifiers fused_rl.recipes.gym:score`.

The rows are those of `reasoning_gym.create_dataset(…)`, with question, answer and metadata.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable

from fused_rl.trainers.base.text import InputError


def import_reasoning_gym():
    """Return reasoning_gym, which takes over a second to import."""
    # One generator of puzzles needs pycosat, which is C source without wheels.
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
    """Return the `score_answer` of a dataset; each call of reasoning_gym's would make the whole dataset again."""
    gym = import_reasoning_gym()
    if dataset not in gym.factory.DATASETS:
        raise InputError(f"reasoning_gym has no dataset {dataset!r:.80}")
    return gym.get_score_answer_fn(dataset)


def score(response: str, row: dict) -> float:
    """Return 0 to 1, as the generator of the row's dataset judges the response."""
    dataset = (row.get("metadata") or {}).get("source_dataset")
    if not dataset:
        what = "metadata.source_dataset is missing, by which reasoning_gym's datasets are found"
        raise InputError(f"{what}; the row has {sorted(row)}")
    judge = judge_of(dataset)
    try:
        return float(judge(response.strip(), row))
    except Exception:  # the generator's own code, on a response that makes no sense: a wrong answer
        return 0.0
