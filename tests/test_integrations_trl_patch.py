"""The patch that exchanges TRL's primitives for ours: whole, undone, refused, pickled, documented."""

import importlib
import importlib.metadata
import sys

import pytest
import torch

from fused_rl.integrations import trl as integration
from fused_rl.integrations.self_test import self_test
from tests.lazy import Lazy, needs_trl

trl_utils = Lazy("trl.trainer.utils")
chunked_divergence = Lazy("trl.kernels.chunked_divergence", "trl.trainer.utils")
chunked_logprob = Lazy("trl.kernels.chunked_logprob", "trl.trainer.utils")
pytestmark = [pytest.mark.usefixtures("cpu"), needs_trl]

# What imports the primitives by name, in TRL and in its experimental trainers.
USERS = [f"trainer.{name}_trainer" for name in ("distillation", "grpo", "sft", "dpo")]
USERS += [f"experimental.{name}.{name}_trainer" for name in ("orpo", "cpo", "tpo", "a2po")]
USERS += [f"experimental.{name}.loss_utils" for name in ("sdft", "sdpo")]
OURS = (
    "ChunkedLogProbFunction",
    "ChunkedDivergenceFunction",
    "selective_log_softmax",
    "entropy_from_logits",
)
OURS += ("selective_log_softmax_and_entropy",)


@pytest.fixture(scope="module")
def host_modules():
    for name in USERS:
        importlib.import_module(f"trl.{name}")


def attributes():
    """Every attribute of every imported module of TRL."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trl" and module is not None:
            found |= {(name, attribute): value for attribute, value in vars(module).items()}
    return found


def test_every_copy_is_replaced_and_every_attribute_restored(host_modules):
    before = attributes()
    originals = [
        chunked_logprob.ChunkedLogProbFunction,
        chunked_divergence.ChunkedDivergenceFunction,
        *(getattr(trl_utils, name) for name in OURS[2:]),
    ]
    copies = {
        place for place, value in before.items() if any(value is original for original in originals)
    }
    integration.patch()
    try:
        patched = attributes()
        changed = {place for place in before if patched[place] is not before[place]}
        assert changed == copies
        assert len(copies) >= 14
        assert {patched[place] for place in changed} == {
            getattr(integration, name) for name in OURS
        }
    finally:
        integration.unpatch()
    after = attributes()
    assert after.keys() == before.keys()
    assert all(after[place] is before[place] for place in before)


def one_target_only(logits, index, temperature=1.0, row_mask=None):
    logprobs = trl_utils.selective_log_softmax(logits, index, temperature, row_mask)
    return logprobs if index.shape == logits.shape[:-1] else logprobs.exp()


def clamped(logits, index, temperature=1.0, row_mask=None):
    return trl_utils.selective_log_softmax(logits, index, temperature, row_mask).clamp(min=-20)


@pytest.mark.parametrize("theirs", [one_target_only, clamped])
def test_several_targets_and_unlikely_ones_are_tried(theirs):
    row = next(row for row in integration._TABLE if row.function == "selective_log_softmax")
    result = self_test(theirs, row.ours, row.samples)
    assert result.startswith("failed in float32: output 0 differs"), result


@pytest.mark.parametrize("logits_dtype", ["bf16", torch.int32, torch.float64])
def test_a_dtype_that_no_head_has_is_refused_at_once(logits_dtype):
    with pytest.raises(ValueError, match="logits_dtype must be None, torch.float32, or .*; got"):
        integration.patch(logits_dtype=logits_dtype)
    assert not integration._PATCH.applied
