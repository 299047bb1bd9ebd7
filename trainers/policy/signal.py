"""The signal for RL: how the scores of responses differ before training."""

from collections.abc import Collection, Mapping

from ..base.screen import print_line
from ..rollouts.types import one_line

# With a smaller share of groups that have a signal, training hardly moves (docs/tutorial.md); this holds for groups of
# GROUP responses or more. Small groups differ less often, about in proportion to their size.
ENOUGH = 0.25
GROUP = 8


def say(
    figures: Mapping[str, float],
    totals: Mapping[str, float],
    k: int,
    response: str,
    answer: Mapping[str, object],
    limit: int,
    counts: Collection[int],
    group_size: int = GROUP,
) -> None:
    """Print the signal that was measured, and a response if most groups of `group_size` would have none.

    Args:
        figures: the metrics of an evaluation without their prefix, with those of `spread`.
        totals: the sums of an evaluation over all ranks.
        k: the number of responses to each problem.
        response: one of the responses.
        answer: its `right_answer`.
        limit: the length in tokens at which responses were cut.
        counts: how many responses have each of their texts.
        group_size: the number of responses to a prompt in training.
    """
    differ = 1 - figures.get("frac_reward_zero_std", figures["score_std"] == 0)
    cut_share = figures["clipped_ratio"]
    group_share = (
        f"in {differ:.0%} of the groups of {k} responses the scores differ: " if k > 1 else ""
    )
    print_line(
        f"signal: {group_share}mean {figures['score']:.3g}, standard deviation {figures['score_std']:.2g}; "
        f"{cut_share:.0%} of the responses were cut at {limit} tokens"
    )
    for name, count in totals.items():
        if name.startswith("none/") and count:
            share = f"{count / totals['responses']:.1%} of the responses"
            print_line(
                f"signal: {name[5:]} returned None for {share}, which adds 0 to their reward"
            )
    # Two responses are alike this often, and a guess among their texts is right as often. Among more than 50 texts they
    # are too rarely alike to tell.
    solved, count = figures.get("accuracy_sampled", 0), sum(counts)
    guess = sum(n * (n - 1) for n in counts) / max(1, count * (count - 1))
    error = (guess * (1 - guess) / totals["problems"]) ** 0.5
    if guess > 0.02 and 0 < solved < guess + 2 * error:
        print_line(
            f"signal: {solved:.0%} of the responses are right, and so are {guess:.0%} of guesses among these answers: "
            "the model knows the form of an answer, not the task (docs/doctor.md#before-training)"
        )
    is_little = differ < ENOUGH * min(1, k / max(group_size, GROUP))
    if is_little or cut_share >= 0.5:
        problem = "little to learn from" if is_little else "most responses are cut"
        shown = "; ".join(
            f"{name}: {one_line(value)}"
            for name, value in {"one response": response, **answer}.items()
        )
        print_line(f"signal: {problem} (docs/doctor.md#before-training); {shown}")
