"""What a run names is looked for before anything is read: here, in the Hub's cache, on a fake of the Hub."""

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.commands import eval
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.options.source import Source
from fused_rl.trainers.run import folder as run_folder
from fused_rl.trainers.run import there


def of_hub(kind):
    """An error of the Hub's, without the response that it comes with."""
    return kind.__new__(kind)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`hub(error)` is what the Hub answers from then on; returns what it was asked."""
    asked = []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def answers(error):
        def ask(_, name, *, revision, timeout):
            asked.append((name, revision, timeout))
            if error is not None:
                raise error

        for method in ("model_info", "dataset_info"):
            monkeypatch.setattr(huggingface_hub.HfApi, method, ask)
        return asked

    return answers


MODEL = Source("model", "model=org/m", "org/m", "v2")
ROWS = Source("rows", "dataset=org/d", "org/d")


@pytest.mark.parametrize("source", [MODEL, ROWS])
def test_a_name_without_a_network_is_one_line_unless_it_was_read_before(hub, tmp_path, source):
    asked = hub(ConnectionError("Name or service not known"))
    with pytest.raises(InputError, match=f"^{source.said} is neither .*Hub cannot be asked: .*not known; look at"):
        there.check([source])
    (tmp_path / "cache" / {"model": "models--org--m", "rows": "datasets--org--d"}[source.kind]).mkdir(parents=True)
    there.check([source])
    assert asked == [(source.name, source.revision, there.PATIENCE)] * 2


def test_what_was_read_before_is_read_again_without_a_token(hub, tmp_path):
    hub(of_hub(RepositoryNotFoundError))
    (tmp_path / "cache" / "models--org--m").mkdir(parents=True)
    there.check([MODEL])


def test_a_home_that_readers_do_not_know_is_not_there(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="dataset file ~/d.jsonl does not exist"):
        there.check([Source("rows", "", "~/d.jsonl")])


def test_what_the_hub_says_is_told(hub):
    hub(None)
    there.check([MODEL, ROWS])
    hub(of_hub(RepositoryNotFoundError))
    with pytest.raises(InputError, match="dataset=org/d is neither there nor on the Hub, or is private"):
        there.check([ROWS])
    hub(of_hub(RevisionNotFoundError))
    with pytest.raises(InputError, match="model=org/m is on the Hub, but has no revision v2"):
        there.check([MODEL])


def test_what_cannot_be_on_the_hub_is_not_asked_for(files):
    model, dataset = files
    there.check([Source("model", "", model), Source("rows", "", dataset), Source("scorer", "", "no_module:f")])
    with pytest.raises(InputError, match="model=runs/sft/model is neither there, nor can it be a name on the Hub"):
        there.check([Source("model", "model=runs/sft/model", "runs/sft/model")])
    with pytest.raises(InputError, match="dataset file none.jsonl does not exist"):
        there.check([Source("rows", "dataset=none.jsonl", "none.jsonl")])


def test_every_command_looks_before_it_reads(hub, files, tmp_path):
    hub(TimeoutError("timed out"))
    model, dataset = files
    away = "org/m is neither there nor in the Hub's cache, and the Hub cannot be asked: TimeoutError: timed out"
    common = ["--model", "org/m", "--dataset", dataset]
    with pytest.raises(SystemExit, match=f"fused-rl grpo: error: model={away}"):
        grpo.main([*common, "--output_dir", str(tmp_path / "run"), "--eval_size=0", "--dry_run"])
    with pytest.raises(SystemExit, match=f"fused-rl sft: error: model={away}"):
        sft.main([*common, "--output_dir", str(tmp_path / "run"), "--eval_size=0", "--steps=1", "--batch_size=2"])
    run_folder.release()
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit, match=f"fused-rl eval: error: model={away}"):
        eval.main([*common])
