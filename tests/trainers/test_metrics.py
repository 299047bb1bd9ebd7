"""Every metric of a GRPO step against its definition in fp64, where ratio and KL are far from 1 and 0."""

import functools
import importlib
import math

import pytest
import torch

from fused_rl.trainers import grpo
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.policy import policy, setup
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.distributed import run_distributed
from tests.trainers import steps, tiny

EOS, GROUP, LENGTH = 3, 4, 6
KL_COEF, ENTROPY_COEF, CLIP_LOW, CLIP_HIGH = 0.3, 0.05, 0.2, 0.3
BUFFER = 4


def case(rank: int) -> dict:
    """What one of two ranks sampled: 2 prompts x 4 responses, and made-up log-probabilities from before the update."""
    made = torch.Generator().manual_seed(rank)
    lengths = torch.randint(1 + rank, LENGTH + rank, (8,), generator=made).tolist()
    scores = torch.randint(0, 3, (8,), generator=made).tolist()
    # So that every metric is another one than on rank 0, which has a group of equal rewards.
    if rank:
        scores[4:] = [0, 0, 0, None]
    else:
        lengths[4:], scores[4:] = [1, 1, 2, 2], [2, 2, 2, 2]
    responses = []
    for i, length in enumerate(lengths):
        ids = torch.randint(10, 200, (length,), generator=made).tolist()
        stops = length < LENGTH or i % 2 == 0
        responses.append(
            Response([*ids[:-1], EOS] if stops else ids, "stop" if stops else "length")
        )
    prompts = [Prompt([1, 70 + rank, 71], {}), Prompt([1, 80 + rank], {})]
    shape = (8, 3 + LENGTH - 1)
    before = {
        "old_logprobs": -5.9 + 0.3 * torch.randn(shape, generator=made),
        "ref_logprobs": -5.4 + 0.3 * torch.randn(shape, generator=made),
        "entropy": torch.rand(shape, generator=made),
        "kl": torch.rand(shape, generator=made),
    }
    return {"prompts": prompts, "responses": responses, "scores": scores, "before": before}


class Sampler(steps.Sampler):
    """The responses of the case."""

    published = None

    def publish(self, step, save):
        self.published = step


class Scorer(steps.Scorer):
    """The scores of the case, twice as many as they count."""

    solved_at = 1.0


config_of = functools.partial(
    tiny.config_of,
    "grpo",
    prompts_per_step=4,
    group_size=GROUP,
    minibatches=1,
    micro_batch_size=4,  # two micro-batches on each rank
    max_new_tokens=LENGTH,
    temperature=0.8,
    kl_coef=KL_COEF,
    entropy_coef=ENTROPY_COEF,
    clip_low=CLIP_LOW,
    clip_high=CLIP_HIGH,
    overlong_buffer=BUFFER,
    lr=1e-3,
    steps=4,
    max_grad_norm=0.0,
)


def step_of_a_rank(rank, world, folder):
    """The metrics of one `train_step`."""
    engine.setup(1)
    config, given = config_of(folder), case(rank)
    tokenizer = encode.load_tokenizer(folder)
    made = setup.load_policy(
        config, tokenizer, [Scorer(given["scores"])], torch.device("cpu"), updates=4
    )
    made.sampler = Sampler(given["responses"])

    def measure(policy_, batch, parts, **options):
        width = batch.response_mask.shape[1]
        masked = {
            k: torch.where(batch.response_mask, v[:, :width], 0) for k, v in given["before"].items()
        }
        return policy.BeforeUpdate(**masked)

    # As in a later minibatch, whose ratio is not 1: the old log-probabilities are those that were measured.
    accumulate = grpo.accumulate
    grpo.measure = measure
    grpo.accumulate = lambda *args, on_policy: accumulate(*args, on_policy=False)
    metrics = grpo.train_step(made, given["prompts"], 3)
    assert made.sampler.published == 3
    return metrics


