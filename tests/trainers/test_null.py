"""`fused-rl doctor --null`: at learning rate 0 a run in this process has no noise at all, and through a server its own.

PROBLEMS.md's noise floor elsewhere: 4.6 % of tokens clipped, KL 7.4e-3, before anything was learned.
"""

import re

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
    cells = rows_of(printed)["by the server, as it drew them"]
    assert float(cells["max |d|"]) < 1e-4 and cells["clipped"] == "0.00%"


def test_noise_of_the_run_is_named_and_is_status_1(files, tmp_path, monkeypatch, capsys):
    forward = LanguageModel.forward

    def noisy(self, *args, **options):
        scored = forward(self, *args, **options)
        return scored._replace(logprobs=scored.logprobs + 1e-3 * torch.randn(scored.logprobs.shape))

    monkeypatch.setattr(LanguageModel, "forward", noisy)
    model, dataset = files
    words = ["--model", model, "--dataset", dataset, f"--output_dir={tmp_path / 'run'}", "--verifiers", runs.VERIFIER]
    words += ["--preset", "grpo", "--prompts_per_step=4", "--group_size=4", "--max_new_tokens=6", "--zero_stage=0"]
    with pytest.raises(SystemExit) as ended:
        null.main([*words, "--eval_size=0"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert re.search(
        r"updates each\): not 0: mean ratio (0\.99|1\.00).*; variance of the ratio \d\.\d+e-0[67]", printed
    )
    assert float(rows_of(printed)["nothing changed"]["max |d|"]) > 1e-3


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


@pytest.mark.parametrize(("line", "said"), [("--lr 1", "fit both"), ("--typo 1", "neither"), ("", "fit both")])
def test_options_of_both_are_refused_with_how_to_say_it(line, said):
    with pytest.raises(InputError, match=f"{said}.*say which run it is: fused-rl doctor --null grpo … or ppo …"):
        null.trainer_of(line.split())
