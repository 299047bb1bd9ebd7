"""GRPO's parts one by one: rewards, advantages, which groups are trained on, the loss, the reference."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from fused_rl import reference as exact_ops
from fused_rl.trainers import grpo
from fused_rl.trainers.base import ranks
from fused_rl.trainers.data import encode
from fused_rl.trainers.models import language_model, moving_reference
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.policy import groups, policy, reference
from fused_rl.trainers.rollouts.types import Prompt, Response
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
    ("--ref_sync_every 101 --kl_coef 0.1", "ref_sync_every=101 is more than steps: the reference would never move"),
    ("--kl_in reward", "kl_in=reward has no meaning with kl_coef=0"),
    ("--sapo_temperature_pos 2", "sapo_temperature_pos=2.0 has no meaning with surrogate=clip.*--surrogate sapo$"),
    ("--vespo_k_neg 2 --preset sapo", "vespo_k_neg=2.0 has no meaning with surrogate=sapo.*--surrogate vespo$"),
    (
        "--clip_low 0.1 --preset rloo",
        "clip_low=0.1 has no meaning with surrogate=policy-gradient.*clip or cispo or geo",
    ),
    ("--clip_high 0.3 --surrogate vespo", "clip_high=0.3 has no meaning with surrogate=vespo"),
    ("--ratio_level sequence --preset rloo", "ratio_level=sequence has no meaning with surrogate=policy-gradient"),
    ("--delta 3 --preset cispo", "delta belongs to the surrogate .clip., not to 'cispo'"),
    (
        "--prompts_per_step 4 --minibatches 8 --share_prompts true",
        "minibatches=8 would split groups, which share their pro",
    ),
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
        "--kl_in loss --kl_coef 0",  # the default, spelled out
        "--surrogate tests.trainers.test_grpo:own_surrogate --sapo_temperature_pos 2",  # which may read anything
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
    lm = (
        language_model.load_lm(config_of(folder), torch.device("cpu"), trainable=False)
        .base.double()
        .requires_grad_(True)
    )
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
    tokenizer, sampling = encode.load_tokenizer(config.model), policy.Sampling(TEMPERATURE, LENGTH, (EOS,))
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
    lm = language_model.load_lm(config, torch.device("cpu"))
    made = fake_policy(config, Plain(lm), exact["responses"], exact["scores"])
    drawn = groups.draw(made, exact["prompts"], None, 1)
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
    logprobs, _, ref, _, _ = exact_terms(exact)
    kl1 = ((logprobs - ref).detach() * there).sum() / there.any(1).sum()  # of the responses that are trained on
    assert sums["kl1"] == pytest.approx(kl1.item(), rel=1e-4)


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


def test_ranks_meet_equally_often_whatever_one_of_them_leaves_out(folder, exact, monkeypatch):
    """One that meets once more waits for the others for ever."""
    meetings, global_sum = [], ranks.global_sum
    monkeypatch.setattr(ranks, "global_sum", lambda values: meetings.append(values) or global_sum(values))
    times = []
    for mask_truncated in (False, True):
        meetings.clear()
        accumulated(folder, exact, mask_truncated=mask_truncated)
        times.append(len(meetings))
    assert times[0] == times[1] > 1


@pytest.mark.parametrize("minibatches", [2, 4])  # of whole groups; and more than there are groups: of responses
def test_minibatches_are_drawn_anew_in_every_epoch(minibatches):
    torch.manual_seed(1)
    config = config_of(minibatches=minibatches, epochs=6)
    together = GROUP if groups.keeps_groups(config, 1) else 1
    updates = policy.plan(config, 2 * GROUP, config.micro_batch_size, "cpu", together)
    assert len(updates) == 6 * minibatches
    orders = [torch.cat(sum(updates[i : i + minibatches], [])) for i in range(0, len(updates), minibatches)]
    assert len({tuple(order.tolist()) for order in orders}) > 1
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(2 * GROUP))
        if minibatches == 2:
            assert torch.equal(order // GROUP, (order // GROUP)[::GROUP].repeat_interleave(GROUP))


# Which groups are trained on.


class Echo:
    """Responds to each prompt with tokens that number the prompt and the copy."""

    def sample(self, prompts, sampling):
        seen, responses = {}, []
        for prompt in map(tuple, prompts):
            seen[prompt] = seen.get(prompt, 0) + 1
            responses.append(Response([prompt[-1], 100 + seen[prompt], EOS], "stop"))
        return responses

    def publish(self, step):
        pass


class Judge:
    """Scores that differ within a group where the prompt's number is odd; all 1 where it is divisible by 4."""

    name, weight, solved_at = "judge", 1.0, 1.0

    def __call__(self, samples):
        scores = []
        for sample in samples:
            number, copy = sample.response.ids[0], sample.response.ids[1] - 100
            scores.append(float(copy % 2) if number % 2 else float(number % 4 == 0))
        return scores


