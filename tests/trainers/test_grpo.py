"""GRPO's parts one by one, in this process: rewards, advantages, which groups are trained on, the loss, the reference."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import fused_rl
from fused_rl import reference as exact_ops
from fused_rl.trainers import data, drawing, engine, groups, grpo, models, policy, reference
from fused_rl.trainers.config import InputError
from fused_rl.trainers.rollout import Prompt, Response
from tests.distributed import run_distributed
from tests.test_losses import PAPERS
from tests.trainers import tiny
from tests.trainers.test_ppo_step import EOS, LENGTH, TEMPERATURE, Plain, Sampler, Scorer, assert_gradients_close

GROUP = 4
REWARDS = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.model_folder(tmp_path_factory.mktemp("grpo") / "model")


def config_of(folder="m", **options) -> grpo.GRPOConfig:
    settings = {"model": folder, "dataset": "", "output_dir": "", "zero_stage": 0, "prompts_per_step": 2}
    settings |= {"group_size": GROUP, "minibatches": 1, "micro_batch_size": 3, "max_new_tokens": LENGTH}
    settings |= {"temperature": TEMPERATURE, "lr": 1e-3, "max_grad_norm": 0.0, "steps": 4}
    return grpo.GRPOConfig(**(settings | options))


def given(words: str) -> grpo.GRPOConfig:
    """As the command line makes it, without its parser's half a second."""
    flags = [flag.split() for flag in words.split("--")[1:]]
    options = {name: yaml.safe_load(value) for name, value in flags}
    return grpo.GRPOConfig(model="m", dataset="d.jsonl", output_dir="o", **options)


# Rewards and advantages.


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        ({}, 1.207381, -0.724429),
        ({"preset": "dr_grpo"}, 0.625, -0.375),
        ({"preset": "rloo"}, 0.714286, -0.428571),
        ({"preset": "reinforce++"}, 0.625 / 0.517549, -0.375 / 0.517549),
        ({"advantage": "group-mean-batch-std"}, 1.207381, -0.724429),
        ({"std_floor": 1.25}, 0.5, -0.3),
        ({"preset": "reinforce++", "std_floor": 1.25}, 0.5, -0.3),
    ],
)
def test_advantages_are_the_published_numbers(options, right, wrong):
    found = groups.advantages_of(config_of(group_size=8, **options), REWARDS, torch.ones(8, dtype=torch.bool))
    expected = torch.where(REWARDS == 1, right, wrong)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_groups_that_do_not_count_reach_no_advantage():
    rewards, counts = torch.cat([REWARDS, torch.full((8,), 9.0)]), torch.arange(16) < 8
    for advantage in groups.ADVANTAGES:
        found = groups.advantages_of(config_of(group_size=8, advantage=advantage), rewards, counts)
        alone = groups.advantages_of(config_of(group_size=8, advantage=advantage), REWARDS, counts[:8])
        assert torch.equal(found[:8], alone) and (found[8:] == 0).all(), advantage


def test_the_overlong_penalty_is_dapos():
    """arXiv:2503.14476, eq. 13, with L_max = 10 and L_cache = 4; a factor of 1/2."""
    config = config_of(max_new_tokens=10, overlong_buffer=4, overlong_factor=0.5)
    lengths = torch.tensor([0, 5, 6, 7, 8, 9, 10])
    expected = [-0.5 * (0 if n <= 6 else ((10 - 4) - n) / 4) for n in lengths.tolist()]
    assert groups.overlong_penalty(config, lengths).tolist() == [-2 * -0.5 * e for e in expected]
    assert groups.overlong_penalty(config, lengths)[-1] == 0.5
    assert (groups.overlong_penalty(config_of(), lengths) == 0).all()


# Options that mean something only beside others.

