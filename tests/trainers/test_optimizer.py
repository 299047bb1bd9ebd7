"""The optimizer: which weights decay, how gradients are clipped, and which stage of ZeRO takes the step."""

import pytest
import torch

from fused_rl.trainers.base import engine, optim
from tests.trainers.steps import TrainingConfig


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({}, 0),
        ({"zero_stage": 1}, 0),
        ({"zero_stage": 3}, 3),
        ({"offload": True}, 2),
        ({"dtype": "bfloat16"}, 2),
    ],
)
def test_one_fp32_process_has_nothing_that_zero_could_divide(options, stage, tmp_path, monkeypatch):
    config = TrainingConfig(**{"dtype": "float32"} | options)
    assert engine.effective_zero_stage(config) == stage
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}')
    with_file = TrainingConfig(**{"dtype": "float32", "deepspeed": str(path)} | options)
    assert engine.effective_zero_stage(with_file) == config.zero_stage
    # Not by WORLD_SIZE, which a process that has trained before no longer reads.
    monkeypatch.setattr(engine, "processes", lambda: 2)
    assert engine.effective_zero_stage(config) == config.zero_stage


@pytest.mark.parametrize("limit", [0.0, 1e-6, 1e-5, 0.5])
@pytest.mark.parametrize("size", [1e-7, 9.4e-6, 0.4999, 3.0])
def test_without_zero_a_gradient_is_clipped_as_torch_does(limit, size):
    """Small limits, too, where the 1e-6 that torch adds to a norm decides."""
    ours, torchs = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    ours.grad, torchs.grad = (torch.tensor([size, 0.0, 0.0]) for _ in range(2))
    optimizer = torch.optim.SGD([ours], lr=1.0)
    optim.Clipping(optimizer, [ours], limit)
    optimizer.step()
    torch.nn.utils.clip_grad_norm_([torchs], limit or float("inf"))
    assert torch.equal(-ours.detach(), torchs.grad)
