"""A saboteur: bad inputs, and kills at random moments. `make test-faults`; counts stand at the end."""

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
import torch

from fused_rl.trainers import cli
from fused_rl.trainers.run import store
from tests.trainers import mounts, tiny
from tests.trainers.bad_inputs import CASES, JUDGES, Case
from tests.trainers.killed import UNDISTURBED, Moment, run

pytestmark = pytest.mark.release

TRAIN = shlex.split(
    "--model model --output_dir run --overwrite --steps 1 --zero_stage 0 --save_every 0 --eval_size 2"
)
GOOD = {
    "sft": [*TRAIN, *shlex.split("--dataset rows.jsonl --completion_column answer --batch_size 2")],
    "grpo": [
        *TRAIN,
        *shlex.split(
            "--dataset rows.jsonl --verifiers judges:even --eval_size 0 --prompts_per_step 2 --group_size 2"
        ),
        *shlex.split("--minibatches 1 --max_new_tokens 4"),
    ],
    "reward": [*TRAIN, *shlex.split("--dataset pairs.jsonl --batch_size 2 --normalize_pairs 2")],
    "dpo": [*TRAIN, *shlex.split("--dataset pairs.jsonl --batch_size 2")],
    "kto": [*TRAIN, *shlex.split("--dataset pairs.jsonl --batch_size 2")],
    "distill": [
        *TRAIN,
        *shlex.split(
            "--dataset rows.jsonl --teacher model --eval_size 0 --prompts_per_step 4 --max_new_tokens 4"
        ),
    ],
    "ppo": [
        *TRAIN,
        *shlex.split(
            "--dataset rows.jsonl --verifiers judges:even --eval_size 0 --prompts_per_step 4 --minibatches 2"
        ),
        *shlex.split("--max_new_tokens 4"),
    ],
    "eval": shlex.split(
        "--model model --dataset rows.jsonl --verifiers judges:even --samples 2 --max_new_tokens 4"
    ),
}


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
    for name in (
        "checkpoints/step-1/state.json",
        "model/config.json",
        "metrics.jsonl",
        "config.yaml",
    ):
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


def answer(command: str, argv: list[str], capfd) -> tuple[object, str, str]:
    """(exit status, what an error said, what else was printed) of a command in this process."""
    capfd.readouterr()
    status, message = 0, ""
    try:
        importlib.import_module(cli.COMMANDS[command].module).main(argv)
    except SystemExit as stopped:
        status, message = (1, stopped.code) if isinstance(stopped.code, str) else (stopped.code, "")
    out, err = capfd.readouterr()
    return status, "\n".join(part for part in (err.strip(), message) if part), out


def assert_one_line(case: Case, argv: list[str], capfd) -> None:
    """The command ends with a status and one line, which says what is expected."""
    status, message, out = answer(case.command, argv, capfd)
    assert status not in (0, None), f"exit status {status}: {message or out}"
    assert re.search(case.message, message), message
    # Rows that cannot be used for one reason are a title and a line.
    lines = message.split("\n")
    assert len(lines) == 1 or (len(lines) == 2 and "rows cannot be used" in lines[0]), message
    assert len(message) < 1000, message
    assert message.startswith(f"fused-rl {case.command}: error: "), message
    assert "Traceback" not in out and "usage:" not in out, out


def named_cases():
    for group, cases in CASES.items():
        for case in cases:
            yield pytest.param(group, case, id=f"{group}, {case.command}: {case.title}"[:80])


@pytest.mark.parametrize(("group", "case"), named_cases())
def test_a_bad_input_is_one_line_and_changes_nothing(group, case, folder, capfd, tally):
    if case.spoil is not None:
        case.spoil(folder)
    before = contents(folder)
    kind = f"bad input, {group}"
    try:
        assert_one_line(case, [*GOOD[case.command], *case.options], capfd)
        assert contents(folder) == before
    except BaseException:
        tally(kind, "otherwise")
        raise
    tally(kind, "one clear line")


# Kills.