BESIDE = [
    ("--std_floor 0.1 --preset dr_grpo", "std_floor=0.1 has no meaning with this advantage.*--advantage group-std"),
    ("--std_floor 0.1 --advantage leave-one-out", "std_floor=0.1 has no meaning"),
    ("--zero_variance drop --preset reinforce++", "zero_variance=drop has no meaning with advantage=batch-std"),
    ("--max_refills 2", "max_refills=2 has no meaning without --zero_variance refill"),
    ("--max_refills 2 --zero_variance drop", "max_refills=2 has no meaning"),
    ("--overlong_factor 2", "overlong_factor=2.0 has no meaning without --overlong_buffer"),
    ("--overlong_buffer 257", "overlong_buffer=257 is more than max_new_tokens"),
    ("--ref_mixup_alpha 0.6", "ref_mixup_alpha=0.6 has no meaning without --ref_sync_every"),
    ("--ref_sync_every 5 --kl_every 0", "ref_sync_every=5 has no meaning with kl_coef=0 and kl_every=0"),
    ("--ref_sync_every 5 --lora_rank 4", "ref_sync_every=5 needs a reference of its own.*lora_rank"),
    ("--sapo_temperature_pos 2", "sapo_temperature_pos=2.0 has no meaning with surrogate=clip.*--surrogate sapo$"),
    ("--vespo_k_neg 2 --preset sapo", "vespo_k_neg=2.0 has no meaning with surrogate=sapo.*--surrogate vespo$"),
    ("--clip_low 0.1 --preset rloo", "clip_low=0.1 has no meaning with surrogate=policy-gradient.*clip or cispo or geo"),
    ("--clip_high 0.3 --surrogate vespo", "clip_high=0.3 has no meaning with surrogate=vespo"),
    ("--ratio_level sequence --preset rloo", "ratio_level=sequence has no meaning with surrogate=policy-gradient"),
    ("--delta 3 --preset cispo", "delta belongs to the surrogate .clip., not to 'cispo'"),
    ("--verifiers math,0.2*m:f", "'math' has no weight, and '0.2[*]m:f' has one; give each a weight: 1[*]math"),
    ("--prompts_per_step 4 --minibatches 8 --share_prompts true", "minibatches=8 would split groups, which share their pro"),
]


@pytest.mark.parametrize(("words", "message"), BESIDE, ids=[words for words, _ in BESIDE])
def test_an_option_without_a_meaning_is_one_line_at_the_start(words, message):
    with pytest.raises(InputError, match=message) as refused:
        grpo.arithmetic(given(words), 1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        "--std_floor 0 --preset rloo",
        "--zero_variance keep --max_refills 3 --overlong_factor 1 --ref_mixup_alpha 1",
        "--clip_low 0.2 --sapo_temperature_pos 1 --preset rloo",  # the values that there would be anyway
        "--std_floor 0.1 --advantage batch-std",
        "--zero_variance refill --max_refills 9 --overlong_buffer 256 --overlong_factor 0.5",
        "--ref_sync_every 3 --ref_mixup_alpha 0.6 --kl_coef 0.1 --kl_every 0",
        "--kl_in reward --kl_coef 0",  # the first of a sweep
        "--surrogate tests.trainers.test_grpo:own_surrogate --sapo_temperature_pos 2",  # which may read anything
        "--verifiers 1*math,0*m:f,0.5*m:g",
        "--verifiers reward_model:m,0*m:g",  # 0 leaves out, it does not weigh
    ],
)
def test_an_option_that_has_its_meaning_or_asks_for_nothing_is_taken(words):
    grpo.arithmetic(given(words), 1)


def test_the_dry_run_says_it_too():
    with pytest.raises(SystemExit) as stopped:
        grpo.main(["--model", "m", "--dataset", "d", "--output_dir", "o", "--max_refills", "2", "--dry_run"])
    (line,) = stopped.value.code.splitlines()
    assert line.startswith("fused-rl grpo: error: max_refills=2 has no meaning")


def own_surrogate(log_ratio, advantages, logprobs, sequences, options):
    return -log_ratio.exp() * advantages


