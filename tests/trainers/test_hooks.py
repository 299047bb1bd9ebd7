"""The user's own code in a run: `on_step`, a schedule, an order of the rows."""

import importlib
import io
import json
import random
import re
import shutil
import traceback
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base import optim
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.order import RowOrder
from fused_rl.trainers.run.hooks import Step
from tests.distributed import run_distributed
from tests.trainers import tiny
from tests.trainers.runs import (
    assert_equal_runs,
    assert_same_weights,
    grpo_config,
    names,
    run_config,
    undrawn,
)

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()


def summing(step: Step) -> dict[str, float]:
    """A hook that draws numbers, changes the model's mode, and returns a figure of all steps so far."""
    torch.rand(3), random.random()
    step.model.train(not step.model.training)
    assert step.number == step.history[-1]["step"]
    return {
        "own/sum": sum(entry.get("lr", 0.5) + entry.get("own/sum", 0) for entry in step.history)
    }


def falling(update: int, total: int) -> float:
    return 1 - 0.75 * update / total


def test_own_code_changes_nothing_but_what_it_returns(files, whole, tmp_path):
    sft.train(run_config(files, tmp_path / "run"), on_step=summing)
    assert_same_weights(tmp_path / "run", whole)
    metrics = tiny.untimed(tiny.read_metrics(tmp_path / "run"))
    assert [entry.pop("own/sum") > 0 for entry in metrics] == [True] * 5
    assert metrics == tiny.untimed(tiny.read_metrics(whole))


# The end of a run.


def failing_at(number: int, error: BaseException):
    def fail(step: Step) -> None:
        if step.number == number:
            raise error

    return fail


@pytest.mark.parametrize(("step", "error"), [(2, ZeroDivisionError()), (4, SystemExit(3))])
def test_an_error_of_on_step_is_raised_after_a_checkpoint(step, error, files, whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(type(error)) as raised:
        sft.train(run_config(files, folder, save_every=0), on_step=failing_at(step, error))
    assert "fail" in [frame.name for frame in traceback.extract_tb(raised.tb)]
    assert names(folder) == [f"step-{step}"]
    sft.train(run_config(files, folder, save_every=0, resume=True))
    assert_equal_runs(folder, whole)


def test_an_error_before_training_ends_the_run_without_a_checkpoint(files, tmp_path):
    with pytest.raises(KeyError):
        sft.train(run_config(files, tmp_path), on_step=failing_at(0, KeyError("eval/x")))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_run_that_on_step_stops_has_its_model_and_goes_on_when_resumed(
    step, files, whole, tmp_path
):
    def stop(at: Step) -> None:
        if at.number >= step:
            at.stop()

    sft.train(run_config(files, tmp_path), on_step=stop)
    assert tiny.read_metrics(tmp_path)[-1]["step"] == step
    saved = (tmp_path / "model/model.safetensors").read_bytes()
    if step == 2:
        # With the same hook the run is whole, as if it had ended between its checkpoint and its model.
        sft.train(run_config(files, tmp_path, resume=True), on_step=stop)
        assert tiny.read_metrics(tmp_path)[-1]["step"] == step
        assert (tmp_path / "model/model.safetensors").read_bytes() == saved
        sft.train(run_config(files, tmp_path, resume=True))
        assert_equal_runs(tmp_path, whole)


RETURNED = [
    ([1.0], "on_step returned list: expected None, or a mapping from names to numbers"),
    ({"own": "much"}, "on_step returned own='much': expected None, or a mapping"),
    ({"train/loss": 1.0}, "on_step returned 'train/loss', which is a metric of the run"),
]


@pytest.mark.parametrize(("returned", "message"), RETURNED)
def test_what_on_step_may_not_return_is_said_in_one_line(returned, message, files, tmp_path):
    def wrong(step: Step):
        return returned if step.number else None

    with pytest.raises(InputError, match=re.escape(message)):
        sft.train(run_config(files, tmp_path / "run", steps=2), on_step=wrong)
    assert names(tmp_path / "run") == ["step-1"]


def stopping_ranks(rank: int, world: int, files, folder: Path) -> list[str]:
    """How runs that process 0 stops, and one in which its hook fails, end on this process."""
    ends = []
    for name, zero_stage in (("stop", 1), ("stop", 3), ("fail", 3)):

        def hook(step: Step, name=name) -> None:
            assert rank == 0
            if step.number == 2:
                step.stop() if name == "stop" else step.model.generate()

        output_dir = folder / f"{name}-{zero_stage}"
        try:
            sft.train(
                run_config(files, output_dir, save_every=0, zero_stage=zero_stage), on_step=hook
            )
            ends.append("model")
        except (InputError, KeyboardInterrupt) as error:
            ends.append(f"{type(error).__name__} {names(output_dir)}")
        assert tiny.read_metrics(output_dir)[-1]["step"] == 2
    return ends


@pytest.mark.slow
def test_two_processes_end_together_when_the_first_asks_or_fails(files, tmp_path):
    first, second = run_distributed(undrawn, 2, stopping_ranks, files, tmp_path)
    assert first == ["model", "model", "InputError ['step-2']"]
    assert second == ["model", "model", "Stopped ['step-2']"]


# What is refused.


def test_a_function_of_the_options_and_one_of_python_are_two(files, tmp_path):
    config = run_config(files, tmp_path / "run", on_step=f"{__name__}:summing")
    with pytest.raises(InputError, match="on_step=.*summing and another from Python"):
        sft.train(config, on_step=summing)


def test_a_schedule_that_would_ascend_is_refused():
    config = tiny.config_of("sft", lr_schedule=lambda update, total: 1 - 2 * update / total)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(InputError, match="lr_schedule at update 3 of 4: .* 0 or more, got -0.5"):
        optim.schedule(optimizer, config, 4)


@pytest.mark.parametrize("lr_schedule", ["linear", lambda update, total: 1 - update / total])
def test_a_schedule_is_that_of_its_function(lr_schedule):
    config = tiny.config_of("sft", lr=0.1, lr_schedule=lr_schedule)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=config.lr)
    schedule, rates = optim.schedule(optimizer, config, 10), []
    for _ in range(10):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1 - 0.01 * update for update in range(10)])


