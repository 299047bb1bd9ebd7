"""Whether a run learned: errors against many draws, verdicts, causes, and what is said before training."""

import random

import pytest
import torch

from fused_rl.trainers.options import RunConfig
from fused_rl.trainers.policy import signal
from fused_rl.trainers.policy.groups import spread
from fused_rl.trainers.run.learned import Figure, held_out_change, residuals
from fused_rl.trainers.run.logger import Logger, read_metrics, rows_by_step
from fused_rl.trainers.run.rules import Watch


def test_a_row_moves_a_ratio_by_what_it_has_beyond_its_weight():
    # 11 / 3, of which the rows have 3 of 1 and 8 of 2.
    assert residuals([[3.0, 8.0], [1.0, 2.0]]) == pytest.approx([-4 / 9, 4 / 9])


@pytest.mark.parametrize("rows", [2, 3, 4, 8, 64])
def test_of_runs_that_changed_nothing_one_in_twenty_is_said_to_have_changed(rows):
    rng = random.Random(rows)
    verdicts = []
    for _ in range(1000):
        both = [[[rng.gauss(2, 1) for _ in range(rows)]] for _ in range(2)]
        means = [{LOSS: sum(each[0]) / rows} for each in both]
        known = zip((0, 9), means, ({LOSS: each} for each in both), strict=True)
        verdicts.append(held_out_change(Figure(LOSS, "loss", -1), *known).gain)
    assert 0.03 < 1 - verdicts.count(0) / 1000 < 0.07


def watched(before, after, training=(), **config):
    """A watch that has seen an evaluation, steps of training, and an evaluation: each {key: sums of rows}."""
    watch = Watch({"dtype": "float32", "eval_size": 8} | config)
    steps = [{}, *training] if training else [{}, {}]
    for step, entry in enumerate(steps):
        rows = {0: before, len(steps) - 1: after}.get(step, {})
        figures = {key: sum(sums) / len(sums) for key, sums in rows.items()}
        watch.update(
            {"step": step, **entry, **figures}, {key: [sums] for key, sums in rows.items()}
        )
    watch.conclude()
    return watch


ACCURACY, LOSS = "eval/accuracy_sampled", "eval/loss"
UNKNOWN = (
    "unknown, as the rows of both evaluations are not known or are a single one: held-out loss"
)
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
        ("eval/dpo/accuracy", [0.5] * 8, ALL, "yes: held-out accuracy on pairs rose from 0.5 (", []),
        # A change that the printed figures do not show, however surely it was measured.
        (LOSS, [5.47] * 8, [5.469, 5.4691] * 4, "no: held-out loss (nats per token) changed by less", ["not-learned"]),
        # One row has no error.
        (LOSS, [5.47], [5.2], UNKNOWN, []),
        (LOSS, [5.2], [5.47], UNKNOWN, []),
        (ACCURACY, [0.0], [0.0], "unknown", []),
    ],
)  # fmt: skip
def test_the_verdict_is_that_of_the_change_beyond_two_errors(key, before, after, said, found):
    watch = watched({key: before}, {key: after})
    assert watch.learned().startswith(f"did it learn? {said}")
    assert [*watch.reports] == found


def steps(count=40, **columns):
    """Steps of training; a metric is a number or a function of the step."""
    made = []
    for step in range(count):
        made.append({k: v(step) if callable(v) else v for k, v in columns.items()})
    return made


def test_a_run_without_held_out_rows_says_so_and_what_training_shows():
    rising = watched({}, {}, steps(reward=lambda step: step / 40), eval_size=0)
    assert rising.learned().startswith(
        "did it learn? no held-out figure was measured twice; in training the reward rose from 0.1"
    )
    assert not rising.reports
    short = watched({}, {}, steps(7, reward=lambda step: step / 40), eval_size=0).learned()
    assert "0.025 (steps 1 to 3) to 0.125 (steps 5 to 7), a change of +0.1 ± 0.02" in short
    flat = watched({}, {}, steps(reward=lambda step: step % 2), eval_size=0)
    assert "not-learned" in flat.reports
    assert "too few steps to compare" in watched({}, {}, eval_size=0).learned()


