"""A run that ends at a held-out figure, and the sampled accuracy of SFT that it may be."""

import json
import math
from pathlib import Path

import pytest

from fused_rl.trainers import distill, grpo, reward, sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.run.loop import Run
from fused_rl.trainers.run.metrics import METRICS
from tests.trainers import killed, tiny
from tests.trainers.runs import (
    assert_same_weights,
    grpo_config,
    names,
    on_ranks,
    refused,
    run_config,
)

LONG = {"steps": 8, "eval_every": 2, "lr": 1e-2, "lr_schedule": "constant"}
SAMPLED = {"verifiers": "tests.trainers.tiny:odd_characters", "max_new_tokens": 6}
FILES = {"model": "m", "dataset": "d", "output_dir": "o"}


def at_steps(folder, key: str) -> dict[int, float]:
    return {line["step"]: line[key] for line in tiny.read_metrics(folder) if key in line}


def test_a_run_ends_at_its_goal_as_if_its_steps_were_done_and_resumes(files, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    sft.train(run_config(files, whole, **LONG))
    losses = at_steps(whole, "eval/loss")
    goal = {"until": f"loss={math.nextafter(losses[4], math.inf)}"}
    assert losses[2] > losses[4] > losses[8]

    # The first evaluation that is as good ends it, with checkpoint and model.
    ended, short = tmp_path / "ended", tmp_path / "short"
    sft.train(run_config(files, ended, **LONG, **goal))
    assert at_steps(ended, "eval/loss") == {step: losses[step] for step in (0, 2, 4)}
    assert names(ended)[-1] == "step-4"
    sft.train(run_config(files, short, **(LONG | {"steps": 4})))
    assert_same_weights(ended, short)

    # Stopped on the way and resumed it ends there as well; resumed at its end it has nothing to do.
    stopped = tmp_path / "stopped"
    log = Run.log

    def failing(run, metrics, *more):
        log(run, metrics, *more)
        if run.step == 3:
            raise InputError("stopped")

    with monkeypatch.context() as patched, pytest.raises(InputError, match="stopped"):
        patched.setattr(Run, "log", failing)
        sft.train(run_config(files, stopped, **LONG, **goal))
    for _ in range(2):
        sft.train(run_config(files, stopped, resume=True, **LONG, **goal))
        assert_same_weights(ended, stopped)
        assert at_steps(stopped, "eval/loss") == at_steps(ended, "eval/loss")
    # With another goal, or none, it is the whole run.
    sft.train(run_config(files, stopped, resume=True, **LONG))
    assert_same_weights(whole, stopped)


def test_sampled_accuracy_of_sft_ends_a_warm_start_and_changes_no_bit_of_it(files, tmp_path):
    plain, sampled = tmp_path / "plain", tmp_path / "sampled"
    few = LONG | {"steps": 4}
    sft.train(run_config(files, plain, **few))
    sft.train(run_config(files, sampled, until="sampled_accuracy=1.1", **few, **SAMPLED))
    assert_same_weights(plain, sampled)
    first, *_, last = tiny.read_metrics(sampled)
    for key in ("accuracy_greedy", "accuracy_sampled", "score", "token_accuracy", "loss"):
        assert f"eval/{key}" in first and f"eval/{key}" in last
    lines = map(json.loads, (sampled / "samples.jsonl").read_text().splitlines())
    assert {line["of"] for line in lines} == {"held-out, greedy"}

    # A goal that is met before training ends the run there: the model is saved as it was.
    began = tmp_path / "began"
    sft.train(run_config(files, began, until="sampled_accuracy=0", **few, **SAMPLED))
    assert [line["step"] for line in tiny.read_metrics(began)] == [0]
    assert (began / "model" / "config.json").exists()


def test_responses_are_scored_by_the_held_out_rows_of_another_file(files, tmp_path, capsys):
    # The rows that are trained on have no answer and another form.
    demonstrations = [{"prompt": f"{i}?", "completion": "ab"} for i in range(16)]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab"}]
    problems = [{"messages": turns, "answer": "abc"[: i % 4]} for i in range(1, 4)]
    dataset = tiny.jsonl(tmp_path / "train.jsonl", demonstrations)
    held_out = tiny.jsonl(tmp_path / "held.jsonl", problems)
    options = {"eval_dataset": held_out, "eval_size": 3, "max_new_tokens": 6, "eval_samples": 2}
    options |= {"completion_column": "completion", "steps": 1, "verifiers": "exact_match"}

    config = run_config((files[0], dataset), tmp_path / "run", **options)
    sft.train(config)
    found = tiny.read_metrics(tmp_path / "run")[-1]
    assert {"eval/accuracy_greedy", "eval/accuracy_sampled", "eval/token_accuracy"} <= found.keys()
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    rows = {line["row"]: line["answer"] for line in lines}
    assert rows == {f"{held_out}, line {i}": "abc"[:i] for i in (1, 2, 3)}
    words = killed.words_of(config.replace(output_dir=str(tmp_path / "dry"), deepspeed=None))
    capsys.readouterr()
    sft.main([*words, "--dry_run"])
    printed = capsys.readouterr()
    assert "# scores, which are only shown: 1*exact_match" in printed.out
    assert f"{held_out}: messages\n" in printed.err and "unused" not in printed.err

    # An answer that is missing is missing there alone.
    tiny.jsonl(tmp_path / "held.jsonl", [*problems[:2], {"messages": turns}])
    missing = "held.jsonl, line 3: there is no answer"
    refused(config.replace(output_dir=str(tmp_path / "other")), missing)
    with pytest.raises(SystemExit, match=missing):
        sft.main([*words, "--dry_run"])


@pytest.mark.parametrize(
    ("config_class", "until", "key"),
    [
        (sft.SFTConfig, "token_accuracy=0.5", "eval/token_accuracy"),
        (reward.RewardConfig, "accuracy=0.9", "eval/rm/accuracy"),
        (grpo.GRPOConfig, "eval/accuracy_greedy = 0.9", "eval/accuracy_greedy"),
        (distill.DistillConfig, "kl=0.1", "eval/distill/kl"),
    ],
)
def test_a_goal_is_a_figure_of_the_trainer_in_its_direction(config_class, until, key):
    given = FILES | ({"teacher": "t"} if config_class is distill.DistillConfig else {})
    goal = config_class(**given, until=until).goal()
    assert goal is not None and goal.key == key
    rises = METRICS[key].better == "higher"
    assert goal.is_met(goal.value) and goal.is_met(goal.value + 1) == rises
    assert goal.is_met(goal.value - 1) != rises and not goal.is_met(math.nan)
    for wrong in ("reward=1", "loss", f"{until}%", f"{until.partition('=')[0]}=nan"):
        with pytest.raises(
            InputError, match="^until='.*': expected FIGURE=VALUE, the figure one of "
        ):
            config_class(**given, until=wrong).goal()


def test_a_goal_needs_what_measures_it():
    with pytest.raises(InputError, match="this figure needs --verifiers"):
        sft.SFTConfig(**FILES, until="sampled_accuracy=0.2").goal()
    for off in ({"eval_size": 0}, {"eval_every": 0}):
        with pytest.raises(InputError, match="until=loss=1 is compared with the figures of eval"):
            sft.SFTConfig(**FILES, until="loss=1", **off)
    with pytest.raises(InputError, match="^eval_samples=8 has no meaning without --verifiers"):
        sft.SFTConfig(**FILES, eval_samples=8)


def ends_at_its_goal(rank: int, world: int, files, folder: str) -> list[int]:
    """Train SFT and GRPO for two steps, then until the figure that these end with; return the last steps of all."""
    ends = []
    finish = Run.finish

    def recorded(run, save):
        ends.append(run.step)
        return finish(run, save)

    Run.finish = recorded  # in a process of its own
    options = LONG | {"zero_stage": 2, "save_every": 0}
    for name, made, key in (("sft", run_config, "eval/loss"), ("grpo", grpo_config, "eval/score")):
        train = {"sft": sft, "grpo": grpo}[name].train
        given, until = Path(folder, name), Path(folder, f"{name}-until")
        train(made(files, given, **options | {"steps": 2}))
        figures = at_steps(given, key)
        best = min if name == "sft" else max
        assert best(figures.values()) == figures[2] != figures[0]
        train(made(files, until, **options, until=f"{key}={figures[2]}"))
    return ends


@pytest.mark.slow
def test_two_processes_end_at_their_goal_together_as_if_its_steps_were_done(files, tmp_path):
    assert on_ranks(ends_at_its_goal, 2, files, str(tmp_path)) == [[2] * 4] * 2
    for name in ("sft", "grpo"):
        assert_same_weights(tmp_path / name, tmp_path / f"{name}-until")