@pytest.mark.parametrize(("words", "warned"), [("--kl_in reward --kl_estimator k3", True), ("--kl_in reward", False)])
def test_an_estimator_that_does_not_do_what_it_seems_to_is_told_at_the_start(words, warned, recwarn):
    grpo.arithmetic(given(f"{words} --kl_coef 0.1"), 1)
    assert bool([w for w in recwarn if "grows exponentially" in str(w.message)]) == warned


# The loss of a step, against fp64.


@pytest.fixture(scope="module")
def exact(folder):
    """8 responses to 2 prompts, scored; and the policy's log-probabilities and entropies of them, each (T,) fp64."""
    made = torch.Generator().manual_seed(0)
    responses = []
    for i, length in enumerate(torch.randint(2, LENGTH + 1, (8,), generator=made).tolist()):
        ids = torch.randint(10, 200, (length,), generator=made).tolist()
        responses.append(Response([*ids[:-1], EOS] if i % 3 else ids, "stop" if i % 3 else "length"))
    prompts = [Prompt([1, 70, 71], {}), Prompt([1, 80], {})]
    lm = models.load_lm(config_of(folder), torch.device("cpu"), trainable=False).base.double().requires_grad_(True)
    rows = []
    for i, response in enumerate(responses):
        prompt = prompts[i // GROUP].ids
        at = slice(len(prompt) - 1, len(prompt) + len(response.ids) - 1)
        logp = (lm(input_ids=torch.tensor([prompt + response.ids])).logits[0, at] / TEMPERATURE).log_softmax(-1)
        taken = logp.gather(1, torch.tensor(response.ids)[:, None])[:, 0]
        drift = 0.2 * torch.randn(2, len(taken), generator=made)
        rows.append({"at": at, "logprobs": taken, "entropy": -(logp.exp() * logp).sum(-1), "drift": drift})
    scores = [0.0, 2, 1, 2, 3, 0, 1, 1]
    return {"lm": lm, "rows": rows, "prompts": prompts, "responses": responses, "scores": scores}


def fake_policy(config, module, responses, scores) -> policy.Policy:
    tokenizer, sampling = data.load_tokenizer(config.model), policy.Sampling(TEMPERATURE, LENGTH, (EOS,))
    scorers, device = [Scorer(scores)], torch.device("cpu")
    return policy.Policy(config, module, None, Sampler(responses), sampling, scorers, tokenizer, device)


def measured_of(exact, batch) -> policy.Measured:
    """Log-probabilities of a policy that sampled and of a reference, a little off those of the policy."""
    old, ref = torch.zeros(batch.response_mask.shape), torch.zeros(batch.response_mask.shape)
    for i, row in enumerate(exact["rows"]):
        old[i, row["at"]] = row["logprobs"].detach().float() + row["drift"][0]
        ref[i, row["at"]] = row["logprobs"].detach().float() + row["drift"][1]
    return policy.Measured(old, torch.zeros_like(old), ref, None)


def accumulated(folder, exact, **options):
    """The sums of one minibatch in three micro-batches, and the model with its gradients."""
    config = config_of(folder, **options)
    lm = models.load_lm(config, torch.device("cpu"))
    made = fake_policy(config, Plain(lm), exact["responses"], exact["scores"])
    drawn = drawing.draw(made, exact["prompts"], None, 1)
    advantages = groups.advantages_of(config, drawn.rollout.rewards, drawn.counts)
    measured, parts = measured_of(exact, drawn.rollout.batch), list(torch.arange(8).split(3))
    sums = grpo.accumulate(made, drawn, measured, advantages, parts, 1, on_policy=False)
    return sums, lm, advantages


def padded(exact, name):
    """(8, LENGTH) fp64, and where it is of a token."""
    values = [row[name] for row in exact["rows"]]
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def assert_step_is(exact, found, lm, loss):
    assert found == pytest.approx(loss.item(), rel=2e-5, abs=1e-7)
    exact["lm"].zero_grad()
    loss.backward(retain_graph=True)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in exact["lm"].parameters()))
    assert norm > 1e-3 and math.isfinite(norm)
    assert_gradients_close(lm, exact["lm"], "lm.")


