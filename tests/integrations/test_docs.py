"""The examples of docs/integrations.md, each run as written; those of verl and OpenRLHF where these are installed."""

import pytest

from tests.hosts import cases
from tests.trainers import tiny


# An example imports torch in a process of its own.
@pytest.mark.slow
@pytest.mark.parametrize("section", ["TRL", "transformers", "open-instruct"])
def test_an_example_runs_as_written(section, tmp_path):
    if section != "open-instruct":
        pytest.importorskip(section.lower())
    tiny.model_folder(tmp_path / "model", chat=False)  # stands for the reader's own
    cases.run_fresh(cases.documented_example(section), tmp_path)
