"""`fused-rl doctor RUN` and the lines of a run: runs broken on purpose, one for each diagnosis, and healthy ones.

All are trained here, on models of a few thousand weights; the longer ones are slow, and test_rules.py has their rules.
"""

import random
import shutil

import pytest
import torch

from fused_rl.trainers import grpo, ppo, reward, sft
from fused_rl.trainers.commands import doctor, report
from fused_rl.trainers.metrics.rules import examine
from fused_rl.trainers.models import language_model
from fused_rl.trainers.run import folder
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.samplers.copied import CopySampler
from tests.trainers import reward_runs, runs, served, tiny

HERE = "tests.trainers.test_doctor"


def asked(capsys, *folders):
    """(exit status, what was printed) of the command."""
    capsys.readouterr()
    status = 0
    try:
        doctor.main([str(folder) for folder in folders])
    except SystemExit as stopped:
        status = stopped.code
    return status, capsys.readouterr()


def diagnosed(folder, capsys) -> list[str]:
    """The rules that fit a run that has just ended, in their order; each was a line on its screen, and once."""
    screen = capsys.readouterr().out
    run = report.read_run(folder)
    found = examine(run.command, run.config, run.history).found
    assert screen.count("warning: since step") == len(found)
    status, said = asked(capsys, folder)
    assert status == (1 if found else 0)
    lines = said.out.splitlines()
    assert lines[0] == f"{folder}: {run.command}, {run.config['steps']} of {run.config['steps']} steps"
    heads = [line.split(":")[0].strip() for line in lines[1:]]
    assert heads == (["first"] + ["then"] * len(found[1:]) if found else ["healthy"])
    for line, finding in zip(lines[1:], found, strict=False):
        assert line.endswith(finding.told()) and f"warning: {finding.told()}\n" in screen
    assert run.verdict == [line.strip() for line in lines[1:]]
    return [finding.rule.name for finding in found]


# What judges.


def nothing(responses, rows):
    return [0.0] * len(responses)


def silent(responses, rows):
    return [None] * len(responses)


def length(responses, rows):
    return [float(len(response)) for response in responses]


def of_a(responses, rows):
    return [float(response.count("a")) / max(len(response), 1) for response in responses]


