"""Every trainer on SmolLM2-135M-Instruct with its own chat template, beside TRL, and what becomes of its models."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import cli
from fused_rl.trainers.run import store
from tests.real import beside_trl, conftest, tasks
from tests.real.watching import Watched
from tests.trainers import tiny
from tests.trainers.killed import ROOT, words_of
from tests.trainers.runs import assert_equal_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        conftest.MODEL not in os.environ, reason="it needs a model of 135M weights: make test-real"
    ),
]
ROWS = 8
STEPS = 3
# Both libraries compute in fp32; sums over a vocabulary of 49,152 are in another order.
CLOSE = 1e-5
SCORER = "tests.real.tasks:last_word"
COMMON = {
    "steps": STEPS,
    "micro_batch_size": 4,
    "lr": 1e-5,
    "eval_size": 0,
    "save_every": 0,
    "seed": 1,
}
SAMPLED = {"verifiers": SCORER, "max_new_tokens": 16, "prompts_per_step": 2, "group_size": 4}
SAMPLED |= {"minibatches": 1}  # so that no update stands between the rows of a step


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


def train(command: str, model: str, rows: list[dict], folder: Path, **options) -> list[dict]:
    """Train with a trainer of ours; return the metrics of its steps, all of which are finite."""
    listed = cli.TRAINERS[command]
    options = COMMON | options
    config = listed.config_class()(model=model, output_dir=str(folder), **options)
    importlib.import_module(listed.module).train(config, dataset=rows)
    store.unlock()  # as the command does when it ends
    metrics = tiny.read_metrics(folder)
    values = [value for step in metrics for value in step.values() if isinstance(value, float)]
    assert all(map(math.isfinite, values))
    return metrics


def run_command(*words, **env) -> subprocess.CompletedProcess:
    """Run the command in a process of its own."""
    # A run in this process has left its place among ranks there.
    of_ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in of_ranks} | env
    command = [Path(sys.executable).with_name("fused-rl"), *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def noted(figures: dict, metrics: list[dict], key: str, loss=None, grad_norm=None) -> list[float]:
    """Return the losses of the steps; the first one and its gradient's norm are TRL's `loss` and `grad_norm`."""
    losses = [step[key] for step in metrics if key in step]
    figures |= {"steps": len(losses), "loss": losses[0], "last_loss": losses[-1]}
    if loss is not None:
        figures |= {"trl_loss": loss, "loss_difference": abs(losses[0] - loss)}
        assert figures["loss_difference"] <= CLOSE
    if grad_norm is not None:
        ratio = metrics[0]["optim/grad_norm"] / grad_norm
        figures["gradient_difference"] = abs(ratio - 1)
        assert figures["gradient_difference"] <= 10 * CLOSE
    return losses


def assert_close(a: torch.Tensor, b: torch.Tensor, tolerance: float = CLOSE) -> None:
    """Check that logits or log-probabilities differ by at most `tolerance` of the largest, or of 1."""
    scale = b.abs().max().item()
    assert (a - b).abs().max() <= tolerance * max(1, scale)


def note_logprobs(figures: dict, ours, theirs) -> None:
    """Write down by how much log-probabilities differ at most from TRL's, which is rounding."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    figures["logprob_difference"] = (ours - theirs).abs().max().item()
    assert_close(ours, theirs)


