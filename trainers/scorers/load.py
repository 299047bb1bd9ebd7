"""The scorers that `--verifiers` names: the dictionary of names, and how they are parsed and loaded."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fused_rl.trainers.base.screen import print_rank0
from fused_rl.trainers.base.text import InputError, load_function, name_of
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.rollouts.options import ROLLOUT_BATCH_SIZE
from fused_rl.trainers.rollouts.roll_out import prompts_of, roll_out
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import (
    OUTSIDE_OF_A_RUN,
    Progress,
    Prompt,
    Response,
    Sampler,
    Scorer,
)
from fused_rl.trainers.scorers import builtin
from fused_rl.trainers.scorers.functions import FunctionScorer
from fused_rl.trainers.scorers.options import REWARD_MODEL, ScorerConfig


def _math(**common: Any) -> Scorer:
    """Return the scorer that compares answers by math-verify, which brings a pool of processes."""
    from fused_rl.trainers.scorers.math import MathVerifier

    return MathVerifier(**common)


def _reward_model(*of_folder: Any, **common: Any) -> Scorer:
    """Return a reward model as a scorer."""
    from fused_rl.trainers.scorers.reward_model import load_reward_model

    return load_reward_model(*of_folder, **common)


# How a scorer is spelled -> what makes it, called with the text in place of <...> and the common arguments by name.
SCORERS: dict[str, Callable[..., Scorer]] = {
    "math": _math,
    "exact_match": builtin.ExactMatch,
    "exact_match:ignore_case": functools.partial(builtin.ExactMatch, ignore_case=True),
    "regex:<pattern>": builtin.Pattern,
    "format": builtin.Format,
    "length:<tokens>": builtin.Length,
    f"{REWARD_MODEL}:<folder>": _reward_model,
}
# Names that no function can have, so that a misspelt detail is not taken for one.
KINDS = {spelling.partition(":")[0] for spelling in SCORERS}
FUNCTION = "function"
EXPECTED = f"{', '.join(SCORERS)} or module:function"
# Rows whose responses a dry run makes up, and the response to one without an answer.
TRIED = 4
SHORT = "1"


class ScorerSpec(NamedTuple):
    """One scorer as the options spell it, not yet loaded."""

    text: str
    kind: str
    """The name before the colon, one of `KINDS`; or `FUNCTION`."""
    make: Callable[..., Scorer]
    """Called with the common arguments, and for a reward model with what it reads."""
    name: str
    """In metrics: its kind, or the whole text where two are of one kind."""
    weight: float
    solved_at: float | None

    def load(self, answer_column: str | None, **reading) -> Scorer:
        """Return the scorer itself."""
        common = {"name": self.name, "weight": self.weight, "solved_at": self.solved_at}
        return self.make(**common, answer_column=answer_column, **reading)


def parse_scorers(options: ScorerConfig) -> list[ScorerSpec]:
    """Return the scorers that the options name; refuse what they cannot mean, and one that is named twice."""
    given = options.verifiers
    if given is None:
        raise InputError(f"verifiers is missing; give one of {EXPECTED}")
    if not given:
        raise InputError("verifiers=[] is empty; name at least one scorer")
    for option, numbers in (
        ("verifier_weights", options.verifier_weights),
        ("solved_at", options.solved_at),
    ):
        if numbers is not None and len(numbers) != len(given):
            what = f"has {len(numbers)} numbers for {len(given)} verifiers"
            raise InputError(f"{option}={numbers} {what}; give one for each")

    # The three lists stand side by side, so that each verifier has its weight and its threshold.
    parsed = [_parse_scorer(one) for one in given]
    kinds = [kind for kind, _, _ in parsed]
    weights = options.verifier_weights or [1.0] * len(given)
    thresholds = options.solved_at or [None] * len(given)
    specs: dict[str, ScorerSpec] = {}
    rows = zip(given, parsed, weights, thresholds, strict=True)
    for one, (kind, text, make), weight, solved_at in rows:
        # Two patterns are told apart in metrics by all of their text, a single one is called by its kind.
        name = kind if kind != FUNCTION and kinds.count(kind) == 1 else text
        if given.count(one) > 1 or (name in specs and not callable(one)):
            raise InputError(f"verifiers names {text!r} twice; for a weight: verifier_weights")
        # Two functions of one name, such as lambdas, get a number.
        while name in specs:
            name = f"{text}_{len(specs) + 1}"
        specs[name] = ScorerSpec(text, kind, make, name, weight, solved_at)
    return list(specs.values())


def _parse_scorer(one: str | Callable) -> tuple[str, str, Callable[..., Scorer]]:
    """Return the kind of one verifier, its text, and what makes it."""
    if callable(one):
        return FUNCTION, name_of(one), functools.partial(FunctionScorer, function=one)
    # Whatever follows the first colon belongs to the scorer, as a pattern may have colons of its own.
    kind, _, detail = one.partition(":")
    if kind == "reasoning_gym":
        raise InputError(f"verifier {one!r} is now a function: give fused_rl.recipes.gym:score")
    for spelling, make in SCORERS.items():
        name, _, after = spelling.partition(":")
        if spelling == one:
            return kind, one, make
        if name == kind and after.startswith("<") and detail:
            return kind, one, functools.partial(make, detail)

    # A function by its module, with a colon or a dot before its name.
    function = re.fullmatch(r"([\w.]+)[:.](\w+)", one)
    if kind in KINDS or function is None:
        raise InputError(f"verifier {one!r}: expected {EXPECTED}")
    where = f"{function[1]}:{function[2]}"
    return FUNCTION, where, functools.partial(_load_function, where)


def _load_function(where: str, **common) -> FunctionScorer:
    return FunctionScorer(function=load_function("verifier", where), **common)


def check_scorers(options: ScorerConfig) -> str:
    """Return the reward in a line; refuse scorers that cannot be loaded, without loading models."""
    specs = parse_scorers(options)
    for spec in specs:
        # Not these two: the one starts a pool of processes, and the other loads a model.
        if spec.kind not in ("math", REWARD_MODEL):
            spec.load(None)
    return " + ".join(f"{spec.weight:g}*{spec.name}" for spec in specs)


def load_scorers(options: ScorerConfig, **reading) -> list[Scorer]:
    """Return the scorers that the options name; all ranks call it together. `reading` is what reward models take.

    Scorers that compare with an answer say which samples are solved; if there are none, functions and patterns do, from
    a score of 1 on.
    """
    models, verifiers = [], []
    for spec in parse_scorers(options):
        if spec.kind == REWARD_MODEL:
            models.append(spec.load(options.answer_column, **reading))
        else:
            verifiers.append(spec.load(options.answer_column))

    # A length or a reward model's score has no value that means "solved".
    if all(scorer.solved_at is None for scorer in verifiers):
        for scorer in verifiers:
            if not isinstance(scorer, builtin.Length):
                scorer.solved_at = 1.0
    return models + verifiers


def checked_scorers(config: ScorerConfig) -> list[Scorer]:
    """Return the scorers with which a dry run checks rows: all but the models that score."""
    specs = parse_scorers(config) if config.verifiers else []
    return [spec.load(config.answer_column) for spec in specs if spec.kind != REWARD_MODEL]


def check_reward_models(config: Any, tokenizer) -> None:
    """Refuse reward models that score and have another tokenizer than the policy; they are not loaded."""
    for folder in config.reward_models().values():
        from fused_rl.trainers.models.reward_model import check_reads_policy

        check_reads_policy("reward model", folder, tokenizer, config.model)


class _MadeUp(Sampler):
    """Returns responses that nobody sampled."""

    is_checked = False

    def __init__(self, responses: list[Response]):
        super().__init__()
        self.responses = responses

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        return self.responses


def try_scorers(
    scorers: Sequence[Scorer],
    tokenizer,
    prompts: Sequence[Prompt],
    progress: Progress = OUTSIDE_OF_A_RUN,
) -> None:
    """Refuse functions of the user's own whose scores would be refused, by responses that are made up: the answers of
    the first rows, and empty ones.
    """
    functions = [scorer for scorer in scorers if isinstance(scorer, FunctionScorer)]
    if not functions:
        return
    tried = list(prompts[:TRIED])
    responses = []
    for prompt in tried:
        for text in (functions[0].answer(prompt.row) or SHORT, ""):
            ids = tokenizer.encode(text, add_special_tokens=False)
            responses.append(Response(ids, "stop"))
    print_rank0(
        f"scoring {len(responses)} made-up responses to the first rows: answers, and empty ones"
    )
    rollout = roll_out(
        _MadeUp(responses),
        functions,
        tried,
        Sampling(0.0, max_new_tokens=1, stop_ids=()),
        tokenizer,
        torch.device("cpu"),
        copies=2,
        progress=progress,
    )
    for name, scores in rollout.scores.items():
        if scores.isnan().all():
            print_rank0(f"{name} returned None for all of them (is a `return` missing?)")


def check_scores_of_run(config: Any, tokenizer, prompts: Sequence[Prompt], held_out: Rows) -> None:
    """Try, for a dry run, the scorers, unless what they score is what a sampler of the user's own returns."""
    # Bad rows are refused before any response is scored, and all rows of a run are collected in one list.
    refuses_rows = bool(held_out.bad) and config.bad_rows == "refuse"
    if prompts and not refuses_rows and getattr(config, "sampler", None) is None:
        # As in the evaluation before training.
        progress = Progress(0, config.steps or 1)
        try_scorers(checked_scorers(config), tokenizer, prompts, progress)


def checked_prompts(config: Any, rows: Rows, encoder: Encoder) -> list[Prompt]:
    """Return the prompts of rows as a dry run reads them: with all that checks rows, but no model that scores."""
    scorers = checked_scorers(config)
    return prompts_of(
        rows,
        encoder,
        scorers,
        column=config.prompt_column,
        max_length=config.max_prompt_length,
        completion_column=config.trained_column,
        check=config.check_row,
    )


def load_for_policy(config: Any, tokenizer, device) -> list[Scorer]:
    """Return the scorers of a policy that is trained with this `RunConfig`, which is a `ScorerConfig` too."""
    size = config.rollout_batch_size or ROLLOUT_BATCH_SIZE
    reading = {"tokenizer": tokenizer, "device": device, "batch_size": size}
    return load_scorers(config, policy=config, held=config, **reading)
