"""DPO and KTO: their losses in fp64, TRL's updates, and what they do before the first step."""

import json
import math
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from fused_rl.trainers import dpo, kto
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.encode import Encoder, load_tokenizer
from fused_rl.trainers.data.marked import marked_rows
from fused_rl.trainers.data.preferences import Pair
from fused_rl.trainers.data.rows import Rows
from tests.trainers import tiny
from tests.trainers.reward_runs import make_model, write_marked, write_pairs
from tests.trainers.steps import Plain, assert_gradients_close

TRAINERS = {"dpo": dpo, "kto": kto}
OPTIONS = {
    "dpo": {"label_smoothing": 0.05, "nll_coef": 0.1},
    "kto": {"desirable_weight": 1.25, "undesirable_weight": 0.75},
}
RUN = {"eval_size": 5, "steps": 2, "batch_size": 8, "save_every": 0, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    make_model(folder / "model")
    write_pairs(folder / "dpo.jsonl")
    write_marked(folder / "kto.jsonl")
    return folder


def config_of(trainer: str, folder: Path, output_dir="run", **options):
    files = {"dataset": folder / f"{trainer}.jsonl", "output_dir": output_dir}
    return tiny.config_of(trainer, folder / "model", **(files | RUN | OPTIONS[trainer] | options))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_before_training_all_scores_are_equal_and_the_accuracy_is_a_half(
    trainer, folder, tmp_path, monkeypatch
):
    evaluations, module = [], TRAINERS[trainer]
    evaluate = module.evaluate

    def noted(*arguments):
        evaluations.append(evaluate(*arguments))
        return evaluations[-1]

    monkeypatch.setattr(module, "evaluate", noted)
    options = {"eval_size": 11, "eval_every": 2, "lr": 1e-3, "micro_batch_size": 3, "steps": 4}
    module.train(config_of(trainer, folder, tmp_path / "run", **options))
    before, *after = evaluations
    accuracy = f"eval/{trainer}/accuracy"
    assert before.by_row[accuracy] == [[0.5] * 11] and before.metrics[accuracy] == 0.5
    # The figure is the mean of its rows.
    for evaluation in after:
        (rows,) = evaluation.by_row[accuracy]
        assert sum(rows) / 11 == pytest.approx(evaluation.metrics[accuracy])
    last = evaluation.metrics
    assert last[accuracy] != 0.5
    if trainer == "kto":
        # The reference is the policy: each response costs half its weight.
        share = before.metrics["eval/kto/desirable"]
        costs = (1.25 * share + 0.75 * (1 - share)) / 2
        assert before.metrics["eval/kto/loss"] == pytest.approx(costs)


# The loss of a pair from log pi and log pi_ref (2,), numbers of predicted tokens (2,) and the pair's margin; beta 0.5.
softplus, relu = torch.nn.functional.softplus, torch.relu
PAPERS = {
    "sigmoid": lambda lp, ref, n, margin: softplus(margin - 0.5 * lead(lp - ref)),
    "hinge": lambda lp, ref, n, margin: relu(1 + margin - 0.5 * lead(lp - ref)),
    "ipo": lambda lp, ref, n, margin: (lead((lp - ref) / n) - margin - 1 / (2 * 0.5)) ** 2,
    "simpo": lambda lp, ref, n, margin: softplus(margin - 0.5 * lead(lp / n)),
    "orpo": lambda lp, ref, n, margin: 0.5 * softplus(margin - lead(torch.logit((lp / n).exp()))),
    "apo-zero": lambda lp, ref, n, margin: 1 - lead(torch.sigmoid(0.5 * (lp - ref))),
}


def lead(scores):
    return scores[0] - scores[1]


@pytest.mark.parametrize("loss_type", PAPERS)
def test_a_loss_is_its_papers_however_the_pairs_are_split(loss_type, folder, monkeypatch):
    """Value and gradient in fp64, over micro-batches and ranks."""
    least = 0.0 if loss_type == "apo-zero" else 0.25
    options = {"loss_type": loss_type, "beta": 0.5, "label_smoothing": 0.0, "margin": least}
    config = config_of("dpo", folder, nll_coef=0.3, **options)
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
        losses.append(PAPERS[loss_type](torch.stack(scores), ref, lengths, least + pair.margin))
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


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_log_probability_that_is_not_finite_names_its_row(trainer, folder, tmp_path):
    from transformers import AutoModelForCausalLM

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    lm = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        lm.get_output_embeddings().weight[3] = math.nan
    lm.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=rf"rows .*{trainer}.jsonl, line \d+: \[nan"):
        TRAINERS[trainer].train(config_of(trainer, tmp_path, tmp_path / "run"))


