"""An error on one rank is a line on all of them, in bounded time."""

import datetime
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base import launch, ranks
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.roll_out import Sampling, roll_out, rollout_metrics
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.distributed import PROCESSES, run_distributed
from tests.trainers import tiny

LAUNCHED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def outcome(action) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def in_a_block(error):
    with ranks.together():
        if error is not None:
            raise error


def errors_of_ranks(rank, world):
    cases = [
        {},
        {1: InputError("row 7 is no good")},
        {0: KeyError("a bug"), 1: None},
        {0: InputError("here"), 1: InputError("there")},
        {},
    ]
    outcomes = [outcome(lambda case=case: in_a_block(case.get(rank))) for case in cases]
    return outcomes, ranks.gather(rank), ranks.global_sum(torch.tensor(1.0)).item()


def test_all_ranks_leave_the_block_or_none():
    (first, *rest), (second, *same) = run_distributed(errors_of_ranks, 2)
    assert first == [
        "done",
        "InputError: rank 1: row 7 is no good",
        "KeyError: 'a bug'",
        "InputError: here",
        "done",
    ]
    assert second == ["done", "InputError: row 7 is no good", "InputError: rank 0: KeyError: 'a bug'"] + [
        "InputError: there",
        "done",
    ]
    assert rest == same == [[0, 1], 2.0]


def test_one_process_raises_its_own():
    with pytest.raises(KeyError), ranks.together():
        raise KeyError("a bug")
    with ranks.together():
        pass


class OneToken(tiny.Sampler):
    """A sampler of single tokens; fails where it is told to."""

    def __init__(self, fails=False):
        self.fails = fails

    def sample(self, prompts, sampling):
        if self.fails:
            raise ConnectionError("the server is gone")
        return [Response([5], "length") for _ in prompts]


class Fixed:
    """A scorer with a given score, and samples that broke its limits."""

    name, weight, solved_at = "fixed", 1.0, 1.0

    def __init__(self, score, broken):
        self.score, self.broken = score, broken

    def __call__(self, samples):
        return [self.score] * len(samples)

    def take_broken(self):
        return self.broken


def rollouts_of_ranks(rank, world):
    def rolled_out(score, fails=False):
        scorer = Fixed(score, ["d.jsonl, line 9 took too long"] * rank)
        prompts = [Prompt([7, 8], {}, f"d.jsonl, line {rank}")] * (rank + 1)
        sampling, device = Sampling(1.0, 1, (3,)), torch.device("cpu")
        return roll_out(OneToken(fails), [scorer], prompts, sampling, tiny.tokenizer(), device)

    metrics = rollout_metrics(rolled_out(1.0), 1, 1)
    struck = {key: value for key, value in metrics.items() if key.startswith("verifier/")}
    bad_score = outcome(lambda: rolled_out(float("nan") if rank else 1.0))
    return struck, bad_score, outcome(lambda: rolled_out(1.0, fails=rank == 0))


def test_a_bad_score_on_one_rank_is_told_on_all_and_incidents_add_up():
    (struck, other, own), (same, own_score, other_sampler) = run_distributed(rollouts_of_ranks, 2)
    assert struck == same == {"verifier/fixed/timeouts": 1.0}
    told = "scorer 'fixed' returned nan (float) as the score of d.jsonl, line 1"
    assert own_score.startswith(f"InputError: {told}") and other.startswith(f"InputError: rank 1: {told}")
    assert own == "ConnectionError: the server is gone"
    assert other_sampler == "InputError: rank 0: ConnectionError: the server is gone"


def speaking(streams: list[Path], action, *arguments) -> None:
    """In a process of its own: what the action prints goes to two files."""
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    action(*arguments)


