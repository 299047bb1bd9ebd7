"""The end of a run, however it comes, and a run beside one that lives."""

import multiprocessing
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.models import language_model
from fused_rl.trainers.run import command, store
from fused_rl.trainers.run.logger import Logger
from fused_rl.trainers.run.loop import Run
from tests.trainers import killed
from tests.trainers.runs import assert_equal_runs, names, refused, run_config

# The end of a run.


@pytest.mark.parametrize("last", [False, True])
def test_processes_end_together_when_one_of_them_is_asked_to(last, monkeypatch):
    """By a signal or a hook that has failed; a hook that asks to end makes this step the last one."""
    run = SimpleNamespace(signalled=False, hook_asked_to_end=False, hook_error=None)
    run.step, run.is_last_step, run.hook_ended = 3, last, False
    stops = []
    for asked in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        monkeypatch.setattr(ranks, "gather_processes", lambda own, asked=asked: [own, asked])
        stops.append(bool(Run._stops(run)))
        assert run.hook_ended == (asked[1] > last)
        run.hook_ended = False
    assert stops == [not last, False, True, False]


def test_a_run_that_dies_between_its_last_step_and_its_model_finishes_when_resumed(
    files, whole, tmp_path, monkeypatch
):
    folder = tmp_path / "run"

    def dies(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(language_model, "save_lm", dies)
        sft.train(run_config(files, folder, save_every=0))
    assert names(folder) == ["step-4"]
    sft.train(run_config(files, folder, save_every=0, resume=True))
    assert_equal_runs(whole, folder)
    assert not (folder / "checkpoints").exists()
    refused(run_config(files, folder, resume=True), "there is no checkpoint in")


@pytest.mark.parametrize("where", [(language_model, "save_lm"), (Logger, "log")])
def test_a_signal_in_the_last_step_or_later_does_not_keep_the_model_from_being_saved(
    where, files, whole, tmp_path, monkeypatch
):
    function, before = getattr(*where), signal.getsignal(signal.SIGTERM)

    def stopping(*args, **options):
        if where[0] is language_model or args[1] == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        function(*args, **options)

    monkeypatch.setattr(*where, stopping)
    try:
        sft.train(run_config(files, tmp_path / "run", save_every=0))
    except KeyboardInterrupt:  # which would end pytest
        pytest.fail("the run was stopped, without its model")
    assert_equal_runs(whole, tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("ends", ["signal", "child"])
def test_what_is_outside_of_its_folder_goes_when_a_run_ends(ends, tmp_path):
    """By a SIGTERM between its steps, or with a process of `multiprocessing`."""
    outside = tmp_path / "outside"
    outside.mkdir()

    def train(config):
        store.remove_at_end(outside)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    if ends == "child":
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=store.remove_at_end, args=(outside,))
        child.start()
        child.join()
    else:
        words = ["--model=m", "--dataset=d.jsonl", f"--output_dir={tmp_path}/run"]
        with pytest.raises(SystemExit) as ended:
            command.run(sft.SFTConfig, train, words)
        assert ended.value.code == 128 + signal.SIGTERM
    assert not outside.exists() and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("error", [KeyError("late"), SystemExit(0)])
def test_an_error_in_a_step_says_what_is_kept(error, files, tmp_path, capfd, monkeypatch):
    """Also `sys.exit(0)` of a scorer, after which the run would look complete."""
    monkeypatch.setattr(sys.modules[__name__], "raised", [None] * 4 + [error])
    words = ["--model", files[0], "--dataset", files[1], "--output_dir", str(tmp_path / "run")]
    words += [
        "--steps",
        "3",
        "--save_every",
        "1",
        "--eval_size",
        "0",
        "--prompts_per_step",
        "2",
        "--group_size",
        "2",
    ]
    words += f"--max_new_tokens 4 --verifiers {__name__}:scorer".split()
    with pytest.raises((SystemExit, KeyError)) as ended:
        grpo.main(words)
    said = f"{ended.value}{capfd.readouterr().err}"
    assert "the run ended in step 2, and --resume continues after step 1" in said


raised: list = []


def scorer(response, row):
    error = raised.pop(0)
    if error is not None:
        raise error
    return 1.0


# Beside a run that lives.


@pytest.fixture(scope="module")
def living(files, tmp_path_factory):
    """(process, folder) of a run in another process that has made a few steps, and makes many more."""
    folder = tmp_path_factory.mktemp("living")
    words = killed.words_of(
        run_config(files, "run", steps=100000, eval_size=0, batch_size=2, save_every=2)
    )
    (process,) = killed.start("sft", words, folder)
    while process.is_alive() and not store.steps_in(folder / "run" / "checkpoints"):
        time.sleep(0.05)
    yield process, folder / "run"
    process.kill()
    process.join()


def test_a_second_run_in_the_folder_is_refused_and_a_killed_one_leaves_no_lock(files, living):
    process, folder = living
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(InputError, match="is in use by another process"):
            store.RunFolder(run_config(files, folder, **options)).open()
    process.kill()
    process.join()
    store.RunFolder(run_config(files, folder, overwrite=True)).open()
    store.unlock()
    assert not (folder / store.LOCK).exists()