def prompts_of(*numbers: int) -> list[Prompt]:
    return [Prompt([1, 50, number], {}) for number in numbers]


def drawn_by(config, numbers, rank=0, world=1):
    """What `draw` makes of the first prompts_per_step of the numbers, the rest waiting; and how many it asked for."""
    tokenizer, sampling = encode.load_tokenizer(config.model), policy.Sampling(TEMPERATURE, LENGTH, (EOS,))
    scorers, device = [Judge()], torch.device("cpu")
    text = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=200))  # all that a rollout asks a model
    module = Plain(SimpleNamespace(base=SimpleNamespace(config=text)))
    made = policy.Policy(config, module, None, Echo(), sampling, scorers, tokenizer, device)
    waiting, asked = list(numbers[config.prompts_per_step :]), []

    def more(count):
        asked.append(count)
        taken = [waiting.pop(0) for _ in range(math.ceil(count / world) * world)]
        return prompts_of(*taken[rank::world])

    drawn = groups.draw(made, prompts_of(*numbers[: config.prompts_per_step][rank::world]), more, 1)
    of_groups = [sample.prompt_ids[-1] for sample in drawn.rollout.samples[:: config.group_size]]
    return drawn, of_groups, asked


def test_groups_of_equal_rewards_are_kept_dropped_or_refilled(folder, capsys):
    numbers = [11, 12, 14, 13, 16, 15, 18, 17, 19, 21]
    options = {"prompts_per_step": 4, "minibatches": 2}
    drawn, of_groups, asked = drawn_by(config_of(folder, **options), numbers)
    assert of_groups == [11, 12, 14, 13] and drawn.counts.all() and not asked
    shared = {"groups/trained": 4, "frac_reward_zero_std": 0.5, "frac_groups_all_solved": 0.25}
    assert {key: drawn.metrics[key] for key in shared} == shared and drawn.metrics["frac_groups_none_solved"] == 0.25

    drawn, of_groups, asked = drawn_by(config_of(folder, zero_variance="drop", **options), numbers)
    assert of_groups == [11, 13] and drawn.counts.all() and not asked
    assert (drawn.metrics["groups/drawn"], drawn.metrics["groups/trained"]) == (4, 2)
    assert drawn.metrics["frac_reward_zero_std"] == 0.5

    # Two are missing; of 16 and 15 one is there; of 18 none; of 17 one.
    drawn, of_groups, asked = drawn_by(config_of(folder, zero_variance="refill", **options), numbers)
    assert asked == [2, 1, 1] and of_groups == [11, 13, 15, 17] and drawn.counts.all()
    assert (drawn.metrics["groups/drawn"], drawn.metrics["groups/trained"]) == (8, 4)
    assert drawn.metrics["episode"] == 8 * GROUP and "rollouts" not in capsys.readouterr().out


