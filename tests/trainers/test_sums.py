"""Gradients of 16-bit weights are added up in fp32, so that how a batch is divided changes no result."""

import pytest
import torch

from fused_rl.trainers.base import engine, ranks
from tests.distributed import run_distributed
from tests.marks import slow
from tests.trainers.steps import TrainingConfig

ROWS = 64
DIVISIONS = (64, 8, 1)  # rows of a micro-batch, over all processes
BETA1 = 0.9


class Tower(torch.nn.Module):
    """Two layers, the second of which few processes divide evenly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(31, 43)
        self.last = torch.nn.Linear(43, 7)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).square().sum() / ROWS


def rows() -> torch.Tensor:
    """Return all rows of a step, (64, 31) bf16."""
    return torch.randn(ROWS, 31, generator=torch.Generator().manual_seed(1)).bfloat16()


def exact() -> dict[str, torch.Tensor]:
    """Return the sum in fp64 of the gradients in bf16 of single rows."""
    tower = Tower().bfloat16()
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in tower.named_parameters()}
    for x in rows():
        tower.zero_grad()
        tower(x[None]).backward()
        for name, p in tower.named_parameters():
            total[name] += p.grad
    return total


def gradient(options: dict, size: int) -> dict[str, torch.Tensor]:
    """Return the gradient that AdamW gets, from its first moment, in micro-batches of `size` rows over all processes.

    A first step has another gradient, of which nothing may be left.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    fixed = {"lr": 0.0, "max_grad_norm": 0.0, "dtype": "bfloat16"}
    config = TrainingConfig(stage3_param_persistence_threshold=0, **fixed, **options)
    model = engine.initialize(Tower().bfloat16(), config, 2)
    share = rows()[ranks.process_index() :: ranks.processes()]
    moments = []
    for step, sign in enumerate((-1, 1)):
        for x in share.split(max(1, size // ranks.processes())):
            model.backward(model(x) * (sign * ranks.processes()))
        engine.optimizer_step(model, step)
        read = {}
        for name, p in model.module.named_parameters():
            read[name] = safe_get_full_optimizer_state(p, "exp_avg").double().clone()
        moments.append(read)
    first, second = moments
    return {name: (second[name] - BETA1 * first[name]) / (1 - BETA1) for name in first}


def errors(rank: int, world: int, options: dict) -> list[float]:
    """Return the relative errors of one division after the other."""
    engine.setup(1)
    expected, found = exact(), []
    whole = torch.cat([x.flatten() for x in expected.values()])
    for size in DIVISIONS:
        of_one = gradient(options, size)
        difference = torch.cat([of_one[name].flatten() for name in expected]) - whole
        found.append((difference.norm() / whole.norm()).item())
    return found


STAGES = (
    *({"zero_stage": stage} for stage in (1, 2, 3)),
    *({"zero_stage": stage, "offload": True} for stage in (2, 3)),
)


@pytest.mark.parametrize("world", [1, slow(2)])
@pytest.mark.parametrize("options", STAGES, ids=str)
def test_a_gradient_is_as_exact_in_any_number_of_micro_batches_and_processes(options, world):
    """Rounding each micro-batch's gradient to bf16 leaves 2e-3; adding 64 of them up in bf16 leaves 6e-3."""
    for of_rank in run_distributed(errors, world, options, timeout=200):
        assert max(of_rank) < 3e-3


def test_sums_in_bf16_are_an_option():
    options = {"zero_stage": 2, "grad_accum_dtype": "bfloat16"}
    one, _, many = errors(0, 1, options)
    assert one < 3e-3 < 5e-3 < many