def test_a_yes_says_in_the_same_line_what_casts_doubt_on_it():
    """Responses that are nearly all cut, that are all alike, or whose accuracy fell."""
    greedy = "eval/accuracy_greedy"
    before = {ACCURACY: NONE, "eval/score": [0.1, 0.2] * 4, greedy: ALL}
    after = {ACCURACY: NONE, "eval/score": [0.4, 0.6] * 4}
    assert watched(before, after | {greedy: NONE}).learned().startswith(
        "did it learn? yes, but most problems are unsolved (greedy 0%) and the accuracy of greedy responses fell "
        "beyond the error: held-out"
    )  # fmt: skip
    almost = {greedy: [1.0] * 7 + [0.0]}
    assert watched(before, after | almost).learned().startswith("did it learn? yes: held-out")
    for key, most, said in (
        ("clipped", 0.5, "50% of the responses were cut at max_new_tokens"),
        ("commonest", 0.9, "90% of the responses are one and the same text"),
    ):
        shares = [
            after | almost | {f"eval/{key}_ratio": [share] * 8} for share in (most, most - 0.01)
        ]
        doubtful, fine = (watched(before, each).learned() for each in shares)
        assert doubtful.startswith(f"did it learn? yes, but {said}: held-out")
        assert fine.startswith("did it learn? yes: held-out")


@pytest.mark.parametrize(
    ("latest", "goes_on"), [(0.6, True), (0.52, False), (0.5, False), (0.4, False)]
)
def test_a_yes_says_that_the_figure_was_still_improving(latest, goes_on):
    watch = Watch({"dtype": "float32", "save_every": 100})
    for step, score in enumerate((0.1, 0.5, latest)):
        watch.update({"step": 40 * step, "eval/score": score}, {"eval/score": [[score] * 8]})
    assert ("yes, and still improving (--resume --steps 160 goes on)" in watch.learned()) == goes_on
    watch.config["num_train_epochs"] = 2.0
    assert ("(--resume --num_train_epochs 4 goes on)" in watch.learned()) == goes_on
    watch.config["save_every"] = 0  # no checkpoint is left
    assert ("yes, and still improving: held-out" in watch.learned()) == goes_on
    assert "improving" not in watch.learned(ended=False)
    watch.evaluations[1][1].clear()  # as where a scorer returned None for all responses
    assert watch.learned().startswith("did it learn? yes: held-out score")


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
    # Right or wrong is no grade.
    same = {ACCURACY: HALF, "eval/score": HALF}, {ACCURACY: ALL, "eval/score": ALL}
    assert "yes: held-out accuracy" in watched(*same).learned()


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
        watch.update(entry, by_row[entry["step"]])
    assert watch.evaluations == logger.watch.evaluations
    assert watch.learned() == logger.watch.learned()


def test_the_signal_of_what_was_sampled(capsys):
    def said_of(rewards, cut=0.0, nones=0, counts=(1,) * 16, **figures):
        rewards = torch.tensor(rewards, dtype=torch.float64)
        figures |= {"clipped_ratio": cut, "score": rewards.mean().item()} | spread(rewards)
        totals = {"responses": 16, "problems": 64, "none/exact_match": nones}
        signal.say(figures, totals, rewards.shape[1], "said", {"answer": "7"}, 12, counts)
        return capsys.readouterr().out

    differ, little = [[0.0, 1.0]] * 4, "little to learn from"
    said = said_of([[i / 10, 0.5, 0.6, 0.7] for i in range(4)])
    assert said.startswith("signal: in 100% of the groups of 4") and said.count("\n") == 1
    assert little in said_of([[0.0] * 4] * 4) and little in said_of([[1.0], [1.0]])
    # Of groups of four an eighth is enough.
    assert said_of([[0.0] * 4] * 7 + [[1.0] + [0.0] * 3]).count("\n") == 1
    assert "most responses are cut" in said_of(differ, cut=0.5)
    assert "None for 25.0% of the responses" in said_of(differ, nones=4)
    # A model that guesses among seven days is right in a seventh of its responses; a better one does not guess.
    guesses = [
        "guesses" in said_of(differ, counts=[37] * 7, accuracy_sampled=a) for a in (0.14, 0.3)
    ]
    assert guesses == [True, False]
    assert "guesses" not in said_of(differ, counts=[1] * 60, accuracy_sampled=0.01)


@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_a_yes_names_what_the_doctor_found(trainer):
    """Good responses lost half a nat a token, while they are told apart better."""
    key, nll = f"eval/{trainer}/accuracy", f"eval/{trainer}/nll"
    watch = watched({key: HALF, nll: [1.0] * 8}, {key: ALL, nll: [1.5] * 8})
    assert [*watch.reports] == ["displaced"]
    assert watch.learned().startswith("did it learn? yes, but displaced: held-out accuracy")
