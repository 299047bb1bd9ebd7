"""The verifier `reasoning_gym`: the `score_answer` of the dataset that made the row, in the run's process."""

import difflib
import sys
import types
from collections.abc import Sequence

from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.types import Sample
from fused_rl.trainers.scorers.answers import answer_of
from fused_rl.trainers.scorers.builtin import Limited


def import_reasoning_gym():
    """reasoning_gym, which takes over a second to import; its logic puzzles need pycosat, arithmetic does not."""
    try:
        import pycosat  # noqa: F401
    except ImportError:
        # pycosat is C source without wheels, and reasoning_gym imports it whatever is used: without a compiler an
        # empty module stands in, and only the one logic-puzzle generator that calls it fails.
        sys.modules["pycosat"] = types.ModuleType("pycosat")
    try:
        import reasoning_gym
    except ImportError as error:
        raise InputError(f"reasoning_gym cannot be imported ({error}); pip install reasoning-gym==0.1.25") from error
    return reasoning_gym


class ReasoningGymVerifier(Limited):
    """The `score_answer` of the reasoning-gym dataset that made the row."""

    def __init__(self, dataset: str = "", answer_column: str | None = None, **judged):
        name = f"reasoning_gym:{dataset}" if dataset else "reasoning_gym"
        super().__init__(**{"name": name, "solved_at": 1.0} | judged)
        self.dataset = dataset
        self.answer_column = answer_column
        self.tried = set()
        gym = import_reasoning_gym()
        self.scorer = gym.get_score_answer_fn
        self.datasets = gym.factory.DATASETS
        if dataset:
            self._known(dataset)

    def check(self, row: dict) -> None:
        """The row must have an answer, and name a dataset; of each dataset one row's own answer is scored."""
        answer = answer_of(row, self.answer_column)
        dataset = self._dataset_of(row)
        if dataset in self.tried:
            return
        self.tried.add(dataset)
        try:
            self.score(answer, row)
        except Exception as error:
            what = f"reasoning_gym:{dataset} cannot score the row's own answer"
            raise InputError(f"{what}: {in_a_line(error)}") from error

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        try:
            return self.score(sample.text, sample.row)
        except Exception as error:  # of the dataset's generator, on nonsense: a wrong answer, and told
            self.broken.append(f"{sample.where} raised {in_a_line(error)}"[:200])
            return 0.0

    def _dataset_of(self, row: dict) -> str:
        metadata = row.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            came = f"{metadata!r:.80} ({type(metadata).__name__})"
            raise InputError(f"column 'metadata' is {came}; reasoning_gym expects an object")
        dataset = self.dataset or (metadata or {}).get("source_dataset")
        if not dataset:
            raise InputError("metadata has no source_dataset; name it with reasoning_gym:<dataset>")
        return self._known(dataset)

    def _known(self, dataset) -> str:
        if isinstance(dataset, str) and dataset in self.datasets:
            return dataset
        near = difflib.get_close_matches(str(dataset), self.datasets, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"verifier {self.name!r}: reasoning_gym has no dataset {dataset!r:.80}{hint}")

    def score(self, response: str, row: dict) -> float:
        """0 to 1, as the dataset's generator judges a response's text."""
        entry = {**row, "answer": answer_of(row, self.answer_column), "metadata": row.get("metadata") or {}}
        return float(self.scorer(self._dataset_of(row))(response.strip(), entry))
