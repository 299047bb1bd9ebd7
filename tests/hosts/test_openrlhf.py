"""OpenRLHF 0.11 patched against unpatched: each replaced function, and the patch itself."""

import functools
import itertools

import openrlhf.trainer.dpo_trainer
import openrlhf.trainer.ppo_utils.experience_maker
import openrlhf.trainer.ray.ppo_actor  # noqa: F401  as above: modules that take functions by name
import pytest
import torch
from openrlhf.models import utils

from fused_rl.integrations import openrlhf as integration
from tests.hosts import cases
from tests.hosts.cases import assert_close, value_and_gradient

FUNCTIONS = ("log_probs_from_logits", "compute_entropy", "compute_approx_kl")
ESTIMATORS = ("k1", "k2", "k3")


@pytest.fixture(autouse=True)
def unpatched_afterwards():
    yield
    integration.unpatch()


both = functools.partial(cases.both, integration)


def assert_both_close(theirs, ours, tolerance=1e-5):
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, tolerance)


# -- the functions


def test_a_temperature_scales_the_logits_in_place():
    def scaled():
        logits, labels = cases.hard_logits("plain", torch.float32)
        utils.log_probs_from_logits(logits, labels, temperature=0.5)
        return logits

    theirs, ours = both(scaled)
    assert torch.equal(ours, theirs)


def test_compiled_entropy():
    with integration.patch():
        compiled = torch.compile(utils.compute_entropy, dynamic=True, fullgraph=True)
        logits, _ = cases.hard_logits("plain", torch.float32)
        assert_both_close(
            value_and_gradient(compiled, logits),
            value_and_gradient(utils.compute_entropy, logits),
            tolerance=0,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", cases.HARD_CASES)
@pytest.mark.parametrize("name", ["log_probs_from_logits", "compute_entropy"])
def test_hard_cases(name, case, dtype):
    logits, labels = cases.hard_logits(case, dtype)
    what, arguments = ("entropy", ()) if name == "compute_entropy" else ("logprobs", (labels,))
    theirs, ours = both(
        lambda: value_and_gradient(lambda x: getattr(utils, name)(x, *arguments), logits)
    )
    cases.assert_no_worse(ours, theirs, cases.truth(what, logits, labels), dtype)
    if what == "entropy":
        assert (ours[0] >= 0).all()


def test_ignored_labels_as_with_flash_attn():
    with integration.patch():
        cases.check_ignored_labels(utils.log_probs_from_logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "old", [None, 0.3, 4.0], ids=["no old", "old", "old beyond the clip of its weight"]
)
@pytest.mark.parametrize(
    ("estimator", "unbiased_gradient"), itertools.product(ESTIMATORS, (False, True))
)
def test_approx_kl(estimator, unbiased_gradient, old, dtype):
    log_probs = torch.linspace(-6, 0, 200).to(dtype)
    base = (log_probs.float() + torch.linspace(-2.5, 2.5, 200)).to(dtype)
    old = None if old is None else log_probs - old

    def call(x):
        return utils.compute_approx_kl(x, base, old, estimator, unbiased_gradient)

    theirs, ours = both(lambda: value_and_gradient(call, log_probs))
    assert ours[0].dtype == theirs[0].dtype == torch.float32
    assert_both_close(theirs, ours)
    # Beyond the cap the value alone is OpenRLHF's.
    base = log_probs + 12
    assert_close(*both(lambda: call(log_probs)))


def test_a_base_that_requires_a_gradient_is_openrlhfs():
    base = torch.linspace(-1, 1, 9)
    theirs, ours = both(
        lambda: value_and_gradient(
            lambda x: utils.compute_approx_kl(torch.zeros(9), x, kl_estimator="k3"), base
        )
    )
    assert_both_close(theirs, ours, tolerance=0)


# -- the patch


def test_every_place_is_replaced_and_restored():
    before = cases.attributes("openrlhf")
    with integration.patch():
        places = cases.changed(before, cases.attributes("openrlhf"))
        assert set(places) == {
            *(f"openrlhf.models.utils.{name}" for name in FUNCTIONS),
            "openrlhf.models.actor.compute_entropy",
            "openrlhf.models.actor.log_probs_from_logits",
            "openrlhf.trainer.ppo_utils.experience_maker.compute_approx_kl",
            "openrlhf.trainer.ray.ppo_actor.compute_approx_kl",
        }
    assert cases.changed(before, cases.attributes("openrlhf")) == []


def test_what_is_not_served_is_openrlhfs():
    """Tensors of other devices, and labels of another shape than the logits' rows."""
    logits = torch.empty(4, 50, device="meta")
    labels = torch.zeros(4, dtype=torch.int64, device="meta")
    with integration.patch():
        assert utils.log_probs_from_logits(logits, labels).device.type == "meta"
        with pytest.raises(RuntimeError, match="Size|shape|dimension|size"):
            utils.log_probs_from_logits(torch.zeros(4, 50), torch.zeros(4, 1, 2, dtype=torch.int64))


def test_the_documented_example_runs_and_the_import_alone_takes_no_host(tmp_path):
    cases.run_fresh(cases.documented_example("OpenRLHF"), tmp_path)
    cases.run_fresh(
        "import sys, fused_rl.integrations.openrlhf; assert 'openrlhf' not in sys.modules", tmp_path
    )