# Random moments beside those that are aimed at an operation come only with a seed, which `make test-faults` gives.
SEED = os.environ.get("FUSED_RL_FAULT_SEED")
LONG = shlex.split("--steps 3 --save_every 1 --eval_every 2 --keep_checkpoints 9 --eval_size 2")
RUNS = {
    "sft": [*GOOD["sft"], *LONG],
    "grpo": [*GOOD["grpo"], *LONG, "--minibatches", "2", "--eval_samples", "1"],
    "reward": [*GOOD["reward"], *LONG, "--zero_stage", "2"],
    "dpo": [*GOOD["dpo"], *LONG],
    "kto": [*GOOD["kto"], *LONG],
    "distill": [*GOOD["distill"], *LONG],
    "ppo": [*GOOD["ppo"], *LONG],
}
AIMED = {
    "sft": [
        Moment(1, "unfinished-step-2"),
        Moment(3, "unfinished-step-1"),
        Moment(1, "unfinished-model", 0.02),
    ],
    "grpo": [
        Moment(3, "metrics.jsonl"),
        Moment(2, "unfinished-step-1", 0.01),
        Moment(1, "run/.unfinished-model", 0.01),
    ],
    "reward": [
        Moment(2, "unfinished-step-3"),
        Moment(1, "evaluation.json"),
        Moment(1, "curves.png"),
    ],
    "dpo": [Moment(2, "unfinished-step-2"), Moment(1, "unfinished-model", 0.01)],
    "kto": [Moment(1, "unfinished-step-3"), Moment(2, "metrics.jsonl")],
    "distill": [Moment(2, "unfinished-step-3"), Moment(1, "curves.png")],
    "ppo": [Moment(1, "unfinished-critic"), Moment(1, "unfinished-model")],
}
WHOLE = ("--zero_stage", "3", "--stage3_param_persistence_threshold", "0")
KILLED = [
    ("sft", ()),
    ("reward", ()),
    ("ppo", WHOLE),
    ("grpo", ("--zero_stage", "1", "--lag", "2")),
]
# What only `make test-faults` kills: the loop and the store are the same for all trainers.
ALSO = [(command, ()) for command in RUNS if (command, ()) not in KILLED]
ALSO.append(("sft", (*WHOLE, "--lora_rank", "2", "--save_merged")))
SEEDED = pytest.mark.skipif(SEED is None, reason="make test-faults")
KILLED += [pytest.param(*case, marks=SEEDED) for case in ALSO]


@pytest.fixture(scope="module")
def whole(good, tmp_path_factory):
    """`whole(command, ranks)` is the folder of a run that nothing interrupted; each is made once."""

    @functools.cache
    def make(command: str, ranks: int = 1, *options: str, judge: Path | None = None) -> Path:
        folder = Path(shutil.copytree(good, tmp_path_factory.mktemp(f"whole-{command}") / "folder"))
        assert (
            run(command, [*RUNS[command], *options], folder, ranks=ranks, judge=judge)
            == [0] * ranks
        ), log_of(folder)
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
    weights, expected_weights = tiny.weights(a / "model"), tiny.weights(b / "model")
    assert weights.keys() == expected_weights.keys()
    for name in weights:
        assert torch.equal(weights[name], expected_weights[name]), name
    assert tiny.untimed(tiny.read_metrics(a)) == tiny.untimed(tiny.read_metrics(b))
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


def moments_of(command: str, operations: int) -> list[list[Moment]]:
    """Per run the moments at which it is killed, one attempt after the other."""
    dice = random.Random(f"{SEED} {command}")

    def anywhere() -> Moment:
        return Moment(dice.randint(1, operations), delay=dice.choice([0, dice.uniform(0, 0.05)]))

    aimed = [[moment] for moment in AIMED[command]]
    if SEED is None:
        return aimed
    return [*aimed, [anywhere()], [anywhere()], [anywhere(), anywhere()]]


@pytest.mark.parametrize(("command", "options"), KILLED, ids=lambda value: "".join(value)[:20])
def test_a_killed_run_goes_on_bit_for_bit(command, options, whole, good, tmp_path, tally):
    expected = whole(command, 1, *options)
    failures = []
    for number, moments in enumerate(
        moments_of(command, int((expected / "operations-0").read_text()))
    ):
        folder = Path(shutil.copytree(good, tmp_path / str(number)))
        shutil.rmtree(folder / "run")
        statuses = []
        for moment in [*moments, UNDISTURBED]:
            statuses += run(command, argv_to_go_on(command, folder, *options), folder, moment)
            if statuses[-1] == 0:  # a moment may come after the end
                break
        try:
            assert statuses[-1] == 0 and set(statuses[:-1]) <= {-signal.SIGKILL}, log_of(folder)
            assert_equal_runs(folder, expected)
        except AssertionError as error:
            failures.append((moments, error))
        outcome = (
            "goes on otherwise"
            if failures and failures[-1][0] is moments
            else "goes on bit for bit"
        )
        seeded = f" (FUSED_RL_FAULT_SEED={SEED})" if SEED else ""
        tally(f"kill -9{seeded}", outcome)
    assert not failures


@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_after_a_checkpoint_is_named_and_before_the_one_before_is_deleted(
    step, whole, good, tmp_path, tally
):
    """After the last checkpoint nothing more is saved, and still the folder is that of a whole run."""
    options = ("--keep_checkpoints", "1")
    expected = whole("sft", 1, *options)
    folder = Path(shutil.copytree(good, tmp_path / "folder"))
    shutil.rmtree(folder / "run")
    moment = Moment(1, f"checkpoints/step-{step}")
    assert run("sft", argv_to_go_on("sft", folder, *options), folder, moment) == [-signal.SIGKILL]
    assert store.steps_in(folder / "run" / "checkpoints") == [step, step + 1]
    assert run("sft", argv_to_go_on("sft", folder, *options), folder) == [0], log_of(folder)
    assert_equal_runs(folder, expected)
    tally("kill -9 before a checkpoint is deleted", "goes on bit for bit")


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


