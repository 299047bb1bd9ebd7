"""The optimizer step on a CPU against DeepSpeed's own: weights, moments and norms, bit for bit."""

import pytest
import torch
import transformers

from fused_rl.trainers import sft
from fused_rl.trainers.base import engine, optim, zero
from fused_rl.trainers.models.reward_model import RewardModel
from fused_rl.trainers.options import EngineConfig, OptimConfig
from tests.trainers import tiny

CELLS = ((1, "float32"), (2, "float32"), (1, "bfloat16"), (2, "bfloat16"))
OPTIONS = (  # with weight decay there are two groups of parameters
    {"max_grad_norm": 0.0},
    {"max_grad_norm": 0.1, "weight_decay": 0.0},
    {"max_grad_norm": 1e-2, "tf_adam": True},  # clipped at every step
    {"max_grad_norm": 1e9, "warmup_steps": 2},
)


class TrainingConfig(EngineConfig, OptimConfig):
    """The options of an engine and of its optimizer."""


class Tower(torch.nn.Module):
    """Weights that no span begins with; one is frozen, one is never used, one gets a gradient of zeros."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(71, 43)
        self.frozen = torch.nn.Linear(43, 43).requires_grad_(False)
        self.unused = torch.nn.Linear(5, 3)
        self.last = torch.nn.Linear(43, 7)

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(self.first(x)))).square().sum()


def steps(stage, dtype, options) -> tuple[list, list]:
    """Norms of the gradient in 3 steps of two micro-batches; then weights and what the optimizer keeps."""
    held = {"lr": 1e-2, "weight_decay": 0.1, "lr_schedule": "constant"} | options
    config = TrainingConfig(zero_stage=stage, dtype=dtype, **held)
    model = engine.initialize(Tower().to(getattr(torch, dtype)), config, 3)
    generator = torch.Generator().manual_seed(engine.rank())
    norms = []
    for step in range(3):
        for _ in range(2):
            x = torch.randn(9, 71, generator=generator).to(getattr(torch, dtype))
            model.backward(model(x) * engine.processes())
        norms.append(engine.optimizer_step(model, step)["optim/grad_norm"])
    kept = [weight.detach().clone() for weight in model.module.parameters()]
    for state in model.optimizer.state.values():
        kept += [state[name].clone() for name in ("step", "exp_avg", "exp_avg_sq")]
    kept += [weight.detach().clone() for weight in model.optimizer.single_partition_of_fp32_groups]
    return norms, kept


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("stage", "dtype"), CELLS)
def test_a_step_has_the_bits_of_deepspeeds_own(stage, dtype, options, monkeypatch):
    engine.setup(1)
    monkeypatch.setattr(zero, "SPAN", 64)
    norms, found = steps(stage, dtype, options)
    monkeypatch.setattr(zero, "own_step", lambda zero_stage, offload: False)
    theirs, expected = steps(stage, dtype, options)
    assert norms == theirs
    for mine, yours in zip(found, expected, strict=True):
        assert torch.equal(mine, yours)


@pytest.mark.parametrize("kind", ["lm", "reward"])
def test_what_decays_is_what_decays_in_transformers_trainer(kind, folder):
    """Norms and biases do not; without weight decay there is one group."""
    config = sft.SFTConfig(model=folder, dataset="d", output_dir="o")
    model = tiny.load_lm(config) if kind == "lm" else RewardModel.from_pretrained(folder)
    parameters, names = (
        list(model.parameters()),
        {id(p): name for name, p in model.named_parameters()},
    )
    decayed, spared = optim.adamw(parameters, OptimConfig(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    expected = transformers.Trainer.get_decay_parameter_names(None, model)
    assert {names[id(p)] for p in decayed["params"]} == {*expected} < {*names.values()}
    assert len(spared["params"]) == len(parameters) - len(expected)
    (group,) = optim.adamw(parameters, OptimConfig()).param_groups
    assert group["params"] == parameters


def test_offload_and_other_stages_take_deepspeeds_own_step():
    assert zero.own_step(2) == (not torch.cuda.is_available())
    assert not zero.own_step(2, offload=True)
    assert not zero.own_step(3) and not zero.own_step(0)


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
