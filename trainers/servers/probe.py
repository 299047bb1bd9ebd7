"""The probe: after each weight update a server samples two prompts twice, by which weights, sampling and seeds show.

The long prompt is the same at every update, so that a prefix cache of earlier weights shows too. docs/rollouts.md lists
what the probe cannot detect.
"""

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.text import InputError
from ..data.batch import make_batch
from ..rollouts.mismatch import ALLOWED, agrees
from ..rollouts.sampling import Sampling
from ..rollouts.types import Response, support_of
from .inference import Server

# Temperature, the highest that vLLM takes: a policy that is sure of its tokens shows no difference at 1.
HOT = 2.0
# Tokens of a response, and of the two prompts: 300 fill two blocks of every server's cache.
TOKENS, SHORT, LONG = 16, 8, 300
TEXT = "12 + 7 = 19, 3.5e-4, naïve café, 北京; def f(x):\n\treturn {x[0]: 'a'}  # and so on.\n"


@dataclass(frozen=True)
class Probe:
    """The policy that servers must sample from, and how the run samples it."""

    model: Any  # a `LanguageModel` in an engine
    ids: list[int]  # of `TEXT`
    exact: bool  # True if the weights are fp32
    sampling: Sampling

    def prompts(self, room: int) -> tuple[list[list[int]], Sampling]:
        """Return four prompts that fit into a server's room, and how they are sampled: without stop tokens."""
        tokens = min(TOKENS, room // 2)
        long = self.ids * math.ceil(LONG / len(self.ids))
        short, long = (long[: min(count, room - tokens)] for count in (SHORT, LONG))
        hot = replace(
            self.sampling, temperature=HOT, max_new_tokens=tokens, stop_ids=(), seeds=None
        )
        return [short, long] * 2, hot

    async def sample(self, server: Server, step: int) -> list[Response]:
        """Return a server's responses to the four prompts: two seeds, and then the same two again."""
        (short, long, *_), sampling = self.prompts(server.room)
        responses = []
        for _ in range(2):
            calls = (
                server.sample(short, sampling, 2 * step),
                server.sample(long, sampling, 2 * step + 1),
            )
            responses += await asyncio.gather(*calls)
        return responses

    @torch.no_grad()
    def differences(self, server: Server, responses: list[Response]) -> list[torch.Tensor]:
        """Return the server's log-probabilities of each response less the policy's, in nats; all ranks call it."""
        prompts, sampling = self.prompts(server.room)
        device = next(self.model.module.parameters()).device
        batch = make_batch(prompts, [response.ids for response in responses], 0, device)
        support = support_of(responses)
        support = None if support is None else support.to(device)
        scored = self.model(
            batch.input_ids, batch.response_mask, sampling.temperature, support=support
        )
        policy_logprobs = scored.logprobs[batch.response_mask].view(len(prompts), -1).cpu()
        return list(torch.tensor([response.logprobs for response in responses]) - policy_logprobs)

    def judge(
        self, server: Server, step: int, responses: list[Response], differences: list[torch.Tensor]
    ) -> None:
        """Refuse a server whose log-probabilities differ from the policy's, or that does not follow seeds."""
        wrong = [not agrees(values, self.exact) for values in differences]
        if any(wrong):
            cause = f"weights, temperature, dtype, precision of the head, or raw log-probabilities; {server.flags}"
            if not any(wrong[::2]):
                cause = f"only after the long prompt, which is cached: start it with {server.without_cache}"
            values = torch.cat(differences)
            sizes = values.abs()
            raise InputError(
                f"{server.name}: log-probabilities after step {step} are not the policy's (mean {values.mean():+.2g}, "
                f"mean of sizes {sizes.mean():.2g}, largest {sizes.max():.2g} nats; allowed: {ALLOWED[self.exact]}); "
                f"{cause}; see docs/rollouts.md"
            )
        # In 16 bits, a response may change with the batch around it.
        repeated = [responses[k].ids == responses[k + 2].ids for k in range(2)]
        if not (all(repeated) if self.exact else any(repeated)):
            raise InputError(
                f"{server.name}: one seed gave two different responses; {server.flags}"
            )
