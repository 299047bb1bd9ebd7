"""Rollouts sampled ahead: those of later steps while a step is trained on, by a schedule and not by a race.

With `lag` k the rollout of step t has the weights after step t - 1 - k, the first ones those at the start; k = 0 is
the usual. When step t begins, a thread begins the rollout of step t + k with the weights after step t - 1, and it ends
before the next weights are published. So a fixed schedule decides which weights sample each response, and a checkpoint
after step t holds the rollouts of steps t + 1 to t + k.

The thread calls the sampler's `sample` and nothing else. Scoring, collectives and the process's own generators stay in
the main thread: a run with a thread, and one without, are the same bit for bit.
"""

import copy
import dataclasses
import hashlib
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Thread

import torch

from fused_rl import TokenSupport
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.checks import check_responses
from fused_rl.trainers.rollouts.generate import TransformersSampler, keeps_keys_and_values
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response, Sampler


@dataclass
class Pending:
    """The rollout of a step that has not been trained on."""

    version: int
    """The step whose weights sample it."""
    digest: str
    """Of its prompts."""
    prompts: list[Prompt] = field(default_factory=list)
    """One for each response; none for a checkpoint's, whose responses were checked before."""
    sampling: Sampling | None = None
    """How it is sampled; None for a checkpoint's."""
    responses: Future = field(default_factory=Future)
    """A list of `Response`."""


class Ahead(Sampler):
    """Samples rollouts ahead, from another sampler; what is requested beside them it samples at once."""

    def __init__(self, sampler: Sampler, lag: int):
        super().__init__(sampler)
        self.lag = lag
        self.pending: dict[int, Pending] = {}  # by step
        self.due: int | None = None  # the step whose rollout is taken next
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
        """Begin step `step`, whose rollout is the next one taken, and the rollouts of later steps in a thread.

        Returns the step whose weights that rollout has.

        Args:
            step: of the run.
            last: step of the run, beyond which nothing is sampled.
            prompts_of: this rank's prompts of the step that comes so many after this one.
            copies: responses to each prompt.
            sampling_of: how so many responses are sampled, with seeds of their own.
        """
        prompts = {}
        for number in range(step, min(step + self.lag, last) + 1):
            prompts[number] = list(chain.from_iterable([prompt] * copies for prompt in prompts_of(number - step)))
        if self.restored:
            self._forget_changed(prompts)

        # What is not there yet, in the order of steps.
        missing = []
        for number in sorted(prompts.keys() - self.pending.keys()):
            given = prompts[number]
            pending = Pending(self.published, digest(ids_of(given)), given, sampling_of(len(given)))
            self.pending[number] = pending
            missing.append(pending)
        self.due = step
        if missing:
            Thread(target=self._sample, args=(missing,), name=f"rollouts from step {step} on").start()
        return self.pending[step].version

    def _sample(self, missing: list[Pending]) -> None:
        """In the thread: one rollout after the other; what it raises is raised where the rollout is waited for."""
        for pending in missing:
            try:
                pending.responses.set_result(self.built.sample(ids_of(pending.prompts), pending.sampling))
            except BaseException as error:
                pending.responses.set_exception(error)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Wait for the rollout of the step that has begun and return it; once it was taken, sample a new one."""
        if self.due is None:
            return self.built.sample(prompts, sampling)
        pending = self.pending.pop(self.due)
        self.due = None
        assert pending.digest == digest(prompts)
        return pending.responses.result()

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Publish new weights, after the rollouts that were begun have ended.

        Raises:
            Exception: what the sampler raised in the thread, or what is wrong with what it returned: a checkpoint must
                not hold what can never be trained on.
        """
        for pending in self.pending.values():
            responses = pending.responses.result()
            if pending.sampling is not None:
                known = {"sampler": self, "version": pending.version}
                check_responses(responses, pending.prompts, pending.sampling, **known)
        self.built.publish(step, save)
        self.published = step

    def state_dict(self) -> dict[str, object]:
        """Return this rank's rollouts of the steps to come, for a checkpoint."""
        state = {}
        for step, pending in self.pending.items():
            responses = [_as_plain(response) for response in pending.responses.result()]
            state[step] = {"version": pending.version, "asked": pending.digest, "responses": responses}
        return state

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take up a checkpoint's rollouts."""
        for step, of_step in state.items():
            self.pending[step] = Pending(of_step["version"], of_step["asked"])
            self.pending[step].responses.set_result([_from_plain(plain) for plain in of_step["responses"]])
        self.restored = True

    def _forget_changed(self, prompts: dict[int, list[Prompt]]) -> None:
        """After a resume with other rows or another tokenizer, which was accepted, sample all rollouts again."""
        self.restored = False
        known = prompts.keys() & self.pending.keys()
        digests = {step: digest(ids_of(prompts[step])) for step in known}
        changed = [step for step in known if digests[step] != self.pending[step].digest]
        if any(ranks.gather(changed)):
            if ranks.rank() == 0:
                tell(f"resume: the prompts have changed; sampled again: steps {', '.join(map(str, self.pending))}")
            self.pending = {}


