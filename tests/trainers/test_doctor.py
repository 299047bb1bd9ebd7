"""`fused-rl doctor RUN`, and the warnings of a run: every condition on metrics made for it, and three real runs."""

import math
import re
from pathlib import Path

import pytest

from fused_rl.trainers import grpo
from fused_rl.trainers.commands import doctor
from fused_rl.trainers.run.rules import RULES, Watch
from tests.trainers import runs, tiny

FP32 = {"dtype": "float32", "eval_size": 256}
BF16 = {"dtype": "bfloat16", "zero_stage": 1}


def found(history, config=FP32) -> dict[str, int]:
    """Rule -> the step in which it is reported, of entries without steps."""
    watch, steps = Watch(config), {}
    for step, entry in enumerate(history):
        # The rows of an evaluation stand around its figure, with a spread that no change here is within.
        evaluated = {key: value for key, value in entry.items() if key.startswith("eval/")}
        rows = {key: [[value - 0.01, value + 0.01] * 4] for key, value in evaluated.items()}
        printed = watch.update({"step": step, **entry}, rows)
        new = {*watch.reports} - {*steps}
        assert len(printed) == len(new)
        steps |= dict.fromkeys(new, step)
    return steps


def of(key, *values, count=1, **others):
    """Entries of one metric, each value `count` times."""
    return [{key: value, **others} for value in values for _ in range(count)]


EVAL, EQUAL, KL = "eval/accuracy_sampled", "frac_reward_zero_std", "objective/kl_exact"
NONE, STD = "rewards/a/none", "rewards/a/std"
LONG, SOLVED = {"completions/mean_length": 4.0}, "frac_groups_all_solved"
OFF = {SOLVED: 0.0}
# (entries, the findings and their steps, and a config if that matters): each condition at its edge, on both sides, and
# where it is off.
CASES = [
    (of("val/first_ratio", 1.0, 1 + 1e-5), {"first-ratio": 1}),
    (of("val/first_ratio", 2.0), {}, FP32 | {"old_logprobs": "sampler"}),
    (of("optim/grad_norm", 2.0, math.inf), {"not-finite": 1}),
    (of("loss/total_avg", None), {"not-finite": 0}),
    (of(EQUAL, 0.75, count=25, **OFF), {"equal-rewards": 19}),
    (of(EQUAL, 0.7, count=25, **OFF), {}),
    (of(EQUAL, 1.0, count=25, **OFF), {}, FP32 | {"advantage": "batch-std"}),
    (of(NONE, 1.0, count=10), {"scores-none": 9}),
    (of(NONE, 1.0, 0.9, count=9), {}),
    (of(SOLVED, 0.75, count=25), {"all-solved": 19}),
    (of(SOLVED, 0.74, count=25), {}),
    (of(SOLVED, 1.0, count=25, **{EQUAL: 1.0}), {"all-solved": 19, "equal-rewards": 19}),
    (of(STD, 0.0, count=25), {"same-score": 9}),
    (of(STD, 0.1, *[0.0] * 12), {}),  # a policy that has become certain
    (of(STD, 0.0, count=10, **{EVAL: 1.0}), {}),
    (of("val/stop_rate", 0.4, count=10), {"length-limit": 9}),
    (of("val/stop_rate", 0.5, count=10), {}),
    (of(EVAL, 0.5, 0.6, 0.41), {"held-out-worse": 2}),
    (of("eval/loss", 2.0, 2.001), {}),  # less than three digits show
    (of(EVAL, 0.5, 0.3, 0.7), {"held-out-worse": 1}),  # and is withdrawn
    (of("eval/loss", 2.0, 2.1), {"held-out-worse": 1}),
    (of(KL, 8.1, count=10, **LONG), {"kl-high": 9}),
    (of(KL, 7.9, count=20, **LONG), {}),
    (of(KL, 1.0, 6.0, count=10, **LONG), {"kl-high": 16}),
    (of(KL, 8.1, count=10, **LONG, **{SOLVED: 0.6}), {}),
    (of("train/loss", 5.5, 8.4), {}),
    (of("train/loss", 5.5, 8.6), {"exploding": 1}),
    (of("optim/grad_norm", 0.0, 0.5, 499.0), {}),
    (of("optim/grad_norm", 0.0, 0.5, 501.0), {"exploding": 2}),
    (of("eval/dpo/nll", 1.0, 1.29), {}),
    (of("eval/kto/nll", 1.0, 1.31), {"displaced": 1}),
    (of("eval/entropy", 5.0, 0.4), {"entropy-collapsed": 1}),
    (of("eval/entropy", 5.0, 0.6), {}),
    (of("policy/entropy_avg", 2.0, 0.1, count=10), {"entropy-collapsed": 19}),
    (of("policy/entropy_avg", 2.0, 0.1, count=10, **{SOLVED: 0.6}), {}),
    (of("policy/clipfrac_avg", 0.6, count=10), {"clipped": 9}),
    (of("val/var_explained", 0.0, count=10), {"idle-critic": 9}),
    (of("lr", 0.0, count=10), {"learning-rate": 9}),
    (of("lr", 0.0, count=10), {}, FP32 | {"critic_only": 12}),
    (of("rollout/logprob_diff_abs", 2e-3, count=3), {"sampler-differs": 2}),
    (of("rollout/logprob_diff_abs", 0.1, count=3), {}, BF16 | {"lag": 1}),
]


