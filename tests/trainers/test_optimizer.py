"""The optimizer: which weights decay, how gradients are clipped, and which stage of ZeRO takes the step."""

import pytest
import torch

from fused_rl.trainers.base import engine, optim
from fused_rl.trainers.models.language_model import load_lm
from tests.trainers import tiny
from tests.trainers.steps import TrainingConfig

CPU = torch.device("cpu")


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


def trained(config):
    """The norms and the weights of four updates of two micro-batches."""
    lm, norms = load_lm(config, CPU), []
    model = engine.initialize(lm, config, 4)
    torch.manual_seed(0)
    for step in range(4):
        for _ in range(2):
            ids, mask = torch.randint(3, 50, (2, 16)), torch.ones(2, 15, dtype=torch.bool)
            model.backward(model(ids, mask, token_loss=lambda logprobs, _: -logprobs).loss / 60)
        norms.append(engine.optimizer_step(model, step)["optim/grad_norm"])
    return norms, [weight.detach().clone() for weight in lm.parameters()], model


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 1},
        {"zero_stage": 1, "grad_accum_dtype": "bfloat16"},
        {"zero_stage": 2, "offload": True},
    ],
)
def test_one_process_scatters_no_gradients_and_keeps_every_bit(options, tmp_path, monkeypatch):
    engine.setup(0)
    folder = tiny.model_folder(tmp_path / "model")
    config = tiny.config_of("sft", folder, steps=4, lr=1e-2, dtype="bfloat16", **options)
    ours, values, made = trained(config)
    theirs = engine._deepspeed_config

    def scattering(*args, **options):
        made = theirs(*args, **options)
        del made["zero_optimization"]["reduce_scatter"]
        return made

    monkeypatch.setattr(engine, "_deepspeed_config", scattering)
    norms, weights, model = trained(config)
    assert model.zero_reduce_scatter() and not made.zero_reduce_scatter()
    assert ours == norms
    torch.testing.assert_close(values, weights, rtol=0, atol=0)
