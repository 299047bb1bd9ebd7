"""A saboteur: bad inputs, and kills at random moments. `make test-faults`."""

import contextlib
import functools
import importlib
import os
import random
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from fused_rl.trainers import cli
from fused_rl.trainers.run import store
from tests.trainers import mounts, runs, tiny
from tests.trainers.bad_inputs import CASES, JUDGES, Case
from tests.trainers.killed import UNDISTURBED, Moment, run

pytestmark = pytest.mark.release

TRAIN = "--model model --output_dir run --overwrite --steps 1 --zero_stage 0 --save_every 0"
PAIRS = f"{TRAIN} --eval_size 2 --dataset pairs.jsonl --batch_size 2"
SAMPLED = f"{TRAIN} --eval_size 0 --dataset rows.jsonl --max_new_tokens 4"
JUDGED = f"{SAMPLED} --verifiers judges:even"
GOOD = {
    "sft": f"{TRAIN} --eval_size 2 --dataset rows.jsonl --completion_column answer --batch_size 2",
    "grpo": f"{JUDGED} --prompts_per_step 2 --group_size 2 --minibatches 1",
    "reward": f"{PAIRS} --normalize_pairs 2",
    "dpo": PAIRS,
    "kto": PAIRS,
    "distill": f"{SAMPLED} --teacher model --prompts_per_step 4",
    "ppo": f"{JUDGED} --prompts_per_step 4 --minibatches 2",
    "eval": "--model model --dataset rows.jsonl --verifiers judges:even --samples 2"
    " --max_new_tokens 4",
}
GOOD = {name: shlex.split(words) for name, words in GOOD.items()}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """What a case starts from."""
    folder = tmp_path_factory.mktemp("good")
    tiny.model_folder(folder / "model")
    tiny.jsonl(folder / "rows.jsonl", tiny.sums(12))
    pairs = [{"prompt": f"{i}=", "chosen": f"{i} a", "rejected": f"{i + 1} bc"} for i in range(12)]
    tiny.jsonl(folder / "pairs.jsonl", pairs)
    (folder / "judges.py").write_text(JUDGES)

    # A run that has ended, as far as `--overwrite` looks.
    files = "checkpoints/step-1/state.json model/config.json metrics.jsonl config.yaml"
    for name in files.split():
        path = folder / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
    return folder


@pytest.fixture
def folder(good, tmp_path, monkeypatch):
    """A copy of it, as the current folder, without a Hub."""
    folder = Path(shutil.copytree(good, tmp_path / "folder"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(good))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, None for a folder."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in paths
    }


