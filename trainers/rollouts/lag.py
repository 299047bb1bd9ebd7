"""Rollouts sampled ahead: those of later steps while a step is trained on, by a schedule and not by a race.

With `lag` k the rollout of step t has the weights after step t - 1 - k, the first ones those at the start; k = 0 is
the usual. When step t begins, a thread begins the rollout of step t + k with the weights after step t - 1, and it ends
before the next weights are published. So a fixed schedule decides which weights sample each response, and a checkpoint
after step t holds the rollouts of steps t + 1 to t + k.

The thread calls the sampler's `sample` and nothing else. Scoring, collectives and the process's own generators stay in
the main thread: a run with a thread, and one without, are the same bit for bit.
"""

import copy
import hashlib
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

import torch

from fused_rl import TokenSupport

from ..base import ranks
from ..base.text import InputError
from .generate import TransformersSampler
from .returned import sampled_by
from .sampling import Sampling
from .types import Prompt, Response, Sampler


@dataclass
class Pending:
    """The rollout of a step that has not been trained on."""

    version: int
    """The step whose weights sample it."""
    prompts: list[list[int]]
    """Token ids, for each response."""
    responses: Future = field(default_factory=Future)
    """A list of `Response`."""


class LaggedSampler(Sampler):
    """Samples rollouts ahead, from another sampler; what is requested beside them it samples at once."""

    def __init__(self, sampler: Sampler, lag: int):
        super().__init__(sampler)
        self.is_checked = sampler.is_checked
        self.lag = lag
        self.pending: dict[int, Pending] = {}  # by step
        self.step_to_take: int | None = None  # the step whose rollout is taken next
        self.published = 0
        # `torch.load` reads plain data, and these, without running code.
        torch.serialization.add_safe_globals([Response, TokenSupport])

    def begin(
        self,
        step: int,
        last: int,
        prompts_of: Callable[[int], list[Prompt]],
        copies: int,
        sampling_of: Callable[[int], Sampling],
    ) -> int:
        """Begin a step, and rollouts up to step `last` in a thread; return the step whose weights this one has.

        Args:
            prompts_of: this rank's prompts of the step that comes so many after this one.
            sampling_of: how so many responses are sampled, with seeds of their own.
        """
        # Of this step and the `lag` next ones: usually only the last of them is missing, and all of them in a new run.
        missing = []
        for later_step in range(step, min(step + self.lag, last) + 1):
            rows = []
            for prompt in prompts_of(later_step - step):
                rows += [prompt] * copies

            # Of processes that hold parts of the same sequences each samples its own.
            mine = ranks.my_items(len(rows))
            prompts = [rows[i].ids for i in mine]
            # What a checkpoint holds is sampled again if the rows have changed since.
            if later_step not in self.pending or self.pending[later_step].prompts != prompts:
                self.pending[later_step] = Pending(self.published, prompts)
                sampling = replace(sampling_of(len(rows)), prompts=tuple(rows)).select(mine)
                missing.append((self.pending[later_step], sampling))
        self.step_to_take = step
        if missing:
            name = f"rollouts from step {step} on"
            Thread(target=self._sample, args=(missing,), name=name).start()
        return self.pending[step].version

    def _sample(self, missing: list[tuple[Pending, Sampling]]) -> None:
        """In the thread: one rollout after the other; what it raises is raised where the rollout is waited for."""
        for pending, sampling in missing:
            try:
                copies = [list(ids) for ids in pending.prompts]  # for a sampler to change
                pending.responses.set_result(sampled_by(self.built, copies, sampling))
            except BaseException as error:
                pending.responses.set_exception(error)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Wait for the rollout of the step that has begun and return it; once it was taken, sample a new one."""
        if self.step_to_take is None:
            return self.built.sample(prompts, sampling)
        pending = self.pending.pop(self.step_to_take)
        self.step_to_take = None
        return pending.responses.result()

    def rest(self) -> None:
        """Do nothing: the thread samples while the policy is trained."""

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Publish new weights, after the rollouts that were begun have ended; raises what the sampler raised."""
        # The thread reads the weights that are about to change, or the server that is about to load others.
        for pending in self.pending.values():
            pending.responses.result()
        self.built.publish(step, save)
        self.published = step

    def state_dict(self) -> dict[int, tuple]:
        """Return this rank's rollouts of the steps to come, for a checkpoint."""
        return {
            step: (pending.version, pending.prompts, pending.responses.result())
            for step, pending in self.pending.items()
        }

    def load_state_dict(self, state: dict[int, tuple]) -> None:
        """Take up a checkpoint's rollouts."""
        for step, (version, prompts, responses) in state.items():
            self.pending[step] = Pending(version, prompts)
            self.pending[step].responses.set_result(responses)


class CopySampler(TransformersSampler):
    """Samples from a copy of the policy, which is trained meanwhile; weights that are not trained are shared."""

    reports_logprobs = True

    def __init__(self, policy, **options):
        super().__init__(policy, **options)
        if not self.is_in_place:
            raise InputError(
                f"lag: {type(policy).__name__} keeps its past in another form than keys and values, and transformers "
                "would sample it with the process's own generator, in a thread; give --server, or drop --lag"
            )
        self.graphs.drop(policy, "a capture would disturb what is trained meanwhile")
        self.policy = policy

    @torch.no_grad()
    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Copy the policy's weights."""
        # The first time the model itself is copied. What `deepcopy` finds in its memo it does not copy, so the weights
        # that are not trained, under adapters all of the model's own, exist once.
        if self.lm is self.policy:
            frozen = [weight for weight in self.policy.parameters() if not weight.requires_grad]
            memo = {id(weight): weight for weight in frozen}
            self.lm = copy.deepcopy(self.policy, memo)
            self.lm.requires_grad_(False).eval()
        else:
            copies = [*self.lm.parameters(), *self.lm.buffers()]
            originals = [*self.policy.parameters(), *self.policy.buffers()]
            for copied, original in zip(copies, originals, strict=True):
                # A weight that is not trained is shared.
                if copied is not original:
                    copied.copy_(original)
        super().publish(step, save)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Sample as the policy would, on its device: a thread begins on the first one."""
        if self.lm.device.type == "cuda":
            torch.cuda.set_device(self.lm.device)
        return super().sample(prompts, sampling)

    def generator(self, prompts: list[list[int]], sampling: Sampling) -> torch.Generator | None:
        """Return a generator of the seeds and prompts, as a thread must not use the process's; None without seeds."""
        if sampling.seeds is None:
            return None
        total = hashlib.blake2b(digest_size=16)
        for ids in (sampling.seeds, *prompts):
            total.update(array("q", [len(ids), *ids]))
        seed = int(total.hexdigest()[:15], 16)
        return torch.Generator(self.lm.device).manual_seed(seed)