def test_refilling_is_bounded_says_so_and_goes_on_with_what_there_is(folder, capsys):
    numbers = [11, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 13]
    config = config_of(folder, zero_variance="refill", max_refills=2, prompts_per_step=4, minibatches=2)
    drawn, of_groups, asked = drawn_by(config, numbers)
    assert asked == [3, 3] and drawn.metrics["groups/drawn"] == 10 and drawn.metrics["groups/trained"] == 1
    assert of_groups == [11, 12]  # minibatches are of whole groups here, so a second one fills up
    assert drawn.counts.tolist() == [True] * GROUP + [False] * GROUP
    line = (
        "step 1: 1 of 4 groups have rewards that differ after 3 rollouts (max_refills=2); the step is trained on those"
    )
    assert line in capsys.readouterr().out


def draw_here(rank, world, folder):
    drawn, of_groups, asked = drawn_by(
        config_of(folder, zero_variance="refill", prompts_per_step=4, max_refills=1),
        [11, 12, 13, 14, 16, 15, 20],
        rank,
        world,
    )
    return of_groups, drawn.counts.tolist(), asked, tiny.untimed([drawn.metrics])[0]


def test_ranks_agree_on_refills_and_share_what_they_find(folder):
    """Rank 0 has both groups with a signal; one of two that are drawn then is rank 1's: 3 of 4, and a fourth fills."""
    (first, first_counts, asked, metrics), (second, second_counts, *again) = run_distributed(draw_here, 2, folder)
    assert asked == [2] and again == [asked, metrics]
    assert (first, second) == ([11, 15], [13, 16])
    assert first_counts == [True] * 2 * GROUP and second_counts == [True] * GROUP + [False] * GROUP
    assert (metrics["groups/drawn"], metrics["groups/trained"]) == (6, 3)


def test_a_step_whose_responses_were_all_cut_and_are_masked_says_so(folder, exact, capsys):
    config = config_of(folder, mask_truncated=True)
    lm = language_model.load_lm(config, torch.device("cpu"))
    responses = []
    for response in exact["responses"]:
        ids = response.ids[:-1] if response.finish == "stop" else response.ids
        responses.append(dataclasses.replace(response, ids=ids, finish="length"))
    policies = [fake_policy(config, Plain(lm), of, [1.0] * 8) for of in (exact["responses"], responses)]
    told = []
    for made in policies:
        groups.draw(made, exact["prompts"], None, 7)
        told.append("step 7: every response was cut" in capsys.readouterr().out)
    assert told == [False, True]


@pytest.mark.parametrize("minibatches", [1, 2])  # with 2 the group that is dropped fills up the second one
def test_a_dropped_group_is_as_if_it_had_not_been_drawn(folder, exact, minibatches):
    scores = [0.0, 2, 1, 2, 1, 1, 1, 1]
    given = exact | {"scores": scores}
    options = {"zero_variance": "drop", "minibatches": minibatches, "mask_truncated": True}
    config = config_of(folder, kl_coef=0.1, kl_estimator="k3", **options)
    lm = language_model.load_lm(config, torch.device("cpu"))
    made = fake_policy(config, Plain(lm), exact["responses"], scores)
    drawn = groups.draw(made, exact["prompts"], None, 1)
    assert len(drawn.counts) == 4 * minibatches and drawn.counts.sum() == 4
    measured = measured_of(given | {"rows": exact["rows"][: len(drawn.counts)]}, drawn.rollout.batch)
    advantages = groups.advantages_of(config, drawn.rollout.rewards, drawn.counts)
    parts = list(torch.arange(len(drawn.counts)).split(3))
    sums = grpo.accumulate(made, drawn, measured, advantages, parts, 1, on_policy=False)

    # A mean over the four responses of the first group, of which those that were cut count 0.
    losses, there = clipped(exact, torch.cat([advantages[:4], torch.zeros(4)]))
    logprobs, _, ref, _, _ = exact_terms(exact)
    d, there = logprobs - ref, there & (torch.arange(8) % 3 != 0)[:, None]
    losses = losses + 0.1 * (torch.expm1(-d) + d)
    per_response = (losses * there).sum(1) / there.sum(1).clamp(min=1)
    assert_step_is(exact, sums["loss"], lm, per_response[:4].sum() / 4)


