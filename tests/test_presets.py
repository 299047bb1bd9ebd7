"""The table of known algorithms: equal to the documentation's, row by row, and no row twice."""

import inspect
import itertools
import typing

import pytest
import torch

import fused_rl
from fused_rl import PRESETS, PolicyLossOptions
from fused_rl.objectives import advantages, losses
from fused_rl.objectives.advantages import ADVANTAGES, Advantage, AdvantageOptions
from fused_rl.objectives.aggregation import LOSS_AGGS, LossAgg
from fused_rl.objectives.presets import PresetName
from fused_rl.objectives.surrogates import RATIO_LEVELS, SURROGATES, RatioLevel
from tests.papers import documented


def chosen(name):
    preset = PRESETS[name]
    o = PolicyLossOptions(**preset.options)
    # a surrogate without a bound: the table has a dash
    clips = (o.clip_low, o.clip_high) if "clip_low" in SURROGATES[o.surrogate].reads else None
    return o.surrogate, o.ratio_level, o.loss_agg, clips, preset.advantage, preset.paper


def test_the_documentation_has_the_table():
    assert documented() == {name: chosen(name) for name in PRESETS}


ROWS, MASK = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]]), torch.ones(2, 2, dtype=torch.bool)
GIVEN = {"old_logprobs": ROWS - 0.3, "advantages": torch.tensor([1.0, -2.0]), "mask": MASK}


def test_a_preset_by_name_as_a_row_and_as_options_is_one_loss():
    """Of both functions, and with a change on top."""
    options = PolicyLossOptions(**PRESETS["dapo"].options)
    for changes in ({}, {"clip_high": 0.01}):
        named, *others = (
            fused_rl.policy_loss(ROWS, **GIVEN, **chosen, **changes)[0]
            for chosen in (
                {"preset": "dapo"},
                {"preset": PRESETS["dapo"]},
                {"options": options},
                PRESETS["dapo"].options | {"clip_high": 0.28},
            )
            if not (changes and "clip_high" in chosen)
        )
        assert others and all(torch.equal(named, other) for other in others)
        loss, per_token = fused_rl.policy_token_loss(**GIVEN, options=options, **changes)
        of_tokens = loss(ROWS.flatten(), ROWS.flatten(), *(x.flatten() for x in per_token)).sum()
        torch.testing.assert_close(of_tokens, named)


OTHERS = {  # of each option of surrogates a value that is not its default
    **{"ratio_level": "sequence", "clip_low": 0.1, "clip_high": 0.3, "delta": 3.0},
    **{f"sapo_temperature_{sign}": 2.0 for sign in ("pos", "neg")},
    **{f"vespo_{what}_{sign}": 1.0 for what in ("k", "lambda") for sign in ("pos", "neg")},
    **{"dppo_cap": 2.0, "ipo_threshold": 0.01, "ipo_tau": 0.2, "dro_beta": 1.0, "aspo_cap": 1.5},
    **{"cov_fraction": 0.5, "kl_cov_coef": 0.5, "clip_cov_low": -9.0, "clip_cov_high": 0.5},
}


def test_each_of_them_has_another_value():
    assert {*OTHERS} == {name for surrogate in SURROGATES.values() for name in surrogate.reads}


