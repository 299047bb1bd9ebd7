"""The DPO trainer: TRL's updates, and runs that do not depend on how they were split or interrupted."""

import json
import math
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from fused_rl.trainers import dpo
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.preferences import Pair
from tests.trainers import figures, runs, tiny
from tests.trainers.reward_runs import make_model, write_pairs
from tests.trainers.runs import forget_after, on_ranks
from tests.trainers.steps import Plain, assert_gradients_close

LOSSES = {
    "sigmoid": {},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo", "beta": 0.5, "label_smoothing": 0.0},
    "nll": {"nll_coef": 0.5},
    "apo-zero": {"loss_type": "apo-zero"},
    "apo-down": {"loss_type": "apo-down"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    make_model(folder / "model")
    write_pairs(folder / "pairs.jsonl")
    return folder


def dpo_config(folder: Path, name: str = "run", **options) -> dpo.DPOConfig:
    settings = {
        "eval_size": 5,
        "steps": 4,
        "batch_size": 8,
        "lr": 1e-3,
        "dtype": "float32",
        "eval_every": 3,
        "save_every": 2,
        "label_smoothing": 0.05,
        "nll_coef": 0.1,
    }
    files = {"dataset": folder / "pairs.jsonl", "output_dir": folder / name}
    return tiny.config_of("dpo", folder / "model", **(files | settings | options))


def trained(folder: Path, name: str, **options) -> tuple[list[dict], dict[str, torch.Tensor]]:
    config = dpo_config(folder, name, **options)
    with figures.drawn():
        dpo.train(config)
    return tiny.untimed(tiny.read_metrics(config.output_dir)), tiny.weights(folder / name / "model")


@pytest.fixture(scope="module")
def run(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        return trained(folder, "whole")


def test_metrics_have_exactly_these_names_and_the_policy_learns(run):
    metrics, _ = run
    names = {"step", *tiny.usual("dpo")} - {
        name for name in tiny.usual("dpo") if name.startswith(("time/", "perf/"))
    }
    evaluation = {name for name in names if name.startswith("eval/")}
    assert set(metrics[0]) == {"step"} | evaluation
    # Evaluated in every third step, and in the fourth, which is the last one.
    assert set(metrics[1]) == set(metrics[2]) == names - evaluation
    assert set(metrics[3]) == set(metrics[4]) == names
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    first, last = metrics[0], metrics[-1]
    # The reference is the policy.
    assert first["eval/dpo/chosen_rewards"] == first["eval/dpo/rejected_rewards"] == 0
    assert first["eval/dpo/accuracy"] == 0.5
    assert last["eval/dpo/loss"] < first["eval/dpo/loss"] and last["eval/dpo/reward_margin"] > 0


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_before_training_all_scores_are_equal_and_the_accuracy_is_a_half(
    micro_batch, folder, tmp_path, monkeypatch
):
    evaluations, evaluate = [], dpo.evaluate

    def noted(*arguments):
        evaluations.append(evaluate(*arguments))
        return evaluations[-1]

    monkeypatch.setattr(dpo, "evaluate", noted)
    options = {"eval_size": 11, "steps": 2, "eval_every": 1, "save_every": 0, "lr": 1e-2}
    sizes = {"micro_batch_size": micro_batch}
    trained(folder, f"halves-{micro_batch}", **options, **sizes)
    before, *after = evaluations
    assert before.by_row["eval/dpo/accuracy"] == [[0.5] * 11]
    assert before.metrics["eval/dpo/accuracy"] == 0.5
    # The figure is the mean of its rows.
    for evaluation in after:
        (rows,) = evaluation.by_row["eval/dpo/accuracy"]
        assert sum(rows) / 11 == pytest.approx(evaluation.metrics["eval/dpo/accuracy"])
    assert evaluation.metrics["eval/dpo/accuracy"] != 0.5


def test_a_stopped_run_goes_on_bit_for_bit(folder, run, tmp_path):
    forget_after(folder / "whole", tmp_path / "run", 2)
    config = dpo_config(folder, resume=True)
    config.output_dir = str(tmp_path / "run")
    dpo.train(config)
    weights = tiny.weights(tmp_path / "run" / "model")
    assert tiny.untimed(tiny.read_metrics(tmp_path / "run")) == run[0]
    assert all(torch.equal(weights[name], run[1][name]) for name in weights)


# The loss of a pair from log pi and log pi_ref (2,), numbers of predicted tokens (2,) and the pair's margin; beta 0.5.
softplus, relu = torch.nn.functional.softplus, torch.relu
PAPERS = {
    "sigmoid": lambda lp, ref, n, margin: softplus(margin - 0.5 * lead(lp - ref)),
    "hinge": lambda lp, ref, n, margin: relu(1 + margin - 0.5 * lead(lp - ref)),
    "ipo": lambda lp, ref, n, margin: (lead((lp - ref) / n) - margin - 1 / (2 * 0.5)) ** 2,
    "simpo": lambda lp, ref, n, margin: softplus(margin - 0.5 * lead(lp / n)),
}


def lead(scores):
    return scores[0] - scores[1]


@pytest.mark.parametrize("loss_type", PAPERS)
def test_a_loss_is_its_papers_however_the_pairs_are_split(loss_type, folder, monkeypatch):
    """Value and gradient in fp64, over micro-batches and ranks."""
    options = {"loss_type": loss_type, "beta": 0.5, "label_smoothing": 0.0, "margin": 0.25}
    config = dpo_config(folder, nll_coef=0.3, **options)
    made = torch.Generator().manual_seed(0)
    pairs = []
    for i in range(6):
        prompt, chosen, rejected = (
            torch.randint(3, 40, (n,), generator=made).tolist() for n in (3 * (i > 0), 2 + i, 9 - i)
        )
        pairs.append(Pair((prompt, chosen), (prompt, rejected), 0.5 * (i % 3), f"line {i}"))
    reference = -40 + 4 * torch.randn(6, 2, generator=made)

    # By the definitions: nothing predicts the first token of a conversation without a prompt.
    exact = tiny.load_lm(config, trainable=False).base.double().requires_grad_(True)
    losses, nll, count = [], 0.0, 0
    for pair, ref in zip(pairs, reference.double(), strict=True):
        scores, lengths = [], []
        for prompt, response in (pair.chosen, pair.rejected):
            ids, begin = torch.tensor(prompt + response), max(1, len(prompt))
            logp = exact(input_ids=ids[None]).logits[0, begin - 1 : -1].log_softmax(-1)
            scores.append(logp.gather(1, ids[begin:, None]).sum())
            lengths.append(len(ids) - begin)
        lengths = torch.tensor(lengths)
        losses.append(PAPERS[loss_type](torch.stack(scores), ref, lengths, 0.25 + pair.margin))
        nll, count = nll - scores[0], count + lengths[0]
    loss = torch.stack(losses).mean() + 0.3 * nll / count
    loss.backward()

    monkeypatch.setattr(ranks, "global_sum", lambda values: values.double())
    for world, micro_batch_size, tokens in ((1, 14, None), (1, 4, 60), (2, 1, None), (3, 4, None)):
        config.micro_batch_size, config.micro_batch_tokens = micro_batch_size, tokens
        lm, logprobs = tiny.load_lm(config), 0.0
        monkeypatch.setattr(ranks, "world_size", lambda world=world: world)
        monkeypatch.setattr(ranks, "processes", lambda world=world: world)
        for rank in range(world):  # one after the other: its gradients add up, as do its scores
            monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
            logprobs = logprobs + dpo.measure(Plain(lm), pairs, config, reference)
        found = dpo.pair_metrics(logprobs, reference, pairs, config, "")
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        for parameter in lm.parameters():
            parameter.grad /= world  # as the engine averages
        assert_gradients_close(lm, exact, "lm.")


@pytest.mark.parametrize("loss_type", ["orpo", "apo-zero", "apo-down"])
def test_orpo_has_no_reference_and_apo_no_margin(folder, loss_type):
    nll_coef = 0.5 if loss_type == "orpo" else 0.0
    options = {"loss_type": loss_type, "beta": 0.3, "nll_coef": nll_coef, "label_smoothing": 0.0}
    config = dpo_config(folder, **options)
    lengths = torch.tensor([[2, 3], [4, 1]])
    pairs = [
        dpo.Pair(([5], [6] * chosen), ([5], [7] * rejected), 0.25, "a row")
        for chosen, rejected in lengths.tolist()
    ]
    logprobs = -lengths * torch.tensor([[0.5, 0.9], [1.5, 0.7]]).double()
    reference = logprobs - torch.tensor([[0.3, -0.2], [-0.4, 0.1]]).double()
    loss, metrics = dpo.pair_loss(logprobs, reference, pairs, pairs, config)

    means = (logprobs / lengths).exp()
    log_odds = (means / (1 - means)).log()
    lead = log_odds[:, 0] - log_odds[:, 1] - 0.25
    odds_ratio = (
        -0.3 * torch.sigmoid(lead).log() + 0.5 * -logprobs[:, 0].sum() / lengths[:, 0].sum()
    )
    chosen, rejected = torch.sigmoid(0.3 * (logprobs - reference)).unbind(1)
    ahead = torch.sigmoid(0.3 * (logprobs - reference) @ torch.tensor([1.0, -1.0]).double())
    want = {"orpo": odds_ratio, "apo-zero": 1 - chosen + rejected, "apo-down": chosen + 1 - ahead}
    torch.testing.assert_close(loss, want[loss_type].mean())
    assert metrics["loss"] == loss


def test_label_smoothing_has_no_effect_on_ipo(folder):
    with pytest.raises(InputError, match="label_smoothing=0.05 has no effect on ipo"):
        dpo_config(folder, "smoothed", loss_type="ipo")


def test_a_log_probability_that_is_not_finite_names_its_row(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        lm.get_output_embeddings().weight[3] = math.nan
    make_model(tmp_path / "model")
    lm.save_pretrained(tmp_path / "model")
    write_pairs(tmp_path / "pairs.jsonl")
    with pytest.raises(InputError, match=r"rows .*pairs.jsonl, line \d+: \[nan"):
        dpo.train(dpo_config(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_three_updates_are_trls(folder, tmp_path, name):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()][:8]
    # TRL knows no margin.
    rows = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]
    tiny.jsonl(tmp_path / "pairs.jsonl", rows)
    options = {"beta": 0.1} | LOSSES[name]
    loss_type = (
        ["sigmoid", "sft"]
        if name == "nll"
        else [options.get("loss_type", "sigmoid").replace("-", "_")]
    )
    lm = AutoModelForCausalLM.from_pretrained(folder / "model")
    with mock.patch.dict(os.environ):  # accelerate leaves a launcher's variables there
        arguments = trl.DPOConfig(
            output_dir=str(tmp_path / "trl"), max_steps=3, per_device_train_batch_size=8, learning_rate=1e-3,
            lr_scheduler_type="constant", beta=options["beta"], loss_type=loss_type, logging_steps=1, report_to=[],
            loss_weights=[1.0, 0.5] if name == "nll" else None, use_cpu=True, save_strategy="no", bf16=False,
        )  # fmt: skip
        given = {"train_dataset": Dataset.from_list(rows)}
        given["processing_class"] = AutoTokenizer.from_pretrained(folder / "model")
        theirs = trl.DPOTrainer(lm, args=arguments, **given)
        theirs.train()
    losses = [row["loss"] for row in theirs.state.log_history if "loss" in row]

    options |= {
        "dataset": str(tmp_path / "pairs.jsonl"),
        "eval_size": 0,
        "steps": 3,
        "lr_schedule": "constant",
    }
    metrics, weights = trained(
        folder, f"as-trl-{name}", **{"label_smoothing": 0.0, "nll_coef": 0.0} | options
    )
    assert [row["train/dpo/loss"] for row in metrics] == pytest.approx(losses, rel=1e-4)
    start = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    for key, value in lm.state_dict().items():
        moved = (value - start[key]).norm()
        assert (weights[key] - value).norm() <= 1e-3 * moved, key


def train_splits(rank, world, folder, splits):
    found = {}
    for split in splits:
        options = {"zero_stage": split[0]} | runs.division(split[1])
        config = dpo_config(folder, f"split-{world}-{split}", eval_every=9, save_every=0, **options)
        dpo.train(config)
        metrics = tiny.untimed(tiny.read_metrics(config.output_dir))
        found[split] = (
            {k: v.numpy() for k, v in tiny.weights(Path(config.output_dir) / "model").items()},
            metrics,
        )
    return found


@pytest.mark.slow
def test_processes_micro_batches_and_zero_stages_agree(folder):
    one = on_ranks(train_splits, 1, folder, [(0, 8), (2, 1)])[0]
    # 5 held-out pairs, which 2 ranks do not divide.
    two = on_ranks(train_splits, 2, folder, [(3, "60 tokens"), (2, 8)])[0]
    weights, metrics = one[0, 8]
    for split, (other_weights, other_metrics) in [*one.items(), *two.items()]:
        for key in weights:
            assert abs(weights[key] - other_weights[key]).max() < 1e-6, (split, key)
        # Before, accuracy is that of rounded zeros.
        for a, b in zip(metrics[2:], other_metrics[2:], strict=True):
            assert a == pytest.approx(b, abs=1e-5), split
