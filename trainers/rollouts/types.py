"""The seams of a rollout: prompts, responses of one turn or of several, samplers and scorers."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from fused_rl import TokenSupport

from ..data.batch import Batch
from .sampling import SEED_LIMIT, Sampling, joined

# The seeds of two turns of a response lie this far apart: with one seed each turn would repeat the first one's draws.
TURN_SEED_STRIDE = 1_000_003
Value = TypeVar("Value")


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt and the dataset row that it came from."""

    ids: list[int]
    row: dict
    where: str = "a row"
    """The file and line, or the like, that the row came from."""
    prompt: str | list[dict] | None = None
    """The prompt as the row has it, text or messages by their usual names."""
    completion: list[int] | None = None
    """Token ids of the row's own completion, where that is trained."""


@dataclass
class Response:
    """A sampler's response to one prompt."""

    ids: list[int]
    """Token ids alone, the stop token included, at most `max_new_tokens`; may be empty."""
    finish: Literal["stop", "length"]
    """Ended by a stop token, or cut at `max_new_tokens`."""
    logprobs: list[float | None] | None = None
    """Log-probability of each id, in nats, under the distribution that it was sampled from; None if not reported."""
    support: TokenSupport | list[list[int]] | None = None
    """The ids that each token was sampled from, including the token itself. An empty set means the whole vocabulary,
    and None means that for all tokens. Lists are accepted too, but are slow for thousands of long responses."""
    trained: list[bool] | None = None
    """True for each id that the policy sampled; None means all of them. Other ids, such as an environment's turn or a
    tool's answer, are context: they get no gradient and do not count in any mean. They have entries in logprobs and
    kept sets, which are not read. A stop token of the policy ends its turn; `finish` says how the last turn ended."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What scorers of TRL's kind may take as arguments, by name, such as the turns as `completions`. `prompt_ids` are
    those that were sampled from, if not the row's, and `logged` lists names and values of metrics."""

    def sampled(self, items: Sequence[Value]) -> list[Value]:
        """Return the values of the ids that the policy sampled, of values of all ids."""
        return list(items) if self.trained is None else list(compress(items, self.trained))


@dataclass
class Sample:
    """One response to one prompt, as a scorer sees it."""

    row: dict
    prompt_ids: list[int]
    response: Response
    text: str
    """The response without its stop token."""
    where: str = "a row"
    """Where its prompt comes from."""
    prompt: str | list[dict] | None = None
    """Its prompt as the row has it, text or messages by their usual names; None in a sample that is made by hand."""
    logged: dict[str, object] = field(default_factory=dict)
    """What scorers say of it beside their scores, by the name of the column."""


class Sampler:
    """Samples responses; every rank calls it with its own prompts. A sampler of your own is a subclass.

    Args:
        built: the sampler that the options describe, to sample from; this one declares what that one does.
        tokenizer: the policy's.
    """

    reports_logprobs: bool = False
    """Every response has the log-probabilities of its ids; False where they are the policy's own."""
    records_support: bool = False
    """Every response has its kept sets, where the sampling truncates."""
    is_checked: bool = True
    """Every response is compared with what `Response` promises; the policy's own need no check."""

    built: Any = None

    def __init__(self, built: "Sampler | type[Sampler] | None" = None, tokenizer: Any = None):
        self.built = built
        self.tokenizer = tokenizer
        if built is not None:
            self.reports_logprobs = built.reports_logprobs
            self.records_support = built.records_support

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Return one response per prompt (token ids), in their order."""
        raise NotImplementedError

    def rest(self) -> None:
        """The policy is about to be trained: no response is sampled until the next `publish`. All ranks call it, except
        under `lag`, where responses are sampled meanwhile.
        """
        if self.built is not None:
            self.built.rest()

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Take the policy's new weights: after an update, when a run begins, and after a resume.

        `save(folder)` writes them in the Hub format, gathered and with adapters merged, complete or not at all; all
        ranks call it together, or none.
        """
        self.built.publish(step, save)


class Progress(NamedTuple):
    """How far a run is, for scorers that change with it."""

    step: int = 0
    """Steps that have been taken."""
    steps: int = 0
    """Steps of the whole run; 0 outside of a run."""
    steps_per_epoch: float = 1.0


NO_PROGRESS = Progress()


