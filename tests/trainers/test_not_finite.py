"""Nothing that is not finite is trained on: the run stops before the step, on every ZeRO stage and every rank."""

import pytest
import torch

from fused_rl.trainers import sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.run import store
from tests.distributed import run_distributed
from tests.trainers import tiny
from tests.trainers.runs import sft_config
from tests.trainers.steps import TrainingConfig


class Spoilt(torch.nn.Module):
    """A line whose gradient is infinite where its loss is not."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (self.weight * x).sqrt().sum()


def steps_of_a_rank(rank, world, cases):
    """The error of a step with an infinite gradient on rank 0 alone, and the weights after it, per case."""
    engine.setup(1)
    found = []
    for stage, dtype in cases:
        optim = {"lr": 0.1, "lr_schedule": "constant", "weight_decay": 0.1}
        config = TrainingConfig(
            zero_stage=stage, dtype=dtype, stage3_param_persistence_threshold=0, **optim
        )
        model = engine.initialize(Spoilt().to(engine.torch_dtype(config)), config, 4)
        for step, x in enumerate((1.0, 0.0 if rank == 0 else 1.0), 1):
            model.backward(model(torch.full((8,), x, dtype=engine.torch_dtype(config))))
            try:
                engine.optimizer_step(model, step)
            except InputError as error:
                found.append(f"{stage} {dtype}: {error}")
            if step == 1:
                before = weights_of(model)
        assert torch.equal(weights_of(model), before), (stage, dtype)
        assert before.isfinite().all() and not torch.equal(before, torch.ones(8))
    return found


def weights_of(model):
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return model.module.weight.detach().float().clone()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_infinite_gradient_changes_no_weight_on_any_stage(world):
    cases = [*((stage, "float32") for stage in range(4)), (1, "bfloat16"), (2, "bfloat16")]
    for found in run_distributed(steps_of_a_rank, world, cases, timeout=200):
        assert len(found) == len(cases)
        for (stage, dtype), message in zip(cases, found, strict=True):
            assert message.startswith(f"{stage} {dtype}: step 2: the norm of the gradient is ")


def test_a_loss_that_becomes_nan_stops_sft_and_leaves_the_last_checkpoint(
    files, tmp_path, monkeypatch
):
    train_step = sft.train_step

    def spoilt(model, *rest):
        if rest[-1] == 3:
            model.module.base.model.norm.weight.data[0] = float("nan")
        return train_step(model, *rest)

    monkeypatch.setattr(sft, "train_step", spoilt)
    with pytest.raises(InputError, match=r"step 3, micro-batch 1 .*: loss.*rows.jsonl, line \d+"):
        sft.train(sft_config(files, tmp_path, save_every=1, eval_every=99))
    assert store.steps_in(tmp_path / "checkpoints")[-1] == 2
    assert [m["step"] for m in tiny.read_metrics(tmp_path)] == [0, 1, 2]