def test_a_step_without_any_signal_is_a_step_of_gradients_0(folder, exact):
    config = config_of(folder, zero_variance="drop")
    lm = language_model.load_lm(config, torch.device("cpu"))
    made = fake_policy(config, Plain(lm), exact["responses"], [1.0] * 8)
    drawn = groups.draw(made, exact["prompts"], None, 1)
    advantages = groups.advantages_of(config, drawn.rollout.rewards, drawn.counts)
    measured = policy.Measured(*(torch.zeros(drawn.rollout.batch.response_mask.shape) for _ in range(2)), None, None)
    parts = list(torch.arange(4).split(3))
    sums = grpo.accumulate(made, drawn, measured, advantages, parts, 1, on_policy=True)
    assert not drawn.counts.any() and sums["loss"] == 0
    assert all((p.grad == 0).all() for p in lm.parameters() if p.grad is not None)


# The KL in the reward, and the reference.


@pytest.mark.parametrize(("estimator", "definition"), [(None, lambda d: d), ("k2", lambda d: d**2 / 2)])
def test_the_kl_in_the_reward_is_its_sum_over_the_response(folder, exact, estimator, definition):
    """Less in the reward before the advantages are taken, and nothing of it in the loss."""
    config = config_of(folder, kl_in="reward", kl_coef=0.3, kl_estimator=estimator)
    lm = language_model.load_lm(config, torch.device("cpu"))
    made = fake_policy(config, Plain(lm), exact["responses"], exact["scores"])
    drawn = groups.draw(made, exact["prompts"], None, 1)
    mask, measured = drawn.rollout.batch.response_mask, measured_of(exact, drawn.rollout.batch)
    charged = config.kl_of_tokens(measured, mask).sum(1)
    _, old, ref, there, _ = exact_terms(exact)
    torch.testing.assert_close(charged.double(), (definition(old - ref) * there).sum(1), rtol=1e-5, atol=1e-6)

    parts = list(torch.arange(8).split(3))
    sums = grpo.accumulate(made, drawn, measured, torch.zeros(8), parts, 1, on_policy=False)
    assert sums["loss"] == 0 and sums["kl1"] != 0
    assert all((p.grad == 0).all() for p in lm.parameters() if p.grad is not None)


def trained(folder, rows, output, **options):
    """A run of a few small steps on a verifier that says right or wrong; its metrics."""
    settings = {"verifiers": "tests.trainers.tiny:first_is_odd", "eval_size": 0, "prompts_per_step": 4}
    settings |= {"steps": 4, "group_size": 2, "minibatches": 2, "micro_batch_size": 8, "save_every": 1}
    settings |= {"model": folder, "dataset": rows, "output_dir": str(output), "keep_checkpoints": 9}
    grpo.train(config_of(**tiny.settled(settings | options)))
    return tiny.untimed(tiny.read_metrics(output))


def forget_after(whole, stopped, step):
    """A copy of a run as it was when it was stopped after `step`."""
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "model")
    (stopped / "checkpoints" / "latest").write_text(f"step-{step}")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return tiny.jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", tiny.sums(11))


REFILLED = {"zero_variance": "refill", "max_refills": 2, "overlong_buffer": 2, "overlong_factor": 0.25}
SYNCED = {"kl_coef": 0.1, "ref_sync_every": 2, "ref_mixup_alpha": 0.6}
CHARGED = {"kl_in": "reward", "kl_coef": 0.05, "advantage": "group-mean-batch-std", "std_floor": 0.1, "epochs": 2}