def outputs_of_ranks(action, folder: Path, *arguments) -> list[tuple[str, str]]:
    """(stdout, stderr) of two processes that end as they like, each of which does `action(rank, *arguments)`."""
    streams = [[folder / f"{name}-{rank}" for name in ("out", "err")] for rank in range(2)]
    processes = []
    for rank in range(2):
        given = (streams[rank], action, rank, *arguments)
        processes.append(PROCESSES.Process(target=speaking, args=given, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(300)
        assert process.exitcode is not None
    return [(out.read_text(), err.read_text()) for out, err in streams]


def meet(rank: int, store: Path, seconds: int) -> None:
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)


def fails_in_a_block(rank: int, store: Path, case: str) -> None:
    meet(rank, store, 240)
    ranks.PATIENCE = datetime.timedelta(seconds=1)
    try:
        with ranks.together():
            if rank == 1 and case == "dies":
                os._exit(3)
            if rank == 1:
                raise InputError("out of memory")
            if case == "collective":  # as in sampling from a model whose weights are partitioned
                dist.all_gather([torch.zeros(5), torch.zeros(5)], torch.zeros(5))
    except InputError as error:
        print(error, flush=True)
        os._exit(1)


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("dies", "another process of the run ended or does not answer; its own output says why\n", ""),
        ("collective", "rank 1: out of memory\n", "out of memory\n"),
    ],
)
def test_a_rank_that_dies_or_fails_within_a_collective_does_not_hang_the_others(case, first, second, tmp_path):
    outputs = outputs_of_ranks(fails_in_a_block, tmp_path, tmp_path / "store", case)
    assert [out for out, _ in outputs] == [first, second]


def ends_in_a_step(rank: int, store: Path, case: str) -> None:
    meet(rank, store, 20 * 60)
    try:
        with ranks.shared_fate():
            ranks.barrier()
            if case == "killed" and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "a bug" and rank == 1:
                raise KeyError("a bug")
            if case == "refused" and rank == 0 or case == "all":
                raise InputError("no good")
            weight = torch.ones(3, requires_grad=True)
            weight.register_hook(lambda gradient: dist.all_reduce(gradient))  # as in a backward pass
            weight.sum().backward()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(1)


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("refused", "InputError: no good\n", "InputError: rank 0: no good\n"),
        ("killed", "", "InputError: another process of the run ended or does not answer; its own output says why\n"),
        ("all", "InputError: no good\n", "InputError: no good\n"),
        ("a bug", "InputError: rank 1: KeyError: 'a bug'\n", "KeyError: 'a bug'\n"),
    ],
)
def test_what_ends_one_rank_within_a_step_is_a_line_on_the_other(case, first, second, tmp_path):
    outputs = outputs_of_ranks(ends_in_a_step, tmp_path, tmp_path / "store", case)
    assert [out for out, _ in outputs] == [first, second]
    assert not any("gloo" in err or "frame #" in err for _, err in outputs)


# What ranks are told and read.


def rows_of(count: int) -> list[dict]:
    return [{"question": f"{i}?", "answer": f"{i}"} for i in range(count)]


def ranks_folder(folder: Path) -> None:
    """What a rank reads, by relative paths: a model, rows and a scorer."""
    folder.mkdir()
    tiny.model_folder(folder / "model")
    tiny.jsonl(folder / "rows.jsonl", rows_of(8))
    (folder / "judge.py").write_text("def score(responses, rows):\n    return [len(r) for r in responses]\n")


def reorder_rows(folder: Path) -> None:
    tiny.jsonl(folder / "rows.jsonl", rows_of(8)[::-1])


def other_answers(folder: Path) -> None:
    tiny.jsonl(folder / "rows.jsonl", [{**row, "answer": "7"} for row in rows_of(8)])


def other_weights(folder: Path) -> None:
    weights = load_file(folder / "model" / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})


def other_template(folder: Path) -> None:
    path = folder / "model" / "chat_template.jinja"
    path.write_text(path.read_text().replace("<bos>", "<bos> "))


def other_scorer(folder: Path) -> None:
    path = folder / "judge.py"
    path.write_text(path.read_text().replace("len(r)", "-len(r)"))


def no_rows(folder: Path) -> None:
    (folder / "rows.jsonl").unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").unlink()