def right(responses, rows):
    return [float(response == row["answer"]) for response, row in zip(responses, rows, strict=True)]


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """A model that has learnt to say one to three letters and to end, and its rows."""
    folder = tmp_path_factory.mktemp("ending")
    model, rng = tiny.model_folder(folder / "model"), random.Random(0)
    rows = [{"question": f"{i}?", "answer": "".join(rng.choices("abcd", k=1 + i % 3))} for i in range(60)]
    dataset = tiny.jsonl(folder / "rows.jsonl", rows)
    config = runs.sft_config((model, dataset), folder / "sft", steps=60, batch_size=16, lr=1e-2, eval_size=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")  # as conftest.py does for a test
        return sft.train(config), dataset


def reinforced(files, folder, **options):
    """A run of grpo of that model."""
    defaults = {"verifiers": f"{HERE}:of_a", "steps": 30, "prompts_per_step": 8, "max_new_tokens": 16, "eval_size": 0}
    defaults |= {"minibatches": 2, "lr": 3e-3, "micro_batch_size": 32}
    grpo.train(runs.grpo_config(files, folder, **(defaults | options)))


def test_healthy_runs_have_no_findings(ending, files, tmp_path, capsys):
    reinforced(ending, tmp_path / "grpo", eval_size=8, eval_every=10)
    assert diagnosed(tmp_path / "grpo", capsys) == []
    sft.train(runs.sft_config(files, tmp_path / "sft", steps=30))
    assert diagnosed(tmp_path / "sft", capsys) == []
    status, said = asked(capsys, tmp_path / "grpo", tmp_path / "sft")
    assert status == 0 and said.out.count("  healthy: ") == 2


def test_a_run_that_ended_without_its_model_is_told_and_one_that_lives_is_not(files, tmp_path, capsys, monkeypatch):
    def dies(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(language_model, "save_lm", dies)
        sft.train(runs.sft_config(files, tmp_path / "run", steps=2))
    status, said = asked(capsys, tmp_path / "run")
    assert status == 1 and "  unfinished: " in said.out and "healthy" not in said.out
    assert "and --resume goes on\n" in said.out
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as where it ended in its first step
    assert ", and there is no checkpoint: --overwrite starts anew\n" in asked(capsys, tmp_path / "run")[1].out
    folder.take(tmp_path / "run")
    try:
        status, said = asked(capsys, tmp_path / "run")
    finally:
        folder.release()
    assert status == 0 and "unfinished" not in said.out


def test_groups_without_a_signal(files, tmp_path, capsys):
    reinforced(files, tmp_path / "run", verifiers=f"{HERE}:nothing", steps=12, max_new_tokens=3)
    assert "no-signal" in diagnosed(tmp_path / "run", capsys)


def test_a_scorer_that_returns_none_for_everything(ending, tmp_path, capsys):
    reinforced(ending, tmp_path / "run", verifiers=[f"{HERE}:silent", f"{HERE}:of_a"], steps=12)
    assert diagnosed(tmp_path / "run", capsys) == ["silent-scorer"]


def test_nothing_but_cut_responses(files, tmp_path, capsys):
    reinforced(files, tmp_path / "run", steps=12, verifiers=runs.VERIFIER)
    assert "cut-responses" in diagnosed(tmp_path / "run", capsys)


@pytest.mark.slow
def test_collapsed_entropy(ending, tmp_path, capsys):
    scorers = {"verifiers": [f"{HERE}:of_a", f"{HERE}:right"], "verifier_weights": [1, 0], "solved_at": [99.0, 1.0]}
    reinforced(ending, tmp_path / "run", lr=3e-2, steps=60, **scorers)
    assert "entropy-gone" in diagnosed(tmp_path / "run", capsys)


def test_exploding_kl(ending, tmp_path, capsys):
    reinforced(ending, tmp_path / "run", lr=3e-2, minibatches=1)
    assert "kl-runs-away" in diagnosed(tmp_path / "run", capsys)


@pytest.mark.slow
def test_a_learning_rate_that_is_100_times_too_high(ending, tmp_path, capsys):
    reinforced(ending, tmp_path / "grpo", lr=0.3)
    assert "steps-too-far" in diagnosed(tmp_path / "grpo", capsys)
    sft.train(runs.sft_config(ending, tmp_path / "sft", steps=10, lr=1.0))
    assert "loss-rises" in diagnosed(tmp_path / "sft", capsys)


def test_a_ratio_that_is_not_one(ending, tmp_path, capsys, monkeypatch):
    forward = language_model.LanguageModel.forward

    def noisy(self, *inputs, token_loss=None, **more):
        with torch.no_grad():
            self.base.get_output_embeddings().weight[::2].mul_(0.99 if token_loss is not None else 1.0)
        return forward(self, *inputs, token_loss=token_loss, **more)

    monkeypatch.setattr(language_model.LanguageModel, "forward", noisy)
    reinforced(ending, tmp_path / "run", steps=2)
    assert diagnosed(tmp_path / "run", capsys) == ["ratio-off"]


@pytest.mark.slow
def test_a_scorer_of_length_that_is_outwitted(ending, tmp_path, capsys):
    scorers = {"verifiers": [f"{HERE}:length", f"{HERE}:right"], "verifier_weights": [1, 0], "solved_at": [99.0, 1.0]}
    options = {"lr": 3e-3, "steps": 40, "eval_size": 12, "eval_every": 10, "max_new_tokens": 24}
    reinforced(ending, tmp_path / "run", **options, **scorers)
    assert "outwitted-scorer" in diagnosed(tmp_path / "run", capsys)


class Telling(tiny.Sampler):
    """A server's likeness: it draws from a copy of the policy, and tells log-probabilities."""

    tells_logprobs = True

    def __init__(self, built, tokenizer):
        self.copy = CopySampler(built.lm, pad_id=tokenizer.pad_token_id, batch_size=64)

    def publish(self, step, save):
        self.copy.publish(step, save)

    def sample(self, prompts, sampling):
        responses = self.copy.sample(prompts, sampling)
        for response in responses:
            response.weight_version = None
        return responses


class Stale(Telling):
    """The first weights are its last."""

    def publish(self, step, save):
        if not step:
            super().publish(step, save)


class Raw(Telling):
    """Tells what the model gives a token before the temperature."""

    def sample(self, prompts, sampling):
        responses = super().sample(prompts, sampling)
        for prompt, response in zip(prompts, responses, strict=True):
            response.logprobs = served.logprobs(self.copy.lm, prompt, response.ids).tolist()
        return responses


@pytest.mark.parametrize(("sampler", "rule"), [(Telling, None), (Stale, "stale-logprobs"), (Raw, "raw-logprobs")])
def test_log_probabilities_of_another_model(ending, tmp_path, capsys, sampler, rule):
    config = {"temperature": 0.7, "verifiers": f"{HERE}:of_a", "steps": 12, "prompts_per_step": 8, "eval_size": 0}
    config |= {"max_new_tokens": 16, "minibatches": 1, "micro_batch_size": 32, "lr": 2e-3}
    grpo.train(runs.grpo_config(ending, tmp_path / "run", **config), sampler=sampler)
    assert diagnosed(tmp_path / "run", capsys)[:1] == ([rule] if rule else [])


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "rules"), [(Telling, []), (Stale, ["stale-logprobs"])])
def test_weights_that_never_arrive_where_rollouts_are_drawn_ahead(ending, tmp_path, capsys, sampler, rules):
    config = {"verifiers": f"{HERE}:of_a", "steps": 20, "prompts_per_step": 8, "eval_size": 0, "max_new_tokens": 16}
    config |= {"minibatches": 1, "micro_batch_size": 32, "lr": 2e-3, "lag": 1}
    grpo.train(runs.grpo_config(ending, tmp_path / "run", **config), sampler=sampler)
    assert diagnosed(tmp_path / "run", capsys) == rules


