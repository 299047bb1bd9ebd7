"""The options `--verifiers`, `--verifier_weights` and `--solved_at`: three lists side by side.

verifiers: [math, my_module:f, 'regex:answer: (\\d+)', reward_model:runs/rm/model]
verifier_weights: [1, 0.2, 0.1, 0.5]
solved_at: [null, 0.5, null, null]
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import pydantic

from ..base.options import Finite, Options
from ..base.text import InputError

# The kind of scorer whose model is an input of the run, like the policy: it is hashed and compared on resume.
REWARD_MODEL = "reward_model"
ScorersLike: TypeAlias = Sequence[Callable[..., object] | str] | None
"""Scorers in Python: names as in `verifiers`, and functions."""
Config = TypeVar("Config", bound="ScorerConfig")


class ScorerConfig(Options):
    """The scorers of responses, and their weights."""

    verifiers: str | list[str] | None = None
    """One or a list: math, exact_match, exact_match:ignore_case, regex:<pattern>, format, length:<tokens>,
    module:function, reward_model:<folder> (docs/verifiers.md). The reward is the weighted sum of their scores."""
    verifier_weights: list[Finite] | None = None
    """Weight of each verifier's score in the reward; 0 only logs the score. None is 1 for each."""
    solved_at: list[Finite | None] | None = None
    """Score from which a response counts as solved, for each verifier; null means the verifier's usual one."""
    answer_column: str | None = None
    """Answers for the verifiers: a column, or a path into nested columns such as reward_model.ground_truth; None takes
    ground_truth, answer or solution. Of `... #### 42`, the part after the marks is read."""

    @pydantic.field_validator("verifiers")
    @classmethod
    def _listed(cls, value: str | list[str] | None) -> list[str] | None:
        return [value] if isinstance(value, str) else value

    def reward_models(self) -> dict[str, str]:
        """Return the folders of the reward models that score, by the verifier that names them."""
        named = [text for text in self.verifiers or [] if isinstance(text, str)]
        begin = f"{REWARD_MODEL}:"
        return {text: text.removeprefix(begin) for text in named if text.startswith(begin)}


def with_scorers(config: Config, scorers: ScorersLike) -> Config:
    """Return the config with the scorers that Python gave."""
    if scorers is None:
        return config
    if config.verifiers is not None:
        raise InputError(
            f"verifiers={config.verifiers} and scorers={scorers} are both given; give one of them"
        )
    return config.replace(
        verifiers=[scorers] if isinstance(scorers, str) or callable(scorers) else [*scorers]
    )