@pytest.mark.parametrize("options", [REFILLED, SYNCED | CHARGED], ids=["refilled", "synced"])
def test_a_run_that_is_resumed_equals_the_uninterrupted_one(folder, rows, tmp_path, options, monkeypatch):
    synced, sync = [], moving_reference.sync

    def watched(frozen, policy_, alpha):
        before = {k: v.clone() for k, v in frozen.named_parameters()}
        sync(frozen, policy_, alpha)
        ours = dict(policy_.module.named_parameters())
        for name, weight in frozen.named_parameters():
            mixed = alpha * ours[name].double() + (1 - alpha) * before[name].double()
            torch.testing.assert_close(weight.double(), mixed, rtol=1e-6, atol=1e-8)
        synced.append(before["lm.lm_head.weight"])

    monkeypatch.setattr(moving_reference, "sync", watched)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    metrics = trained(folder, rows, whole, **options)
    forget_after(whole, stopped, 3)
    torch.manual_seed(1234)
    assert trained(folder, rows, stopped, resume=True, **options) == metrics
    for name, weight in tiny.weights(whole / "model").items():
        assert torch.equal(weight, tiny.weights(stopped / "model")[name]), name

    if "zero_variance" in options:
        assert {m["groups/trained"] for m in metrics} <= {1, 2, 3, 4} and max(m["groups/drawn"] for m in metrics) > 4
        drawn = torch.tensor([m["groups/drawn"] for m in metrics]).cumsum(0) * 2
        assert [m["episode"] for m in metrics] == drawn.tolist()
        state = json.loads((whole / "checkpoints" / "step-4" / "state.json").read_text())
        assert state["position"] == metrics[-1]["episode"] / 2
        assert any(m["overlong_penalty"] > 0 for m in metrics)
    else:
        # At steps 2 and 4 of both runs; the resumed one's last reference is the one that was saved.
        assert len(synced) == 3 and not torch.equal(synced[0], synced[1]) and torch.equal(synced[1], synced[2])


def test_a_copy_of_the_policy_is_at_no_distance_from_it(folder, rows, tmp_path):
    options = {"minibatches": 1, "eval_size": 0, "lr": 1e-2, "save_every": 0, "steps": 3}
    metrics = trained(folder, rows, tmp_path / "copied", ref_sync_every=2, **options)
    kept = trained(folder, rows, tmp_path / "kept", **options)
    exact_kl = [m["objective/kl_exact"] for m in metrics]
    assert exact_kl[:2] == [m["objective/kl_exact"] for m in kept[:2]] and exact_kl[1] > 1e-3
    assert exact_kl[2] == pytest.approx(0, abs=1e-6) and kept[2]["objective/kl_exact"] > 1e-3
    estimates = {f"objective/kl{i}_avg" for i in (1, 2, 3, 4)}
    assert estimates < kept[0].keys()  # with kl_coef 0, too


def kept_in(found: list, monkeypatch, module, name: str):
    """Append to `found` what the function returns from now on."""
    function = getattr(module, name)

    def watched(*inputs, **options):
        found.append(function(*inputs, **options))
        return found[-1]

    monkeypatch.setattr(module, name, watched)