def test_a_function_from_python_has_a_name_that_reads_back():
    config = tiny.config_of("sft", lr_schedule=falling)
    name = config.to_dict()["lr_schedule"]
    assert tiny.config_of("sft", lr_schedule=name).to_dict() == config.to_dict()


# The order of the rows.


def test_the_order_of_the_file_is_that_of_each_pass():
    config = tiny.config_of("sft", order="file", batch_size=3)
    order = RowOrder.of(config, range(4))
    assert [next(order) for _ in range(3)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]
    assert order.first(9) == [0, 1, 2, 3] and order.after(1) == [1, 2, 3]


# The page.


@pytest.mark.slow
def test_the_examples_of_the_page_do_what_they_say(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for name, source in blocks:
        Path(name).write_text(source)
    shutil.copy(files[1], "train.jsonl")
    importlib.import_module("curriculum")
    rows = Path("sorted.jsonl").read_text().splitlines()
    lengths = [len(json.loads(row)["question"]) for row in rows]
    assert lengths == sorted(lengths) and len(lengths) == 20

    def send(request, timeout):
        sent.append(json.loads(request.data)["text"])
        return io.BytesIO()

    sent = []
    monkeypatch.setenv("SLACK_WEBHOOK_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(importlib.import_module("slack"), "urlopen", send)
    monkeypatch.setattr(importlib.import_module("goal"), "GOAL", 0.0)

    def train(on_step, **options):
        """The last entry of the metrics."""
        name = on_step.partition(":")[0]
        grpo.train(grpo_config(files, name, on_step=on_step, eval_every=1, **options))
        return tiny.read_metrics(name)[-1]

    # With a learning rate of 0 no evaluation is better than the first, and the fourth ends the run.
    last = train("slack:report", steps=2, lr_schedule="schedule:restarts", order="file")
    assert len(sent) == 3 and sent[2] == f"step 2: held-out score {last['eval/score']:.3f}"
    restarts = importlib.import_module("schedule").restarts
    assert last["lr"] == pytest.approx(1e-3 * restarts(3, 4))  # two updates a step
    assert train("early:stop", steps=9, lr=0.0)["step"] == 3
    assert train("goal:reach", steps=9)["step"] == 0
    train("quiz:ask", steps=1)
    assert "quiz/solved" in tiny.read_metrics("quiz")[0]
