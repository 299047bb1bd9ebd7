"""The user's own code in a run: `on_step`, a schedule, an order of the rows."""

import importlib
import json
import random
import re
import shutil
import sys
import threading
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base import optim
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.order import RowOrder
from fused_rl.trainers.run.hooks import Step
from tests import digests
from tests.distributed import run_distributed
from tests.trainers import tiny
from tests.trainers.runs import (
    assert_equal_runs,
    assert_same_weights,
    grpo_config,
    names,
    refused,
    run_config,
    sft_config,
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


HOOKED = {"on_step": f"{__name__}:summing", "lr_schedule": f"{__name__}:falling"}
CASES = ["sft-zero0", "grpo-zero0", "ppo-zero0", "distill-zero0", "dpo-zero0", "kto-zero0"]
CASES = ["sft-zero1", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES[1:])]
CASES.append(pytest.param("reward-zero2", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The models and rows of all cases."""
    folder = tmp_path_factory.mktemp("hooks")
    digests.make_files(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_own_code_is_resumed_bit_for_bit(name, made):
    command, options, world = digests.CASES[name]
    options = options | HOOKED | {"order": "file", "steps": 4, "save_every": 2}
    whole, resumed = made / name, made / f"{name}-resumed"

    def train(output_dir, *resuming):
        words = [*digests.words_of(command, options, made, output_dir), *resuming]
        digests.run(command, options, world, words)

    train(whole)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "model")
    train(resumed, "--resume_from", "step-2")
    found, expected = digests.digest(resumed), digests.digest(whole)
    assert list(digests.differences(expected, found, exact=True, tolerance=0.0)) == []
    assert expected["metrics"]["own/sum"] > 0.5


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


def test_an_error_before_training_ends_the_run_without_a_checkpoint(files, tmp_path, capsys):
    with pytest.raises(KeyError):
        sft.train(run_config(files, tmp_path / "run"), on_step=failing_at(0, KeyError("eval/x")))
    assert "stopped after step 0, because on_step raised an error" in capsys.readouterr().out
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_run_that_on_step_stops_has_its_model_and_goes_on_when_resumed(
    step, files, whole, tmp_path
):
    folder = tmp_path / "run"

    def stop(at: Step) -> None:
        if at.number >= step:
            at.stop()

    sft.train(run_config(files, folder), on_step=stop)
    assert tiny.read_metrics(folder)[-1]["step"] == step
    saved = tiny.weights(folder / "model")
    if 0 < step < 4:
        # With the same hook the run is whole, as if it had ended between its checkpoint and its model.
        sft.train(run_config(files, folder, resume=True), on_step=stop)
        assert tiny.read_metrics(folder)[-1]["step"] == step
        again = tiny.weights(folder / "model")
        assert all(torch.equal(again[name], saved[name]) for name in saved)
        sft.train(run_config(files, folder, resume=True))
        assert_equal_runs(folder, whole)


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


def test_the_model_is_not_given_where_it_is_divided(files, tmp_path):
    config = run_config(files, tmp_path / "run", zero_stage=0)
    config.zero_stage = 3
    run = sft.Run.__new__(sft.Run)
    run.config = config
    with pytest.raises(InputError, match="step.model needs a model that is whole"):
        run._whole_model()


def ask_of_the_model(step: Step) -> None:
    step.model.generate()


ENDS = {
    "1 stop": (1, lambda step: step.stop()),
    "3 stop": (3, lambda step: step.stop()),
    "3 fail": (3, lambda step: 1 / 0),
    "3 model": (3, ask_of_the_model),
}


def stopping_ranks(rank: int, world: int, files, folder: str) -> list[str]:
    """How runs that process 0 stops, and runs in which its hook fails, end on this process."""
    ends = []
    for name, (zero_stage, ended) in ENDS.items():

        def hook(step: Step, ended=ended) -> dict[str, float]:
            assert rank == 0
            if step.number == 2:
                ended(step)
            return {"own/steps": len(step.history)}

        output_dir = Path(folder, name)
        config = run_config(files, output_dir, save_every=0, zero_stage=zero_stage)
        try:
            sft.train(config, on_step=hook)
            ends.append("model")
        except (ZeroDivisionError, InputError, KeyboardInterrupt) as error:
            ends.append(f"{type(error).__name__} {names(output_dir)}")
        if name == "3 fail":
            sft.train(config.replace(resume=True))
            sft.train(config.replace(output_dir=str(Path(folder, "whole"))))
    return ends


@pytest.mark.slow
def test_two_processes_end_together_when_the_first_asks_or_fails(files, tmp_path):
    first, second = run_distributed(undrawn, 2, stopping_ranks, files, str(tmp_path))
    failed = " ['step-2']"
    assert first == ["model", "model", f"ZeroDivisionError{failed}", f"InputError{failed}"]
    assert second == ["model", "model", f"Stopped{failed}", f"Stopped{failed}"]
    for name in ("1 stop", "3 stop", "3 model"):
        *_, before, last = tiny.read_metrics(tmp_path / name)
        assert last["step"] == 2 == before["own/steps"]
    # What was stopped by an error under ZeRO 3 goes on as if nothing had happened.
    assert_same_weights(tmp_path / "3 fail", tmp_path / "whole")


# What is refused.


def test_a_function_of_the_options_and_one_of_python_are_two(files, tmp_path):
    config = run_config(files, tmp_path / "run", on_step=HOOKED["on_step"])
    with pytest.raises(InputError, match="on_step=.*summing and a function given to train"):
        sft.train(config, on_step=summing)


def test_a_schedule_of_ones_own_is_that_of_its_name(files, tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(2))

    def rates(lr_schedule):
        config = sft_config(files, tmp_path, lr=0.1, lr_schedule=lr_schedule)
        optimizer = torch.optim.AdamW([parameter], lr=config.lr)
        schedule = optim.schedule(optimizer, config, 10)
        values = []
        for _ in range(10):
            values += schedule.get_last_lr()
            optimizer.step()
            schedule.step()
        return values

    assert rates(lambda update, total: 1 - update / total) == pytest.approx(rates("linear"))
    config = sft_config(
        files, tmp_path, lr=0.1, lr_schedule=lambda update, total: 1, warmup_steps=4
    )
    optimizer = torch.optim.AdamW([parameter], lr=config.lr)
    assert optim.schedule(optimizer, config, 10).get_last_lr() == [0.0]


def test_a_function_from_python_has_a_name_that_reads_back(files, tmp_path):
    config = sft_config(files, tmp_path, lr_schedule=falling)
    name = config.to_dict()["lr_schedule"]
    assert sft_config(files, tmp_path, lr_schedule=name).to_dict() == config.to_dict()


# The order of the rows.


def test_the_order_of_the_file_is_that_of_each_pass():
    config = tiny.config_of("sft", order="file", batch_size=3)
    order = RowOrder.of(config, range(4))
    assert [next(order) for _ in range(3)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]
    assert order.first(9) == [0, 1, 2, 3] and order.after(1) == [1, 2, 3]


def test_another_order_is_refused_on_resume(files, run):
    refused(run_config(files, run, resume=True, order="file"), "order")


# The page.


def blocks() -> dict[str, str]:
    """The page's files by name."""
    sources = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return dict(sources)


class Webhook(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.messages.append(json.loads(body)["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def webhook(monkeypatch):
    """What is sent to SLACK_WEBHOOK_URL."""
    server = HTTPServer(("127.0.0.1", 0), Webhook)
    server.messages = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SLACK_WEBHOOK_URL", f"http://127.0.0.1:{server.server_port}")
    yield server.messages
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_examples_of_the_page_do_what_they_say(files, tmp_path, monkeypatch, webhook):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name, source in blocks().items():
        Path(name).write_text(source)
    shutil.copy(files[1], "train.jsonl")
    importlib.import_module("curriculum")
    lengths = [
        len(json.loads(line)["question"]) for line in Path("sorted.jsonl").read_text().splitlines()
    ]
    assert lengths == sorted(lengths) and len(lengths) == 20

    def train(on_step, **options):
        name = on_step.partition(":")[0]
        grpo.train(grpo_config(files, tmp_path / name, on_step=on_step, eval_every=1, **options))
        return tiny.read_metrics(name)[-1]["step"]

    # With a learning rate of 0 no evaluation is better than the first, and the fourth ends the run.
    assert train("slack:report", steps=2, lr_schedule="schedule:restarts", order="file") == 2
    assert train("early:stop", steps=9, lr=0.0) == 3
    sure = importlib.import_module("goal")
    monkeypatch.setattr(sure, "GOAL", 0.0)
    assert train("goal:reach", steps=9) == 0
    assert train("quiz:ask", steps=2) == 2
    scores = [entry["eval/score"] for entry in tiny.read_metrics("slack")]
    assert webhook == [f"step {n}: held-out score {scores[n]:.3f}" for n in range(3)]
    assert ["quiz/solved" in entry for entry in tiny.read_metrics("quiz")] == [True, False, False]
    # Two updates a step: the rates are of the second and the fourth of four.
    restarts = importlib.import_module("schedule").restarts
    rates = [entry["lr"] for entry in tiny.read_metrics("slack") if "lr" in entry]
    assert rates == pytest.approx([1e-3 * restarts(update, 4) for update in (1, 3)])