@pytest.mark.parametrize(("surrogate", "name"), itertools.product(SURROGATES, OTHERS))
def test_an_option_that_the_surrogate_does_not_read_is_refused(surrogate, name):
    """However it is given; what is the default asks for nothing, and what a surrogate reads changes its loss."""
    usual, other = ({name: value} for value in (getattr(PolicyLossOptions, name), OTHERS[name]))
    generator = torch.Generator().manual_seed(0)
    rows = -3 * torch.rand(2, 40, generator=generator) - 1e-3
    # Within every bound, and beyond.
    old = (rows + 0.8 * torch.randn(2, 40, generator=generator)).clamp(max=-1e-3)
    far = {"old_logprobs": old, "mask": rows < 0, "surrogate": surrogate}

    def loss_of(option):
        given = [{"advantages": sign * GIVEN["advantages"], **option} for sign in (1, -1)]
        return torch.stack([fused_rl.policy_loss(rows, **far, **each)[0] for each in given])

    default = loss_of(usual)
    if name in SURROGATES[surrogate].reads:
        assert not torch.equal(loss_of(other), default)
        return
    said = rf"^{name}={OTHERS[name]} has no meaning with surrogate={surrogate}, [^\n]*; leave it out, or choose "
    options = PolicyLossOptions(surrogate=surrogate)
    for call in (
        lambda: fused_rl.policy_token_loss(**GIVEN, surrogate=surrogate, **other),
        lambda: fused_rl.policy_loss(ROWS, **GIVEN, options=options, **other),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_of_a_preset_with_another_surrogate_only_what_is_given_must_be_read():
    """gspo's ratio and bounds were asked for by nobody; options of one's own were."""
    exchanged, plain = (
        fused_rl.policy_loss(
            ROWS, **GIVEN, preset=preset, surrogate="policy-gradient", loss_agg="token-mean"
        )[0]
        for preset in ("gspo", None)
    )
    assert torch.equal(exchanged, plain)
    options = PolicyLossOptions(**PRESETS["gspo"].options)
    with pytest.raises(
        ValueError, match="ratio_level=sequence has no meaning with surrogate=policy-gradient"
    ):
        fused_rl.policy_loss(ROWS, **GIVEN, options=options, surrogate="policy-gradient")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kl_estimator": "k3"}, "kl_estimator=k3 has no meaning without ref_logprobs"),
        ({"rollout_high": 3.0}, "rollout_high=3.0 has no meaning without rollout_logprobs"),
        (
            {"rollout_correction": "token-mask"},
            "rollout_correction=token-mask has no meaning without rollout_logprobs",
        ),
        (
            {"rollout_correction": None, "rollout_low": 0.5},
            "rollout_low=0.5 has no meaning with rollout_correction=None",
        ),
    ],
)
def test_an_option_without_what_it_is_about_is_refused(given, said):
    for call in (
        lambda: fused_rl.policy_loss(ROWS, **GIVEN, **given),
        lambda: fused_rl.policy_token_loss(**GIVEN, **given),
    ):
        with pytest.raises(ValueError, match=rf"^{said}[^\n]*leave it out[^\n]*$"):
            call()


def test_closed_sets_are_literals():
    for alias, table in (
        (PresetName, PRESETS),
        (RatioLevel, RATIO_LEVELS),
        (LossAgg, LOSS_AGGS),
    ):
        assert typing.get_args(alias) == tuple(table)
    names = [
        name for part in typing.get_args(Advantage) for name in typing.get_args(part) or [part]
    ]
    assert names == [*ADVANTAGES]


ARGUMENTS = {
    fused_rl.policy_loss: (losses.PolicyLossArguments, fused_rl.PolicyLossOptions),
    fused_rl.policy_token_loss: (losses.PolicyTokenLossArguments, fused_rl.PolicyLossOptions),
    fused_rl.response_advantages: (advantages.ResponseAdvantagesArguments, AdvantageOptions),
}


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda function: function.__name__)
def test_type_checkers_see_what_a_function_takes_and_its_options(function):
    declared, options = ARGUMENTS[function]
    taken = typing.get_type_hints(function)
    *_, by_name = inspect.signature(function).parameters
    del taken["return"], taken[by_name]
    assert typing.get_type_hints(declared) == typing.get_type_hints(options) | taken


def test_one_default_wherever_an_option_has_one():
    """The estimator of a KL in a loss, and the direction of a divergence; in the library and its reference."""
    found = {}
    for module in (fused_rl, fused_rl.reference):
        for function in (
            f for name, f in inspect.getmembers(module, inspect.isfunction) if name[0] != "_"
        ):
            for name in ("kl_estimator", "direction"):
                parameter = inspect.signature(function).parameters.get(name)
                if parameter is not None:
                    found.setdefault(name, set()).add(parameter.default)
    assert found == {"kl_estimator": {"rk3"}, "direction": {"reverse"}}
