"""The micro-batches of a run on a GPU: what two trial passes measure, and that they leave no trace."""

from types import SimpleNamespace

import pytest
import torch
import yaml

from fused_rl.trainers import sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.models.reward_model import Critic, RewardModel
from fused_rl.trainers.run import fitting
from tests.trainers import steps, tiny
from tests.trainers.runs import run_config


class Measured:
    """Stands for an engine on a GPU: a pass takes `base` bytes and `per_token` bytes per token."""

    device = torch.device("cpu")

    def __init__(self, base: int, per_token: int, state: bool = True):
        self.base, self.per_token = base, per_token
        self.module = SimpleNamespace(trial_inputs=lambda input_ids: {"input_ids": input_ids})
        groups = [{"params": [torch.zeros(1000)]}]
        self.optimizer = SimpleNamespace(state=state, param_groups=groups)
        self.passes = []

    def __call__(self, input_ids):
        self.passes.append(tuple(input_ids.shape))
        self.peak = self.base + self.per_token * input_ids.numel()
        return torch.zeros(1)

    def backward(self, loss):
        assert loss == 0


def gpu(monkeypatch, total: int, engines, peak=None) -> None:
    """Stand in for a GPU that holds the engines, of which so many bytes are theirs or free; a server has the rest."""
    base = sum(one.base for one in engines)
    free = total - base
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 3 * total))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: base)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: base)
    peaks = lambda device: peak or sum(one.peak for one in engines)  # noqa: E731
    monkeypatch.setattr("torch.cuda.max_memory_allocated", peaks)


@pytest.mark.parametrize(
    ("total", "expected", "engines"),
    [
        (1_000_000, 6500, [(100_000, 100)]),  # (750,000 - 100,000) / 100
        (10**9, 256 * 50, [(100_000, 100)]),
        (150_000, 125, [(100_000, 100)]),
        (140_000, 50, [(100_000, 100)]),  # no room for a second sequence, so no second pass
        # Moments that the first step makes are left room; models that are trained together share it.
        (1_000_000, 6500 - 8 * 1000 // 100, [(100_000, 100, False)]),
        (1_000_000, 6500, [(50_000, 75), (50_000, 25)]),
    ],
)
def test_what_two_sequences_take_more_than_one_says_how_many_tokens_fit(
    total, expected, engines, monkeypatch
):
    engines = [Measured(*one) for one in engines]
    gpu(monkeypatch, total, engines)
    assert fitting.fitting_tokens(engines, 50) == expected
    assert engines[0].passes == [(1, 50), (2, 50)][: 1 + (expected > 50)]


def trained(kind, folder, options, *, tried: bool) -> list[torch.Tensor]:
    """Return the weights after two steps, with or without trial passes before them."""
    torch.manual_seed(0)
    config = steps.TrainingConfig(lr=1e-2, lr_schedule="constant", weight_decay=0.1, **options)
    made = (
        tiny.load_lm(tiny.config_of("sft", folder))
        if kind is None
        else kind.from_pretrained(folder)
    )
    model = engine.initialize(made.to(engine.torch_dtype(config)), config, 2)
    if tried:
        fitting.fitting_tokens([model], 6)
    for step in range(2):
        for part in torch.arange(8).view(2, 1, 4):
            output = model(**model.module.trial_inputs(part))
            model.backward(output.sum() if isinstance(output, torch.Tensor) else output.loss)
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
    gpu(monkeypatch, 1 << 30, [], peak=1000)
    expected, found = (trained(kind, folder, options, tried=tried) for tried in (False, True))
    assert all(map(torch.equal, expected, found)) and len(expected) == len(found)


def test_a_resumed_run_keeps_what_was_measured(files, tmp_path, monkeypatch):
    measured = []

    def fitting_tokens(engines, longest):
        measured.append(longest)
        return 5 * longest

    monkeypatch.setattr(fitting, "fitting_tokens", fitting_tokens)
    monkeypatch.setattr(sft.SFTConfig, "resolve", lambda self: None)  # as on a GPU
    for more in ({"steps": 1}, {"resume": True, "steps": 2}):
        sft.train(run_config(files, tmp_path, micro_batch_size=None, **more))
        written = yaml.safe_load((tmp_path / "config.yaml").read_text())
        found = written["micro_batch_size"], written["micro_batch_tokens"]
        assert found == (5, 5 * measured[0]) and len(measured) == 1
