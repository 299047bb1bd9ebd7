"""Rollouts drawn ahead: those of later steps while a step is trained on, by a schedule and not by a race.

With `lag` k the rollout of step t is drawn with the weights after step t - 1 - k, the first ones with those at the
start; k = 0 is the usual. One set of weights is published at a time. When step t begins it is that after step t - 1,
and a thread begins the rollout of step t + k with it; before the next set is published that rollout is there. So no
clock decides which weights a response is of, and a checkpoint after step t holds the rollouts of steps t + 1 to t + k:
that of step t + 1 + k is drawn from the weights that it has.

The thread calls the sampler's `sample` and nothing else. What scores, what ranks do together, and what draws from the
process's own generators stays where it was: a thread, and one after the other, are the same run bit for bit.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Thread

from fused_rl import TokenSupport
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.rollouts.checks import check_responses
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response, Sampler


@dataclass
class Pending:
    """The rollout of a step that has not been trained on."""

    version: int
    """The step whose weights it is drawn with."""
    asked: str
    """A sum of its prompts."""
    prompts: list[Prompt] = field(default_factory=list)
    """One for each response; none of what a checkpoint held, whose responses were looked at before."""
    sampling: Sampling | None = None
    """How it is drawn; None of what a checkpoint held."""
    responses: Future = field(default_factory=Future)
    """A list of `Response`, when it is there."""


class Ahead(Sampler):
    """A sampler that draws rollouts ahead, from another one; what is asked for beside them it draws at once."""

    def __init__(self, drawn_from: Sampler, lag: int):
        super().__init__(drawn_from)
        self.drawn_from = drawn_from
        self.lag = lag
        self.pending: dict[int, Pending] = {}  # by step
        self.due: int | None = None  # the step whose rollout is asked for next
        self.published = 0
        self.restored = False

    def begin(
        self,
        step: int,
        last: int,
        prompts_of: Callable[[int], list[Prompt]],
        copies: int,
        sampling_of: Callable[[int], Sampling],
    ) -> int:
        """Step `step` begins: its rollout is the next one that is asked for, and later ones are drawn meanwhile.

        Returns the step whose weights that rollout is of.

        Args:
            step: of the run.
            last: step of the run, beyond which nothing is drawn.
            prompts_of: this rank's prompts of the step that comes so many after this one.
            copies: responses to each prompt.
            sampling_of: how so many responses are drawn, with seeds of their own.
        """
        asked = {}
        for number in range(step, min(step + self.lag, last) + 1):
            asked[number] = list(chain.from_iterable([prompt] * copies for prompt in prompts_of(number - step)))
        if self.restored:
            self._forget_changed(asked)

        # What of it is not there yet, in the order of steps.
        wanted = []
        for number in sorted(asked.keys() - self.pending.keys()):
            prompts = asked[number]
            sampling = sampling_of(len(asked[number]))
            self.pending[number] = Pending(self.published, digest(ids_of(prompts)), prompts, sampling)
            wanted.append(self.pending[number])
        self.due = step
        if wanted:
            Thread(target=self._draw, args=(wanted,), name=f"rollouts from step {step} on").start()
        return self.pending[step].version

    def _draw(self, wanted: list[Pending]) -> None:
        """In the thread: one rollout after the other; what it raises is raised where the rollout is waited for."""
        for pending in wanted:
            try:
                pending.responses.set_result(self.drawn_from.sample(ids_of(pending.prompts), pending.sampling))
            except BaseException as error:
                pending.responses.set_exception(error)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """The rollout of the step that has begun, when it is there; without one, or once it was taken, a new one."""
        if self.due is None:
            return self.drawn_from.sample(prompts, sampling)
        step = self.due
        self.due = None
        pending = self.pending.pop(step)
        if pending.asked != digest(prompts):
            raise RuntimeError(f"the rollout that was drawn ahead for step {step} is of other prompts")
        return pending.responses.result()

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """New weights, which no rollout is in the middle of: those that were begun are there first.

        Raises:
            Exception: what the sampler raised in the thread, or what is wrong with what it returned, on all ranks: a
                checkpoint must not hold what can never be trained on.
        """
        for pending in self.pending.values():
            responses = pending.responses.result()
            if pending.sampling is not None:
                known = {"sampler": self, "version": pending.version}
                check_responses(responses, pending.prompts, pending.sampling, **known)
        self.drawn_from.publish(step, save)
        self.published = step

    def state_dict(self) -> dict[str, object]:
        """This rank's rollouts of the steps to come, for a checkpoint."""
        told = {}
        for step, pending in self.pending.items():
            responses = [_as_plain(response) for response in pending.responses.result()]
            told[step] = {"version": pending.version, "asked": pending.asked, "responses": responses}
        return told

    def load_state_dict(self, told: dict[str, object]) -> None:
        """Take up what another has told."""
        for step, of_step in told.items():
            self.pending[step] = Pending(of_step["version"], of_step["asked"])
            self.pending[step].responses.set_result([_from_plain(plain) for plain in of_step["responses"]])
        self.restored = True

    def _forget_changed(self, asked: dict[int, list[Prompt]]) -> None:
        """After a resume with other rows or another tokenizer, which was accepted, other rollouts are asked for."""
        self.restored = False
        there = asked.keys() & self.pending.keys()
        changed = [step for step in there if digest(ids_of(asked[step])) != self.pending[step].asked]
        if not any(ranks.gather(changed)):
            return
        steps = ", ".join(map(str, self.pending))
        self.pending = {}
        if ranks.rank() == 0:
            tell(f"resume: drawn again, as their prompts have changed: the rollouts of steps {steps}")


def ids_of(prompts: list[Prompt]) -> list[list[int]]:
    """The token ids of each, for a sampler to change."""
    return [list(prompt.ids) for prompt in prompts]


def digest(prompts: list[list[int]]) -> str:
    """A sum of token ids, the same in every process."""
    total = hashlib.blake2b(digest_size=16)
    for ids in prompts:
        total.update(array("q", [len(ids), *ids]))
    return total.hexdigest()


def _as_plain(response: Response) -> dict[str, object]:
    """What `torch.load` takes for data."""
    plain = {field.name: getattr(response, field.name) for field in dataclasses.fields(Response)}
    plain["ids"] = list(map(int, response.ids))
    if response.logprobs is not None:  # a sampler of the user's may have numpy's numbers
        plain["logprobs"] = [None if value is None else float(value) for value in response.logprobs]
    if response.weight_version is not None:
        plain["weight_version"] = int(response.weight_version)
    if response.trained is not None:
        plain["trained"] = list(map(bool, response.trained))
    if isinstance(response.support, TokenSupport):
        plain["support"] = {"ids": response.support.ids, "offsets": response.support.offsets}
    return plain


def _from_plain(plain: dict[str, object]) -> Response:
    if isinstance(plain["support"], dict):
        plain = plain | {"support": TokenSupport(**plain["support"])}
    return Response(**plain)
