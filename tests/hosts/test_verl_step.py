"""verl 0.9's own training step, patched against unpatched: loss, metrics and every parameter's gradient."""

import functools

import pytest
import torch
import verl.utils.torch_functional as verl_F
from verl.workers.config import PolicyLossConfig

from fused_rl.integrations import verl as integration
from tests.hosts import cases, verl_step
from tests.hosts.cases import assert_close
from tests.hosts.verl_step import KL_NAMES

both = functools.partial(cases.both, integration)


@pytest.fixture(autouse=True)
def unpatched_afterwards():
    yield
    integration.unpatch()


def assert_same_step(monkeypatch, **options):
    theirs, ours = both(lambda: verl_step.step(monkeypatch, **options))
    assert_close(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    for name in theirs[1]:
        assert ours[1][name] == pytest.approx(theirs[1][name], abs=1e-5, rel=1e-5), name
    for name, gradient in theirs[2].items():
        assert gradient.abs().sum() > 0, f"{name} gets no gradient: nothing is compared"
        assert_close(ours[2][name], gradient)


LOSS_MODES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
)


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_loss_modes(monkeypatch, mode):
    policy_loss = PolicyLossConfig(loss_mode=mode, dro_beta=0.1, clip_cov_ratio=0.2, kl_cov_ratio=0.2)
    assert_same_step(monkeypatch, loss={"policy_loss": policy_loss})


@pytest.mark.parametrize("kl", KL_NAMES)
def test_kl_losses(monkeypatch, kl):
    assert_same_step(monkeypatch, loss={"kl_loss_type": kl})


@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize(
    "engine_options",
    [
        {},
        {"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 5},
        {"entropy_checkpointing": True},
        {"use_torch_compile": True},
    ],
    ids=["plain", "chunks", "checkpoint", "compiled"],
)
def test_engine_options(monkeypatch, engine_options, remove_padding):
    assert_same_step(monkeypatch, engine_options=engine_options, remove_padding=remove_padding)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("remove_padding", [True, False])
def test_fused_kernels(monkeypatch, remove_padding, entropy):
    assert_same_step(monkeypatch, fused_kernels=True, remove_padding=remove_padding, entropy=entropy)


def test_without_entropy_and_inplace(monkeypatch):
    """`inplace_backward` is True where no entropy is computed, and has its effect where flash-attn is installed."""
    theirs = verl_step.step(monkeypatch, entropy=False)
    with integration.patch():
        monkeypatch.setattr(verl_F, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
        ours = verl_step.step(monkeypatch, entropy=False)
    assert_close(ours[0], theirs[0])
    for name, gradient in theirs[2].items():
        assert_close(ours[2][name], gradient)


@pytest.mark.parametrize("fused_kernels", [True, False])
def test_a_step_under_autocast_is_no_further_from_fp32(monkeypatch, fused_kernels):
    exact, *_ = verl_step.step(monkeypatch, fused_kernels=fused_kernels)
    theirs, ours = both(lambda: verl_step.step(monkeypatch, fused_kernels=fused_kernels, autocast=torch.bfloat16)[0])
    # the model's own rounding is in both
    assert abs(ours - exact) <= abs(theirs - exact) + 1e-3
