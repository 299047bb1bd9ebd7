"""Numbers that responses are drawn with, of a generator that nothing else in a run draws from.

A sampler elsewhere has generators of its own; with a seed for each response a resumed run draws what the uninterrupted
one would have.
"""

import torch

BELOW = 2**31  # what every server takes


class Seeds:
    """Those of one rank; `state_dict` is its part of a checkpoint."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> tuple[int, ...]:
        """So many, from 0 to 2^31 - 1."""
        return tuple(torch.randint(BELOW, (count,), generator=self.generator).tolist())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What goes on with the next number."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on where another stood."""
        self.generator.set_state(state["generator"])