PLACES = [on_a_volume, behind_a_link]


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_run_goes_on_bit_for_bit_there_too(place, whole, good, tmp_path, tally):
    expected = whole("sft")
    operations = int((expected / "operations-0").read_text())
    for number, moments in enumerate(moments_of("sft", operations)):
        folder = Path(shutil.copytree(good, tmp_path / str(number)))
        shutil.rmtree(folder / "run")
        with place(folder):
            for moment in [*moments, UNDISTURBED]:
                (status,) = run("sft", argv_to_go_on("sft", folder), folder, moment)
                if status == 0:
                    break
                assert status == -signal.SIGKILL, log_of(folder)
            assert status == 0, log_of(folder)
            assert_equal_runs(folder, expected)
        tally(f"kill -9 {place.__name__}", "goes on bit for bit")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("moved", ["checkpoints", "model", "metrics.jsonl", "config.yaml"])
def test_a_kill_while_the_old_content_is_moved_loses_nothing(
    moved, place, whole, good, tmp_path, tally
):
    expected = whole("sft")
    folder = Path(shutil.copytree(good, tmp_path / "folder"))
    shutil.rmtree(folder / "run")
    with place(folder):
        shutil.copytree(good / "run", folder / "run", dirs_exist_ok=True)
        before = contents(folder / "run")
        assert run("sft", RUNS["sft"], folder, Moment(1, f"run/{moved}")) == [-signal.SIGKILL]
        assert run("sft", RUNS["sft"], folder) == [0], log_of(folder)
        assert_equal_runs(folder, expected)
        kept = {}
        for number in ("1", "2"):
            kept |= contents(folder / "run" / f"{store.EARLIER}{number}")
        assert kept == before
    tally(f"kill -9 while content is moved, {place.__name__}", "nothing is lost")


OF_TWO = {
    "ZeRO 2": (0, ("--zero_stage", "2")),
    "ZeRO 3": (1, WHOLE),
    "sequence parallel": (1, ("--zero_stage", "2", "--sequence_parallel", "2")),
}


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    "kind", ["ZeRO 3", *(pytest.param(kind, marks=SEEDED) for kind in OF_TWO if kind != "ZeRO 3")]
)
def test_two_ranks_one_of_which_gets_a_signal(kind, sent, whole, good, tmp_path, tally):
    rank, options = OF_TWO[kind]
    expected = whole("sft", 2, *options)
    dice = random.Random(f"{SEED} {kind}")
    anywhere = dice.randint(1, int((expected / f"operations-{rank}").read_text()))
    moments = [Moment(1, "unfinished-step-1", signal=sent, rank=rank)]
    if sent is signal.SIGKILL:
        moments = [Moment(1, "unfinished-step-2", rank=rank)]
    if sent is signal.SIGKILL and SEED is not None:
        moments.append(Moment(anywhere, rank=rank))
    for number, moment in enumerate(moments):
        folder = Path(shutil.copytree(good, tmp_path / str(number)))
        shutil.rmtree(folder / "run")
        statuses = run("sft", argv_to_go_on("sft", folder, *options), folder, moment, ranks=2)
        if sent is signal.SIGKILL:
            assert statuses[rank] == -sent and statuses[1 - rank] not in (0, None)
            assert "is the disk full" not in log_of(folder)
        else:
            assert statuses == [130, 130], log_of(folder)
            assert re.search("stopped after step [12]; continue with --resume", log_of(folder))
        argv = argv_to_go_on("sft", folder, *options)
        assert run("sft", argv, folder, ranks=2) == [0, 0], log_of(folder)
        assert_equal_runs(folder, expected)
        tally(f"{sent.name} to one of two ranks, {kind}", "goes on bit for bit")


JUDGE = """
import time

def judge(response, answer):
    time.sleep(0.02)
    return len(response.encode()) % 2
"""


def test_ctrl_c_while_answers_are_judged(whole, good, tmp_path, tally):
    """The terminal sends it to the whole group; the judge gives a score of 1 where a dead one would be 0."""
    (tmp_path / "judge.py").write_text(JUDGE)
    judge, options = (
        tmp_path / "judge.py",
        ("--verifiers", "math", "--group_size", "8", "--steps", "8"),
    )
    expected, dice = whole("grpo", 1, *options, judge=judge), random.Random(f"{SEED}")
    for number in range(1 if SEED is None else 3):
        folder = Path(shutil.copytree(good, tmp_path / str(number)))
        shutil.rmtree(folder / "run")
        # In a step from 2 to 4.
        moment = Moment(2, "unfinished-step-1", delay=dice.uniform(0, 0.3), signal=signal.SIGINT)
        assert run(
            "grpo", argv_to_go_on("grpo", folder, *options), folder, moment, judge=judge
        ) == [130], log_of(folder)
        assert "stopping after this step" in log_of(folder) and "Traceback" not in log_of(folder)
        assert run("grpo", argv_to_go_on("grpo", folder, *options), folder, judge=judge) == [0], (
            log_of(folder)
        )
        assert_equal_runs(folder, expected)
        assert 0 < tiny.read_metrics(folder / "run")[-1]["reward"] < 1
        tally("Ctrl-C while answers are judged", "goes on bit for bit")
