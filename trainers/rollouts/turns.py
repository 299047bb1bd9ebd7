"""Responses of several turns, some of them the policy's: for samplers of the user's own (docs/rollouts.md)."""

from collections.abc import Sequence
from dataclasses import replace

from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.sampling import Sampling, joined
from fused_rl.trainers.rollouts.seeds import BELOW
from fused_rl.trainers.rollouts.types import Response

APART = 1_000_003  # seeds of turns: by one seed for all of them each turn would be drawn as the first was


def of_turn(sampling: Sampling, turn: int, responses: Sequence[int], max_new_tokens: int) -> Sampling:
    """How the policy draws its `turn`, from 0, in the responses of these numbers, with so many tokens at most."""
    seeds = sampling.seeds
    if seeds is not None:
        seeds = tuple((seeds[number] + turn * APART) % BELOW for number in responses)
    return replace(sampling, max_new_tokens=max_new_tokens, seeds=seeds)


def after_turn(before: Response | None, drawn: Response, said: Sequence[int] = ()) -> Response:
    """A response that is longer by a turn of the policy's and by what somebody else said to it.

    Args:
        before: the turns until then; None where this is the first.
        drawn: the turn, as the sampler that the options make returns it.
        said: token ids that the policy did not draw.

    Raises:
        InputError: the turns were drawn with different weights.
    """
    before = before or Response([], "length", logprobs=[], weight_version=drawn.weight_version, trained=[])
    if before.weight_version != drawn.weight_version:
        versions = f"{before.weight_version} and {drawn.weight_version}"
        raise InputError(f"turns of one response were drawn with the weights after steps {versions}")
    lengths = [len(before.ids), len(drawn.ids), len(said)]
    told = drawn.logprobs is not None
    return Response(
        before.ids + drawn.ids + list(said),
        drawn.finish,
        logprobs=before.logprobs + drawn.logprobs + [0.0] * len(said) if told else None,
        support=joined([before.support, drawn.support, None], lengths),
        weight_version=drawn.weight_version,
        trained=before.trained + [True] * len(drawn.ids) + [False] * len(said),
    )