class Scorer(Protocol):
    """Scores samples, and knows what its own scores mean.

    One that works under limits lists in `broken` (list[str]) each sample that broke one, and how; a rollout empties it.
    Processes that hold parts of the same sequences call it on the first of them, unless it has `shares_work`, and then
    scores what `ranks.my_items` says and gathers the rest itself.
    One that reports metrics lists their names and values in `logged`; a rollout empties it. One that may know a row's
    answer returns it, or None, with `answer(row)`.
    """

    name: str
    weight: float
    """Weight of its score in the reward."""
    solved_at: float | None
    """A sample counts as solved from this score on; None: this scorer does not tell right from wrong."""
    progress: Progress
    """A rollout sets it."""
    longest: str
    """The longest answer of the rows that were checked, "" where it compares with none."""

    @property
    def columns(self) -> Collection[str] | None:
        """The columns of a row that the scorer may read; None is any."""
        ...

    def read_ahead(self, rows: Iterable[dict]) -> None:
        """Read all rows of a dataset before `check` is called on each, if that is quicker."""

    def check(self, row: dict) -> None:
        """Raise InputError where a dataset row lacks what the scorer reads; called on every row before the run."""

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return one score per sample; None where the scorer does not apply to it."""
        ...


@dataclass
class Rollout:
    """This rank's samples, those of one prompt adjacent, as a batch and with their scores."""

    samples: list[Sample]
    batch: Batch
    scores: dict[str, torch.Tensor]
    """(B,) fp32 of each scorer, NaN where it does not apply."""
    rewards: torch.Tensor
    """(B,) fp32: the weighted sum of the scores that apply."""
    solved: torch.Tensor
    """(B,) bool: every scorer that tells right from wrong, and applies, says right."""
    seconds: dict[str, float]
    incidents: dict[str, float] = field(default_factory=dict)
    """`verifier/<name>/timeouts` of the scorers that work under limits, over all ranks."""
    logged: list[tuple[str, float]] = field(default_factory=list)
    """The names and values of the metrics that scorers logged, over all ranks."""

    @property
    def stopped(self) -> torch.Tensor:
        """(B,) bool: ended by a stop token."""
        return torch.tensor([sample.response.finish == "stop" for sample in self.samples])

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int64: tokens of each response that the policy sampled."""
        responses = [sample.response for sample in self.samples]
        return torch.tensor([len(response.sampled(response.ids)) for response in responses])

    @property
    def rollout_logprobs(self) -> torch.Tensor | None:
        """(B, T - 1) fp32: the sampler's own log-probabilities, 0 where masked; None if it does not report them."""
        if any(sample.response.logprobs is None for sample in self.samples):
            return None
        # The mask is True for the ids that the policy sampled, in the order of samples and ids, and nothing else.
        reported = []
        for sample in self.samples:
            reported.append(sample.response.sampled(sample.response.logprobs or []))
        mask = self.batch.response_mask
        logprobs = torch.zeros(mask.shape, device=mask.device)
        values = torch.tensor(list(chain.from_iterable(reported)), dtype=torch.float32)
        logprobs[mask] = values.to(mask.device)
        return logprobs


def support_of(responses: Sequence[Response]) -> TokenSupport | None:
    """Return the sets of all ids that the policy sampled, response by response; None where there are none."""
    # Of all ids first; those that an environment said are then left out, with their sets.
    support = joined(
        [response.support for response in responses], [len(response.ids) for response in responses]
    )
    if support is None or all(response.trained is None for response in responses):
        return support
    trained = [response.trained or [True] * len(response.ids) for response in responses]
    is_trained = list(chain.from_iterable(trained))
    return support.select(torch.tensor(is_trained, dtype=torch.bool))


def of_turn(
    sampling: Sampling, turn: int, responses: Sequence[int], max_new_tokens: int
) -> Sampling:
    """Return how the policy samples its `turn`, from 0, in the responses of these numbers, with so many tokens."""
    seeds = sampling.seeds
    if seeds is not None:
        seeds = tuple(
            (seeds[number] + turn * TURN_SEED_STRIDE) % SEED_LIMIT for number in responses
        )
    return replace(sampling, max_new_tokens=max_new_tokens, seeds=seeds)


def after_turn(before: Response | None, turn: Response, said: Sequence[int] = ()) -> Response:
    """Return a response with one more turn of the policy, and with what somebody else then said to it.

    Args:
        before: the turns until then; None if this is the first.
        turn: the policy's turn, as `Sampler.built` returns it.
        said: token ids that the policy did not sample.
    """
    # The turns so far, none at first; `finish` is that of the last turn.
    before = before or Response([], "length", logprobs=[], trained=[])
    lengths = [len(before.ids), len(turn.ids), len(said)]
    # What somebody else said has log-probabilities and kept sets too, for one value per id; nothing reads them.
    logprobs = None
    if turn.logprobs is not None:
        logprobs = [*(before.logprobs or []), *turn.logprobs]
        logprobs += [0.0] * len(said)
    trained = [*(before.trained or [])]
    trained += [True] * len(turn.ids) + [False] * len(said)
    return Response(
        before.ids + turn.ids + list(said),
        turn.finish,
        logprobs=logprobs,
        support=joined([before.support, turn.support, None], lengths),
        trained=trained,
        extra=before.extra,
    )


def one_line(value) -> str:
    """A value of somebody else's in a line of 80 characters."""
    # repr() escapes what could steer a terminal.
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}…"
