"""The rules over metrics, on entries made here: when each begins to fit, and that it is told once."""

import math

import pytest

from fused_rl.trainers.metrics import bands, rules
from fused_rl.trainers.metrics.bands import BANDS, MARGIN, UNITS, widest
from fused_rl.trainers.metrics.rules import RULES, Watch, examine
from fused_rl.trainers.metrics.table import KEYS, row_of

NAN = float("nan")
FP32 = {"dtype": "float32"}


def found(trainer, key, values, **config):
    """(rule, step in which it was told, step since when) for a metric over steps 1, 2, …"""
    watch, told = Watch(trainer, FP32 | config), []
    for step, value in enumerate(values, 1):
        told += [(finding.rule.name, step, finding.step) for finding in watch.see({"step": step, key: value})]
    return told


def test_every_rule_looks_at_metrics_of_the_table_and_says_what_to_do():
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        for trainer in rule.trainers:
            assert any(row_of(trainer, metric) for metric in rule.metrics), rule.name
        assert rule.means and rule.change and rule.patience >= 1
    assert {trainer for rule in RULES for trainer in rule.trainers} == set(KEYS)


@pytest.mark.parametrize(
    ("trainer", "key", "value", "rule"),
    [
        ("grpo", "frac_reward_zero_std", 1.0, "no-signal"),
        ("grpo", "rewards/f/none", 1.0, "silent-scorer"),
        ("ppo", "rewards/odd: name/none", 1.0, "silent-scorer"),
        ("ppo", "val/var_explained", -0.1, "idle-critic"),
        ("ppo", "val/var_explained", 0.0, "idle-critic"),
    ],
)
def test_what_teaches_nothing_for_ten_steps_is_told_once(trainer, key, value, rule):
    assert found(trainer, key, [value] * 24) == [(rule, 10, 1)]
    assert found(trainer, key, [value] * 9 + [0.5] + [value] * 9 + [NAN] + [value] * 9) == []  # the count begins again
    assert found(trainer, key, [0.5] * 3 + [value] * 12 + [0.5] + [value] * 12) == [(rule, 13, 4)]


def test_rewards_that_are_compared_over_the_batch_may_be_equal_in_a_group():
    assert found("grpo", "frac_reward_zero_std", [1.0] * 20, advantage="batch-std") == []
    assert found("grpo", "frac_reward_zero_std", [1.0] * 20, preset="reinforce++") == []
    assert found("ppo", "frac_reward_zero_std", [1.0] * 20) == []  # one reward per prompt is not compared with others


def test_a_critic_without_gradient_is_told_at_once_unless_nothing_is_trained():
    assert found("ppo", "optim/critic_grad_norm", [1.0, 0.0, 0.0]) == [("dead-critic", 2, 2)]
    watch = Watch("ppo", FP32 | {"mask_truncated": True})
    entry = {"step": 1, "optim/critic_grad_norm": 0.0, "val/stop_rate": 0.0}
    assert [finding.rule.name for finding in watch.see(entry)] == ["nothing-trained"]


@pytest.mark.parametrize(
    ("drift", "dtype", "warned"),
    [(5e-7, "float32", 0), (2e-6, "float32", 1), (0.04, "bfloat16", 0), (-0.1, "bfloat16", 1)],
)
def test_a_first_ratio_that_is_not_one_is_told(drift, dtype, warned):
    assert len(found("grpo", "val/first_ratio", [1 + drift], dtype=dtype)) == warned
    auto = {"dtype": "auto", "zero_stage": 0 if dtype == "float32" else 2}  # as config.yaml says it
    assert len(found("grpo", "val/first_ratio", [1 + drift], **auto)) == warned


def test_what_a_sampler_tells_is_raw_from_the_beginning_or_stale_later():
    key = "rollout/logprob_diff_abs"
    assert found("grpo", key, [0.02] * 5) == [("raw-logprobs", 3, 1)]
    assert found("grpo", key, [1e-6] * 2 + [0.02] * 5) == [("stale-logprobs", 5, 3)]
    assert found("grpo", key, [0.02] * 5, dtype="bfloat16") == []
    # Drawn ahead: the first rollout is of the weights that the run begins with, as without.
    assert found("grpo", key, [1e-6] + [0.02] * 5, lag=1) == []
    assert found("grpo", key, [0.02] * 5, lag=1) == [("raw-logprobs", 3, 1)]


