"""docs/metrics.md describes every key that a run logs, and none that no run logs."""

import json
import re
from pathlib import Path

import pytest

from fused_rl.trainers import distill, dpo, grpo, kto, ppo, reward, sft
from fused_rl.trainers.run.logger import Logger
from tests.distributed import PROCESSES
from tests.trainers import tiny
from tests.trainers.runs import grpo_config, sft_config


def test_tensorboard_has_curves_and_samples(files, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = Logger(sft_config(files, tmp_path), 0)
    for step, loss in ((1, 2.5), (2, 1.25)):
        logger.log(step, {"train/loss": loss, "lr": 0.5})
    # What is logged is on the disk before the writer is closed, because a run may be killed.
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(read.Scalars("train/loss")) == 2
    logger.samples(2, [{"prompt": "1+1", "response": "a\n<b>2</b>"}])
    logger.board.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("train/loss")] == [
        (1, 2.5),
        (2, 1.25),
    ]
    (sample,) = read.Tensors("samples/0/text_summary")
    assert (
        sample.tensor_proto.string_val[0].decode()
        == "prompt:\n\n    1+1\n\nresponse:\n\n    a\n    <b>2</b>"
    )


def train_each(files, tmp_path, folders):
    """Train every trainer, with what makes a metric appear."""
    model, rows = files
    pairs = [{"prompt": f"{i}+1", "chosen": f"{i + 1}", "rejected": "no"} for i in range(20)]
    few = {"eval_size": 4, "save_every": 1, "steps": 2, "zero_stage": 0, "lr": 1e-3}
    of_pairs = tiny.jsonl(tmp_path / "pairs.jsonl", pairs)
    scorers = {
        "verifiers": ["math", "tests.trainers.tiny:first_is_odd"],
        "rollout_correction": "token-truncate",
    }
    scorers["solved_at"] = [0.0, 1.0]  # so that some responses of random weights are right
    sft.train(sft_config(files, folders["sft"], **few))
    reward.train(
        reward.RewardConfig(
            model=model, dataset=of_pairs, output_dir=folders["reward"], batch_size=8, **few
        )
    )
    dpo.train(
        dpo.DPOConfig(model=model, dataset=of_pairs, output_dir=folders["dpo"], batch_size=8, **few)
    )
    kto.train(
        kto.KTOConfig(model=model, dataset=of_pairs, output_dir=folders["kto"], batch_size=8, **few)
    )
    grpo.train(grpo_config(files, folders["grpo"], **few, **scorers), sampler=tiny.Telling)
    config = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6, "eval_samples": 2}
    judged = {"verifiers": scorers["verifiers"], "solved_at": scorers["solved_at"]}
    given = {"model": model, "teacher": model, "dataset": rows, "output_dir": folders["distill"]}
    distill.train(distill.DistillConfig(**given, **config, **few, **judged))
    config["minibatches"] = 1
    config |= {
        "model": model,
        "dataset": rows,
        "critic": tiny.reward_folder(tmp_path / "critic", model),
    }
    ppo.train(
        ppo.PPOConfig(output_dir=folders["ppo"], **config, **few, **scorers), sampler=tiny.Telling
    )


@pytest.mark.slow
def test_every_key_that_a_run_logs_stands_in_the_table_and_every_row_is_logged(files, tmp_path):
    folders = {
        name: str(tmp_path / name)
        for name in ("sft", "reward", "dpo", "kto", "distill", "grpo", "ppo")
    }
    # In a process of its own, as a process that has trained with ZeRO 3 is too large to fork math's.
    process = PROCESSES.Process(target=train_each, args=(files, tmp_path, folders))
    process.start()
    process.join()
    assert process.exitcode == 0

    for trainer, folder in folders.items():
        # What held_out.jsonl has of each row is what the evaluation has of them all.
        logged = {entry["step"]: entry for entry in tiny.read_metrics(folder)}
        lines = [
            json.loads(line) for line in (Path(folder) / "held_out.jsonl").read_text().splitlines()
        ]
        assert {line["step"] for line in lines} == {0, max(logged)}, trainer
        for line in lines:
            step = line.pop("step")
            for key, (sums, *weights) in line.items():
                count = sum(weights[0]) if weights else len(sums)
                of_rows = sum(sums) / count
                # A KL of equal models is rounding alone.
                assert of_rows == pytest.approx(logged[step][key], rel=1e-5, abs=1e-7), key

        rows, named = tiny.documented(trainer), set()
        for key in set().union(*tiny.read_metrics(folder)) - {"step"}:
            fitting = [
                row
                for row in rows
                if re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(row)), key)
            ]
            assert fitting, f"{key} of {trainer} is not in docs/metrics.md"
            named |= {key} if key in rows else {*fitting}
        assert named == rows, trainer