@torch.no_grad()
def assert_reloads(watched: Watched, folder: Path, auto: str = "AutoModelForCausalLM"):
    """transformers reads the weights that were trained, and the tokenizer's chat template."""
    import transformers

    ids = torch.tensor([watched.rows[0].ids])
    saved = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32)
    expected = watched.model.eval()(ids, use_cache=False).logits
    weights, trained = saved.state_dict(), watched.model.state_dict()
    assert weights.keys() == trained.keys()
    assert all(torch.equal(weights[name], trained[name]) for name in weights)
    # Weights that begin elsewhere in memory may be multiplied in another order.
    assert_close(saved(ids, use_cache=False).logits, expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(tasks.problems()[0]["prompt"], tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_sft(model, folder, watched, figures):
    metrics = train("sft", model, tasks.demonstrations(), folder / "run", batch_size=ROWS)
    assert_reloads(watched, folder / "run" / "model")

    trainer = beside_trl.trainer("SFT", model, tasks.demonstrations(), folder / "trl")
    rows = beside_trl.without_newline(trainer, ["input_ids", "labels"])
    theirs = [(row["input_ids"], [i for i in row["labels"] if i != -100]) for row in rows]
    assert sorted(row[:2] for row in watched.rows[:ROWS]) == sorted(theirs)
    step = beside_trl.first_step(trainer)
    losses = noted(figures, metrics, "train/loss", step["loss"], step["grad_norm"])
    assert losses[-1] < losses[0]
    assert metrics[0]["train/entropy"] == pytest.approx(step["entropy"], rel=CLOSE)


def test_dpo(model, folder, watched, figures):
    metrics = train("dpo", model, tasks.pairs(), folder / "run", batch_size=ROWS)
    assert_reloads(watched, folder / "run" / "model")

    trainer = beside_trl.trainer("DPO", model, tasks.pairs(), folder / "trl")
    rows = beside_trl.without_newline(trainer, ["chosen_ids", "rejected_ids"])
    chosen = [(row["prompt_ids"] + row["chosen_ids"], row["chosen_ids"]) for row in rows]
    rejected = [(row["prompt_ids"] + row["rejected_ids"], row["rejected_ids"]) for row in rows]
    # Our batches hold the two sides of a pair next to each other.
    first = watched.rows[: 2 * ROWS]
    assert sorted(row[:2] for row in first[::2]) == sorted(chosen)
    assert sorted(row[:2] for row in first[1::2]) == sorted(rejected)

    step = beside_trl.first_step(trainer)
    ours = [sum(row.logprobs.sum().item() for row in first[i::2]) / ROWS for i in range(2)]
    note_logprobs(figures, ours, [step["logps/chosen"], step["logps/rejected"]])
    losses = noted(figures, metrics, "train/dpo/loss", step["loss"], step["grad_norm"])
    assert losses[-1] < losses[0] == pytest.approx(math.log(2))


def test_kto(model, folder, watched, figures):
    metrics = train("kto", model, tasks.marked(), folder / "run", batch_size=ROWS)
    assert_reloads(watched, folder / "run" / "model")

    trainer = beside_trl.trainer("KTO", model, tasks.marked(), folder / "trl")
    rows = beside_trl.without_newline(trainer, ["completion_ids", "KL_completion_ids"])
    theirs = [(row["prompt_ids"] + row["completion_ids"], row["completion_ids"]) for row in rows]
    first = watched.rows[:ROWS]
    assert sorted(row[:2] for row in first) == sorted(theirs)

    step = beside_trl.first_step(trainer)
    good = {tuple(row["completion_ids"]) for row in rows if row["label"]}
    sums = {True: [], False: []}
    for row in first:
        sums[tuple(row.trained) in good].append(row.logprobs.sum())
    ours = [torch.stack(sums[label]).mean() for label in (True, False)]
    note_logprobs(figures, torch.stack(ours), [step["logps/chosen"], step["logps/rejected"]])
    losses = noted(figures, metrics, "train/kto/loss", step["loss"], step["grad_norm"])
    assert losses[-1] < losses[0]


def test_reward(model, folder, watched, figures):
    """From a head that transformers has drawn, which both trainers read."""
    import transformers

    torch.manual_seed(0)
    read = transformers.AutoModelForSequenceClassification.from_pretrained
    headed = read(model, num_labels=1, dtype=torch.float32)
    # A stock classifier takes an end token for a pad, if that is the pad token, and reads the score before it.
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder / "headed")
    headed.config.pad_token_id = tokenizer.pad_token_id
    headed.save_pretrained(folder / "headed")
    del headed
    # Scores as the head gives them, as in TRL.
    options = {"batch_size": ROWS, "share_prompts": False, "normalize_pairs": 0}
    headed = str(folder / "headed")
    metrics = train("reward", headed, tasks.pairs(), folder / "run", **options)
    assert_reloads(watched, folder / "run" / "model", "AutoModelForSequenceClassification")

    trainer = beside_trl.trainer("Reward", headed, tasks.pairs(), folder / "trl")
    rows = beside_trl.without_newline(trainer, ["chosen_ids", "rejected_ids"])
    first = watched.rows[: 2 * ROWS]
    assert sorted(row.ids for row in first[::2]) == sorted(row["chosen_ids"] for row in rows)
    assert sorted(row.ids for row in first[1::2]) == sorted(row["rejected_ids"] for row in rows)
    step = beside_trl.first_step(trainer)
    losses = noted(figures, metrics, "train/rm/loss", step["loss"], step["grad_norm"])
    assert losses[-1] < losses[0]
    assert metrics[0]["train/rm/reward_margin"] == pytest.approx(step["margin"], abs=CLOSE)


def test_distill(model, folder, watched, figures):
    """A student that has forgotten something, on the completions of the rows: the divergence is the one of TRL."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    import transformers

    read = transformers.AutoModelForCausalLM.from_pretrained
    student, teacher = (read(model, dtype=torch.float32) for _ in range(2))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in student.model.layers.parameters():
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    student.save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "student")

    # TRL's loss on the ids that transformers makes of the rows.
    terms = []
    for row in tasks.demonstrations():
        prompt = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=False)
        # Without the newline after the end token.
        ids = torch.tensor([whole[:-1]])
        kept = slice(len(prompt) - 1, -1)
        with torch.no_grad():
            both = [lm(ids).logits[:, kept].double() for lm in (student, teacher)]
            divergence = gkd.GKDTrainer.generalized_jsd_loss(*both, beta=1, reduction="none")
        terms.append(divergence.sum(-1).flatten())
    theirs = torch.cat(terms).mean().item()
    del student, teacher

    options = {"teacher": model, "on_policy": 0, "prompts_per_step": ROWS, "lr": 1e-4}
    rows = tasks.demonstrations()
    metrics = train("distill", str(folder / "student"), rows, folder / "run", **options)
    losses = noted(figures, metrics, "distill/kl", theirs)
    assert losses[-1] < losses[0]


def test_ppo(model, folder, watched, figures):
    """TRL has no PPO any more."""
    options = SAMPLED | {"prompts_per_step": ROWS, "group_size": 1, "steps": 2}
    metrics = train("ppo", model, tasks.problems(), folder / "run", **options)
    figures["steps"] = len(metrics)
    assert metrics[0]["val/first_ratio"] == 1
    assert_reloads(watched, folder / "run" / "model")


def test_grpo_killed_and_resumed(model, folder, watched, figures):
    """Killed in the middle of its last step, a run goes on from its checkpoint and ends with the same bits."""
    rows = tiny.jsonl(folder / "rows.jsonl", tasks.problems())
    options = COMMON | SAMPLED | {"model": model, "dataset": rows, "save_every": STEPS - 1}
    config = cli.TRAINERS["grpo"].config_class()(**options, output_dir=str(folder / "whole"))
    importlib.import_module("fused_rl.trainers.grpo").train(config)
    store.unlock()
    metrics = tiny.read_metrics(folder / "whole")
    figures["steps"] = len(metrics)
    assert metrics[0]["val/first_ratio"] == 1
    assert_reloads(watched, folder / "whole" / "model")

    # The same responses in TRL's trainer.
    trainer = beside_trl.trainer(
        "GRPO", model, tasks.problems(), folder / "trl", {"num_generations": 4}, reward_funcs=len
    )
    count = SAMPLED["prompts_per_step"] * SAMPLED["group_size"]
    first = watched.rows[:count]
    asked = [row["prompt"] for row in tasks.problems()]
    prompts = trainer._tokenize_prompts(asked)[0]
    theirs = []
    for row in first:
        assert row.ids[: len(row.ids) - len(row.trained)] in prompts
        ids = torch.tensor([row.ids])
        with torch.no_grad():
            logprobs, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), len(row.trained)
            )
        theirs.append(logprobs[0])
    note_logprobs(figures, torch.cat([row.logprobs for row in first]), torch.cat(theirs))
    del trainer

    # The scorer is called once in each step.
    words = words_of(config, output_dir=folder / "killed")
    killed = run_command("grpo", *words, **{tasks.KILLED_AT: str(STEPS)})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(tiny.read_metrics(folder / "killed")) == STEPS - 1
    resumed = run_command("grpo", *words, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(folder / "whole", folder / "killed")


def test_lora(model, folder, watched, figures):
    """The adapters through peft are the weights that save_merged writes."""
    import peft
    import transformers

    options = {"batch_size": ROWS, "lora_rank": 8, "lr": 1e-3, "steps": 2}
    metrics = train("sft", model, tasks.demonstrations(), folder / "adapters", **options)
    losses = noted(figures, metrics, "train/loss")
    assert losses[-1] < losses[0]
    options |= {"save_merged": True}
    merged = train("sft", model, tasks.demonstrations(), folder / "merged", **options)
    assert tiny.untimed(merged) == tiny.untimed(metrics)

    read = transformers.AutoModelForCausalLM.from_pretrained
    base, whole = (read(name, dtype=torch.float32) for name in (model, folder / "merged" / "model"))
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapters" / "model")
    ids = torch.tensor([watched.rows[0].ids])
    with torch.no_grad():
        expected = watched.model.eval()(ids).logits
        assert_close(adapted(ids).logits, expected)
        # Merged weights are rounded once more.
        assert_close(whole(ids).logits, expected, 10 * CLOSE)


def test_eval(model, folder, figures):
    """Its table, and greedy responses as transformers generates them."""
    import transformers

    questions = tasks.QUESTIONS + tasks.HELD_OUT
    rows = tiny.jsonl(folder / "rows.jsonl", tasks.problems(questions))
    options = ["--dataset", rows, "--output_dir", folder / "eval", "--samples", "2"]
    options += ["--verifiers", r"regex:(\w+)", "--max_new_tokens", "16"]
    ended = run_command("eval", "--model", model, *options)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((folder / "eval" / "summary.json").read_text())
    figures["accuracy"] = summary["accuracy_greedy"]
    assert f"{'accuracy_greedy':<24}{summary['accuracy_greedy']:.4g}" in ended.stdout
    assert 0 < summary["accuracy_greedy"] < 1

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    responses = map(json.loads, (folder / "eval" / "responses.jsonl").read_text().splitlines())
    greedy = [row for row in responses if row["decoding"] == "greedy"]
    for row, problem in zip(greedy, tasks.problems(questions), strict=True):
        encoded = tokenizer.apply_chat_template(
            problem["prompt"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = lm.generate(**encoded, max_new_tokens=16, do_sample=False)[0]
        text = tokenizer.decode(ids[encoded.input_ids.shape[1] :], skip_special_tokens=True)
        assert row["response"] == text
