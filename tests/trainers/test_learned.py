"""Whether a run learned: errors against many draws, verdicts, causes, and what is said before training."""

import random
from statistics import stdev

import pytest
import torch

from fused_rl.trainers.options import RunConfig
from fused_rl.trainers.policy import signal
from fused_rl.trainers.run.learned import Figure, error_of, held_out_change, residuals
from fused_rl.trainers.run.logger import Logger, read_metrics, rows_by_step
from fused_rl.trainers.run.rules import Watch
from fused_rl.trainers.scorers.builtin import ExactMatch, Pattern


def evaluation(rng, hard, lift):
    """Sums and weights of rows: each row's own difficulty, what training changed, and the noise of sampling."""
    weights = [rng.randint(1, 9) for _ in hard]
    sums = [(h + lift + rng.gauss(0, 0.1)) * w for h, w in zip(hard, weights, strict=True)]
    return [sums, weights]


def ratio(columns):
    return sum(columns[0]) / sum(columns[1])


def test_the_error_of_a_change_is_what_many_draws_of_rows_show():
    rng = random.Random(1)
    changes, errors, alone = [], [], []
    for _ in range(400):
        hard = [rng.gauss(2, 1) for _ in range(60)]
        before, after = evaluation(rng, hard, 0.0), evaluation(rng, hard, -0.3)
        after[1] = before[1]
        after[0] = [(h - 0.3 + rng.gauss(0, 0.1)) * w for h, w in zip(hard, after[1], strict=True)]
        changes.append(ratio(after) - ratio(before))
        both = residuals(before), residuals(after)
        errors.append(error_of([b - a for a, b in zip(*both, strict=True)]))
        alone.append(error_of(both[0]))
    assert sum(errors) / 400 == pytest.approx(stdev(changes), rel=0.1)
    # Rows differ far more from each other than training changed each of them.
    assert sum(alone) > 5 * sum(errors)


@pytest.mark.parametrize("rows", [2, 3, 4, 8, 64])
def test_of_runs_that_changed_nothing_one_in_twenty_is_said_to_have_changed(rows):
    rng = random.Random(rows)
    verdicts = []
    for _ in range(1000):
        both = [[[rng.gauss(2, 1) for _ in range(rows)]] for _ in range(2)]
        means = [{LOSS: ratio([*each, [1] * rows])} for each in both]
        known = zip((0, 9), means, ({LOSS: each} for each in both), strict=True)
        verdicts.append(held_out_change(Figure(LOSS, "loss", "fell"), *known, rows).verdict)
    assert 0.03 < 1 - verdicts.count("no change") / 1000 < 0.07


def watched(before, after, training=(), **config):
    """A watch that has seen an evaluation, steps of training, and an evaluation: each {key: sums of rows}."""
    watch = Watch({"dtype": "float32", "eval_size": 8} | config)
    steps = [{}, *training] if training else [{}, {}]
    for step, entry in enumerate(steps):
        rows = {0: before, len(steps) - 1: after}.get(step, {})
        figures = {key: sum(sums) / len(sums) for key, sums in rows.items()}
        watch.see({"step": step, **entry, **figures}, {key: [sums] for key, sums in rows.items()})
    watch.conclude()
    return watch


ACCURACY, LOSS = "eval/accuracy_sampled", "eval/loss"
UNKNOWN = "unknown: one held-out row has no error: held-out loss (nats per token) went from"
HALF, NONE, ALL = [1.0, 0.0] * 4, [0.0] * 8, [1.0] * 8


