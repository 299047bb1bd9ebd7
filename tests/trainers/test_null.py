"""`fused-rl doctor --null`: at learning rate 0 a run in this process has no noise at all, and through a server its own.

PROBLEMS.md's noise floor elsewhere: 4.6 % of tokens clipped, KL 7.4e-3, before anything was learned.
"""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.doctor import null
from fused_rl.trainers.models.language_model import LanguageModel
from fused_rl.trainers.options.config import InputError
from tests.marks import first_fast, slow
from tests.trainers import fake_server, figures, runs

LR = 0.5  # of the config that is looked at: only a null run is at 0


def grpo_config(files, folder, **options):
    settings = {"lr": LR, "warmup_steps": 2, "overwrite": True, "minibatches": 2, "temperature": 0.8, "kl_coef": 0.01}
    return runs.grpo_config(files, folder, **(settings | options))


def ppo_config(files, folder, **options):
    model, dataset = files
    settings = {"verifiers": runs.VERIFIER, "eval_size": 4, "eval_samples": 2, "prompts_per_step": 4, "group_size": 2}
    settings |= {"minibatches": 2, "max_new_tokens": 6, "lr": LR, "critic_lr": LR, "zero_stage": 0}
    settings |= {"micro_batch_size": 3, "num_train_epochs": 2.0, "save_every": 1, "epochs": 2, "target_kl": 0.1}
    return ppo.PPOConfig(model=model, dataset=dataset, output_dir=str(folder), **(settings | options))


def printed_of(config, capsys):
    """What a null run of the config prints, and whether it found no noise in the run."""
    exact = null.report(config)
    return capsys.readouterr().out, exact


def rows_of(printed):
    """{source: cells} of the table."""
    lines = [re.split(r" {2,}", line.strip()) for line in printed[printed.index("scored again") :].splitlines()]
    return {cells[0]: dict(zip(lines[0][1:], cells[1:], strict=True)) for cells in lines[1:]}


CASES = {
    "micro-batches of 1": (grpo_config, {"micro_batch_size": 1}),
    "of 3, which do not divide": (grpo_config, {"micro_batch_size": 3, "share_prompts": False}),
    "of 8": (grpo_config, {"micro_batch_size": 8, "share_prompts": False}),
    "packed": (grpo_config, {"micro_batch_size": 8, "share_prompts": True}),
    "responses of unequal length at random": (grpo_config, {"minibatches": 8, "micro_batch_size": 2}),
    "from whole logits": (grpo_config, {"loss_from": "logits"}),
    "kept sets": (grpo_config, {"top_p": 0.9}),
    "bfloat16": (grpo_config, {"dtype": "bfloat16", "zero_stage": 1}),
    "sequences": (grpo_config, {"preset": "gspo"}),
    "adapters": (grpo_config, {"lora_rank": 2}),
    "ahead": (grpo_config, {"lag": 1}),
    "ppo": (ppo_config, {}),
    "ppo, a shared backbone": (ppo_config, {"critic": "shared", "critic_lr": None, "micro_batch_size": 8}),
}


FAST = ("of 3, which do not divide", "packed", "ppo")


@pytest.mark.parametrize("case", [case if case in FAST else slow(case) for case in CASES])
def test_in_process_there_is_no_noise_at_all(case, files, tmp_path, capsys):
    made, options = CASES[case]
    printed, exact = printed_of(made(files, tmp_path / "run", **options), capsys)
    assert exact, printed
    assert "exactly 0: ratio 1, variance 0, nothing clipped, KL 0" in printed
    assert set(rows_of(printed)["nothing changed"].values()) <= {"0", "0.00%", "none"}
    assert not (tmp_path / "run").exists()
    assert ("epochs=2: of the first; later ones have other micro-batches" in printed) == (made is ppo_config)


