"""The numbers that decide whether PPO works, each on its own; a whole step is in test_metrics.py."""

import functools
from types import SimpleNamespace

import pytest
import torch

from fused_rl.trainers import ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.models.reward_model import RewardModel
from fused_rl.trainers.policy.before_update import BeforeUpdate
from fused_rl.trainers.policy.critic import (
    Critic,
    KLController,
    advantages_and_returns,
    load_critic,
)
from tests.trainers import tiny
from tests.trainers.runs import ppo_config

EOS = 3


config_of = functools.partial(tiny.config_of, "ppo")


# The numbers that decide whether PPO works.


def test_the_adaptive_coefficient():
    constant, adaptive = KLController(0.15), KLController(0.15, 6.0, 10_000)
    for kl, factor in ((12.0, 1 + 0.2 * 64 / 10_000), (0.0, 1 - 0.2 * 64 / 10_000), (6.6, 1.00064)):
        before = adaptive.kl_coef
        for controller in (constant, adaptive):
            controller.update(kl, 64)
        assert adaptive.state() == {"kl_coef": pytest.approx(before * factor, rel=1e-12)}
    assert constant.state() == {"kl_coef": 0.15}


def credited(rewards, values, mask, **options):
    config = config_of(**({"gamma": 1.0, "whiten_advantages": False} | options))
    return advantages_and_returns(config, rewards, values, mask)


def test_whitened_rewards_keep_their_mean():
    rewards = torch.tensor([[1.0, 5.0, 9.0, 77.0]])
    mask = torch.tensor([[True, True, True, False]])
    advantages, _ = credited(rewards, torch.zeros(1, 4), mask, whiten_rewards=True, gae_lambda=0.0)
    torch.testing.assert_close(advantages, torch.tensor([[4.0, 5.0, 6.0, 0.0]]))


def test_the_kl_that_is_right_for_its_place_is_the_default():
    assert config_of().estimator == "k1"
    assert config_of(kl_in="loss").estimator == "rk3"
    assert config_of(kl_estimator="k3").estimator == "k3"


def test_what_is_cut_is_not_trained_on_and_moves_no_advantage_of_others(monkeypatch):
    batch = make_batch([[1, 70]] * 3, [[90, EOS], [91, EOS], [92, 93]], 0, "cpu")
    zeros = torch.zeros(3, 3)
    rollout = SimpleNamespace(
        batch=batch,
        rewards=torch.tensor([1.0, 2.0, 9.0]),
        stopped=torch.tensor([True, True, False]),
    )
    monkeypatch.setattr(ppo, "measure", lambda *_: BeforeUpdate(*[zeros] * 4))
    monkeypatch.setattr(ppo, "values_of", lambda critic, micro: zeros[: len(micro.input_ids)])
    policy = SimpleNamespace(config=config_of(mask_truncated=True, gae_lambda=1.0))
    found = ppo.judge(policy, None, rollout, [torch.arange(3)], 0.0)
    assert found.mask.sum(1).tolist() == [2, 2, 0]
    # Whitened over the four tokens that are left.
    expected = torch.tensor([[-1.0], [1.0], [0.0]]) * found.mask * (3 / 4) ** 0.5
    torch.testing.assert_close(found.advantages, expected)

    # Nor does it count in the length of its group.
    def loss(*_, group_lengths, **options):
        assert group_lengths.tolist() == [2, 2, 0]
        raise KeyboardInterrupt

    policy.device, policy.loss = "cpu", loss
    rollout.lengths, rollout.rollout_logprobs = torch.tensor([2, 2, 2]), None
    with pytest.raises(KeyboardInterrupt):
        ppo.accumulate(policy, None, found, [torch.arange(3)], 0.0, 1)


# The critic.


def test_a_critic_expects_nothing_at_first_and_is_a_reward_model_otherwise(folders, tmp_path):
    model, reward = folders
    prompt, response = [1, 70, 71, 72], [90, 91, EOS]
    given = make_batch([prompt], [response], 0, "cpu")
    inputs = given.input_ids, given.response_mask
    assert (Critic.from_pretrained(model)(*inputs) == 0).all()
    critic, scorer = Critic.from_pretrained(reward), RewardModel.from_pretrained(reward)
    values = critic(*inputs)
    # The value before a token is the score of what stands before it.
    for t in range(len(response)):
        ids = torch.tensor([prompt + response[:t]])
        score = scorer(ids, torch.ones_like(ids)).item()
        assert values[0, len(prompt) - 1 + t].item() == pytest.approx(score, abs=1e-5)
    assert (values[~given.response_mask] == 0).all()
    critic.save_pretrained(str(tmp_path / "saved"))
    assert torch.equal(Critic.from_pretrained(tmp_path / "saved")(*inputs), values)


@pytest.mark.parametrize("given", [None, 0, 2])
def test_the_critics_own_options_are_the_policys_only_where_they_are_left_out(
    given, folders, monkeypatch
):
    monkeypatch.setattr(engine, "initialize", lambda model, optim, *_: optim)
    options = {"critic_lr": given, "critic_warmup_steps": given}
    config = config_of(
        folders[0], critic=folders[1], lr=0.5, warmup_steps=3, adam_eps=1e-3, **options
    )
    tokenizer = encode.load_tokenizer(config.model)
    optim = load_critic(config, tokenizer, torch.device("cpu"), 1)
    own = (0.5, 3) if given is None else (given, given)
    assert (optim.lr, optim.warmup_steps, optim.adam_eps) == (*own, 1e-3)


@pytest.mark.slow
def test_critic_only_leaves_the_policy_alone_and_teaches_the_critic(files, tmp_path):
    options = {
        "critic_lr": 1e-2,
        "value_clip": None,
        "gae_lambda": 1.0,
        "epochs": 4,
        "eval_size": 0,
    }
    ppo.train(ppo_config(files, tmp_path, critic_only=12, minibatches=2, **options))
    metrics = tiny.read_metrics(tmp_path)
    before, after = tiny.weights(files[0]), tiny.weights(tmp_path / "model")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(metrics) == 12 and {m["lr"] for m in metrics} == {0.0}
    assert metrics[-1]["loss/value_avg"] < 0.6 * metrics[0]["loss/value_avg"]


@pytest.mark.slow
def test_updates_stop_together_once_the_policy_has_moved_and_the_schedule_goes_on(files, tmp_path):
    config = {"target_kl": 1e-6, "epochs": 3, "minibatches": 2, "eval_size": 0, "steps": 2}
    ppo.train(ppo_config(files, tmp_path, **config))
    metrics = tiny.read_metrics(tmp_path)
    assert [m["optim/updates"] for m in metrics] == [2, 2]
    # The second update of the second step: of 12 planned ones the eighth, though only the fourth that was made.
    assert metrics[1]["lr"] == pytest.approx(1e-3 * (12 - 7) / 12)
    assert metrics[1]["optim/critic_lr"] == pytest.approx(1e-3 * (12 - 7) / 12)
