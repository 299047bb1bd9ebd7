"""The library as a repository of Hugging Face's `kernels`, beside the installed one."""

import importlib.util
import subprocess
import sys

import pytest
import torch

import fused_rl
from fused_rl.layers import FusedForCausalLMLossLayer
from tests.tools import hub_build

ALONE = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("loaded", sys.argv[1], submodule_search_locations=[sys.argv[2]])
loaded = sys.modules["loaded"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loaded)
logits = torch.randn(2, 3, 50, requires_grad=True)
targets = torch.randint(50, (2, 3))
loss, _ = loaded.policy_loss(loaded.token_logprobs(logits, targets).logprobs, torch.zeros(2, 3), torch.ones(2),
                             torch.ones(2, 3, dtype=torch.bool), preset="gspo")
loss.backward()
hidden, weight = torch.randn(3, 8), torch.randn(50, 8)
loaded.linear_token_logprobs(hidden, weight, targets[0])
loaded.token_kl(logits, logits + 1).sum().backward()
print([name for name in sys.modules if name.split(".")[0] in ("fused_rl", "kernels")])
"""


@pytest.mark.slow
def test_a_build_imports_nothing_of_an_installed_library(tmp_path):
    hub_build.build(tmp_path / "hub")
    place = tmp_path / "hub" / "torch-cpu"
    words = [sys.executable, "-c", ALONE, str(place / "__init__.py"), str(place)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_build_beside_an_installed_library_has_operators_of_its_own(tmp_path):
    prefix = hub_build.build(tmp_path)
    assert prefix == hub_build.build(tmp_path), "the same sources, the same prefix"
    place = tmp_path / "torch-cuda"
    spec = importlib.util.spec_from_file_location(
        prefix, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    loaded = sys.modules[prefix] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    logits, targets = torch.randn(4, 300), torch.randint(300, (4,))
    for ours, theirs in zip(
        fused_rl.token_logprobs(logits, targets),
        loaded.token_logprobs(logits, targets),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    operators = {getattr(torch.ops, name).token_logprobs.default for name in ("fused_rl", prefix)}
    assert len(operators) == 2
    assert loaded.layers.FusedForCausalLMLossLayer is not FusedForCausalLMLossLayer


def test_the_layer_is_transformers_loss():
    from transformers.loss.loss_utils import ForCausalLMLoss

    labels = torch.randint(60, (3, 7))
    labels[0, :4] = -100
    logits = torch.randn(3, 7, 60, requires_grad=True)
    layer = FusedForCausalLMLossLayer()
    assert not list(layer.parameters()) and "__init__" not in vars(FusedForCausalLMLossLayer)
    shifted = {"labels": None, "shift_labels": labels}
    for options in (
        {"labels": labels},
        shifted,
        {"labels": labels, "num_items_in_batch": torch.tensor(9)},
    ):
        losses = [loss(logits, vocab_size=60, **options) for loss in (layer, ForCausalLMLoss)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(
            *(torch.autograd.grad(loss, logits)[0] for loss in losses), rtol=1e-5, atol=1e-7
        )