def ids_of(prompts: list[Prompt]) -> list[list[int]]:
    """Return copies of the token ids of each, for a sampler to change."""
    return [list(prompt.ids) for prompt in prompts]


def digest(prompts: list[list[int]]) -> str:
    """Return a hash of token ids, the same in every process."""
    total = hashlib.blake2b(digest_size=16)
    for ids in prompts:
        total.update(array("q", [len(ids), *ids]))
    return total.hexdigest()


def _as_plain(response: Response) -> dict[str, object]:
    """Return the fields of a response as `torch.load` takes them for data."""
    plain = {field.name: getattr(response, field.name) for field in dataclasses.fields(Response)}
    if isinstance(response.support, TokenSupport):
        plain["support"] = {"ids": response.support.ids, "offsets": response.support.offsets}
    return plain


def _from_plain(plain: dict[str, object]) -> Response:
    if isinstance(plain["support"], dict):
        plain = plain | {"support": TokenSupport(**plain["support"])}
    return Response(**plain)


class CopySampler(TransformersSampler):
    """Samples from a copy of the policy, which is trained meanwhile, and reports the copy's log-probabilities.

    Weights that are not trained are shared: with adapters, these alone are copied.
    """

    tells_logprobs = True
    has_versions = True

    def __init__(self, policy, *, pad_id: int, batch_size: int):
        if not keeps_keys_and_values(policy):
            raise InputError(
                f"lag: {type(policy).__name__} keeps its past in another form than keys and values, and transformers "
                "would sample it with the process's own generator, in a thread; give --server, or drop --lag"
            )
        super().__init__(policy, pad_id=pad_id, batch_size=batch_size)
        self.policy = policy

    @torch.no_grad()
    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Copy the policy's weights."""
        if self.lm is self.policy:
            frozen = {id(weight): weight for weight in self.policy.parameters() if not weight.requires_grad}
            self.lm = copy.deepcopy(self.policy, frozen).requires_grad_(False).eval()
        else:
            copies = [*self.lm.parameters(), *self.lm.buffers()]
            originals = [*self.policy.parameters(), *self.policy.buffers()]
            for copied, own in zip(copies, originals, strict=True):
                if copied is not own:  # a frozen one is shared
                    copied.copy_(own)
        super().publish(step, save)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Sample as the policy would, on its device: a thread begins on the first one."""
        if self.lm.device.type == "cuda":
            torch.cuda.set_device(self.lm.device)
        return super().sample(prompts, sampling)

    def generator(self, prompts: list[list[int]], sampling: Sampling) -> torch.Generator | None:
        """Return a generator of its own, if there are seeds: a thread must not use the process's.

        It depends on the prompts: each turn of a conversation has other numbers, though its seeds are the same.
        """
        if sampling.seeds is None:
            return None
        seed = int(digest([list(sampling.seeds), *prompts])[:15], 16)
        return torch.Generator(self.lm.device).manual_seed(seed)
