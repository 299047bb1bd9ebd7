"""The KTO trainer: TRL's updates, and runs that do not depend on how they were split or interrupted."""

import json
import math
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from fused_rl.trainers import kto
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.encode import Encoder, load_tokenizer
from fused_rl.trainers.data.marked import marked_rows
from fused_rl.trainers.data.rows import Rows
from tests.trainers import figures, runs, tiny
from tests.trainers.reward_runs import make_model, write_marked
from tests.trainers.runs import forget_after, on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kto")
    make_model(folder / "model")
    write_marked(folder / "marked.jsonl")
    return folder


def kto_config(folder: Path, name: str = "run", **options) -> kto.KTOConfig:
    settings = {"eval_size": 5, "steps": 4, "batch_size": 8, "lr": 1e-3, "dtype": "float32"}
    settings |= {"eval_every": 2, "save_every": 2}
    settings |= {"desirable_weight": 1.5, "undesirable_weight": 0.75}
    files = {"dataset": folder / "marked.jsonl", "output_dir": folder / name}
    return tiny.config_of("kto", folder / "model", **(files | settings | options))


def trained(folder: Path, name: str, **options) -> tuple[list[dict], dict[str, torch.Tensor]]:
    config = kto_config(folder, name, **options)
    with figures.drawn():
        kto.train(config)
    return tiny.untimed(tiny.read_metrics(config.output_dir)), tiny.weights(folder / name / "model")


@pytest.fixture(scope="module")
def run(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        return trained(folder, "whole")


def test_metrics_have_exactly_these_names_and_the_policy_learns(run):
    metrics, _ = run
    timed = ("time/", "perf/")
    names = {"step"} | {name for name in tiny.usual("kto") if not name.startswith(timed)}
    evaluation = {name for name in names if name.startswith("eval/")}
    assert set(metrics[0]) == {"step"} | evaluation
    assert set(metrics[1]) == names - evaluation and set(metrics[2]) == names
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    first, last = metrics[0], metrics[-1]
    # The reference is the policy: every score and the KL are 0, and each response costs half its weight.
    assert first["eval/kto/kl"] == first["eval/kto/desirable_rewards"] == 0
    fraction = first["eval/kto/desirable"]
    assert 0 < fraction < 1 and first["eval/kto/accuracy"] == 0.5
    assert first["eval/kto/loss"] == pytest.approx((1.5 * fraction + 0.75 * (1 - fraction)) / 2)
    assert last["eval/kto/desirable_rewards"] > last["eval/kto/undesirable_rewards"]
    assert last["eval/kto/loss"] < first["eval/kto/loss"]


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_before_training_all_scores_are_equal_and_the_accuracy_is_a_half(
    micro_batch, folder, tmp_path, monkeypatch
):
    evaluations, evaluate = [], kto.evaluate

    def noted(*arguments):
        evaluations.append(evaluate(*arguments))
        return evaluations[-1]

    monkeypatch.setattr(kto, "evaluate", noted)
    options = {"eval_size": 11, "steps": 2, "eval_every": 1, "save_every": 0, "lr": 1e-2}
    sizes = {"micro_batch_size": micro_batch}
    trained(folder, f"halves-{micro_batch}", **options, **sizes)
    before, *after = evaluations
    assert before.by_row["eval/kto/accuracy"] == [[0.5] * 11]
    assert before.metrics["eval/kto/accuracy"] == 0.5
    # The figure is the mean of its rows.
    for evaluation in after:
        (rows,) = evaluation.by_row["eval/kto/accuracy"]
        assert sum(rows) / 11 == pytest.approx(evaluation.metrics["eval/kto/accuracy"])
    assert evaluation.metrics["eval/kto/accuracy"] != 0.5


def test_a_stopped_run_goes_on_bit_for_bit(folder, run, tmp_path):
    forget_after(folder / "whole", tmp_path / "run", 2)
    config = kto_config(folder, resume=True)
    config.output_dir = str(tmp_path / "run")
    kto.train(config)
    weights = tiny.weights(tmp_path / "run" / "model")
    assert tiny.untimed(tiny.read_metrics(tmp_path / "run")) == run[0]
    assert all(torch.equal(weights[name], run[1][name]) for name in weights)


def read(folder, rows, **options):
    encoder = Encoder(load_tokenizer(str(folder / "model")))
    return marked_rows(kto_config(folder, **options), Rows(rows, "rows.jsonl"), encoder)


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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"label": "yes"}, "line 1: column 'label' must be true or false, got 'yes'"),
        ({"label": 2}, "line 1: column 'label' must be true or false, got 2"),
        ({"label": None}, "line 1: column 'label' is null"),
    ],
)
def test_a_label_is_true_or_false(folder, row, message):
    with pytest.raises(InputError, match=message):
        read(folder, [{"prompt": "a", "completion": "b"} | row])