def of_critic(files, folder, **options):
    settings = {"verifiers": f"{HERE}:of_a", "steps": 12, "prompts_per_step": 8, "group_size": 2, "max_new_tokens": 16}
    settings |= {"model": files[0], "dataset": files[1], "output_dir": str(folder), "eval_size": 0, "save_every": 0}
    settings |= {"zero_stage": 0, "lr": 1e-3, "micro_batch_size": 32}
    ppo.train(ppo.PPOConfig(**tiny.settled(settings | options)))


@pytest.mark.slow
def test_a_critic_that_explains_nothing(ending, tmp_path, capsys):
    of_critic(ending, tmp_path / "idle", critic_lr=0.0)
    assert diagnosed(tmp_path / "idle", capsys) == ["idle-critic"]
    of_critic(ending, tmp_path / "dead", verifiers=f"{HERE}:nothing", kl_coef=0.0, steps=2)
    assert diagnosed(tmp_path / "dead", capsys) == ["dead-critic"]
    of_critic(ending, tmp_path / "healthy", critic_lr=1e-2, value_clip=None, steps=20)
    assert diagnosed(tmp_path / "healthy", capsys) == []


@pytest.mark.parametrize(
    ("options", "rule"),
    [({"lr": 0.0}, "no-learning-rate"), ({"lr": 1e-9}, "stands-still"), ({"kl_coef": 1e4}, "scores-outweighed")],
)
def test_a_policy_that_does_not_learn_its_task(ending, tmp_path, capsys, options, rule):
    reinforced(ending, tmp_path / "run", steps=14, **options)
    assert diagnosed(tmp_path / "run", capsys) == [rule]


@pytest.mark.slow
def test_a_scorer_that_gives_all_responses_of_ppo_one_score(ending, tmp_path, capsys):
    of_critic(ending, tmp_path / "run", verifiers=f"{HERE}:nothing", kl_coef=0.1)
    assert "equal-scores" in diagnosed(tmp_path / "run", capsys)


@pytest.mark.slow
def test_rows_that_are_learnt_by_heart(ending, tmp_path, capsys):
    rng = random.Random(0)
    rows = [{"question": f"{i}?", "answer": "".join(rng.choices("abcdefgh", k=12))} for i in range(48)]
    trained, held_out = (tiny.jsonl(tmp_path / f"{i}.jsonl", rows[i::2]) for i in range(2))
    options = {"steps": 80, "batch_size": 24, "lr": 1e-2, "eval_every": 10, "eval_dataset": held_out, "eval_size": 24}
    sft.train(runs.sft_config((ending[0], trained), tmp_path / "run", **options))
    assert diagnosed(tmp_path / "run", capsys) == ["overfitted"]