def definitions(folder: str, ranks=(0, 1)) -> dict[str, float]:
    """Every metric from its definition, in fp64, over all responses of these ranks at once."""
    lm = tiny.load_lm(config_of(folder), trainable=False).base.double().requires_grad_(True)
    tokens, sequences, sizes, scores, stopped = [], [], [], [], []
    for rank in ranks:
        given = case(rank)
        prompts = sum(([prompt] * GROUP for prompt in given["prompts"]), [])
        for i, (prompt, response) in enumerate(zip(prompts, given["responses"], strict=True)):
            whole = torch.tensor([prompt.ids + response.ids])
            at = slice(len(prompt.ids) - 1, len(prompt.ids) + len(response.ids) - 1)
            logp = (lm(input_ids=whole).logits[0, at] / 0.8).log_softmax(-1)
            taken = logp.gather(1, torch.tensor(response.ids)[:, None])[:, 0]
            row = {name: values[i, at].double() for name, values in given["before"].items()}
            row |= {"logprobs": taken, "true_entropy": -(logp.exp() * logp).sum(-1)}
            tokens.append(row)
            sizes.append(len(response.ids))
            stopped.append(response.finish == "stop")
        scores += given["scores"]
    lengths = torch.tensor(sizes, dtype=torch.float64)
    scores = torch.tensor([math.nan if score is None else score for score in scores]).double()
    judged, scores = scores[~scores.isnan()], scores.nan_to_num()
    penalties = (lengths - (LENGTH - BUFFER)).clamp(min=0) / BUFFER
    rewards = 0.5 * scores - penalties
    solved = (scores >= 1).view(-1, GROUP)
    groups = rewards.view(-1, GROUP)
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    advantages = torch.where(
        equal, 0, (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    )

    # The loss: sequences' means of clip + kl_coef rk3 - entropy_coef H, and the gradient's norm.
    per_sequence = {
        name: []
        for name in ("surrogate", "total", "kl", "kl1", "kl2", "kl3", "kl4", "exact", "nll")
    }
    per_token = {name: [] for name in ("approx", "clipped", "ratio", "entropy")}
    for row, advantage in zip(tokens, advantages.flatten(), strict=True):
        log_ratio, d = row["logprobs"] - row["old_logprobs"], row["logprobs"] - row["ref_logprobs"]
        ratio, k3 = log_ratio.exp(), torch.expm1(-d) + d
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        surrogate = -torch.minimum(ratio * advantage, clipped * advantage)
        total = surrogate + KL_COEF * ratio * k3 - ENTROPY_COEF * row["true_entropy"]
        per_sequence["surrogate"].append(surrogate.mean())
        per_sequence["total"].append(total.mean())
        estimates = {"kl": ratio * k3, "kl1": d, "kl2": d**2 / 2, "kl3": k3, "kl4": ratio * d}
        for name, values in {**estimates, "exact": row["kl"], "nll": -row["old_logprobs"]}.items():
            per_sequence[name].append(values.sum())
        high, low = (
            (advantage > 0) & (ratio > 1 + CLIP_HIGH),
            (advantage < 0) & (ratio < 1 - CLIP_LOW),
        )
        per_token["clipped"].append((high | low).double())
        per_token["approx"].append(log_ratio**2 / 2)
        per_token["ratio"].append(ratio)
        per_token["entropy"].append(row["true_entropy"])
    sequences = {name: torch.stack(values).mean() for name, values in per_sequence.items()}
    tokens = {name: torch.cat(values) for name, values in per_token.items()}
    gradient = torch.autograd.grad(sequences["total"], list(lm.parameters()))
    norm = math.sqrt(sum(g.square().sum().item() for g in gradient))

    penalty = -KL_COEF * sequences["kl"] - penalties.mean()
    stop_rate = sum(stopped) / len(stopped)
    found = {
        "lr": 1e-3,
        "optim/grad_norm": norm,
        "episode": 3 * len(stopped),
        "objective/kl": sequences["kl"],
        **{f"objective/kl{i}_avg": sequences[f"kl{i}"] for i in (1, 2, 3, 4)},
        "objective/kl_exact": sequences["exact"],
        "objective/entropy": sequences["nll"],
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": 0.5 * scores.mean() + penalty,
        "objective/scores": 0.5 * scores.mean(),
        "objective/kl_coef": KL_COEF,
        "policy/approxkl_avg": tokens["approx"].mean(),
        "policy/clipfrac_avg": tokens["clipped"].mean(),
        "policy/entropy_avg": tokens["entropy"].mean(),
        "loss/policy_avg": sequences["surrogate"],
        "loss/total_avg": sequences["total"],
        "val/ratio": tokens["ratio"].mean(),
        "val/first_ratio": tokens["ratio"].mean(),
        "val/ratio_var": tokens["ratio"].var(unbiased=False),
        "val/num_eos_tokens": sum(stopped),
        "val/stop_rate": stop_rate,
        "reward": rewards.mean(),
        "reward_std": groups.std(1).mean(),
        "frac_reward_zero_std": equal.double().mean(),
        "frac_groups_all_solved": solved.all(1).double().mean(),
        "frac_groups_none_solved": (~solved.any(1)).double().mean(),
        "groups/sampled": len(groups),
        "groups/trained": len(groups),
        "overlong_penalty": penalties.mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - stop_rate,
        "rewards/points/mean": judged.mean(),
        "rewards/points/std": judged.std(unbiased=False),
        "rewards/points/none": 1 - len(judged) / len(scores),
    }
    return {key: torch.as_tensor(value).item() for key, value in found.items()}


def test_every_metric_of_a_step_is_its_definition_in_two_micro_batches_on_two_ranks(tmp_path):
    folder = tiny.model_folder(tmp_path / "model")
    first, second = run_distributed(step_of_a_rank, 2, folder, timeout=200)
    timings = {key for key in first if key.startswith(("time/", "perf/"))}
    expected = definitions(folder)
    assert abs(expected["val/ratio"] - 1) > 0.05 and expected["objective/kl1_avg"] != pytest.approx(
        0, abs=0.05
    )
    assert first.keys() - timings == expected.keys()
    one, other = (definitions(folder, [rank]) for rank in range(2))
    alike = {key for key in expected if one[key] == pytest.approx(other[key])}
    assert alike == {"lr", "objective/kl_coef", "episode", "groups/sampled", "groups/trained"}
    evaluated = {key for key in tiny.usual("grpo") if key.startswith("eval/")}
    assert {key for key in first if not key.startswith("rewards/")} == tiny.usual(
        "grpo"
    ) - evaluated - {"time/save"}
    for key, value in expected.items():
        assert first[key] == pytest.approx(value, rel=2e-5, abs=1e-7), key
        assert second[key] == first[key], key


class Silent(tiny.Sampler):
    """Nothing but empty responses."""

    def sample(self, prompts, sampling):
        return [Response([], "length") for _ in prompts]


def judge_none(response, row):
    return None


@pytest.mark.parametrize("trainer", ["grpo", "ppo", "distill"])
def test_a_mean_over_nothing_is_left_out(trainer, files, tmp_path):
    given = {"steps": 1, "eval_size": 2, "eval_samples": 2, "save_every": 0, "max_new_tokens": 4}
    given |= {"prompts_per_step": 2, "group_size": 2}
    if trainer == "distill":
        given |= {"teacher": files[0]}
    else:
        given |= {"verifiers": f"{__name__}:judge_none"}
    config = tiny.config_of(trainer, *files, tmp_path / "run", **given)
    train = importlib.import_module(f"fused_rl.trainers.{trainer}").train
    train(config, sampler=lambda *_: Silent())
    of_tokens = {"policy/entropy_avg", "val/ratio", "val/first_ratio", "policy/clipfrac_avg"}
    of_tokens |= {"distill/kl", "distill/top1_agreement", "eval/distill/kl", "eval/entropy"}
    of_tokens |= {"rewards/judge_none/mean", "rewards/judge_none/std"}
    for metrics in tiny.read_metrics(tmp_path / "run"):
        assert not metrics.keys() & of_tokens
        assert metrics.get("distill/num_tokens", 0) == 0
