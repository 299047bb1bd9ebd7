"""verl 0.9's own training step, patched against unpatched: loss, metrics and every parameter's gradient."""

import functools

import pytest
import torch

from fused_rl.integrations import verl as integration
from tests.hosts import cases, verl_step
from tests.hosts.cases import assert_close

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
    assert_same_step(
        monkeypatch, fused_kernels=True, remove_padding=remove_padding, entropy=entropy
    )


@pytest.mark.parametrize("fused_kernels", [True, False])
def test_a_step_under_autocast_is_no_further_from_fp32(monkeypatch, fused_kernels):
    exact, *_ = verl_step.step(monkeypatch, fused_kernels=fused_kernels)
    theirs, ours = both(
        lambda: verl_step.step(monkeypatch, fused_kernels=fused_kernels, autocast=torch.bfloat16)[0]
    )
    # the model's own rounding is in both
    assert abs(ours - exact) <= abs(theirs - exact) + 1e-3
