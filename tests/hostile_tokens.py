"""Hostile (B, T) log-probabilities, and every public function on them beside its definition, as tests/hostile.py does.

A function joins by one row of `FUNCTIONS`: what it is called with, ours and its definition in fp64.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

import fused_rl
from fused_rl import reference
from fused_rl.objectives.estimators import KL_ESTIMATORS
from fused_rl.objectives.presets import resolve_options
from fused_rl.objectives.surrogates import RATIO_LEVELS
from tests import papers
from tests.drawn import st

MASKS = {
    "half": lambda n, generator: torch.rand(n, generator=generator) < 0.5,
    "all": lambda n, generator: torch.ones(n, dtype=torch.bool),
    "none": lambda n, generator: torch.zeros(n, dtype=torch.bool),
    "one": lambda n, generator: torch.arange(n[0] * n[1]).view(n) == n[1] // 2,
    "one each": lambda n, generator: (torch.arange(n[1]) == n[1] - 1).expand(n),
}


class Case(NamedTuple):
    gap: float  # nats, of the policy to the others; a token in three is this far, either way
    shape: tuple[int, int]
    mask: str
    dtype: torch.dtype
    seed: int


def cases():
    choice = st.sampled_from
    return st.builds(
        Case,
        gap=choice([1.0, 0.0, 1e-6, 1e-3, 10.0, 19.0, 25.0, 40.0, 60.0]),
        shape=choice([(2, 4), (1, 1), (4, 7), (2, 1), (0, 3), (6, 2)]),
        mask=choice([*MASKS]),
        dtype=choice([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        seed=st.integers(0, 10**6),
    )


class Batch(NamedTuple):
    """(B, T) each, NaN where the mask is False."""

    logprobs: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor  # (B,)


def build(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(case.seed)
    mask = MASKS[case.mask](case.shape, generator)

    def noise():
        return torch.randn(case.shape, generator=generator, dtype=torch.float64)

    logprobs = -3 * noise().abs() - 60
    far = torch.where(noise() > 0.4, case.gap * noise().sign(), 1e-3 * noise())
    old = logprobs + far
    ref = logprobs + torch.where(noise() > 0.4, case.gap * noise().sign(), 1e-3 * noise())
    tokens = [
        x.to(case.dtype).masked_fill(~mask, torch.nan)
        for x in (logprobs, old, ref, 10**case.gap**0.3 * noise())
    ]
    return Batch(
        *tokens,
        mask,
        torch.randn(case.shape[0], generator=generator, dtype=torch.float64).to(case.dtype),
    )


def numbers(batch):
    """What the definitions get: numbers everywhere."""
    return batch._replace(**{name: getattr(batch, name).nan_to_num() for name in Batch._fields[:4]})


class Function(NamedTuple):
    """(x, batch) -> a tensor or several, x the leaf, in the dtype of the batch."""

    ours: Callable
    definition: Callable
    leaf: str = "logprobs"
    single: bool = False  # works in fp32 alone


def _estimate(op, name):
    def call(x, b):
        # It takes no mask.
        kl = op(x.nan_to_num(), b.ref.nan_to_num(), name, old_logprobs=b.old.nan_to_num())
        return torch.where(b.mask, kl, 0)

    return call


def _ratio(level):
    def ours(x, b):
        return torch.where(
            b.mask, fused_rl.importance_ratio(x, b.old, b.mask, ratio_level=level), 0
        )

    def definition(x, b):
        log_ratio = torch.where(b.mask, x - b.old, 0)
        if level != "token":
            log_ratio = log_ratio.sum(1, keepdim=True).expand(x.shape)
        if level == "sequence":
            log_ratio = log_ratio / b.mask.sum(1, keepdim=True).clamp(min=1)
        exp = log_ratio.clamp(max=20).exp()
        tangent = math.exp(20) * (log_ratio - 19)
        return torch.where(b.mask, torch.where(log_ratio > 20, tangent, exp), 0)

    return Function(ours, definition)


_TOKENS = {"num_tokens": 11, "num_sequences": 5, "max_length": 9}


def _options(preset, b):
    lengths = b.mask.new_full((len(b.mask),), 2.0, dtype=torch.float32)
    given = {"ref_logprobs": b.ref, "kl_coef": 0.1, "group_lengths": lengths, **_TOKENS}
    return given, resolve_options(preset, {})


def _policy(preset):
    def ours(x, b):
        return fused_rl.policy_loss(
            x, b.old, b.advantages, b.mask, preset=preset, **_options(preset, b)[0]
        )[0]

    return Function(ours, functools.partial(_of_papers, preset=preset))


def _of_papers(x, b, preset):
    given, chosen = _options(preset, b)
    names = ("ratio_level", "surrogate", "loss_agg", "clip_low", "clip_high", "delta")
    ids = torch.arange(len(x))[:, None].expand(x.shape)
    options = given | {name: getattr(chosen, name) for name in names} | {"sequence_ids": ids}
    return papers.policy_loss(x, b.old, b.advantages[:, None].expand(x.shape), b.mask, **options)


def _by_token(preset):
    def ours(x, b):
        loss, per_token = fused_rl.policy_token_loss(
            b.old, b.advantages, b.mask, preset=preset, **_options(preset, b)[0]
        )
        wide = x.to(torch.promote_types(x.dtype, torch.float32))[b.mask]
        return loss(wide, torch.zeros_like(wide), *(p[b.mask] for p in per_token)).sum()

    return Function(ours, functools.partial(_of_papers, preset=preset), single=True)


def _value(x, b):
    near = x.clamp(b.old - 0.2, b.old + 0.2)
    losses = torch.maximum((x - b.ref) ** 2, (near - b.ref) ** 2) / 2
    return torch.where(b.mask, losses, 0).sum() / 11


def _preferred(x, b):
    x = torch.where(b.mask, x, x.detach())
    return -torch.nn.functional.logsigmoid(x[:, 0] - b.old[:, 0]).sum() / 5


def _log_ratios(x, b):
    wide = torch.promote_types(x.dtype, torch.float32)
    x = torch.where(b.mask, x, x.detach())
    return (x.to(wide) - b.old.to(wide)).nan_to_num()[:, 0]


def _unpaired(op):
    options = {"desirable_weight": 1.5, "undesirable_weight": 0.5, "num_sequences": 5}

    def call(x, b):
        scores = _log_ratios(x, b)
        found = op(scores, b.advantages > 0, baseline=scores.detach().abs().sum() / 5, **options)
        return found[0] if isinstance(found, tuple) else found

    return call


def _mean(x, b):
    return (torch.where(b.mask, x, 0)).sum() / b.mask.sum().clamp(min=1)


def _var(x, b):
    return torch.where(b.mask, x - _mean(x, b), 0).square().sum() / (b.mask.sum() - 1).clamp(min=1)


def _whitened(x, b, shift_mean=True):
    mean, var = _mean(x, b).detach(), _var(x, b).detach()
    shift = 0 if shift_mean else mean
    return torch.where(b.mask, (x - mean) / (var + 1e-8).sqrt() + shift, 0)


def _group(x, b):
    groups = x.view(-1, 2)
    centred = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return torch.where(groups[:, :1] == groups[:, 1:], 0, centred).flatten()


def _rewards(x):
    """(2 n,) of values that are numbers."""
    flat = x.detach().flatten().nan_to_num()
    return flat[: len(flat) // 2 * 2]


FUNCTIONS = {
    **{
        f"kl_estimate, {k}": Function(*(_estimate(m.kl_estimate, k) for m in (fused_rl, reference)))
        for k in KL_ESTIMATORS
    },
    **{f"importance_ratio, {level}": _ratio(level) for level in RATIO_LEVELS},
    **{f"policy_loss, {preset}": _policy(preset) for preset in fused_rl.PRESETS},
    **{
        f"policy_token_loss, {preset}": _by_token(preset)
        for preset in ("ppo", "dapo", "cispo", "sapo", "rloo")
    },
    "value_loss": Function(
        lambda x, b: fused_rl.value_loss(x, b.old, b.ref, b.mask, num_tokens=11)[0],
        _value,
        "values",
    ),
    "entropy_bonus": Function(
        lambda x, b: fused_rl.entropy_bonus(x, b.mask, 0.3)[0],
        lambda x, b: -0.3 * _mean(x, b),
        "values",
    ),
    "preference_loss": Function(
        lambda x, b: fused_rl.preference_loss(
            x.nan_to_num()[:, 0], b.old.nan_to_num()[:, 0], num_sequences=5
        )[0],
        _preferred,
    ),
    "unpaired_preference_loss": Function(
        _unpaired(fused_rl.unpaired_preference_loss),
        _unpaired(papers.unpaired_preference_loss),
    ),
    "kl_baseline": Function(
        lambda x, b: fused_rl.kl_baseline(_log_ratios(x, b)),
        lambda x, b: papers.kl_baseline(_log_ratios(x, b)),
    ),
    "masked_sum": Function(
        lambda x, b: fused_rl.masked_sum(x, b.mask),
        lambda x, b: torch.where(b.mask, x, 0).sum(),
        "values",
    ),
    "masked_mean": Function(lambda x, b: fused_rl.masked_mean(x, b.mask), _mean, "values"),
    "masked_var": Function(lambda x, b: fused_rl.masked_var(x, b.mask), _var, "values"),
    "whiten": Function(lambda x, b: fused_rl.whiten(x, b.mask), _whitened, "values"),
    "whiten, the mean stays": Function(
        lambda x, b: fused_rl.whiten(x, b.mask, shift_mean=False),
        functools.partial(_whitened, shift_mean=False),
        "values",
    ),
    "gae": Function(
        lambda x, b: fused_rl.gae(b.ref, x, b.mask, gamma=0.9, gae_lambda=0.8),
        lambda x, b: reference.gae(
            b.ref.to(x.dtype), x.detach(), b.mask, gamma=0.9, gae_lambda=0.8
        ),
        "values",
    ),
    "group_advantages": Function(
        lambda x, b: fused_rl.group_advantages(_rewards(x), 2),
        lambda x, b: _group(_rewards(x), b),
        "values",
    ),
    "response_advantages": Function(
        lambda x, b: fused_rl.response_advantages(_rewards(x), "group-mean", group_size=2),
        lambda x, b: (
            _rewards(x).view(-1, 2) - _rewards(x).view(-1, 2).mean(1, keepdim=True)
        ).flatten(),
        "values",
    ),
}
