"""bench/repro/kl_estimators.py: its runs, what it keeps of them, and what it makes of their results."""

from pathlib import Path

import pytest

from bench import results
from bench.repro import kl_estimators
from fused_rl.trainers import grpo

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_run_is_one_that_the_trainer_takes(tmp_path):
    found = [kl_estimators.config_of(setting, 2, tmp_path) for setting in kl_estimators.settings()]
    for setting, config in zip(kl_estimators.settings(), found, strict=True):
        grpo.arithmetic(config, 1)
        assert (config.minibatches, config.kl_estimator, config.kl_coef) == setting[:]
        assert (config.seed, config.steps, config.group_size) == (2, kl_estimators.SETTING["steps"], 8)
        assert config.model == str(tmp_path / "seed2" / "sft" / "model")
    assert len({config.output_dir for config in found}) == len(found)
    assert config.steps % config.kl_every == 0
    on_policy = {config.minibatches == 1 for config in found if config.kl_estimator == "k1"}
    assert on_policy == {True, False}


def test_the_page_holds_the_table_of_the_results_that_stand_here():
    rows = results.load(kl_estimators.RESULTS)["rows"]
    kl_estimators.check(rows)
    assert kl_estimators.table(rows) in (ROOT / "docs" / "losses.md").read_text()