@pytest.mark.slow
def test_pairs_whose_held_out_sides_are_swapped(tmp_path, capsys):
    model, pairs = reward_runs.make_model(tmp_path / "model"), reward_runs.write_pairs(tmp_path / "pairs.jsonl")
    rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in map(dict, rows_of(pairs))]
    swapped = tiny.jsonl(tmp_path / "swapped.jsonl", rows)
    config = {"model": model, "dataset": pairs, "steps": 40, "batch_size": 8, "lr": 1e-2, "save_every": 0}
    config |= {"zero_stage": 0, "eval_every": 10, "normalize_pairs": 0}
    for name, held_out, rules in (("swapped", swapped, ["below-chance", "loss-rises"]), ("right", pairs, [])):
        reward.train(reward.RewardConfig(eval_dataset=held_out, output_dir=str(tmp_path / name), **config))
        assert diagnosed(tmp_path / name, capsys) == rules


def rows_of(path):
    import json
    from pathlib import Path

    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_says_a_line_once(files, tmp_path, capsys):
    options = {"verifiers": f"{HERE}:nothing", "max_new_tokens": 1, "eval_size": 0, "steps": 14, "minibatches": 1}
    for stopped, lines in ((6, [0, 1]), (12, [1, 0])):  # before the tenth step, and after it
        config = runs.grpo_config(files, tmp_path / f"{stopped}", **options)
        said = [runs.stopped_after(grpo, config, stopped)]
        capsys.readouterr()
        grpo.train(runs.grpo_config(files, tmp_path / f"{stopped}", resume=True, **options))
        said.append(capsys.readouterr().out)
        assert [text.count("frac_reward_zero_std is 1") for text in said] == lines
        assert len(read_metrics(tmp_path / f"{stopped}" / "metrics.jsonl")) == 14


# What is no run, and what is a damaged one.


def made(folder, lines, config="# fused-rl sft --config <this file>\nsteps: 9\n"):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(lines)
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return folder


def test_what_is_no_run_is_one_line_and_status_2(tmp_path, capsys):
    entry = '{"step": 1, "train/loss": 2.0}\n'
    for name, lines, config, message in (
        (
            "unknown",
            entry,
            "# fused-rl distill --config <this file>\nsteps: 3\n",
            "it is of 'distill'; the doctor knows runs of sft, ",
        ),
        ("bare", entry, None, "its config.yaml does not say of which trainer it is"),
        ("broken", entry, "a: [\n", "config.yaml cannot be read"),
        ("older", '{"step": 1, "loss": 2.0}\n', "# fused-rl sft\nsteps: 3\n", "no rule looks at any metric"),
    ):
        status, said = asked(capsys, made(tmp_path / name, lines, config))
        assert status == 2 and said.out == "" and said.err.count("\n") == 1
        assert said.err.startswith("fused-rl doctor: error: ") and message in said.err
    folder.take(made(tmp_path / "begun", "", "# fused-rl sft\nsteps: 3\n"))
    try:
        status, said = asked(capsys, tmp_path / "begun")
    finally:
        folder.release()
    assert status == 2 and "holds no step yet" in said.err
    status, said = asked(capsys, tmp_path / "begun")  # it has ended since, in its first step
    assert status == 1 and "sft, 0 of 3 steps\n  unfinished: " in said.out
    status, said = asked(capsys, tmp_path / "none")
    assert status == 2 and f"there is no folder {tmp_path / 'none'}; give the output_dir" in said.err
    (tmp_path / "empty").mkdir()
    status, said = asked(capsys, tmp_path / "empty")
    assert status == 2 and "is no run: it holds no metrics.jsonl" in said.err
    assert asked(capsys, "--no_such_option")[0] == 2


def test_damaged_lines_and_values_that_are_no_numbers(tmp_path, capsys):
    damaged = made(tmp_path / "damaged", '{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/lo')
    status, said = asked(capsys, damaged)
    assert status == 1 and "line 2 is damaged and left out" in said.out and "sft, 1 of 9 steps" in said.out
    assert "  unfinished: " in said.out
    of_passes = made(tmp_path / "passes", '{"step": 1, "train/loss": 2.0}\n', "# fused-rl sft\nsteps: null\n")
    (of_passes / "model").mkdir()
    status, said = asked(capsys, of_passes)
    assert status == 0 and "sft, 1 of ? steps\n  healthy: 1 metrics within their bands; of 1 steps, and" in said.out
    of_nan = made(tmp_path / "nan", '{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/loss": null}\n')
    status, said = asked(capsys, damaged, of_nan)
    assert status == 1 and "first: since step 2 train/loss is nan, and healthy is a number" in said.out
