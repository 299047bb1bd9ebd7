"""Runs whose responses a real vLLM draws: what they learn, and that it is what the same responses teach without it."""

import dataclasses

import pytest
import torch

from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.policy import policy
from fused_rl.trainers.rollouts.types import Sampler
from tests.trainers import runs, tiny

pytestmark = pytest.mark.server
SHARED = {
    "eval_size": 0,
    "max_prompt_length": 64,
    "max_new_tokens": 6,
    "micro_batch_size": 8,
    "lr": 1e-5,
}
CLOSE = 1e-5  # losses and gradients of the same responses


class Recording(Sampler):
    """A sampler and what it returned."""

    def __init__(self, built):
        super().__init__(built)
        self.drawn = []

    def sample(self, prompts, sampling):
        found = self.built.sample(prompts, sampling)
        self.drawn.append((prompts, found))
        return found


class Replay(tiny.Sampler):
    """What was recorded, drawn again as the policy itself draws, which tells nothing."""

    def __init__(self, drawn):
        super().__init__()
        self.drawn = iter(drawn)

    def sample(self, prompts, sampling):
        expected, found = next(self.drawn)
        assert prompts == expected
        return [dataclasses.replace(response, logprobs=None) for response in found]


@pytest.fixture
def gradients(monkeypatch):
    """Of every update, by name; where each update begins."""
    found, take_step = [], policy.Policy.optimizer_step

    def stepped(self, step):
        named = self.model.module.named_parameters()
        found.append(
            {
                name: parameter.grad.clone()
                for name, parameter in named
                if parameter.grad is not None
            }
        )
        return take_step(self, step)

    monkeypatch.setattr(policy.Policy, "optimizer_step", stepped)
    return found


def grpo_config(folder, rows, output, **options):
    return runs.grpo_config((folder, rows), output, **SHARED | options)


def ppo_config(folder, rows, output, **options):
    return runs.ppo_config((folder, rows), output, critic=folder, **SHARED | options)


def recorded(trainer, config):
    """The run, and the sampler that recorded it."""
    made = []

    def recording(built, tokenizer):
        made.append(Recording(built))
        return made[0]

    trainer.train(config, sampler=recording)
    return made[0]


@pytest.mark.parametrize(
    ("trainer", "config_of", "steps"), [(grpo, grpo_config, 20), (ppo, ppo_config, 5)]
)
def test_the_same_responses_teach_the_same(
    trainer, config_of, steps, servers, folders, rows, tmp_path, gradients, capsys
):
    """Steps through the server, and again in this process with the responses that came: losses, gradients, weights."""
    url = servers.holding(folders[1]).url  # other weights: the run must push its own
    through = config_of(folders[0], rows, tmp_path / "through", steps=steps, server=[url])
    recording = recorded(trainer, through)
    of_server = list(gradients)
    gradients.clear()
    replayed = config_of(folders[0], rows, tmp_path / "replayed", steps=steps)
    trainer.train(replayed, sampler=lambda built, tokenizer: Replay(recording.drawn))

    # Gradients of every update, which there are: the run teaches something to the end.
    assert len(recording.drawn) == steps
    assert len(of_server) == len(gradients) == steps * through.minibatches * through.epochs
    for one, other in zip(of_server, gradients, strict=True):
        assert one.keys() == other.keys() and any(gradient.any() for gradient in one.values())
        for name in one:
            scale = max(1.0, other[name].abs().max().item())
            torch.testing.assert_close(one[name], other[name], atol=CLOSE * scale, rtol=0, msg=name)

    # Losses, as far as both runs know them, and what came of it.
    first, second = (
        tiny.untimed(tiny.read_metrics(tmp_path / name)) for name in ("through", "replayed")
    )
    for ours, theirs in zip(first, second, strict=True):
        for key in ours.keys() & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=CLOSE, abs=CLOSE), (
                ours["step"],
                key,
            )
    assert any("loss" in key for key in first[0].keys() & second[0].keys())
    runs.assert_same_weights(tmp_path / "through", tmp_path / "replayed", atol=CLOSE)