# KTO's metrics and rows.


def test_scores_of_a_kind_are_a_mean_of_its_responses():
    sums = {"desirable": 0.25, "desirable_rewards": 1.0, "undesirable_rewards": 3.0}
    means = {"desirable": 0.25, "desirable_rewards": 4.0, "undesirable_rewards": 4.0}
    assert kto.mean_scores({name: torch.tensor(value) for name, value in sums.items()}) == means


def read(folder, rows, **options):
    encoder = Encoder(load_tokenizer(str(folder / "model")))
    return marked_rows(config_of("kto", folder, **options), Rows(rows, "rows.jsonl"), encoder)


def test_a_pair_is_two_rows_and_mismatched_responses_answer_another_prompt(folder):
    pairs = [{"prompt": f"{a}:", "chosen": a * 3, "rejected": a} for a in "abc"]
    marked = [{"prompt": "d:", "completion": "d", "label": label} for label in (1, 0, True)]
    rows = read(folder, pairs + marked)
    assert [row.desirable for row in rows] == [True, False] * 3 + [True, False, True]
    assert [row.where for row in rows[:3]] == [f"rows.jsonl, line {i}" for i in (1, 1, 2)]
    responses = [row.matched[1] for row in rows]
    # Each row's is that of the last row before it with another prompt; before the first row comes the last one.
    others = [responses[i] for i in (8, 8, 1, 1, 3, 3, 5, 5, 5)]
    assert [row.mismatched for row in rows] == [
        (row.matched[0], other) for row, other in zip(rows, others, strict=True)
    ]
    # That is so where the first and the last row have one prompt, too.
    rows = [{"prompt": p, "completion": r, "label": True} for p, r in ("pA", "qB", "rC", "pD")]
    responses = [row.matched[1] for row in read(folder, rows)]
    assert [row.mismatched[1] for row in read(folder, rows)] == [responses[i] for i in (2, 0, 1, 2)]
    for alone in (rows[:1], [rows[0], rows[3]]):
        with pytest.raises(
            InputError, match="rows have the prompt of rows.jsonl, line .; .*several"
        ):
            read(folder, alone).check_prompts()
    # A response to a shorter prompt is cut where the row would be too long.
    long = [
        {"prompt": p, "completion": r, "label": True} for p, r in (("a" * 6, "b"), ("a", "b" * 6))
    ]
    first, second = read(folder, long, max_length=8)
    assert sum(map(len, first.mismatched)) == 8 and len(second.mismatched[1]) == 2


@pytest.mark.slow
def test_three_updates_of_kto_are_trls(folder, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in (folder / "kto.jsonl").read_text().splitlines()][:8]
    shutil.copytree(folder / "model", tmp_path / "model")
    tiny.jsonl(tmp_path / "kto.jsonl", rows)
    lm = AutoModelForCausalLM.from_pretrained(folder / "model")
    with mock.patch.dict(os.environ):  # accelerate leaves a launcher's variables there
        arguments = trl.KTOConfig(
            output_dir=str(tmp_path / "trl"), max_steps=3, per_device_train_batch_size=8, learning_rate=1e-2,
            lr_scheduler_type="constant", beta=0.5, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", bf16=False, **OPTIONS["kto"],
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
        peer = trl.KTOTrainer(lm, args=arguments, **given)
        peer.train()
    options = {"eval_size": 0, "steps": 3, "lr": 1e-2, "lr_schedule": "constant", "beta": 0.5}
    kto.train(config_of("kto", tmp_path, tmp_path / "run", **options))
    metrics, weights = tiny.read_metrics(tmp_path / "run"), tiny.weights(tmp_path / "run/model")
    for key in ("loss", "kl"):
        logged = [row[key] for row in peer.state.log_history if key in row]
        found = [row[f"train/kto/{key}"] for row in metrics]
        assert found == pytest.approx(logged, rel=1e-3, abs=1e-5)
    start = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    for key, value in lm.state_dict().items():
        assert (weights[key] - value).norm() <= 1e-3 * (value - start[key]).norm(), key


def test_a_label_is_true_or_false(folder):
    for label, message in (("yes", "must be true or false, got 'yes'"), (None, "is null")):
        with pytest.raises(InputError, match=f"line 1: column 'label' {message}"):
            read(folder, [{"prompt": "a", "completion": "b", "label": label}])