def test_each_source_is_measured_alone(files, tmp_path, capsys):
    """What one thing would bring shows in its row: rounding of the last bits, and of logits in bfloat16 far more."""
    printed, _ = printed_of(grpo_config(files, tmp_path / "run", micro_batch_size=8, share_prompts=False), capsys)
    found = {source: float(cells["max |d|"]) for source, cells in rows_of(printed).items()}
    assert list(found) == [
        "nothing changed",
        "by the sampler, as it drew them",
        "in micro-batches of 4, not 8",
        "with prompts shared, not apart",
        "from whole logits, not in tiles",
        "with logits in bfloat16, not float32",
    ]
    *exact, rounded = found.values()
    assert max(exact) < 1e-5 and 1e-3 < rounded < 0.1
    printed, _ = printed_of(
        grpo_config(files, tmp_path / "run", dtype="bfloat16", zero_stage=1, share_prompts=True), capsys
    )
    found = {source: float(cells["max |d|"]) for source, cells in rows_of(printed).items()}
    assert "with prompts apart, not shared" in found and found["with logits in float32, not bfloat16"] > 1e-4


@pytest.mark.parametrize("kind", first_fast(["vllm", "sglang"]))
def test_through_a_server_the_noise_is_the_samplers(kind, files, tmp_path, capsys):
    with fake_server.serving(kind, files[0]) as fake:
        config = grpo_config(files, tmp_path / "run", server=[fake.url], max_prompt_length=64)
        printed, exact = printed_of(config, capsys)
    assert exact, printed  # the trainer measures the responses itself
    assert f"{tmp_path}/fused-rl-null-" in str(fake.asked) and not list(tmp_path.iterdir())
    cells = rows_of(printed)["by the server, as it drew them"]
    assert float(cells["max |d|"]) < 1e-4 and cells["clipped"] == "0.00%"


def test_the_folder_is_where_servers_see_and_read_it(files, tmp_path, capsys):
    """They see the disk of the run's own folder, not this machine's /tmp, and they may be another user's."""
    run = tmp_path / "not yet there" / "run"
    with null.a_folder(grpo_config(files, run, server=["http://a:1", "http://b:2"])) as folder:
        assert Path(folder).parent == tmp_path and Path(folder).stat().st_mode & 0o055 == 0o055
    assert not list(tmp_path.iterdir())
    said = f"server=http://a:1,http://b:2 gets the weights of {files[0]}: no other run may be drawing from it meanwhile"
    assert capsys.readouterr().out.splitlines() == [said]
    with null.a_folder(grpo_config(files, run)) as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())
    assert not capsys.readouterr().out


def test_a_disk_that_refuses_the_weights_is_a_line(files, tmp_path, monkeypatch):
    def refuses(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuses)
    config = grpo_config(files, tmp_path / "run", server=["http://a:1"])
    with (
        pytest.raises(InputError, match=f"could not be written to {tmp_path}: Permission denied"),
        null.a_folder(config),
    ):
        pass


# Nothing hides the noise of a run: not what leaves responses out of the loss, nor a ratio that is 1 by definition.
NOISY = {
    "plain": [],
    "no group with a signal": ["--zero_variance=drop"],
    "refilled": ["--zero_variance=refill", "--max_refills=1"],
    "every response cut": ["--mask_truncated", "--max_new_tokens=1"],
    "every response cut, ppo": ["--mask_truncated", "--max_new_tokens=1", "--preset=ppo"],
    "one update": ["--minibatches=1"],
}


@pytest.mark.parametrize("case", NOISY)
def test_noise_of_the_run_is_named_and_is_status_1(case, files, tmp_path, monkeypatch, capsys):
    forward = LanguageModel.forward

    def noisy(self, *args, **options):
        scored = forward(self, *args, **options)
        return scored._replace(logprobs=scored.logprobs + 1e-3 * torch.randn(scored.logprobs.shape))

    monkeypatch.setattr(LanguageModel, "forward", noisy)
    model, dataset = files
    words = ["--model", model, "--dataset", dataset, f"--output_dir={tmp_path / 'run'}"]
    words += ["--verifiers", "tests.trainers.test_null:the_same", "--preset", "grpo", "--prompts_per_step=4"]
    words += ["--group_size=4", "--max_new_tokens=6", "--zero_stage=0", "--eval_size=0"]
    with pytest.raises(SystemExit) as ended:
        null.main([*words, *NOISY[case]])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "exactly 0" not in printed
    if case != "one update":  # whose forward pass is what it is compared with
        assert re.search(
            r"updates each\): not 0: mean ratio (0\.99|1\.00).*; variance of the ratio \d\.\d+e-0[67]", printed
        )
    apart = re.search(r"the same responses scored twice, up to (\S+) nats apart\n", printed)
    assert rows_of(printed)["nothing changed"]["max |d|"] == apart[1] and float(apart[1]) > 1e-3