def half_a_model(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


# (what spoils the files of rank 1, its other options, what both ranks say)
APART = [
    (None, {"lr": 0.5}, "must be told the same options: lr is 1e-06 on rank 0 and 0.5 on rank 1"),
    (None, {"seed": 2, "minibatches": 2}, "seed is 1 on rank 0 and 2 on rank 1; minibatches is 1 on rank 0 and 2"),
    (None, {"prompts_per_step": 3}, "prompts_per_step is 2 on rank 0 and 3 on rank 1"),
    (reorder_rows, {}, "not what rank 0 reads are rows .*: contents. of rank 1"),
    (other_answers, {}, "not what rank 0 reads are rows .*: contents. of rank 1"),
    (other_weights, {}, "not what rank 0 reads are model .*: model.safetensors. of rank 1"),
    (other_template, {}, "chat_template"),
    (other_scorer, {}, "not what rank 0 reads are scorers .*: judge:score. of rank 1"),
    (no_rows, {}, "(rank 1: )?dataset file rows.jsonl does not exist"),
    (no_tokenizer, {}, "(rank 1: )?model='model'.*tokenizer"),
    (half_a_model, {}, "model .*: model.safetensors. of rank 1"),
]


def apart(rank, world, folder) -> list[str]:
    """What a rank says in each of the cases."""
    told = []
    for number, (spoil, options, _) in enumerate(APART):
        mine = Path(folder) / f"{rank}"
        here = Path(shutil.copytree(mine, f"{mine}-{number}"))
        os.chdir(here)
        sys.modules.pop("judge", None)
        sys.path[:] = [path for path in sys.path if not path.startswith(folder)]
        if rank == 1 and spoil is not None:
            spoil(here)
        common = {
            "model": "model",
            "dataset": "rows.jsonl",
            "verifiers": "judge:score",
            "eval_size": 0,
            "minibatches": 1,
        }
        common |= {"prompts_per_step": 2, "group_size": 2, "zero_stage": 0, "output_dir": f"{folder}/run{number}"}
        config = grpo.GRPOConfig(**(common | (options if rank == 1 else {})))
        told.append(outcome(lambda config=config: grpo.train(config)))
        assert not list(Path(config.output_dir).glob("[!.]*"))
    return told


def test_ranks_that_are_told_or_read_other_things_all_say_which(tmp_path):
    for rank in range(2):
        ranks_folder(tmp_path / str(rank))
    for of_rank in run_distributed(apart, 2, str(tmp_path)):
        for told, (spoil, options, expected) in zip(of_rank, APART, strict=True):
            assert re.match(f"InputError: .*{expected}", told), (spoil, options, told)


# What a launcher says.


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "0"},
            "the environment has RANK, and not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start through torchrun",
        ),
        ({"WORLD_SIZE": "2"}, "the environment has WORLD_SIZE, and not RANK, MASTER_ADDR, MASTER_PORT"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
            "has RANK, WORLD_SIZE, MASTER_ADDR, and not MASTER_PORT",
        ),
        (
            {**LAUNCHED, "WORLD_SIZE": "abc"},
            "WORLD_SIZE is 'abc' in the environment; expected a whole number of at least 1",
        ),
        ({**LAUNCHED, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({**LAUNCHED, "WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({**LAUNCHED, "RANK": "2"}, "RANK is '2' in the environment; expected a whole number from 0 to 1"),
        ({**LAUNCHED, "RANK": "-1"}, "RANK is '-1'"),
        ({**LAUNCHED, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'.*from 0 to 65535"),
        ({**LAUNCHED, "MASTER_PORT": "99999"}, "MASTER_PORT is '99999'"),
        ({**LAUNCHED, "LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x'.*from 1 to 2"),
        ({**LAUNCHED, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is '3'"),
        ({**LAUNCHED, "LOCAL_RANK": "1.5"}, "LOCAL_RANK is '1.5'"),
        ({**LAUNCHED, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "1"}, "LOCAL_RANK is '1'.*from 0 to 0"),
        ({name: value for name, value in LAUNCHED.items() if name != "LOCAL_RANK"}, "LOCAL_RANK is 'nothing'"),
    ],
)
def test_a_launcher_that_says_nonsense_is_a_line(environment, message, monkeypatch, capsys):
    for name in (*LAUNCHED, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch.dist, "is_initialized", lambda: False)
    with pytest.raises(SystemExit, match=f"fused-rl sft: error: .*{message}") as stopped:
        sft.main(["--model", "none", "--dataset", "none.jsonl", "--output_dir", "none"])
    assert "\n" not in stopped.value.code and not capsys.readouterr().err


def test_no_launcher_and_a_whole_one_are_heard(monkeypatch):
    monkeypatch.setattr(launch.dist, "is_initialized", lambda: False)
    for name in (*LAUNCHED, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launch.processes() == 1
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert launch.processes() == 2
