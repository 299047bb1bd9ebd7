"""The micro-batches of a run on a GPU: what two trial passes measure, and that they leave no trace."""

from types import SimpleNamespace

import pytest
import torch
import yaml

from fused_rl.trainers import sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.models.reward_model import Critic, RewardModel
from fused_rl.trainers.options import EngineConfig, OptimConfig
from fused_rl.trainers.run import fitting
from tests.trainers import tiny
from tests.trainers.runs import run_config


class TrainingConfig(EngineConfig, OptimConfig):
    """The options of an engine and of its optimizer."""


class Measured:
    """Stands for an engine on a GPU: a pass takes `base` bytes and `per_token` bytes per token."""

    device = torch.device("cpu")

    def __init__(self, base: int, per_token: int, state: bool = True):
        self.base, self.per_token = base, per_token
        self.module = SimpleNamespace(trial_inputs=lambda input_ids: {"input_ids": input_ids})
        weights = [torch.zeros(1000)]
        self.optimizer = SimpleNamespace(state=state, param_groups=[{"params": weights}])
        self.passes: list[tuple[int, ...]] = []

    def __call__(self, input_ids):
        self.passes.append(tuple(input_ids.shape))
        self.peak = self.base + self.per_token * input_ids.numel()
        return torch.zeros(1)

    def backward(self, loss):
        assert loss == 0


def gpu(monkeypatch, total: int, engines) -> None:
    """Stand in for a GPU with so many bytes that holds the engines."""
    properties = SimpleNamespace(total_memory=total)
    base = sum(one.base for one in engines)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: base)
    monkeypatch.setattr(
        "torch.cuda.max_memory_allocated", lambda device: sum(one.peak for one in engines)
    )


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (1_000_000, 6500),  # (750,000 - 100,000) / 100
        (10**9, 256 * 50),
        (150_000, 125),
        (140_000, 50),  # no room for a second sequence, so there is no second pass
    ],
)
def test_what_two_sequences_take_more_than_one_says_how_many_tokens_fit(
    total, expected, monkeypatch
):
    one = Measured(100_000, 100)
    gpu(monkeypatch, total, [one])
    assert fitting.fitting_tokens([one], 50) == expected
    assert one.passes == [(1, 50), (2, 50)][: 1 + (expected > 50)]


def test_moments_that_the_first_step_makes_are_left_room(monkeypatch):
    one = Measured(100_000, 100, state=False)
    gpu(monkeypatch, 1_000_000, [one])
    assert fitting.fitting_tokens([one], 50) == 6500 - 8 * 1000 // 100


def test_models_that_are_trained_together_share_the_memory(monkeypatch):
    engines = [Measured(50_000, 75), Measured(50_000, 25)]
    gpu(monkeypatch, 1_000_000, engines)
    assert fitting.fitting_tokens(engines, 50) == 6500


def trained(kind, folder, options, *, tried: bool) -> list[torch.Tensor]:
    """Return the weights after two steps, with or without trial passes before them."""
    config = TrainingConfig(lr=1e-2, lr_schedule="constant", weight_decay=0.1, **options)
    if kind is None:
        model = tiny.load_lm(sft.SFTConfig(model=folder, dataset="d", output_dir="o"))
    else:
        model = kind.from_pretrained(folder)
    model = model.to(engine.torch_dtype(config))
    model = engine.initialize(model, config, 2)
    if tried:
        fitting.fitting_tokens([model], 6)
    ids = torch.arange(8).view(2, 4)
    for step in range(2):
        for part in ids.split(1):
            output = model(**model.module.trial_inputs(part))
            loss = output.sum() if isinstance(output, torch.Tensor) else output.loss
            model.backward(loss)
        engine.optimizer_step(model, step)
    import deepspeed

    with deepspeed.zero.GatheredParameters([*model.module.parameters()]):
        return [p.detach().clone() for p in model.module.parameters()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((None, {"zero_stage": stage, "dtype": "bfloat16"}) for stage in (1, 2, 3)),
        (None, {"zero_stage": 0}),
        (None, {"zero_stage": 3, "stage3_param_persistence_threshold": 0}),
        (None, {"zero_stage": 2, "dtype": "bfloat16", "grad_accum_dtype": "bfloat16"}),
        (RewardModel, {}),
        (Critic, {}),
    ],
    ids=str,
)
def test_trial_passes_change_no_bit(kind, options, folder, monkeypatch):
    engine.setup(1)
    gpu(monkeypatch, 1 << 30, [])
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 1000)
    torch.manual_seed(0)
    expected = trained(kind, folder, options, tried=False)
    torch.manual_seed(0)
    found = trained(kind, folder, options, tried=True)
    for before, after in zip(expected, found, strict=True):
        assert torch.equal(before, after)


def test_a_resumed_run_keeps_what_was_measured(files, tmp_path, monkeypatch):
    measured = []

    def fitting_tokens(engines, longest):
        measured.append(longest)
        return 5 * longest

    monkeypatch.setattr(fitting, "fitting_tokens", fitting_tokens)
    monkeypatch.setattr(sft.SFTConfig, "resolve", lambda self: None)  # as on a GPU
    run = tmp_path / "run"
    options = {"micro_batch_size": None, "save_every": 1}
    sft.train(run_config(files, run, **options, steps=1))
    (longest,) = measured
    for again in ({}, {"resume": True, "steps": 2}):
        if again:
            sft.train(run_config(files, run, **options, **again))
        written = yaml.safe_load((run / "config.yaml").read_text())
        assert (written["micro_batch_size"], written["micro_batch_tokens"]) == (5, 5 * longest)
    assert measured == [longest]
