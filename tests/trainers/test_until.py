"""A run that ends at a held-out figure, and the sampled accuracy of SFT that it may be."""

import json
import math

import pytest

from fused_rl.trainers import distill, grpo, reward, sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.run.loop import Run
from fused_rl.trainers.run.metrics import METRICS
from tests.trainers import tiny
from tests.trainers.runs import assert_same_weights, names, run_config

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