def test_a_log_probability_that_is_not_finite_names_its_row(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "model")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        lm.get_output_embeddings().weight[3] = math.nan
    lm.save_pretrained(tmp_path / "model")
    write_marked(tmp_path / "marked.jsonl")
    with pytest.raises(InputError, match=r"rows .*marked.jsonl, line \d+: \[nan"):
        kto.train(kto_config(tmp_path))


@pytest.mark.slow
def test_three_updates_are_trls(folder, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in (folder / "marked.jsonl").read_text().splitlines()][:8]
    tiny.jsonl(tmp_path / "marked.jsonl", rows)
    weights_of_kinds = {"desirable_weight": 1.25, "undesirable_weight": 0.75}
    lm = AutoModelForCausalLM.from_pretrained(folder / "model")
    with mock.patch.dict(os.environ):  # accelerate leaves a launcher's variables there
        arguments = trl.KTOConfig(
            output_dir=str(tmp_path / "trl"), max_steps=3, per_device_train_batch_size=8, learning_rate=1e-2,
            lr_scheduler_type="constant", beta=0.5, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", bf16=False, **weights_of_kinds,
        )  # fmt: skip
        given = {"train_dataset": Dataset.from_list(rows)}
        given["processing_class"] = AutoTokenizer.from_pretrained(folder / "model")
        theirs = trl.KTOTrainer(lm, args=arguments, **given)
        theirs.train()
    losses = [row["loss"] for row in theirs.state.log_history if "loss" in row]
    kls = [row["kl"] for row in theirs.state.log_history if "kl" in row]

    options = {"dataset": str(tmp_path / "marked.jsonl"), "eval_size": 0, "steps": 3, "lr": 1e-2}
    options |= {"lr_schedule": "constant", "beta": 0.5} | weights_of_kinds
    metrics, weights = trained(folder, "as-trl", **options)
    assert [row["train/kto/loss"] for row in metrics] == pytest.approx(losses, rel=1e-4)
    assert [row["train/kto/kl"] for row in metrics] == pytest.approx(kls, rel=1e-3, abs=1e-5)
    assert kls[-1] > 1e-3  # else nothing is compared
    start = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    for key, value in lm.state_dict().items():
        moved = (value - start[key]).norm()
        assert (weights[key] - value).norm() <= 1e-3 * moved, key


def train_splits(rank, world, folder, splits):
    found = {}
    for split in splits:
        options = {"zero_stage": split[0]} | runs.division(split[1])
        config = kto_config(folder, f"split-{world}-{split}", eval_every=9, save_every=0, **options)
        kto.train(config)
        weights = tiny.weights(Path(config.output_dir) / "model")
        numbers = {name: tensor.numpy() for name, tensor in weights.items()}
        found[split] = numbers, tiny.untimed(tiny.read_metrics(config.output_dir))
    return found


@pytest.mark.slow
def test_processes_micro_batches_and_zero_stages_agree(folder):
    one = on_ranks(train_splits, 1, folder, [(0, 8), (2, 1)])[0]
    # Two ranks do not divide the 5 held-out rows.
    two = on_ranks(train_splits, 2, folder, [(3, "60 tokens"), (2, 8)])[0]
    weights, metrics = one[0, 8]
    for split, (other_weights, other_metrics) in [*one.items(), *two.items()]:
        for key in weights:
            assert abs(weights[key] - other_weights[key]).max() < 1e-5, (split, key)
        # Before the first step the accuracy is that of rounded zeros.
        for a, b in zip(metrics[2:], other_metrics[2:], strict=True):
            assert a == pytest.approx(b, abs=1e-5), split