def test_what_is_drawn_ahead_is_stale_where_it_stays_as_far_as_the_start():
    def told(of_sampler, of_start=4.0, **config):
        entry = {"objective/kl_exact": of_start, "completions/mean_length": 20.0, "rollout/kl_k3": of_sampler}
        history = [{"step": i, "rollout/logprob_diff_abs": min(i - 1, 1) * 0.3} | entry for i in range(1, 31)]
        return [(one.rule.name, one.step) for one in examine("grpo", FP32 | {"lag": 1} | config, history).found]

    assert told(0.18) == [("stale-logprobs", 10)] and told(0.18, lag=4) == [("stale-logprobs", 25)]
    assert told(0.09) == told(0.04, of_start=0.9) == told(0.18, ref_sync_every=5) == []


@pytest.mark.parametrize("value", [NAN, math.inf, None])
def test_a_loss_that_is_no_number_is_told(value):
    assert found("sft", "train/loss", [2.0, value, 2.0]) == [("not-finite", 2, 2)]
    assert found("ppo", "val/var_explained", [value] * 20) == []  # of equal returns


MEASURED = [
    ("grpo", "val/stop_rate", "low", "cut-responses"),
    ("grpo", "policy/approxkl_avg", "high", "steps-too-far"),
    ("grpo", "policy/entropy_avg", "low", "entropy-gone"),
    ("grpo", "policy/entropy_avg", "high", "entropy-rises"),
    ("grpo", "objective/kl_exact", "high", "kl-runs-away"),
    ("ppo", "policy/approxkl_avg", "high", "steps-too-far"),
    ("ppo", "optim/critic_grad_norm", "high", "gradient-grows"),
    ("grpo", "optim/grad_norm", "high", "gradient-grows"),
]


@pytest.mark.parametrize(("trainer", "key", "edge", "rule"), MEASURED)
def test_a_measured_band_is_left_beyond_its_margin(trainer, key, edge, rule):
    measured, patience = widest(key), next(each.patience for each in RULES if each.name == rule)
    begun = [{"step": step, key: 1.0} for step in range(1, UNITS[key].first + 1)]

    def of(value, steps):
        later = [{"step": len(begun) + i, "completions/mean_length": 1.0, key: value} for i in range(1, steps + 1)]
        return [finding.rule.name for finding in examine(trainer, FP32, begun + later).found]

    edge, further = (measured.low / MARGIN, 0.99) if edge == "low" else (measured.high * MARGIN, 1.01)
    assert of(edge * further, patience) == [rule]
    assert of(edge * further, patience - 1) == of(edge, 20) == []


def test_a_limit_is_told_in_the_unit_of_the_value():
    def told(key, value, **others):
        entry = {key: value, "completions/mean_length": 10.0} | others
        return examine("grpo", FP32, [{"step": i} | entry for i in range(1, 12)]).found[0].told()

    most = MARGIN * widest("objective/kl_exact").high
    said = told("objective/kl_exact", 100 * most)
    assert f"is {100 * most:.4g}, and healthy is at most {10 * most:.4g} ({most:.2g} nats per token): " in said
    assert " nats: " in told("policy/approxkl_avg", 1e3) and "(" not in told("val/stop_rate", 0.0).split(": ")[0]
    said = told("objective/kl_exact", math.inf)
    assert f"is inf, and healthy is at most {most:.2g} nats per token: " in said


def test_of_what_begins_together_the_cause_is_told_first():
    def told(trainer, entry, **config):
        history = [{"step": step} | entry for step in range(1, 12)]
        return [finding.rule.name for finding in examine(trainer, FP32 | config, history).found]

    no_signal = {"frac_reward_zero_std": 1.0}
    assert told("grpo", no_signal | {"rewards/f/none": 1.0}) == ["silent-scorer", "no-signal"]
    assert told("grpo", no_signal | {"val/stop_rate": 0.0}) == ["cut-responses", "no-signal"]
    swapped = [{"step": 0, "eval/rm/loss": 0.7, "eval/rm/accuracy": 0.5}]
    swapped += [{"step": step, "eval/rm/loss": 1.9, "eval/rm/accuracy": 0.1} for step in (10, 20)]
    found = examine("reward", FP32, swapped).found
    assert [(each.rule.name, each.step) for each in found] == [("below-chance", 10), ("loss-rises", 10)]


def test_a_scorer_without_return_is_told_of_it():
    watch = Watch("grpo", FP32)
    told = [finding.told() for step in range(1, 11) for finding in watch.see({"step": step, "rewards/f/none": 1.0})]
    assert len(told) == 1 and "`return`" in told[0]