def exact_terms(exact):
    """(8, T) each: logprobs, old and ref logprobs as the step reads them, which tokens are there, sequence ids."""
    logprobs = padded(exact, "logprobs")
    lengths = torch.tensor([len(row["logprobs"]) for row in exact["rows"]])
    there = torch.arange(logprobs.shape[1]) < lengths[:, None]
    drift = torch.zeros(2, *logprobs.shape)
    for i, row in enumerate(exact["rows"]):
        drift[:, i, : lengths[i]] = row["drift"]
    old, ref = (logprobs.detach().float() + drift).double()
    return logprobs, old, ref, there, torch.arange(8)[:, None].expand(logprobs.shape)


@pytest.mark.parametrize("preset", PAPERS)
def test_a_step_of_every_preset_is_its_paper(folder, exact, preset):
    chosen = {"advantage": "group-std"} if preset == "ppo" else {}
    sums, lm, advantages = accumulated(folder, exact, preset=preset, kl_coef=0.1, kl_estimator="k3", **chosen)
    surrogate, level, loss_agg, clip_low, clip_high = PAPERS[preset]
    logprobs, old, ref, there, ids = exact_terms(exact)
    loss = exact_ops.policy_loss(
        logprobs,
        old,
        advantages.double()[:, None].expand(logprobs.shape),
        there,
        sequence_ids=ids,
        ratio_level=level,
        surrogate=surrogate,
        loss_agg=loss_agg,
        clip_low=clip_low,
        clip_high=clip_high,
        ref_logprobs=ref,
        kl_coef=0.1,
        kl_estimator="k3",
        max_length=LENGTH,
    )
    assert_step_is(exact, sums["loss"], lm, loss)


def clipped(exact, advantages, high=0.2):
    """(8, T): PPO's surrogate of each token, and where tokens are."""
    logprobs, old, _, there, _ = exact_terms(exact)
    ratio, a = (logprobs - old).exp(), advantages.double()[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(0.8, 1 + high) * a), there


def test_clip_higher_truncated_responses_masked_and_the_entropy_bonus(folder, exact):
    options = {"preset": "dapo", "clip_high": 0.5, "mask_truncated": True, "entropy_coef": 0.3}
    sums, lm, advantages = accumulated(folder, exact, **options)
    losses, there = clipped(exact, advantages, high=0.5)
    there = there & (torch.arange(8) % 3 != 0)[:, None]
    loss = ((losses - 0.3 * padded(exact, "entropy")) * there).sum() / there.sum()
    assert_step_is(exact, sums["loss"], lm, loss)


def test_the_tokens_of_highest_entropy_alone_are_trained_on(folder, exact):
    sums, lm, advantages = accumulated(folder, exact, preset="dapo", clip_high=0.2, top_entropy=0.3, micro_batch_size=8)
    assert sums["policy_loss"] != 0
    losses, there = clipped(exact, advantages)
    kept, entropy = torch.zeros_like(there), padded(exact, "entropy").detach()
    for part in torch.arange(8).split(3):  # of each micro-batch its own fraction
        threshold = entropy[part][there[part]].quantile(0.7)
        kept[part] = there[part] & (entropy[part] >= threshold)
    assert 0 < kept.sum() < there.sum() / 2
    assert_step_is(exact, sums["loss"], lm, (losses * kept).sum() / there.sum())


def test_tokens_below_a_threshold_of_entropy_are_not_trained_on(folder, exact):
    _, _, _, there, _ = exact_terms(exact)
    entropy = padded(exact, "entropy").detach()
    threshold = entropy[there].median().item() + 1e-4
    sums, lm, advantages = accumulated(folder, exact, preset="dapo", clip_high=0.2, entropy_threshold=threshold)
    losses, _ = clipped(exact, advantages)
    kept = there & (entropy >= threshold)
    assert 0 < kept.sum() < there.sum()
    assert_step_is(exact, sums["loss"], lm, (losses * kept).sum() / there.sum())
