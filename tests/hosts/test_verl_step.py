"""verl 0.9's own training step, patched against unpatched: loss, metrics and every parameter's gradient."""

import functools

import pytest

from fused_rl.integrations import verl as integration
from tests.hosts import cases, verl_step
from tests.hosts.cases import assert_close

both = functools.partial(cases.both, integration)


@pytest.fixture(autouse=True)
def unpatched_afterwards():
    yield
    integration.unpatch()


OPTIONS = [
    {},
    {"engine_options": {"entropy_from_logits_with_chunking": True}},
    {"engine_options": {"entropy_checkpointing": True}},
    {"engine_options": {"use_torch_compile": True}},
    {"fused_kernels": True},
    {"fused_kernels": True, "entropy": False},
]


@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step(monkeypatch, options, remove_padding):
    theirs, ours = both(
        lambda: verl_step.step(monkeypatch, remove_padding=remove_padding, **options)
    )
    assert_close(ours[0], theirs[0])
    assert ours[1] == pytest.approx(theirs[1], abs=1e-5, rel=1e-5)
    for name, gradient in theirs[2].items():
        assert gradient.abs().sum() > 0, f"{name} gets no gradient: nothing is compared"
        assert_close(ours[2][name], gradient)