def test_a_value_without_bounds_is_beyond_every_band():
    assert found("grpo", "objective/kl_exact", [0.1, *[math.inf] * 3]) == [("kl-runs-away", 4, 2)]
    assert found("grpo", "policy/approxkl_avg", [math.inf] * 3) == [("steps-too-far", 3, 1)]
    assert found("grpo", "policy/approxkl_avg", [10**400] * 3) == [("steps-too-far", 3, 1)]


def test_what_is_small_in_itself_may_grow():
    assert found("grpo", "optim/grad_norm", [0.001] * 10 + [0.3] * 20) == []
    assert found("grpo", "optim/grad_norm", [0.0] * 10 + [0.1] * 10 + [50.0] * 10) == [("gradient-grows", 30, 21)]
    assert found("grpo", "policy/entropy_avg", [0.01] + [0.3] * 20) == []


def test_a_loss_that_rises_is_told_and_one_hard_batch_is_not():
    assert found("sft", "train/loss", [0.2, *[3.0, 2.0, 1.0] * 10]) == []
    assert found("sft", "train/loss", [0.002] * 10 + [0.3] * 20) == []
    assert found("sft", "train/loss", [2.0] * 10 + [2.6] * 10)[0][0] == "loss-rises"
    assert found("sft", "train/loss", [1.07, 21.0, 27.3, 5.5, 19.5, 11.8]) == [("loss-rises", 6, 6)]
    assert found("sft", "eval/loss", [5.45, 9.0]) == [("loss-rises", 2, 2)]
    assert found("sft", "eval/loss", [5.45, 5.8, 3.0]) == []
    assert found("reward", "eval/rm/loss", [0.7, 1.3]) == [("loss-rises", 2, 2)]


def test_what_is_told_of_a_loss_is_what_is_outside():
    watch, told = Watch("sft", FP32), []
    for step, value in enumerate([1.07, 21.0, 27.3, 5.5, 19.5, 4.5], 1):
        told += watch.see({"step": step, "train/loss": value})
    assert "train/loss is 4.5, and healthy is at most 6.07 (the median of 5 steps is 19.5)" in told[0].told()


