"""Nothing that a server says is believed that can be checked: ten checks, each of which has failed for somebody.

    at the start, before anything is pushed
    1  version, length    a prompt and its response fit; each push is known by its version (`Server.push`)
    2  tokenizer          ids as text, and back, are the same ids there and here
    3  vocabulary         its last id is one there too, and the next one is none
    after the first push
    4  seeds              one seed repeats, others differ, and a group is not clones
    5  finish reasons     a response ends with its stop token, or has max_new_tokens; all others are refused always
    6  kept sets          each holds its token, and the log-probabilities are of the distribution over it
    after every push: four requests of a few tokens, and a look at the folder
    7  weights            a greedy response has the trainer's log-probabilities
    8  temperature        so have responses at the run's temperature, and at another one
    9  cache              so has one to a long prompt that was asked with the weights before
    10 digests            every tensor that is another in the folder is another there; none has left the folder

What is told is compared with what the trainer's own model makes of the same ids: in fp32 within 1e-3 nats, otherwise
within 0.05 on average. For 10 the folder is read and the server reads its weights: of a large one twice (digests.py).
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fused_rl import TokenSupport
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Response
from fused_rl.trainers.servers.connection import Refused
from fused_rl.trainers.servers.digests import kept_though_changed
from fused_rl.trainers.servers.inference import Server

Score = Callable[[list[list[int]], list[list[int]], float, TokenSupport | None], list[list[float]]]
"""(prompts, responses, temperature, what the responses' tokens were drawn from) -> the log-probability of each of these
tokens in nats, by the policy; all ranks call it together."""
EXACT, ON_AVERAGE = 1e-3, 0.05  # nats: the most that a token may differ in fp32; a mean of |differences| otherwise
ROUNDED = 1e-2  # nats, of |differences| whose mean is 0: what logits of 16 bits make
TOKENS = 16  # of a response that is only compared
LONG = 300  # tokens of a prompt: two blocks of every server's cache
SAME_SEED = 8  # tokens that one seed repeats: later ones may differ by rounding in another batch
UNLIKELY = 1e-6
TEXT = (
    "Round trips tell one tokenizer from another: 12 + 7 = 19, 3.5e-4, naïve café, Größe, 北京, \U0001f642; "
    "def f(x):\n\treturn {x[0]: 'a', None: \"b\"}  # and so on.\n"
)


@dataclass(frozen=True)
class Expected:
    """The policy to which servers are held."""

    tokenizer: object
    vocab: int
    """Ids that its embedding has."""
    longest: int
    """Tokens of a prompt and its response together, at most."""
    exact: bool
    """Whether its weights are fp32."""
    sampling: Sampling
    """How it is sampled, and what stops it."""
    score: Score


class Asked(NamedTuple):
    """A question to a server, and of what its answer is to be compared."""

    kind: str
    prompt: list[int]
    sampling: Sampling
    seed: int | None = 0


class Probe(NamedTuple):
    """What a server answered, to be compared with the policy."""

    asked: Asked
    response: Response

    @property
    def temperature(self) -> float:
        """Of the distribution that the log-probabilities are of: greedy ones are of the model's own."""
        return self.asked.sampling.temperature or 1.0


class Compared(NamedTuple):
    """Log-probabilities that were told, less the policy's own: in nats, over the tokens of a response."""

    mean: float
    absolute: float
    largest: float

    @classmethod
    def of(cls, told: Sequence[float], own: Sequence[float]) -> "Compared":
        """Of two lists of equal length."""
        apart = [a - b for a, b in zip(told, own, strict=True)]
        sizes = [abs(value) for value in apart]
        largest = math.inf if any(map(math.isnan, sizes)) else max(sizes)  # max() passes over a NaN
        return cls(sum(apart) / len(apart), sum(sizes) / len(sizes), largest)

    def within(self, exact: bool) -> bool:
        """Whether it is rounding, of the policy's weights."""
        return self.largest <= EXACT if exact else self.absolute <= ON_AVERAGE

    def __str__(self) -> str:
        return f"mean {self.mean:+.2g}, mean of sizes {self.absolute:.2g}, largest {self.largest:.2g} nats"


class Verifier:
    """The checks of one server, in a process that asks it; what has to be scored is scored elsewhere (`scored`)."""

    def __init__(self, server: Server, expected: Expected):
        self.server, self.expected = server, expected
        self.tokens = min(TOKENS, server.max_model_len // 2)
        self.ids = expected.tokenizer.encode(TEXT, add_special_tokens=False)
        self.digests: dict[str, str] | None = None
        self.tensors: dict[str, int] | None = None
        self.pushes, self.hinted = 0, False

    def before_pushes(self) -> None:
        """Checks 1 to 3, and a first look at what check 9 asks again."""
        server, expected = self.server, self.expected
        if server.max_model_len < expected.longest:
            raise InputError(
                f"{server} takes {server.max_model_len} tokens, but max_prompt_length and max_new_tokens are "
                f"{expected.longest} together; start it with {server.flags.length} {expected.longest}, or lower them"
            )
        self._check_tokenizer()
        self._check_vocabulary()
        if expected.sampling.truncates:
            reason = server.why_no_sets(expected.sampling)
            if reason is not None:
                raise InputError(
                    f"{server} does not tell what tokens were drawn from, which top_p, top_k and min_p need: {reason}; "
                    f"start it with {server.flags.sets}, or leave them out"
                )
        self._ask(self._repeated())

    def after_push(self, folder: Path, step: int, tensors: dict[str, int] | None) -> list[Probe]:
        """Checks 4, 5 and 10, half of 6, and what the others compare; `tensors` as of `to_compare`."""
        if tensors is not None:
            self._check_digests(folder, step, tensors)
        self.pushes += 1
        asked = self._every_time(step)
        if self.pushes == 1:
            self._check_seeds()
            self._check_stops()
            if self.expected.sampling.truncates:
                asked.append(Asked("kept sets", self._short(step), self._drawn_as_in_the_run()))
        with ThreadPoolExecutor(len(asked)) as pool:
            probes = list(pool.map(self._ask, asked))
        for probe in probes:
            self._check_sets(probe.response)
        return probes

    def judge(self, probes: list[Probe], own: list[list[float]], plain: list[list[float]], step: int) -> None:
        """Checks 6 to 9, of `own` log-probabilities, and `plain` ones, at temperature 1.

        Raises:
            InputError: what was told is of other weights, another temperature, an old cache, …; names what to set.
        """
        server, exact = self.server, self.expected.exact
        for probe, values, at_one in zip(probes, own, plain, strict=True):
            compared = Compared.of(probe.response.logprobs, values)
            if compared.within(exact):
                self._hint(compared)
                continue
            raw = Compared.of(probe.response.logprobs, at_one).within(exact) and probe.temperature != 1
            kind = "raw" if raw else probe.asked.kind
            limit = f"{EXACT:g} at most" if exact else f"{ON_AVERAGE:g} on average"
            raise InputError(
                f"{server}: log-probabilities of a response after step {step} are not the trainer's ({compared}; "
                f"allowed are {limit}): {self._reason(kind, compared)}"
            )

    def _check_sets(self, response: Response) -> None:
        """Each token was drawn from the set that is told of it."""
        if response.support is None:
            return
        sets = response.support.ids.split(response.support.offsets.diff().tolist())
        lacking = [token for token, kept in zip(response.ids, sets, strict=True) if len(kept) and token not in kept]
        if lacking:
            raise InputError(f"{self.server}: token {lacking[0]} is not in the set that it was drawn from")

    def _reason(self, kind: str, compared: Compared) -> str:
        """What such a difference is of, and what to set."""
        flags = self.server.flags
        reasons = {
            "raw": f"they are of the model, and not of what was drawn from; start it with {flags.logprobs}",
            "temperature": f"a greedy response's are right, so it draws otherwise than it was told; see that it has no "
            f"logits processor and no defaults of its own, and {flags.logprobs}",
            "repeated": "those to a new prompt are right, so what it keeps of prompts is of the weights before; start "
            f"it with {flags.no_cache}",
            "kept sets": f"they are not of the distribution over the kept sets; start it with {flags.sets}",
        }
        if kind in reasons:
            return reasons[kind]
        if ROUNDED > compared.absolute > 4 * abs(compared.mean):
            return _of_the_head(flags.head)
        return (
            "it does not have the weights that were pushed, or computes in another dtype; see that it serves the "
            f"architecture of --model, unquantised, and set {flags.dtype} as --dtype of this run"
        )

    def _hint(self, compared: Compared) -> None:
        """Say once where rounding is more than it must be."""
        rounded = compared.absolute >= ROUNDED and abs(compared.mean) < compared.absolute / 4
        if rounded and not self.hinted:
            tell(f"{self.server}: log-probabilities differ by {compared}: {_of_the_head(self.server.flags.head)}")
            self.hinted = True

    def _ask(self, asked: Asked) -> Probe:
        seeds = None if asked.seed is None else [asked.seed]
        (response,) = self.server.sample(asked.prompt, 1, asked.sampling, seeds)
        return Probe(asked, response)

    def _drawn_as_in_the_run(self, **other) -> Sampling:
        chosen = {name: getattr(self.expected.sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return Sampling(**{"max_new_tokens": self.tokens, "stop_ids": (), **chosen, **other})

    def _plain(self, temperature: float) -> Sampling:
        """Of the whole vocabulary."""
        return Sampling(temperature, self.tokens, ())

    def _short(self, step: int) -> list[int]:
        """A prompt that was not asked before."""
        start = 5 * step % len(self.ids)
        most = max(1, min(8, self.server.max_model_len - self.tokens))
        return (self.ids[start:] + self.ids)[:most]

    def _repeated(self) -> Asked:
        """A prompt that fills blocks of a cache, the same after each push."""
        length = min(LONG, self.server.max_model_len - self.tokens)
        copies = math.ceil(length / len(self.ids))
        return Asked("repeated", (self.ids * copies)[:length], self._plain(self.expected.sampling.temperature or 1.0))

    def _every_time(self, step: int) -> list[Asked]:
        temperature, prompt = self.expected.sampling.temperature or 1.0, self._short(step)
        other = 2.0 if temperature == 0.5 else 0.5
        return [
            Asked("greedy", prompt, self._plain(0.0), None),
            Asked("temperature", prompt, self._plain(other), step),
            Asked("temperature", prompt, self._plain(temperature), step),
            self._repeated(),
        ]

    def _check_tokenizer(self) -> None:
        tokenizer = self.expected.tokenizer
        spread = [int(i * len(tokenizer) / 64) for i in range(64)]
        for text in (TEXT, tokenizer.decode(spread)):
            found, own = self.server.tokens_of(text), tokenizer.encode(text, add_special_tokens=False)
            if found is not None and found != own:
                at = next((i for i, pair in enumerate(zip(found, own, strict=False)) if pair[0] != pair[1]), 0)
                raise InputError(
                    f"{self.server} has another tokenizer: {text[:40]!r}… is {len(found)} ids there, {found[at:][:3]} "
                    f"from id {at} on, and {len(own)} here, {own[at:][:3]}; serve the model of --model, or give "
                    f"its tokenizer: {self.server.flags.tokenizer}"
                )

    def _check_vocabulary(self) -> None:
        vocab, one = self.expected.vocab, Sampling(0.0, 1, ())
        outside = max(vocab, len(self.expected.tokenizer))
        remedy = "serve the model of --model"
        try:
            self.server.sample([vocab - 1], 1, one, None)
        except Refused as error:
            raise InputError(f"{self.server} has not the policy's {vocab} ids: {error}; {remedy}") from error
        try:
            self.server.sample([outside], 1, one, None)
        except Refused:
            return
        raise InputError(f"{self.server} takes id {outside}, but the policy has {vocab} ids; {remedy}")

    def _check_seeds(self) -> None:
        """Four seeds, and the first of them again."""
        temperature = self.expected.sampling.temperature or 1.0
        asked = [Asked("seeds", self._short(0), self._plain(temperature), seed) for seed in (11, 12, 13, 14)]
        first, *others = [self._ask(one).response for one in asked]
        chance = math.exp(3 * sum(first.logprobs))  # that three more are the same
        if all(other.ids == first.ids for other in others) and chance < UNLIKELY:
            raise InputError(
                f"{self.server}: four seeds gave four times the same response, whose probability is "
                f"{math.exp(sum(first.logprobs)):.1g}: a group would be clones, with advantages of 0; start it "
                f"{self.server.flags.seeds}"
            )
        again = [self._ask(asked[0]).response.ids[:SAME_SEED] for _ in range(2)]
        if first.ids[:SAME_SEED] not in again:
            raise InputError(
                f"{self.server}: one seed gave {first.ids[:SAME_SEED]} and then {again[0]}: a resumed run would not be "
                f"the uninterrupted one; start it {self.server.flags.seeds}"
            )

    def _check_stops(self) -> None:
        """A token that it draws greedily, as a stop token."""
        asked = Asked("stop", self._short(0), self._plain(0.0), None)
        free = self._ask(asked).response.ids
        stop = free[len(free) // 2]
        stops = (stop, *self.expected.sampling.stop_ids)  # a server may stop at the model's own beside what it is told
        stopped = self._ask(asked._replace(sampling=Sampling(0.0, self.tokens, stops))).response
        if stop in stopped.ids[:-1] or (stopped.ids[-1] in stops) != (stopped.finish == "stop"):
            raise InputError(
                f"{self.server} does not stop at a stop token: {stop} in {stopped.ids}, which it says ended by "
                f"{stopped.finish!r}; see that nothing between here and there changes requests"
            )

    def _check_digests(self, folder: Path, step: int, tensors: dict[str, int]) -> None:
        digests, before, known = self.server.digests(), self.tensors, self.digests
        self.tensors, self.digests = tensors, digests
        if digests is None and self.pushes == 0:
            tell(
                f"{self.server} tells no digests of its weights: what it did not read shows in log-probabilities alone"
            )
        if before is None:
            return

        # What left the folder, the server still has from before; what changed there must have changed here.
        gone = sorted(before.keys() - tensors.keys())
        if gone:
            raise InputError(
                f"{folder} lacks {len(gone)} tensors that were pushed before ({gone[0]}, …): {self.server} keeps its "
                "old ones"
            )
        changed = {name for name in tensors if tensors[name] != before.get(name)}
        kept = [] if digests is None or known is None else kept_though_changed(known, digests, changed)
        if kept:
            raise InputError(
                f"{self.server} did not read all weights of step {step}: {len(kept)} of its {len(digests)} tensors "
                f"({kept[0]}, …) are what they were before, though they changed in {folder}; see that it reads that "
                "folder, and the architecture of --model, unquantised"
            )


def _of_the_head(flag: str) -> str:
    return f"a difference of this size around 0 is of logits in 16 bits; start it with {flag}, and --head_dtype float32"


def scored(probes: list[Probe], score: Score) -> tuple[list[list[float]], list[list[float]]]:
    """The policy's log-probabilities of the probes' tokens, as they were drawn; and without kept sets at temperature 1.

    All ranks call it together, with the same probes.
    """
    prompts, responses = [p.asked.prompt for p in probes], [p.response.ids for p in probes]
    plain = score(prompts, responses, 1.0, None)
    own = list(plain)
    kinds = [(probe.temperature, probe.asked.sampling.truncates) for probe in probes]
    for temperature, truncates in sorted({*kinds} - {(1.0, False)}):
        rows = [i for i, kind in enumerate(kinds) if kind == (temperature, truncates)]
        support = TokenSupport.cat([probes[i].response.support for i in rows]) if truncates else None
        found = score([prompts[i] for i in rows], [responses[i] for i in rows], temperature, support)
        for i, values in zip(rows, found, strict=True):
            own[i] = values
    return own, plain