@pytest.mark.parametrize(
    ("key", "before", "after", "said", "found"),
    [
        (ACCURACY, NONE, ALL, "yes: held-out accuracy of sampled responses rose", []),
        (ACCURACY, NONE, NONE, "no: held-out accuracy of sampled responses shows no", ["not-learned"]),
        (ACCURACY, HALF, HALF[::-1], "no: held-out accuracy of sampled", ["not-learned"]),
        (ACCURACY, ALL, NONE, "no: held-out accuracy of sampled responses fell", ["held-out-worse"]),
        (LOSS, [2.0] * 8, [1.9, 1.8] * 4, "yes: held-out loss (nats per token) fell", []),
        (LOSS, [2.0] * 8, [2.1, 2.2] * 4, "no: held-out loss (nats per token) rose", ["held-out-worse"]),
        ("eval/distill/kl", [3.0, 1.0] * 4, [2.5, 0.6] * 4, "yes: held-out KL to the teacher", []),
        ("eval/dpo/accuracy", [0.5] * 8, ALL, "yes: held-out accuracy on pairs rose from 0.5 ± 0", []),
        # A change that the printed figures do not show, however surely it was measured.
        (LOSS, [5.47] * 8, [5.469, 5.4691] * 4, "no: held-out loss (nats per token) changed by", ["not-learned"]),
        # One row has no error.
        (LOSS, [5.47], [5.2], f"{UNKNOWN} 5.47", []),
        (LOSS, [5.2], [5.47], f"{UNKNOWN} 5.2", []),
        (ACCURACY, [0.0], [0.0], "no: held-out accuracy of sampled", ["not-learned"]),
    ],
)  # fmt: skip
def test_the_verdict_is_that_of_the_change_beyond_two_errors(key, before, after, said, found):
    watch = watched({key: before}, {key: after})
    assert watch.learned().startswith(f"did it learn? {said}")
    assert [*watch.found] == found


def steps(count=40, **columns):
    """Steps of training; a metric is a number or a function of the step."""
    made = []
    for step in range(count):
        made.append({k: v(step) if callable(v) else v for k, v in columns.items()})
    return made


@pytest.mark.parametrize(
    ("training", "config", "cause"),
    [
        (steps(frac_reward_zero_std=0.9), {}, "90% of the groups had equal rewards: warm start"),
        (
            steps(frac_reward_zero_std=0.9, **{"completions/clipped_ratio": 0.9}),
            {},
            "and most responses were cut: raise max_new_tokens",
        ),
        (steps(frac_reward_zero_std=0.9, frac_groups_all_solved=0.9), {}, "being solved: take"),
        (
            steps(**{"rewards/a/std": 0.0, "objective/scores": 0.0}),
            {},
            "all responses had the same score (0): warm start longer with sft, take easier rows, or a scorer that",
        ),
        # What was cut does not explain it.
        (
            steps(**{"rewards/a/std": 0.0, "objective/scores": 0.3, "completions/clipped_ratio": 1.0}),
            {},
            "all responses had the same score (0.3): look at what the scorer reads",
        ),
        (
            steps(frac_reward_zero_std=0.9, frac_groups_all_solved=0.9, **{"completions/clipped_ratio": 1.0}),
            {},
            "being solved: take harder",
        ),
        (steps(reward=lambda step: step / 40), {}, "in training the reward rose"),
        (
            steps(frac_reward_zero_std=1.0, **{"rewards/a/std": 0.0, "objective/scores": 0.0, "rewards/a/none": 1.0}),
            {},
            "the error; every scorer returned None for all responses: see that each ends in `return`",
        ),
        (steps(lr=0.0, **{"completions/clipped_ratio": 1.0}), {}, "error; lr was 0 in every step"),
        (steps(lr=2.0, **{"policy/clipfrac_avg": 0.9}), {}, "too far (clipped): lr (2) is probably too large"),
        (
            steps(**{"objective/kl_exact": 1e-4}),
            {"kl_coef": 5.0},
            "the KL may outweigh the reward (kl_coef 5): lower kl_coef; the policy hardly moved",
        ),
        (steps(5, lr=1e-3), {}, "only 5 steps were made"),
    ],
)  # fmt: skip
def test_a_run_that_did_not_learn_names_what_its_metrics_show(training, config, cause):
    watch = watched({ACCURACY: HALF}, {ACCURACY: HALF}, training, **config)
    assert cause in watch.found["not-learned"]


def test_a_run_without_held_out_rows_says_so_and_what_training_shows():
    rising = watched({}, {}, steps(reward=lambda step: step / 40), eval_size=0)
    assert rising.learned().startswith(
        "did it learn? there are no held-out rows (eval_size 0); in training the reward rose from 0.1"
    )
    assert not rising.found
    flat = watched({}, {}, steps(reward=lambda step: step % 2), eval_size=0)
    assert "not-learned" in flat.found
    assert "too few steps to compare" in watched({}, {}, eval_size=0).learned()


