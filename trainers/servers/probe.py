"""The probe: a few short responses that show which weights a server samples from, and how.

After each weight update a server samples a short prompt with three seeds, and a long one that is the same at every
update, so that a prefix cache of earlier weights is seen; and all of it once more. docs/rollouts.md lists what this
cannot detect.
"""

import math
from dataclasses import dataclass, replace

import torch

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.rollouts.mismatch import ALLOWED, agrees
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Response, support_of
from fused_rl.trainers.servers.inference import Server

HOT = 2.0  # temperature, the highest that vLLM takes: a policy that is sure of its tokens shows no difference at 1
TOKENS, SHORT, LONG = 16, 8, 300  # of a response, and of the prompts: 300 fill two blocks of every server's cache
UNLIKELY = 1e-6
TEXT = "12 + 7 = 19, 3.5e-4, naïve café, 北京; def f(x):\n\treturn {x[0]: 'a'}  # and so on.\n"


@dataclass(frozen=True)
class Probe:
    """The policy that servers must sample from, and how the run samples it."""

    model: object
    """A `LanguageModel` in an engine."""
    ids: list[int]
    """Token ids of `TEXT`."""
    exact: bool
    """True if the weights are fp32."""
    sampling: Sampling

    def prompts(self, room: int) -> tuple[list[list[int]], Sampling]:
        """Return eight prompts that fit into a server's room, and how they are sampled: without stop tokens."""
        tokens = min(TOKENS, room // 2)
        long = self.ids * math.ceil(LONG / len(self.ids))
        short, long = (long[: min(count, room - tokens)] for count in (SHORT, LONG))
        hot = replace(self.sampling, temperature=HOT, max_new_tokens=tokens, stop_ids=(), seeds=None)
        return [short, short, short, long] * 2, hot

    def sample(self, server: Server, step: int) -> list[Response]:
        """Return a server's responses to the eight prompts: four seeds, and the same four again."""
        prompts, sampling = self.prompts(server.room)
        responses = []
        for part in (range(4), range(4, 8)):
            calls = [server.sample(prompts[k], sampling, 4 * step + k % 4) for k in part]
            responses += server.http.run(calls)
        return responses

    @torch.no_grad()
    def differences(self, server: Server, responses: list[Response]) -> list[torch.Tensor]:
        """Return the server's log-probabilities of each response less the policy's, in nats; all ranks call it."""
        prompts, sampling = self.prompts(server.room)
        device = next(self.model.module.parameters()).device
        batch = make_batch(prompts, [response.ids for response in responses], 0, device)
        support = support_of(responses)
        support = None if support is None else support.to(device)
        scored = self.model(batch.input_ids, batch.response_mask, sampling.temperature, support=support)
        own = scored.logprobs[batch.response_mask].view(len(prompts), -1).cpu()
        return list(torch.tensor([response.logprobs for response in responses]) - own)

    def judge(self, server: Server, step: int, responses: list[Response], differences: list[torch.Tensor]) -> None:
        """Refuse a server whose log-probabilities differ from the policy's, or that does not follow seeds.

        Raises:
            InputError: what differs, by how much, and the flag to set.
        """
        wrong = [number for number, values in enumerate(differences) if not agrees(values, self.exact)]
        if wrong:
            cause = f"weights, temperature, dtype, precision of the head, or not {server.flags['logprobs']}"
            if all(number % 4 == 3 for number in wrong):
                cause = f"only after the long prompt, which is cached: start the server with {server.flags['cache']}"
            values = torch.cat([differences[number] for number in wrong])
            sizes = values.abs()
            raise InputError(
                f"{server}: log-probabilities after step {step} are not the policy's (mean {values.mean():+.2g}, "
                f"mean of sizes {sizes.mean():.2g}, largest {sizes.max():.2g} nats; allowed: {ALLOWED[self.exact]}); "
                f"{cause}; see docs/rollouts.md"
            )

        # Seeds. In 16 bits, a response may change with the batch around it.
        ids = [response.ids for response in responses]
        pairs = zip(ids[:4], ids[4:], strict=True)
        repeated = [first == second for first, second in pairs]
        if not (all(repeated) if self.exact else any(repeated)):
            raise InputError(f"{server}: one seed gave two different responses; start it {server.flags['seeds']}")
        chance = math.exp(2 * sum(responses[0].logprobs))
        if ids[0] == ids[1] == ids[2] and chance < UNLIKELY:
            raise InputError(f"{server}: three seeds gave the same response; start it {server.flags['seeds']}")
