"""The signal for RL: how the scores of responses differ before training, and what to change if most are equal."""

from collections.abc import Mapping, Sequence

import torch

from fused_rl.trainers.base.screen import print_line
from fused_rl.trainers.policy.groups import equal_rewards
from fused_rl.trainers.rollouts.types import Scorer, shortened
from fused_rl.trainers.run.learned import FAILED

# With a smaller share of groups that have a signal, training hardly moves (docs/tutorial.md); this holds for groups of
# GROUP responses or more.
ENOUGH = 0.25
GROUP = 8
# The number of responses in which an answer is looked for.
LOOKED_AT = 256


CUT = "most responses are cut before they end: raise max_new_tokens, or warm start with sft so that they end"


def spread(rewards: torch.Tensor) -> dict[str, float]:
    """Return the standard deviation of rewards (N, k), and the share of the N groups whose k rewards are equal."""
    found = {"score_std": rewards.std(correction=0).item()}
    k = rewards.shape[1]
    if k > 1:
        equal = equal_rewards(rewards.flatten(), k)
        found["frac_reward_zero_std"] = equal.double().mean().item()
    return found


def say(
    scorers: Sequence[Scorer],
    rewards: torch.Tensor,
    figures: Mapping[str, float],
    texts: Sequence[str],
    max_new_tokens: int,
    totals: Mapping[str, float],
    group_size: int = GROUP,
) -> None:
    """Print the signal that was measured, and what to change first if most groups of `group_size` would have none.

    Args:
        scorers: the scorers that gave the rewards.
        rewards: (N, k) fp64, the rewards of k responses to each of N problems.
        figures: the metrics of an evaluation without their prefix, with those of `spread`.
        texts: some of the responses.
        max_new_tokens: the length in tokens at which responses were cut.
        totals: the sums of an evaluation over all ranks.
        group_size: the number of responses to a prompt in training.
    """
    count, k = rewards.shape
    cut = figures["clipped_ratio"]
    spread_of_scores = f"mean {figures['score']:.3g}, standard deviation {figures['score_std']:.2g}"
    seen = f"the scores of {count} responses have {spread_of_scores}"
    is_little = figures["score_std"] == 0
    if k > 1:
        differ = 1 - figures["frac_reward_zero_std"]
        seen = f"in {differ:.0%} of {count} groups of {k} responses the scores differ ({spread_of_scores})"
        # Small groups differ less often, about in proportion to their size if few responses differ from the others.
        is_little = differ < ENOUGH * min(1, k / max(group_size, GROUP))
    print_line(f"signal: {seen}; {cut:.0%} of the responses were cut at {max_new_tokens} tokens")
    nones = {}
    for scorer in scorers:
        nones[scorer.name] = totals.get(f"none/{scorer.name}", 0) / totals["responses"]
    # Where nothing was judged, as another line says, equal scores say nothing of the responses.
    if all(share == 1 for share in nones.values()):
        return
    for name, share in nones.items():
        if share > 0:
            print_line(
                f"signal: {name} returned None for {share:.1%} of the responses, which adds 0 to their reward"
            )
    advice = []
    if is_little:
        advice = remedies(scorers, rewards, figures, texts)
    elif cut >= 0.5:
        advice = [CUT]
    shown = "" if advice == [CUT] else f"; one response: {shortened(texts[0])}"
    if advice:
        print_line(f"signal: {'; '.join(advice)}{shown}")


def remedies(
    scorers: Sequence[Scorer],
    rewards: torch.Tensor,
    figures: Mapping[str, float],
    texts: Sequence[str],
) -> list[str]:
    """Return what to change when most scores are equal, the likeliest remedy first; arguments as of `say`."""
    # First two cases that the length limit does not explain: correct responses, and a constant score that is not that
    # of a failed response.
    solved = figures.get("accuracy_sampled", 0)
    if solved > 0.5:
        return [f"{solved:.1%} of the responses are correct: take harder rows"]
    if figures["score_std"] == 0 and figures["score"] not in FAILED:
        return [
            f"every response has the score {figures['score']:.3g}: look at what the scorer reads and returns"
        ]
    is_cut = figures["clipped_ratio"] >= 0.5
    unless_longer = [CUT] if is_cut else []
    for scorer in scorers:
        # A scorer that looks for an answer in the text can say in which responses it finds one.
        finds = getattr(scorer, "finds", None)
        if finds is None:
            continue
        found = sum(finds(texts[:LOOKED_AT])) / len(texts[:LOOKED_AT])
        if found < 0.1:
            return [
                *unless_longer,
                f"{scorer.name} finds an answer in {found:.0%} of the responses: change the scorer, or the form that "
                "prompts and demonstrations ask for",
            ]
    if is_cut:
        return unless_longer
    # More than two different scores show that a scorer grades, and does not only say right or wrong.
    finer = "" if len(rewards.unique()) > 2 else ", or use a scorer that grades"
    if "accuracy_sampled" not in figures:
        return [f"most scores are equal: take other rows, a longer warm start{finer}"]
    return [f"{solved:.1%} of the responses are correct: train SFT longer, take easier rows{finer}"]