def test_a_scorer_that_grades_is_followed_by_its_score():
    before = {ACCURACY: NONE, "eval/score": [0.1, 0.2] * 4}
    after = {ACCURACY: NONE, "eval/score": [0.4, 0.6] * 4}
    said = watched(before, after).learned()
    assert said.startswith("did it learn? yes: held-out score of sampled responses rose")
    assert said.endswith("solved 0 → 0")


def test_a_change_as_large_as_in_training_is_no_fit_to_the_training_rows():
    before, after = [0.1, 0.4, 0.2, 0.5] * 2, [0.4, 0.4, 0.7, 0.4] * 2
    some = {ACCURACY: NONE, "eval/score": before}, {ACCURACY: NONE, "eval/score": after}
    rises = steps(reward=lambda step: step / 100, **{"objective/scores": 0.5})
    cause = watched(*some, rises).found["not-learned"]
    assert "in training the reward rose" in cause and "equals within the errors: raise" in cause
    same = {ACCURACY: NONE, "eval/score": before}
    cause = watched(same, same, rises).found["not-learned"]
    assert "exploits the scorer: take more rows or fewer passes, and read samples.jsonl" in cause


def test_an_accuracy_that_falls_while_the_score_rises_is_named():
    greedy = "eval/accuracy_greedy"
    before = {ACCURACY: NONE, "eval/score": [0.1, 0.2] * 4, greedy: ALL}
    after = {ACCURACY: NONE, "eval/score": [0.4, 0.6] * 4}
    hint = "; but the accuracy of greedy responses fell beyond the error: read samples.jsonl"
    assert watched(before, after | {greedy: NONE}).learned().endswith(hint)
    assert hint not in watched(before, after | {greedy: [1.0] * 7 + [0.0]}).learned()


def test_a_scorer_that_grades_is_followed_also_where_some_are_solved_and_the_accuracy_stands_beside_it():
    before = {ACCURACY: HALF, "eval/score": [0.1, 0.2, 0.3, 0.4] * 2}
    after = {ACCURACY: HALF[::-1], "eval/score": [0.6, 0.8, 0.9, 0.7] * 2}
    said = watched(before, after).learned()
    assert said.startswith("did it learn? yes: held-out score of sampled responses rose")
    assert said.endswith("solved 0.5 → 0.5")
    # Two scorers, of which the other may pay for the form alone.
    both = steps(**{"rewards/a/std": 0.1, "rewards/b/std": 0.1, "reward": lambda step: step})
    watch = watched(before, after, both)
    assert watch.learned().startswith("did it learn? no: held-out accuracy of sampled responses")
    assert "but the held-out score of sampled responses rose" in watch.found["not-learned"]
    assert "exploits" not in watch.found["not-learned"]
    # Right or wrong is no grade: the score is a line through the accuracy.
    signs = {ACCURACY: HALF, "eval/score": [1.0, -1.0] * 4}, {ACCURACY: ALL, "eval/score": ALL}
    assert "yes: held-out accuracy" in watched(*signs).learned()


def test_the_advice_fits_what_the_run_has():
    graded = {ACCURACY: NONE, "eval/score": [0.1, 0.2] * 4}
    watch = watched(graded, graded, steps(frac_reward_zero_std=0.9))
    assert "take easier rows" in watch.found["not-learned"]
    assert "scorer that grades" not in watch.found["not-learned"]
    fell = {ACCURACY: ALL}, {ACCURACY: NONE}
    assert "fewer passes" in watched(*fell).found["held-out-worse"]
    rewarded = watched(*fell, steps(**{"objective/scores": 1.0})).found["held-out-worse"]
    assert "what is rewarded may not be" in rewarded
    fits = {LOSS: [2.0, 3.0] * 4}, {LOSS: [3.0, 2.0] * 4}
    learns = steps(**{"train/loss": lambda step: 2 - step / 40})
    # Its loss fell by 0.75, and the held-out one by 0 ± 0.38, which are the same within the errors.
    assert "raise steps, or eval_size" in watched(*fits, learns).found["not-learned"]
    fits = {LOSS: [2.0, 2.1] * 4}, {LOSS: [2.1, 2.0] * 4}
    assert "fits the training rows: take" in watched(*fits, learns).found["not-learned"]
    assert (
        watched({LOSS: [5.0]}, {LOSS: [4.0]}, learns)
        .learned()
        .endswith("a change of -0.75 ± 0.034")
    )
    far = steps(lr=3.0, **{"objective/kl_exact": 40.0, "completions/mean_length": 4.0})
    assert "lr (3) is probably too large" in watched(*fell, far).found["held-out-worse"]
    assert watched({}, {}).no_condition.endswith(", and nothing shows whether it learned")
    assert watched({ACCURACY: NONE}, {ACCURACY: ALL}).no_condition == "no condition holds"


