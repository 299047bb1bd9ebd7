"""The table of metrics holds every key that a run logs, and none that no run logs; TensorBoard shows what it says."""

import pytest

from fused_rl.trainers import grpo, ppo, reward, sft
from fused_rl.trainers.metrics.table import KEYS, NAMED, description, row_of
from fused_rl.trainers.run.logger import Logger
from tests.trainers import tiny
from tests.trainers.runs import grpo_config, sft_config


def test_a_key_is_described_by_its_row():
    assert row_of("grpo", "reward") == "reward"
    assert row_of("grpo", "rewards/my: odd/name/mean") == "rewards/{name}/mean"
    assert row_of("ppo", "eval/verifier/math/timeouts") == "eval/verifier/{name}/timeouts"
    assert row_of("ppo", "eval/pass_at_16") == "eval/pass_at_{k}"
    assert row_of("sft", "rewards/math/mean") is None and row_of("grpo", "rewards/math/median") is None
    assert row_of("grpo", "eval/pass_at_k") == "eval/pass_at_k"
    assert "Healthy: 0 to 1, rising" in description("ppo", "val/var_explained")
    assert "how" not in description("grpo", "no/such/key")


def test_a_definition_stands_alone():
    """The page of a run shows each without the one before it in the table."""
    for table in (*KEYS.values(), *(origin.metrics for origin in NAMED)):
        for key, metric in table.items():
            assert not metric.definition.startswith(("the same", "of ", "the largest of these")), key


@pytest.mark.parametrize("trainer", [grpo, ppo])
def test_the_progress_line_calls_a_held_out_score_one(trainer):
    (header,) = [header for header, key in trainer.COLUMNS.items() if key.startswith("eval/")]
    assert header == ("held-out score" if trainer.COLUMNS[header] == "eval/score" else "held-out")


def test_tensorboard_shows_what_the_table_says(files, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = Logger(sft_config(files, tmp_path), {}, 0)
    for step, loss in ((1, 2.5), (2, 1.25)):
        logger.log(step, {"train/loss": loss, "lr": 0.5})
    with pytest.raises(KeyError, match="train/lss"):
        logger.log(3, {"train/lss": 1.0})
    logger.samples(2, [{"prompt": "1+1", "response": "a\n<b>2</b>"}])
    logger.file.close()
    logger.board.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("train/loss")] == [(1, 2.5), (2, 1.25)]
    (sample,) = read.Tensors("samples/0/text_summary")
    assert sample.tensor_proto.string_val[0].decode() == "prompt:\n\n    1+1\n\nresponse:\n\n    a\n    <b>2</b>"
    assert read.SummaryMetadata("train/loss").summary_description == description("sft", "train/loss")


@pytest.mark.slow
def test_every_key_that_a_run_logs_stands_in_the_table_and_every_row_is_logged(files, tmp_path):
    model, rows = files
    pairs = [{"prompt": f"{i}+1", "chosen": f"{i + 1}", "rejected": "no"} for i in range(20)]
    few = {"eval_size": 4, "save_every": 1, "steps": 2, "zero_stage": 0, "lr": 1e-3}
    of_pairs = tiny.jsonl(tmp_path / "pairs.jsonl", pairs)
    scorers = {"verifiers": ["math", "tests.trainers.tiny:first_is_odd"], "rollout_correction": "token-truncate"}
    scorers["solved_at"] = [0.0, 1.0]  # so that some responses of random weights are right
    folders = {name: str(tmp_path / name) for name in KEYS}

    # A run of each, with what makes a metric appear.
    sft.train(sft_config(files, folders["sft"], **few))
    reward.train(reward.RewardConfig(model=model, dataset=of_pairs, output_dir=folders["reward"], batch_size=8, **few))
    grpo.train(grpo_config(files, folders["grpo"], **few, **scorers), sampler=tiny.Telling)
    config = {"prompts_per_step": 4, "group_size": 4, "minibatches": 1, "max_new_tokens": 6, "eval_samples": 2}
    config |= {"model": model, "dataset": rows, "critic": tiny.reward_folder(tmp_path / "critic", model)}
    ppo.train(ppo.PPOConfig(output_dir=folders["ppo"], **config, **few, **scorers), sampler=tiny.Telling)

    for trainer, folder in folders.items():
        logged = set()
        for entry in tiny.read_metrics(folder):
            logged |= {row_of(trainer, key) for key in entry.keys() - {"step"}}
        table = KEYS[trainer].keys() | {key for o in NAMED if trainer in o.trainers for key in o.metrics}
        assert logged == table, trainer