def assert_one_line(case: Case, argv: list[str], capfd) -> None:
    """The command ends with a status and one line, which says what is expected."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(cli.COMMANDS[case.command].module).main(argv)
    out, err = capfd.readouterr()
    status, message = stopped.value.code, err.strip()
    assert status not in (0, None), f"exit status {status}: {message or out}"
    if isinstance(status, str):
        message = f"{message}\n{status}".strip()
    assert re.search(case.message, message), message
    # Rows that cannot be used for one reason are a title and a line.
    lines = message.split("\n")
    assert len(lines) == 1 or (len(lines) == 2 and "rows cannot be used" in lines[0]), message
    assert len(message) < 1000, message
    assert message.startswith(f"fused-rl {case.command}: error: "), message
    assert "Traceback" not in out and "usage:" not in out, out


NAMED = [
    pytest.param(case, id=f"{group}, {case.command}: {case.title}"[:80])
    for group, cases in CASES.items()
    for case in cases
]


@pytest.mark.parametrize("case", NAMED)
def test_a_bad_input_is_one_line_and_changes_nothing(case, folder, capfd):
    if case.spoil is not None:
        case.spoil(folder)
    before = contents(folder)
    assert_one_line(case, [*GOOD[case.command], *case.options], capfd)
    assert contents(folder) == before


# Kills.

# Random moments beside those that are aimed at an operation come only with a seed, which `make test-faults` gives.
SEED = os.environ.get("FUSED_RL_FAULT_SEED")
LONG = shlex.split("--steps 3 --save_every 1 --eval_every 2 --keep_checkpoints 9 --eval_size 2")
MORE = {"grpo": ["--minibatches", "2", "--eval_samples", "1"], "reward": ["--zero_stage", "2"]}
RUNS = {name: [*GOOD[name], *LONG, *MORE.get(name, [])] for name in cli.TRAINERS}
WHOLE = ("--zero_stage", "3", "--stage3_param_persistence_threshold", "0")


in_a_folder = contextlib.nullcontext


@contextlib.contextmanager
def on_a_volume(folder: Path):
    (folder / "run").mkdir()
    with mounts.tmpfs(folder / "run"):
        yield


@contextlib.contextmanager
def behind_a_link(folder: Path):
    (folder / "elsewhere").mkdir()
    (folder / "run").symlink_to(folder / "elsewhere")
    yield


STARTED = [Moment(1, "unfinished-step-2"), Moment(1, "unfinished-model", 0.02)]
LATER = [Moment(3, "metrics.jsonl"), Moment(2, "unfinished-step-1", 0.01)]
# A command, options, where its folder lies, and the moments at which a run each is killed.
KILLED = [
    ("sft", (), in_a_folder, [*STARTED, Moment(3, "unfinished-step-1")]),
    ("sft", (), on_a_volume, STARTED),
    ("sft", (), behind_a_link, STARTED),
    # After a checkpoint has its name, and before the one before is deleted.
    ("sft", ("--keep_checkpoints", "1"), in_a_folder, [Moment(1, "checkpoints/step-1")]),
    ("sft", ("--keep_checkpoints", "1"), in_a_folder, [Moment(1, "checkpoints/step-2")]),
    ("reward", (), in_a_folder, [Moment(1, "evaluation.json"), Moment(1, "curves.png")]),
    ("ppo", WHOLE, in_a_folder, [Moment(1, "unfinished-critic"), Moment(1, "unfinished-model")]),
    ("grpo", ("--zero_stage", "1", "--lag", "2"), in_a_folder, LATER),
]


@pytest.fixture(scope="module")
def whole(good, tmp_path_factory):
    """`whole(command, ranks)` is the folder of a run that nothing interrupted; each is made once."""

    @functools.cache
    def make(command: str, ranks: int = 1, *options: str, judge: Path | None = None) -> Path:
        folder = tmp_path_factory.mktemp(f"whole-{command}") / "folder"
        shutil.copytree(good, folder)
        statuses = run(command, [*RUNS[command], *options], folder, ranks=ranks, judge=judge)
        assert statuses == [0] * ranks, log_of(folder)
        return folder

    return make


def log_of(folder: Path) -> str:
    return (folder / "log").read_text()


def argv_to_go_on(command: str, folder: Path, *options: str) -> list[str]:
    """`--resume` where there is a checkpoint, else the run again."""
    argv = [*RUNS[command], *options]
    if store.steps_in(folder / "run" / "checkpoints"):
        return [*argv, "--overwrite", "false", "--resume"]
    return argv


def assert_equal_runs(folder: Path, expected: Path) -> None:
    """The same files, and in them the same weights, metrics and samples, bit for bit."""
    a, b = folder / "run", expected / "run"
    runs.assert_equal_runs(a, b)
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    assert names_of(a) == names_of(b)


def names_of(run: Path) -> set[str]:
    """What a run has in its folder, without what was there before."""
    names = set()
    for path in run.rglob("*"):
        name = path.relative_to(run)
        if name.parts[0] != "tensorboard" and not name.parts[0].startswith(store.EARLIER):
            names.add(str(name))
    return names


def anywhere(expected: Path, rank: int = 0) -> Moment:
    """A moment of a run that is like another."""
    dice = random.Random(f"{SEED} {expected} {rank}")
    operations = int((expected / f"operations-{rank}").read_text())
    return Moment(dice.randint(1, operations), delay=dice.choice([0, 0.03]), rank=rank)


def without_run(good: Path, folder: Path) -> Path:
    return Path(shutil.copytree(good, folder, ignore=shutil.ignore_patterns("run")))


@pytest.mark.parametrize(("command", "options", "place", "moments"), KILLED)
def test_a_killed_run_goes_on_bit_for_bit(command, options, place, moments, whole, good, tmp_path):
    expected = whole(command, 1, *options)
    attempts = [[moment] for moment in moments]
    if SEED is not None:
        attempts.append([anywhere(expected), anywhere(expected)])
    for number, attempt in enumerate(attempts):
        folder = without_run(good, tmp_path / str(number))
        with place(folder):
            for moment in [*attempt, UNDISTURBED]:
                argv = argv_to_go_on(command, folder, *options)
                (status,) = run(command, argv, folder, moment)
                if status == 0:  # a moment may come after the end
                    break
                assert status == -signal.SIGKILL, log_of(folder)
            assert status == 0, log_of(folder)
            assert_equal_runs(folder, expected)


@pytest.mark.parametrize("place", [on_a_volume, behind_a_link])
@pytest.mark.parametrize("moved", ["checkpoints", "model", "metrics.jsonl", "config.yaml"])
def test_a_kill_while_the_old_content_is_moved_loses_nothing(moved, place, whole, good, tmp_path):
    folder = without_run(good, tmp_path / "folder")
    with place(folder):
        shutil.copytree(good / "run", folder / "run", dirs_exist_ok=True)
        before = contents(folder / "run")
        assert run("sft", RUNS["sft"], folder, Moment(1, f"run/{moved}")) == [-signal.SIGKILL]
        assert run("sft", RUNS["sft"], folder) == [0], log_of(folder)
        assert_equal_runs(folder, whole("sft"))
        kept = {}
        for number in ("1", "2"):
            kept |= contents(folder / "run" / f"{store.EARLIER}{number}")
        assert kept == before


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_two_ranks_one_of_which_gets_a_signal(sent, whole, good, tmp_path):
    expected = whole("sft", 2, *WHOLE)
    folder = without_run(good, tmp_path / "folder")
    at = "unfinished-step-2" if sent is signal.SIGKILL else "unfinished-step-1"
    moment = Moment(1, at, signal=sent, rank=1)
    if SEED is not None and sent is signal.SIGKILL:
        moment = anywhere(expected, 1)
    statuses = run("sft", argv_to_go_on("sft", folder, *WHOLE), folder, moment, ranks=2)
    if sent is signal.SIGKILL:
        assert statuses[1] == -sent and statuses[0] not in (0, None)
        assert "is the disk full" not in log_of(folder)
    else:
        assert statuses == [130, 130], log_of(folder)
        assert re.search("stopped after step [12]; continue with --resume", log_of(folder))
    argv = argv_to_go_on("sft", folder, *WHOLE)
    assert run("sft", argv, folder, ranks=2) == [0, 0], log_of(folder)
    assert_equal_runs(folder, expected)


JUDGE = """
import time

def judge(response, answer):
    time.sleep(0.02)
    return len(response.encode()) % 2
"""


def test_ctrl_c_while_answers_are_judged(whole, good, tmp_path):
    """The terminal sends it to the whole group; the judge gives a score of 1 where a dead one would be 0."""
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    options = ("--verifiers", "math", "--group_size", "8", "--steps", "8")
    expected = whole("grpo", 1, *options, judge=judge)
    folder = without_run(good, tmp_path / "folder")
    # In a step from 2 to 4.
    delay = random.Random(f"{SEED}").uniform(0, 0.3)
    moment = Moment(2, "unfinished-step-1", delay=delay, signal=signal.SIGINT)
    for at, status in ((moment, 130), (UNDISTURBED, 0)):
        argv = argv_to_go_on("grpo", folder, *options)
        assert run("grpo", argv, folder, at, judge=judge) == [status], log_of(folder)
    assert "stopping after this step" in log_of(folder) and "Traceback" not in log_of(folder)
    assert_equal_runs(folder, expected)
    assert 0 < tiny.read_metrics(folder / "run")[-1]["reward"] < 1