def test_what_the_run_has_seen_is_what_its_file_holds(tmp_path):
    config = RunConfig(model="m", dataset="d", output_dir=str(tmp_path), steps=1)
    logger = Logger(config, 0)
    rng = random.Random(0)
    for step in range(2):
        sums = [5 + 1e-7 * rng.random() for _ in range(8)]
        logger.log(step, {LOSS: sum(sums) / 8}, {LOSS: [sums, [1.0] * 8]})
    logger.close()
    watch = Watch({"dtype": "float32"})
    by_row = rows_by_step(read_metrics(tmp_path / "held_out.jsonl"))
    for entry in read_metrics(tmp_path / "metrics.jsonl"):
        watch.see(entry, by_row[entry["step"]])
    assert watch.evaluations == logger.watch.evaluations
    assert watch.learned() == logger.watch.learned()


def said_of(capsys, rewards, cut=0.0, scorer=None, texts=("the answer",), accuracy=None, nones=0):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    figures = {"clipped_ratio": cut, "score": rewards.mean().item()} | signal.spread(rewards)
    if accuracy is not None:
        figures["accuracy_sampled"] = accuracy
    scorer = scorer or ExactMatch(name="exact_match")
    totals = {"responses": 16, f"none/{scorer.name}": nones}
    signal.say([scorer], rewards, figures, texts, 12, totals)
    return capsys.readouterr().out


def test_the_advice_follows_from_what_was_sampled(capsys):
    graded = [[i / 10, 0.5, 0.6, 0.7] for i in range(4)]
    right, wrong = [[1.0] * 4] * 4, [[0.0] * 4] * 4
    said = said_of(capsys, graded, accuracy=0.0)
    assert said.startswith("signal: in 100% of 4 groups of 4 responses the scores differ (mean 0.4")
    assert said.count("\n") == 1
    said = said_of(capsys, wrong, accuracy=0.0)
    assert (
        "in 0% of 4 groups" in said
        and "0.0% of the responses are correct: train SFT longer" in said
    )
    assert "one response: 'the answer'" in said
    assert "raise max_new_tokens" in said_of(capsys, wrong, cut=0.9, accuracy=0.0)
    assert "100.0% of the responses are correct: take harder" in said_of(
        capsys, right, accuracy=1.0
    )
    number = Pattern(r"(\d+)", name="regex")
    assert "regex finds an answer in 0% of the responses" in said_of(capsys, wrong, scorer=number)
    said = said_of(capsys, wrong, scorer=number, texts=("it is 5",), accuracy=0.0)
    assert "train SFT longer" in said
    # What being cut does not explain comes first, and without a cause it may be one.
    same = said_of(capsys, [[0.3] * 4] * 4, cut=1.0, accuracy=0.0)
    assert "every response has the score 0.3: look at" in same and "max_new_tokens" not in same
    solved = said_of(capsys, right, cut=1.0, accuracy=1.0)
    assert "take harder" in solved and "max_new_tokens" not in solved
    both = said_of(capsys, wrong, cut=1.0, scorer=number, accuracy=0.0)
    assert both.index("raise max_new_tokens") < both.index("finds an answer in 0%")
    # A scorer that grades, without differences in a group.
    said = said_of(capsys, [[i / 10] * 4 for i in range(4)], accuracy=0.0)
    assert "take easier rows" in said and "scorer that grades" not in said
    # What a scorer did not judge is no matter of the policy.
    said = said_of(capsys, graded, nones=4)
    assert "signal: exact_match returned None for 25.0% of the responses" in said
    assert said_of(capsys, wrong, nones=16).count("\n") == 1
    # A single response to each prompt has no group.
    assert said_of(capsys, [[0.0], [1.0]]).startswith("signal: the scores of 2 responses have mean")


def test_math_says_in_which_responses_it_finds_an_answer():
    verifier = pytest.importorskip("fused_rl.trainers.scorers.math").MathVerifier()
    assert verifier.finds(["so it is \\boxed{7}", "no idea", ""]) == [True, False, False]
