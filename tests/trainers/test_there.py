"""A run checks that its model and datasets exist before it reads them: here, in the Hub's cache, on a fake Hub."""

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from fused_rl.trainers.options import InputError
from fused_rl.trainers.run import there


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`hub(error)` is what the Hub answers from then on; returns what it was asked."""
    asked = []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def answers(error):
        def ask(_, name, *, repo_type, revision, timeout):
            asked.append((name, repo_type, revision, timeout))
            if error is not None:
                raise error

        monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", ask)
        return asked

    return answers


NO_REPOSITORY, NO_REVISION = (kind.__new__(kind) for kind in (RepositoryNotFoundError, RevisionNotFoundError))
ANSWERS = [
    (ConnectionError("no route"), "model=org/m does not exist here, and not on the Hub: ConnectionError: no route"),
    (NO_REPOSITORY, "model=org/m does not exist here, and not on the Hub: RepositoryNotFoundError"),
    (NO_REVISION, "model=org/m does not exist here, and not on the Hub: RevisionNotFoundError"),
]


@pytest.mark.parametrize(("error", "line"), ANSWERS)
def test_a_model_that_the_hub_does_not_have_is_one_line(hub, error, line):
    asked = hub(error)
    with pytest.raises(InputError, match=line):
        there.check("org/m", "v2", [])
    assert asked == [("org/m", "model", "v2", there.PATIENCE)]


@pytest.mark.parametrize("error", [ConnectionError("no route"), NO_REPOSITORY])
def test_a_model_that_was_read_before_needs_no_hub(hub, tmp_path, error):
    hub(error)
    (tmp_path / "cache" / "models--org--m").mkdir(parents=True)
    there.check("org/m", None, [])


def test_datasets_are_looked_for_as_well(hub, files):
    model, dataset = files
    there.check(model, None, [dataset, None])
    hub(NO_REPOSITORY)
    with pytest.raises(InputError, match="dataset=org/d does not exist here, and not on the Hub"):
        there.check(model, None, ["org/d"])
    with pytest.raises(InputError, match="dataset file none.jsonl does not exist"):
        there.check(model, None, ["none.jsonl"])