def learnt_by_heart(held_out, train=lambda step: 1 / step):
    """Steps in which the loss falls, evaluated at the start and after each 10."""
    for step in range(10 * len(held_out) - 9):
        entry = {"step": step} | ({"train/loss": train(step)} if step else {})
        yield entry | ({"eval/loss": held_out[step // 10]} if step % 10 == 0 else {})


def test_rows_learnt_by_heart_are_told_when_the_held_out_loss_has_turned():
    def told(*run, **options):
        return [(one.rule.name, one.step) for one in examine("sft", FP32, learnt_by_heart(*run, **options)).found]

    assert told([5.7, 3.2, 2.6, 3.0, 3.5, 6.5]) == [("overfitted", 30)]  # and not once more as a loss that rises
    assert told([5.7, 3.2, 2.6, 2.9, 2.7, 2.9, 2.7]) == told([5.7, 3.2, 3.0, 3.1, 3.19]) == []
    assert told([2.0, 1.5, 1.8, 1.8], train=lambda step: 1.0) == []  # no more was learnt
    assert told([2.0, 2.6, 2.6]) == [("loss-rises", 10)]


GOES = {"optim/grad_norm": 1.0, "lr": 1e-6}


def test_a_run_in_which_nothing_moves_is_told():
    def told(trainer, entry, steps=12, **config):
        history = [{"step": step} | entry for step in range(1, steps + 1)]
        return [(finding.rule.name, finding.step) for finding in examine(trainer, FP32 | config, history).found]

    for trainer in KEYS:
        assert told(trainer, {"lr": 0.0}) == [("no-learning-rate", 1)]
        assert told(trainer, {"lr": 0.0}, steps=9) == told(trainer, {"lr": 1e-9}) == []
    assert told("ppo", {"lr": 0.0}, critic_only=20) == []
    assert told("grpo", GOES | {"objective/kl_exact": 1e-13}) == [("stands-still", 1)]
    assert told("grpo", GOES | {"objective/kl_exact": 1e-13}, steps=9) == []
    for healthy in ({"objective/kl_exact": 1e-7}, {"objective/kl_exact": 0.0, "optim/grad_norm": 0.0}):
        assert told("grpo", GOES | healthy) == []
    assert told("grpo", GOES | {"objective/kl_exact": 0.0}, ref_sync_every=1) == []


def test_scores_that_the_kl_outweighs_are_told():
    def told(cost, scores, **more):
        entry = {"objective/non_score_reward": cost, "objective/scores": scores} | more
        return [
            finding.rule.name for finding in examine("ppo", FP32, [{"step": i} | entry for i in range(1, 12)]).found
        ]

    assert told(-575.0, 0.2) == ["scores-outweighed"]
    assert told(-1.9, 0.2) == told(-575.0, 0.0) == []
    assert told(-3.0, 0.01, **{"rewards/rm/std": 1.0}) == []  # a reward model's scores are around 0


def test_scores_that_are_all_alike_are_told_of_ppo():
    entry = {"objective/scores": 0.5, "val/stop_rate": 0.5, "rewards/a/std": 0.0}

    def told(**changed):
        config = {"missing_eos_penalty": changed.pop("missing_eos_penalty", 0.0)}
        history = [{"step": step} | entry | changed for step in range(1, 12)]
        return [finding.rule.name for finding in examine("ppo", FP32 | config, history).found]

    assert told() == ["equal-scores"]
    assert told(**{"rewards/b/std": 0.1}) == told(missing_eos_penalty=1.0) == []


def test_steps_in_which_no_response_counts_say_nothing_of_entropy():
    entries = [{"step": step, "policy/entropy_avg": float(step < 3), "groups/trained": 0.0} for step in range(1, 20)]
    assert examine("grpo", FP32, entries).found == []
    entries = [entry | {"groups/trained": 4.0} for entry in entries]
    assert [finding.rule.name for finding in examine("grpo", FP32, entries).found] == ["entropy-gone"]


def test_a_kl_of_groups_with_a_signal_is_not_divided_by_the_length_of_all():
    per_token = 1.5 * MARGIN * widest("objective/kl_exact").high
    entry = {"objective/kl_exact": 10 * per_token, "completions/mean_length": 10, "completions/max_length": 40}

    def told(trained):
        history = [{"step": i, "groups/drawn": 8, "groups/trained": trained} | entry for i in range(1, 5)]
        return [finding.rule.name for finding in examine("grpo", FP32, history).found]

    assert told(8) == ["kl-runs-away"] and told(2) == []


def test_a_reward_model_that_gives_one_score_is_told():
    def told(*spread):
        entries = [{"step": i, "train/rm/max_reward": 3 + by, "train/rm/min_reward": 3} for i, by in enumerate(spread)]
        return [finding.rule.name for finding in examine("reward", FP32, entries).found]

    assert told(*[1e-10] * 10) == ["one-score"] and told(*[1e-10] * 9, 1e-3, *[1e-10] * 9) == []


def test_a_config_that_was_written_by_hand_is_no_crash():
    odd = dict.fromkeys(("steps", "lag", "eval_size", "max_grad_norm", "preset", "mask_truncated"), ["odd"])
    keys = ("eval/rm/accuracy", "rollout/logprob_diff_abs", "optim/grad_norm", "frac_reward_zero_std", "val/stop_rate")
    for trainer in KEYS:
        examine(trainer, odd, [{"step": step} | dict.fromkeys(keys, 0.3) for step in range(30)])


def test_pairs_told_apart_by_chance_are_told_beyond_its_error():
    half = [0.5, 0.49, 0.5, 0.47]
    assert found("reward", "eval/rm/accuracy", half, eval_size=200, steps=4) == [("below-chance", 4, 3)]
    assert found("reward", "eval/rm/accuracy", half, eval_size=200, steps=40) == []
    assert found("reward", "eval/rm/accuracy", [0.47, 0.48, 0.8], eval_size=200) == []
    assert found("reward", "eval/rm/accuracy", [0.4, 0.4], eval_size=200) == [("below-chance", 2, 1)]


def test_a_ratio_near_one_is_told_with_its_digits():
    watch = Watch("grpo", FP32)
    (finding,) = watch.see({"step": 1, "val/first_ratio": 1 + 2.5e-6})
    assert "val/first_ratio is 1+2.5e-06, and healthy is 1 within 1e-06" in finding.told()


def test_a_run_that_has_solved_its_problems_may_lose_its_entropy():
    solved = [
        {"step": step, "policy/entropy_avg": 1e-4 ** (step > 1), "frac_groups_all_solved": 0.9} for step in range(30)
    ]
    assert examine("grpo", FP32, solved).found == []
    of_ppo = [{"step": entry["step"], "policy/entropy_avg": entry["policy/entropy_avg"]} for entry in solved]
    assert examine("ppo", FP32, [of_ppo[0] | {"eval/accuracy_sampled": 0.9}, *of_ppo[1:]]).found == []
    unsolved = [entry | {"frac_groups_all_solved": 0.1} for entry in solved]
    assert [finding.rule.name for finding in examine("grpo", FP32, unsolved).found] == ["entropy-gone"]


def test_bands_are_of_metrics_of_the_table_and_of_runs_that_were_made():
    import json

    measured = json.loads(bands.FILE.read_text())
    assert set(BANDS) == set(KEYS)
    assert measured["commit"] and measured["device"] and measured["command"].startswith("python -m bench bands")
    for trainer, of_trainer in BANDS.items():
        for key, (low, high) in of_trainer.items():
            assert key in KEYS[trainer] and low <= high


def hacked(accuracy):
    """Steps in which scores and lengths rise, evaluated after each 20."""
    for step in range(1, 20 * len(accuracy) + 1):
        entry = {"step": step, "objective/scores": step, "completions/mean_length": step**2}
        yield entry | ({"eval/accuracy_sampled": accuracy[step // 20 - 1]} if step % 20 == 0 else {})


def test_scores_that_rise_with_length_and_not_with_accuracy_are_told():
    assert [finding.rule.name for finding in examine("grpo", FP32, hacked([0.5, 0.5])).found] == ["outwitted-scorer"]
    assert examine("grpo", FP32, hacked([0.5, 0.9])).found == []
    assert examine("grpo", FP32, hacked([0.4, 0.55, 0.5])).found == []


def test_held_out_accuracy_that_falls_while_scores_rise_is_told():
    def told(greedy, score, sampled=None, scores=0.5, **config):
        """Evaluated at the start and after each 10 steps; `scores` are those of training, from the first step on."""
        watch, found = Watch("grpo", FP32 | {"eval_size": 240} | config), []
        for step in range(10 * len(greedy) - 9):
            entry = {"step": step} | ({"objective/scores": scores * step if scores != 0.5 else 0.5} if step else {})
            if step % 10 == 0:
                entry |= {"eval/accuracy_greedy": greedy[step // 10], "eval/score": score[step // 10]}
                entry |= {"eval/accuracy_sampled": (sampled or greedy)[step // 10]}
            found += [(finding.rule.name, finding.step, finding.told()) for finding in watch.see(entry)]
        return found

    rising, falling = [0.38, 0.5, 0.7, 0.87], [0.77, 0.75, 0.5, 0.21]
    ((name, step, said),) = told(falling, rising)
    assert (name, step) == ("accuracy-lost", 20)
    assert "is 0.5, and healthy is at least 0.67 (it was 0.77 in step 0)" in said and "--verifier_weights" in said
    assert told([0.69, 0.6, 0.55, 0.45], [0.22, 0.3, 0.35, 0.39])[0][1] == 20
    assert told(falling, [0.5] * 4, scores=0.1)[0][:2] == ("accuracy-lost", 20)  # what training pays rises
    # Scores that do not rise, chance among few problems, and sampled responses that are as right as before.
    assert told(falling, [0.5] * 4) == told(falling, falling) == []
    assert told([0.5, 0.4, 0.45, 0.4], rising) == told([0.5, 0.32, 0.5, 0.32], rising, eval_size=64) == []
    assert (
        told(falling, rising, sampled=[0.4, 0.4, 0.37, 0.36]) == told(rising, rising) == told([0.0] * 4, rising) == []
    )


def test_a_resumed_run_says_no_line_twice_and_misses_none():
    history = [{"step": step, "frac_reward_zero_std": 1.0} for step in range(1, 25)]
    whole = Watch("grpo", FP32)
    told = {entry["step"]: [finding.told() for finding in whole.see(entry)] for entry in history}
    for stopped in range(25):
        watch = Watch("grpo", FP32)
        for entry in history[:stopped]:
            watch.see(entry)
        assert {e["step"]: [f.told() for f in watch.see(e)] for e in history[stopped:]} == {
            e["step"]: told[e["step"]] for e in history[stopped:]
        }


def test_steps_are_not_compared_to_what_is_not_there():
    """A hand-made or damaged history is no crash: text, other metrics, none of them."""
    history = [{"step": 1}, {"step": 2, "train/loss": "high", "odd": [1]}, {"step": 3, "train/loss": True}]
    assert [finding.rule.name for finding in examine("sft", {}, history).found] == ["not-finite"]
    assert examine("distill", {}, history).found == [] and rules.WINDOW == 10
