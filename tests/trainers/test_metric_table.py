"""docs/metrics.md describes every key that a run logs, and none that no run logs."""

import importlib
import json
import re

import pytest

from fused_rl.trainers import cli
from fused_rl.trainers.run.logger import Logger
from tests.distributed import PROCESSES
from tests.trainers import tiny
from tests.trainers.runs import sft_config


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
    assert [(at.step, at.value) for at in read.Scalars("train/loss")] == [(1, 2.5), (2, 1.25)]
    (sample,) = read.Tensors("samples/0/text_summary")
    text = sample.tensor_proto.string_val[0].decode()
    assert text == "prompt:\n\n    1+1\n\nresponse:\n\n    a\n    <b>2</b>"


OF_ROWS = {"batch_size": 8}
SAMPLED = {
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 6,
    "eval_samples": 2,
    "verifiers": ["math", "tests.trainers.tiny:first_is_odd"],
    "solved_at": [0.0, 1.0],  # so that some responses of random weights are right
}
CORRECTED = SAMPLED | {"rollout_correction": "token-truncate", "minibatches": 1}
OPTIONS = {
    "sft": OF_ROWS | {"completion_column": "answer"},
    "reward": OF_ROWS,
    "dpo": OF_ROWS,
    "kto": OF_ROWS,
    "distill": SAMPLED | {"teacher": "{model}"},
    "grpo": CORRECTED,
    "ppo": CORRECTED | {"critic": "{critic}"},
}


def train_each(files, tmp_path):
    """Train every trainer, with what makes a metric appear."""
    model, rows = files
    pairs = [{"prompt": f"{i}+1", "chosen": f"{i + 1}", "rejected": "no"} for i in range(20)]
    of_pairs = tiny.jsonl(tmp_path / "pairs.jsonl", pairs)
    critic = tiny.reward_folder(tmp_path / "critic", model)
    for trainer, options in OPTIONS.items():
        options = {"eval_size": 4, "save_every": 1, "steps": 2, "lr": 1e-3} | options
        for name in {"teacher", "critic"} & options.keys():
            options[name] = options[name].format(model=model, critic=critic)
        dataset = of_pairs if trainer in ("reward", "dpo", "kto") else rows
        config = tiny.config_of(trainer, model, dataset, str(tmp_path / trainer), **options)
        telling = {"sampler": tiny.Telling} if options.get("rollout_correction") else {}
        importlib.import_module(cli.TRAINERS[trainer].module).train(config, **telling)


@pytest.mark.slow
def test_every_key_that_a_run_logs_stands_in_the_table_and_every_row_is_logged(files, tmp_path):
    # In a process of its own, as a process that has trained with ZeRO 3 is too large to fork math's.
    process = PROCESSES.Process(target=train_each, args=(files, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0

    for trainer in OPTIONS:
        folder = tmp_path / trainer
        # What held_out.jsonl has of each row is what the evaluation has of them all.
        logged = {entry["step"]: entry for entry in tiny.read_metrics(folder)}
        lines = [*map(json.loads, (folder / "held_out.jsonl").read_text().splitlines())]
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
            patterns = {row: re.sub(r"\\\{\w+\\\}", ".+", re.escape(row)) for row in rows}
            fitting = [row for row, pattern in patterns.items() if re.fullmatch(pattern, key)]
            assert fitting, f"{key} of {trainer} is not in docs/metrics.md"
            named |= {key} if key in rows else {*fitting}
        assert named == rows, trainer
