"""Hugging Face's `kernels` loads a build of the library, and `kernelize` finds the layer in it."""

import sys

import torch

from kernels import (
    LocalLayerRepository,
    Mode,
    get_local_kernel,
    kernelize,
    use_kernel_forward_from_hub,
)
from kernels import use_kernel_mapping as mapping
from tests.tools import hub_build


@use_kernel_forward_from_hub("ForCausalLMLoss")
class Loss(torch.nn.Module):
    """The slot, which transformers' mapping names."""

    def forward(
        self,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        **_,
    ):
        raise NotImplementedError


def test_the_build_is_loaded_beside_the_installed_library(tmp_path):
    hub_build.build(tmp_path)
    loaded = get_local_kernel(tmp_path, backend="cpu", trust_remote_code=True)
    logits, targets = torch.randn(6, 1000), torch.randint(1000, (6,))
    ours = sys.modules["fused_rl"].token_logprobs(logits, targets)
    assert (
        loaded.__name__ != "fused_rl"
        and loaded.token_logprobs is not sys.modules["fused_rl"].token_logprobs
    )
    assert torch.equal(ours.logprobs, loaded.token_logprobs(logits, targets).logprobs)


def test_kernelize_finds_the_layer(tmp_path):
    hub_build.build(tmp_path)
    model = torch.nn.ModuleList([Loss()])
    layer = LocalLayerRepository(repo_path=tmp_path, layer_name="FusedForCausalLMLossLayer")
    with mapping({"ForCausalLMLoss": {"cpu": layer}}):
        kernelize(model, mode=Mode.TRAINING, device="cpu")
    logits, labels = torch.randn(2, 5, 30), torch.randint(30, (2, 5))
    exact = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(model[0](logits, labels, 30), exact)
