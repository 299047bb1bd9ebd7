"""Tells, once each, of what keeps a run from learning anything."""

import torch

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.rollouts.types import Rollout


class Stuck:
    """What the rollouts so far had in common; every rank looks at its own part of each."""

    PATIENCE = 10  # steps

    def __init__(self):
        self.equal, self.silent = 0, {}

    def look(self, rollout: Rollout, group_size: int | None) -> None:
        """After each rollout; `group_size` None where responses are not compared with those to the same prompt."""
        groups = rollout.rewards.view(-1, group_size or 1)
        differing = (groups != groups[:, :1]).any(1).sum() if group_size else torch.ones(())
        applied = [(~scores.isnan()).sum() for scores in rollout.scores.values()]
        differing, *applied = ranks.global_sum(torch.stack([differing.double(), *map(torch.Tensor.double, applied)]))
        for name, count in zip(rollout.scores, applied, strict=True):
            self.silent[name] = 0 if count else self.silent.get(name, 0) + 1
            if self.silent[name] == self.PATIENCE:
                _warn(f"scorer {name!r} returned None for every response of {self.PATIENCE} steps: it judges nothing")
        self.equal = 0 if differing else self.equal + 1
        if self.equal == self.PATIENCE:
            _warn(
                f"for {self.PATIENCE} steps all rewards of every group were equal, so that nothing is learnt; look at "
                "the responses in samples.jsonl, at what judges them, and at temperature and group_size"
            )


class IdleCritic:
    """Says once each what is wrong with a critic that does not learn."""

    PATIENCE = 10

    def __init__(self):
        self.dead_said, self.worse_said, self.worse = False, False, 0

    def look(self, grad_norm: float | None, var_explained: float) -> None:
        """After each step: the norm of the critic's gradient (None: not known), and the variance it explained."""
        self.worse = self.worse + 1 if var_explained < 0 else 0
        if grad_norm == 0 and not self.dead_said:
            self.dead_said = True
            _warn(
                "the critic has no gradient: its value loss is 0, every response is empty, or value_clip holds every "
                "token; look at loss/value_avg, completions/mean_length and val/clipfrac_avg"
            )
        if self.worse >= self.PATIENCE and not self.worse_said:
            self.worse_said = True
            _warn(
                f"val/var_explained was below 0 for {self.PATIENCE} steps: the critic is worse than a constant, and "
                "adds noise to the advantages; look at critic_lr, value_clip (smaller than the rewards' scale?), and "
                "warm it up first: --critic_only N, then --critic OUTPUT_DIR/critic"
            )


def _warn(text: str) -> None:
    if ranks.rank() == 0:
        tell(f"warning: {text}")