def test_the_reward_that_is_trained_on_is_less_by_the_kl_and_logged(folder, rows, tmp_path, monkeypatch):
    drawn, charged, trained_on = [], [], []
    kept_in(drawn, monkeypatch, grpo, "draw")
    kept_in(charged, monkeypatch, reference.KLConfig, "kl_of_tokens")
    advantages_of = groups.advantages_of
    monkeypatch.setattr(grpo, "advantages_of", lambda c, r, k: trained_on.append(r) or advantages_of(c, r, k))
    options = {"minibatches": 2, "save_every": 0, "lr": 1e-2, "kl_coef": 0.5, "steps": 2}
    _, second = trained(folder, rows, tmp_path, kl_in="reward", **options)
    charged = [of_tokens.sum(1) for of_tokens in charged]
    assert charged[1].abs().min() > 1e-4
    torch.testing.assert_close(trained_on[1], drawn[1].rollout.rewards - 0.5 * charged[1], rtol=0, atol=1e-6)
    assert second["objective/kl"] == pytest.approx(charged[1].mean().item(), rel=1e-5)
    assert second["objective/kl1_avg"] != pytest.approx(second["objective/kl"], rel=1e-4)  # which is of the updates
    assert second["objective/non_score_reward"] == pytest.approx(-0.5 * second["objective/kl"])
    assert second["loss/total_avg"] == pytest.approx(second["loss/policy_avg"], abs=1e-12)


def test_a_forward_pass_that_does_not_repeat_itself_is_told(folder, rows, tmp_path, monkeypatch, capsys):
    """Where the exact KL has taken the policy's log-probabilities, the first minibatch's are compared with them."""
    options = {"minibatches": 1, "save_every": 0, "steps": 1}
    trained(folder, rows, tmp_path / "same", **options)
    assert "warning" not in capsys.readouterr().out
    forward = language_model.LanguageModel.forward

    def noisy(self, *inputs, token_loss=None, **more):
        with torch.no_grad():
            self.base.get_output_embeddings().weight.add_(1e-3 if token_loss is not None else 0.0)
            self.base.get_output_embeddings().weight[::2].mul_(0.9 if token_loss is not None else 1.0)
        return forward(self, *inputs, token_loss=token_loss, **more)

    monkeypatch.setattr(language_model.LanguageModel, "forward", noisy)
    trained(folder, rows, tmp_path / "noisy", **options)
    assert "warning: the first minibatch's mean ratio is" in capsys.readouterr().out


def train_and_resume(rank, world, folder, rows, output, stages):
    """All of it at once, over ranks that find unequally many groups with a signal."""
    output = Path(output)
    for stage in stages:
        options = SYNCED | {"kl_in": "reward", "zero_stage": stage, "offload": stage == 3}
        options |= {"zero_variance": "refill", "max_refills": 1}
        whole, stopped = output / f"{stage}", output / f"{stage}-stopped"
        metrics = trained(folder, rows, whole, **options)
        if rank == 0:
            forget_after(whole, stopped, 3)
        torch.distributed.barrier()
        torch.manual_seed(1234)
        assert trained(folder, rows, stopped, resume=True, **options) == metrics


@pytest.mark.slow
def test_over_two_ranks_and_all_zero_stages_it_is_one_run_and_resumes(folder, rows, tmp_path):
    run_distributed(train_and_resume, 2, folder, rows, str(tmp_path), [0, 1, 2, 3], timeout=500)
    first = tiny.weights(tmp_path / "0" / "model")
    assert min(m["groups/trained"] for m in tiny.read_metrics(tmp_path / "0")) < 4  # unequal counts are dealt
    for stage in range(4):
        whole, stopped = (tiny.weights(tmp_path / name / "model") for name in (f"{stage}", f"{stage}-stopped"))
        for name, weight in whole.items():
            assert torch.equal(weight, stopped[name]), name
            torch.testing.assert_close(weight, first[name], atol=5e-5, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("options", [REFILLED, SYNCED | CHARGED], ids=["refilled", "synced"])
def test_the_size_of_micro_batches_changes_nothing(folder, rows, tmp_path, options):
    whole = trained(folder, rows, tmp_path / "8", save_every=0, **options)
    split = trained(folder, rows, tmp_path / "3", save_every=0, micro_batch_size=3, **options)
    for a, b in zip(whole, split, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    weights = tiny.weights(tmp_path / "3" / "model")
    for name, weight in tiny.weights(tmp_path / "8" / "model").items():
        torch.testing.assert_close(weights[name], weight, atol=1e-4, rtol=0, msg=name)