@pytest.mark.parametrize("case", CASES)
def test_a_condition_holds_from_its_edge_on(case):
    history, rules, *config = case
    assert found(history, *config) == rules


def test_every_condition_is_tried_and_its_paragraph_stands_where_a_finding_points():
    names = [*dict.fromkeys(rule.name for rule in RULES)]
    assert {rule for _, rules, *_ in CASES for rule in rules} == {*names, "held-out-worse"}
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    titles = re.findall(r"^### (.*)$", page.split("## The findings")[1], re.MULTILINE)
    assert titles == [*names, "held-out-worse", "not-learned"]


def test_what_may_be_the_cause_of_the_others_is_named_first():
    """A hundred times the learning rate: responses stop ending in the second step, and the loss shows it later."""
    watch = Watch(FP32)
    for step in range(12):
        loss = 2.0 if step < 11 else 50.0
        watch.update({"step": step, "val/stop_rate": 0.1, "train/loss": loss, "lr": 1e-2})
    assert [*watch.findings] == ["exploding", "length-limit"] == [*watch.reports][::-1]
    assert "try a tenth of it (docs" in watch.findings["exploding"]
    assert "perhaps because of exploding (docs" in watch.findings["length-limit"]


def made(folder, entries, rows):
    """A folder as a finished run leaves it, with the held-out rows of steps."""
    (folder / "model").mkdir(parents=True)
    tiny.jsonl(folder / "metrics.jsonl", entries)
    held_out = [{"step": step, EVAL: [of_step]} for step, of_step in rows.items()]
    tiny.jsonl(folder / "held_out.jsonl", held_out)
    config = "# fused-rl grpo --config <this file>\nsteps: 100\neval_size: 256\n"
    (folder / "config.yaml").write_text(config)
    return folder


def run_doctor(capsys, *words):
    """(exit status, stdout, stderr) of the command."""
    capsys.readouterr()
    status = 0
    try:
        doctor.main([str(word) for word in words])
    except SystemExit as stopped:
        status = stopped.code
    return status, *capsys.readouterr()


def test_what_is_no_run_is_one_line_and_status_2(tmp_path, capsys):
    for folder in (tmp_path / "none", tmp_path):
        status, said, error = run_doctor(capsys, folder)
        assert status == 2 and said == "" and "holds no metrics.jsonl" in error, folder
        assert error.startswith(f"fused-rl doctor: error: {folder}")
    (tmp_path / "metrics.jsonl").touch()
    assert "holds no config.yaml" in run_doctor(capsys, tmp_path)[2]


def nothing(response, row):
    return 0.0


def reinforced(files, folder, **options):
    options |= {"verifiers": f"{__name__}:nothing", "max_new_tokens": 1, "eval_size": 0}
    return runs.grpo_config(files, folder, steps=24, minibatches=1, **options)


@pytest.mark.slow
def test_a_run_warns_as_it_trains_once_and_so_does_a_resumed_one(files, tmp_path, capsys):
    said = [runs.stopped_after(grpo, reinforced(files, tmp_path), 11)]
    capsys.readouterr()
    grpo.train(reinforced(files, tmp_path, resume=True))
    said.append(capsys.readouterr().out)
    assert [text.count("val/stop_rate is 0") for text in said] == [1, 0]
    assert "finding: step 10: length-limit: val/stop_rate" in run_doctor(capsys, tmp_path)[1]


def test_a_run_that_learned_is_told_from_one_that_did_not(tmp_path, capsys):
    step = {EQUAL: 0.9, "frac_groups_all_solved": 0.01}
    history = [{"step": i} | step for i in range(101)]
    history[0][EVAL], history[-1][EVAL] = 0.15, 0.1
    rows = {0: [0.0] * 17 + [1.0] * 3, 100: [1.0] * 2 + [0.0] * 18}
    bad = made(tmp_path / "bad", history, rows)
    status, said, _ = run_doctor(capsys, bad)
    assert status == 1 and "did it learn? no: held-out accuracy of sampled responses" in said
    assert "from 0.15 (step 0) to 0.1 (step 100), a change of -0.05 ± 0.11 on 20 rows" in said
    findings = re.findall(r"finding: step (\d+): ([\w-]+)", said)
    assert findings == [("19", "equal-rewards"), ("100", "not-learned")]

    history = [{"step": 0, EVAL: 0.2}, {"step": 5, EVAL: 0.6}]
    good = made(tmp_path / "good", history, {0: [0.2] * 2, 5: [0.6] * 2})
    status, said, _ = run_doctor(capsys, good)
    assert status == 0 and "did it learn? yes" in said and "no problems found" in said
    (good / "model").rmdir()
    status, said, _ = run_doctor(capsys, good)
    assert status == 1 and "did it learn? so far yes" in said and "unfinished: " in said
