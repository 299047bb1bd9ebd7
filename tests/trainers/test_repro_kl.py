"""bench/repro/kl_estimators.py: its runs, what it keeps of them, and what it makes of their results."""

import json
from pathlib import Path

import pytest

from bench import results
from bench.repro import kl_estimators
from fused_rl.trainers import grpo

ROOT = Path(__file__).parents[2]
WEAK, STRONG = kl_estimators.COEFFICIENTS
OFF, ON = kl_estimators.OFF_POLICY, kl_estimators.ON_POLICY
# Nats of each setting, of the first seed; those after it lie a little higher.
SHOWN = {(OFF, "none", 0.0): 1.0, (OFF, "k1", WEAK): 50.0, (OFF, "k1", STRONG): 60.0}
SHOWN |= {(OFF, estimator, WEAK): 0.6 for estimator in kl_estimators.HOLDING}
SHOWN |= {(OFF, estimator, STRONG): 0.2 for estimator in kl_estimators.HOLDING}
SHOWN |= {(ON, "none", 0.0): 1.0, (ON, "k1", STRONG): 1.1, (ON, "rk3", STRONG): 0.25}


def rows_of(nats=None):
    """Rows of runs that end at these nats."""
    nats, rows = SHOWN | (nats or {}), []
    for seed in kl_estimators.SEEDS:
        for setting in kl_estimators.settings():
            end = nats[setting.minibatches, setting.label, setting.kl_coef] + seed / 100
            history = [{"step": 0, "eval/kl_exact": 0.0, "eval/accuracy_greedy": 0.3, "eval/accuracy_sampled": 0.3}]
            for step, kl in enumerate((0.01, 9.0, 9.0, 9.0, 9.0, 9.0, end - 0.005, end + 0.005), start=1):
                history.append({"step": step, "objective/kl_exact": kl, "completions/mean_length": 2.5})
            history[-1] |= {"eval/kl_exact": end, "eval/accuracy_greedy": 0.75 + seed / 100}
            history[-1]["eval/accuracy_sampled"] = 0.5
            rows.append(kl_estimators.row_of(setting, seed, history))
    return rows


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


def test_the_table_and_the_figure_are_of_the_rows(tmp_path):
    lines = kl_estimators.table(rows_of()).splitlines()
    assert len(lines) == 2 + len(kl_estimators.settings())
    assert f"| {OFF} | none | 0 | 1.01, 1.02, 1.03 | 1.02 | 77% |" in lines
    assert f"| {OFF} | k3 | {STRONG:g} | 0.21, 0.22, 0.23 | 0.22 | 77% |" in lines
    assert f"| {ON} | k1 | {STRONG:g} | 1.11, 1.12, 1.13 | 1.12 | 77% |" in lines
    kl_estimators.draw(rows_of(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({(OFF, "k3", WEAK): 1.1}, "k3 at kl_coef 0.3 holds the policy: 1.11, 1.12, 1.13 should lie below 1.01"),
        ({(OFF, "k4", STRONG): 0.59}, "k4 at kl_coef 1 holds it nearer than at 0.3"),
        ({(OFF, "k1", WEAK): 1.0}, "k1 at kl_coef 0.3 drives the policy away"),
        ({(ON, "k1", STRONG): 0.3}, "on-policy k1 does not"),
        ({(ON, "rk3", STRONG): 0.9}, "on-policy rk3 holds the policy"),
    ],
)
def test_what_the_table_must_show_is_checked(changed, named):
    kl_estimators.check(rows_of())
    with pytest.raises(AssertionError) as failed:
        kl_estimators.check(rows_of(changed))
    assert named in str(failed.value)


def test_a_finished_run_is_kept_and_one_of_other_options_is_not(tmp_path, monkeypatch):
    trained = []

    def train(config):
        trained.append(config.steps)
        entry = {"step": 1, "objective/kl_exact": 0.5, "completions/mean_length": 2.5}
        entry |= {"eval/kl_exact": 0.4, "eval/accuracy_greedy": 0.7, "eval/accuracy_sampled": 0.6}
        Path(config.output_dir).mkdir(exist_ok=True)
        (Path(config.output_dir) / "metrics.jsonl").write_text(json.dumps(entry) + "\n")

    monkeypatch.setattr(grpo, "train", train)
    (tmp_path / "seed1").mkdir()
    weak, strong = (kl_estimators.Setting(OFF, "k2", coefficient) for coefficient in kl_estimators.COEFFICIENTS)
    row = kl_estimators.run(weak, 1, tmp_path, "abc")
    assert (row["kl_exact"], row["kl_coef"], row["commit"]) == ([0.5], WEAK, "abc")
    assert kl_estimators.run(weak, 1, tmp_path, "def") == row
    assert len(trained) == 1
    kl_estimators.run(strong, 1, tmp_path, "abc")
    monkeypatch.setitem(kl_estimators.SETTING, "steps", 8)
    kl_estimators.run(weak, 1, tmp_path, "abc")
    assert trained[1:] == [trained[0], 8]


def test_the_page_holds_the_table_of_the_results_that_stand_here():
    rows = results.load(kl_estimators.RESULTS)["rows"]
    kl_estimators.check(rows)
    assert kl_estimators.table(rows) in (ROOT / "docs" / "losses.md").read_text()
