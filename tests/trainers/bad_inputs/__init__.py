"""Input that a trainer must refuse, as a table: a row is what is wrong and the line that is expected (a regex).

A case runs in a folder of its own with a `model`, `rows.jsonl`, `pairs.jsonl`, and `run`, the folder of a finished run
that `--overwrite` would replace. `spoil` changes files there; `options` come after those that would train well.
"""

from tests.trainers.bad_inputs.cases import Case
from tests.trainers.bad_inputs.data import DATA
from tests.trainers.bad_inputs.models import MODELS
from tests.trainers.bad_inputs.options import OPTIONS
from tests.trainers.bad_inputs.places import PLACES
from tests.trainers.bad_inputs.verifiers import JUDGES, VERIFIERS

__all__ = ["CASES", "JUDGES", "Case"]

CASES = {
    "options": OPTIONS,
    "models": MODELS,
    "data": DATA,
    "verifiers": VERIFIERS,
    "output_dir": PLACES,
}