def the_same(responses, rows):
    """A verifier that gives no group a signal."""
    return [1.0] * len(responses)


def test_the_config_as_a_recipe_has_it_and_the_runs_folder_is_not_touched(files, tmp_path, capsys):
    model, dataset = files
    run = tmp_path / "run"
    with figures.drawn():
        grpo.train(runs.grpo_config(files, run, steps=1))
    before = runs.contents(run)
    recipe = tmp_path / "recipe.yaml"
    lines = {"model": model, "dataset": dataset, "output_dir": run, "verifiers": runs.VERIFIER, "preset": "grpo"}
    lines |= {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 4, "zero_stage": 0, "eval_size": 4, "lr": LR}
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()) + "overwrite: true\n")
    null.main(["--config", str(recipe)])
    assert "exactly 0" in capsys.readouterr().out
    null.main(["--config", str(run / "config.yaml")])  # a run's own, complete
    assert "exactly 0" in capsys.readouterr().out
    assert runs.contents(run) == before


TRAINER_OF = {
    "grpo --lr 0.1": ("grpo", ["--lr", "0.1"]),
    "ppo --preset grpo": ("ppo", ["--preset", "grpo"]),
    "--preset grpo": ("grpo", None),
    "--preset=rloo": ("grpo", None),
    "--preset ppo": ("ppo", None),
    "--preset grpo --preset=ppo": ("ppo", None),
    "--critic c": ("ppo", None),
    "--zero_variance drop": ("grpo", None),
    "--config c.yaml": ("ppo", None),
}


@pytest.mark.parametrize("line", TRAINER_OF)
def test_which_run_it_is_follows_from_the_options(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("model: m\ngae_lambda: 0.9\n")
    trainer, words = TRAINER_OF[line]
    assert null.trainer_of(line.split()) == (trainer, line.split() if words is None else words)


UNCLEAR = {
    "": "the options fit both",
    "--lr 1": "the options fit both",
    "--config empty.yaml --local_rank=0": "the options fit both",
    "--config c.yaml --zero_variance drop": r"fit neither .*\(grpo has no gae_lambda; ppo has no zero_variance\)",
    "--preset=ppo --zero_variance drop": r"fit neither .*\(grpo has no preset=ppo; ppo has no zero_variance\)",
}
REFUSED = {
    "--config sft.yaml": "these are the options of a run of sft; --null is of grpo and ppo",
    "--typo 1": "unknown option --typo",
    "--typo 3 --config c.yaml": "unknown option --typo",
    "--config t.yaml": "t.yaml, line 2: unknown option --typo",
    "--config nothere.yaml": "File does not exist: .*nothere.yaml",
    "--config=nothere.yaml --config c.yaml": "File does not exist: .*nothere.yaml",
    "--config bad.yaml": "bad.yaml: not YAML",
    "--config list.yaml": "list.yaml: expected lines of `option: value`",
    "--config": "expected one argument",
    "recipe.yaml": "unrecognized arguments: recipe.yaml",
    "grpo --typo 1": "unknown option --typo",
    "grpo --preset ppo --model m --dataset d --output_dir o": "preset=ppo takes its advantages from gae",  # in its work
}


@pytest.mark.parametrize(
    ("line", "said"),
    [(line, f"{said}.*; say which run it is: {null.PROG} grpo … or ppo …") for line, said in UNCLEAR.items()]
    + [*REFUSED.items()],
)
def test_what_is_refused_is_one_line_that_names_it_and_status_2(line, said, tmp_path, monkeypatch, capsys):
    """Status 1 is noise that was found."""
    monkeypatch.chdir(tmp_path)
    written = {"c": "gae_lambda: 0.9\n", "t": "lr: 1\ntypo: 3\n", "bad": "[a\n", "list": "- a\n", "empty": ""}
    written["sft"] = "lr: 1\ncompletion_column: reply\n"
    for name, text in written.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        null.main(line.split())
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert re.fullmatch(rf"fused-rl .*: error: .*{said}.*\n", printed), printed
