"""The reward trainer: runs that do not depend on how they were split or interrupted."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import reward
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import encode, preferences
from fused_rl.trainers.data.reading import load_train_eval
from fused_rl.trainers.models.reward_model import RewardModel, RewardScorer
from tests.distributed import run_distributed
from tests.trainers import figures, tiny
from tests.trainers.reward_runs import comparable, make_config, make_model, weights, write_pairs
from tests.trainers.runs import division, on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    make_model(folder / "model")
    write_pairs(folder / "pairs.jsonl")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """One finished run: its config and its metrics."""
    config = make_config(folder)
    with figures.drawn(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        reward.train(config)
    return config, [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def test_metrics_have_exactly_these_names(run):
    config, metrics = run
    assert [m["step"] for m in metrics] == [0, 1, 2, 3, 4]
    names = {"step", *tiny.usual("reward")}
    evaluation = {name for name in names if name.startswith("eval/")}
    assert set(metrics[0]) == {"step"} | evaluation
    assert set(metrics[1]) == set(metrics[3]) == names - evaluation
    assert set(metrics[2]) == set(metrics[4]) == names
    for m in metrics:
        assert all(map(math.isfinite, m.values()))
    made = {path.name for path in Path(config.output_dir).iterdir()}
    assert {"curves.png", "evaluation.json", "samples.jsonl", "tensorboard", "model"} <= made


def held_out_pairs(config) -> list[preferences.Pair]:
    tokenizer = encode.load_tokenizer(config.model)
    return preferences.pairs_of(
        config, load_train_eval(config)[1], encode.Encoder.of(config, tokenizer)
    )


def test_the_scorer_gives_the_trainers_scores(run):
    """From another folder, in other batches, other order: what PPO sees is what was trained."""
    config, metrics = run
    pairs, last = held_out_pairs(config), metrics[-1]
    model = RewardModel.from_pretrained(Path(config.output_dir) / "model")
    sides = sum(([p.rejected, p.chosen] for p in pairs), [])
    rejected, chosen = (
        RewardScorer(model, 3)([p for p, _ in sides], [r for _, r in sides]).view(-1, 2).T
    )
    constants = json.loads((Path(config.output_dir) / "evaluation.json").read_text())[
        "normalization"
    ]
    assert constants["after"] == [model.score_mean, model.score_std]
    # Undone: metrics are in the scale of the training loss.
    chosen, rejected = (
        (s.double() * model.score_std + model.score_mean - constants["before"][0])
        / constants["before"][1]
        for s in (chosen, rejected)
    )
    assert chosen.mean().item() == pytest.approx(last["eval/rm/chosen_rewards"], abs=1e-5)
    assert rejected.mean().item() == pytest.approx(last["eval/rm/rejected_rewards"], abs=1e-5)
    both = torch.cat([chosen, rejected])
    assert both.min().item() == pytest.approx(last["eval/rm/min_reward"], abs=1e-5)
    assert both.max().item() == pytest.approx(last["eval/rm/max_reward"], abs=1e-5)
    assert (chosen > rejected).double().mean().item() == last["eval/rm/accuracy"]
    assert (chosen - rejected).mean().item() == pytest.approx(
        last["eval/rm/reward_margin"], abs=1e-5
    )


def test_a_score_that_is_not_finite_stops_the_run(folder, tmp_path, monkeypatch):
    import deepspeed
    from transformers import AutoModelForCausalLM

    lm, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        encode.load_tokenizer(str(folder / "model")),
    )
    with torch.no_grad():
        lm.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("z")] = math.inf
    lm.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    lines[6] = json.dumps({"prompt": "a=", "chosen": "a", "rejected": "z"})
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    steps, step = [], deepspeed.DeepSpeedEngine.step
    monkeypatch.setattr(
        deepspeed.DeepSpeedEngine, "step", lambda *args: (steps.append(1), step(*args))
    )
    # Rows 1 to 3; the first epoch, two steps, meets row 7.
    config = make_config(tmp_path, normalize_pairs=3)
    with pytest.raises(InputError, match=r"1 of 8 rows .*pairs.jsonl, line 7: \[-?[\d.]+, nan\]"):
        reward.train(config)
    logged = comparable(config)
    # The step that would have spoilt the weights was not made.
    assert len(steps) == len(logged) - 1 < 2


@pytest.mark.slow
def test_pairs_that_share_a_row_train_as_sides_of_their_own(folder, run, monkeypatch):
    shared, pack_pairs = [], reward.pack_pairs
    monkeypatch.setattr(
        reward, "pack_pairs", lambda *given: shared.append(pack_pairs(*given)) or shared[-1]
    )
    config = make_config(folder, "shared", share_prompts=True)
    reward.train(config)
    assert len(shared) == 8 and None not in shared  # two micro-batches of each of four steps
    own = make_config(folder, "own", share_prompts=False)
    reward.train(own)
    assert len(shared) == 8
    assert comparable(config) == comparable(run[0])  # what None does, too
    for a, b in zip(comparable(config), comparable(own), strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    expected, found = weights(own), weights(config)
    for name in expected:
        assert (found[name] - expected[name]).abs().max() < 1e-6, name


def train_splits(rank, world, folder, splits):
    found = {}
    for split in splits:
        options = {"zero_stage": split[0], "lora_rank": split[2]} | division(split[1])
        config = make_config(folder, f"split-{world}-{split}", eval_every=9, **options)
        reward.train(config)
        found[split] = (
            {key: value.double().numpy() for key, value in weights(config).items()},
            comparable(config),
            json.loads((Path(config.output_dir) / "evaluation.json").read_text())["normalization"],
        )
    return found


def check_agreement(folder, tmp_path, one, two):
    shutil.copytree(folder, tmp_path / "copy")
    one = on_ranks(train_splits, 1, tmp_path / "copy", one)[0]
    two = on_ranks(train_splits, 2, tmp_path / "copy", two)[0]
    for split, (other_weights, other_metrics, other_constants) in [*one.items(), *two.items()]:
        weights, metrics, constants = one[0, 8, split[2]]
        for key in weights:
            assert abs(weights[key] - other_weights[key]).max() < 1e-6, (split, key)
        for a, b in zip(metrics, other_metrics, strict=True):
            assert a == pytest.approx(b, abs=1e-5), split
        assert other_constants["after"] == pytest.approx(constants["after"], abs=1e-5)


def head_under_zero_3(rank, world, folder):
    """Loaded where transformers itself partitions the weights: the head of the whole, as every rank has it."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from fused_rl.trainers.base import engine

    engine.setup(rank)  # another seed on every rank
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    alive = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    model = RewardModel.from_pretrained(folder / "model")
    head = model.classifier.score.weight
    assert head.shape == (0,) and alive is not None  # partitioned
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        del alive
        embeddings = (
            AutoModelForCausalLM.from_pretrained(folder / "model").get_input_embeddings().weight
        )
        assert torch.equal(model.classifier.get_input_embeddings().weight, embeddings)
        return head[0].tolist()


@pytest.mark.slow
def test_the_head_under_zero_3(folder):
    draws = run_distributed(head_under_zero_3, 2, folder)
    assert draws[0] == draws[1]
    # Of 16 draws; stock: 0.1.
    assert torch.tensor(draws[0]).std().item() == pytest.approx(1 / math.sqrt(17), rel=0.5)


@pytest.mark.slow
def test_processes_micro_batches_and_zero_stages_agree(folder, tmp_path):
    # (ZeRO stage, micro-batch, LoRA rank). Two processes have 8 sequences each; 1 means one pair at a time.
    check_agreement(
        folder, tmp_path, [(0, 8, 0), (2, 1, 0), (0, 8, 2)], [(3, "60 tokens", 0), (2, 8, 2)]
    )
