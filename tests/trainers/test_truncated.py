"""Truncated sampling: the kept sets are recorded where tokens are drawn, and everything of the loss is over them."""

import functools

import pytest
import torch

from fused_rl import TokenSupport
from fused_rl.trainers import grpo
from fused_rl.trainers.models import packing
from fused_rl.trainers.policy import policy
from fused_rl.trainers.policy.groups import Groups
from fused_rl.trainers.policy.reference import Reference
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.lazy import transformers
from tests.marks import grid
from tests.trainers import tiny
from tests.trainers.steps import Plain, fake_policy

PROMPTS = [[1, 70, 71], [1, 70, 71], [1, 80], [1, 90, 91, 92, 93], [1, 90, 91, 92, 93]]
TOP_P, TOP_K, MIN_P = {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}
FILTERS = {"top_p": TOP_P, "top_k": TOP_K, "min_p": MIN_P, "together": TOP_P | TOP_K | MIN_P}
TEMPERATURE, LENGTH = 0.7, 8


config_of = functools.partial(
    tiny.config_of,
    "grpo",
    temperature=TEMPERATURE,
    max_new_tokens=LENGTH,
    prompts_per_step=4,
    group_size=4,
    micro_batch_size=8,
)


def load(folder, **options):
    return tiny.load_lm(config_of(folder, **options), trainable=False)


def sampling_of(**filters) -> Sampling:
    return Sampling(TEMPERATURE, LENGTH, (3,), **filters)


def lists_of(support: TokenSupport) -> list[list[int]]:
    return [sorted(part.tolist()) for part in support.ids.split(support.offsets.diff().tolist())]


def kept_by_definition(logits: torch.Tensor, top_p=1.0, top_k=0, min_p=0.0) -> list[int]:
    """The ids that the filters leave of one row (V,), in fp64: k, then p of what is left, then min_p."""
    p = (logits.double() / TEMPERATURE).softmax(-1)
    if top_k:
        p = torch.where(p >= p.sort(descending=True).values[top_k - 1], p, 0)
    p = p / p.sum()
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]  # the mass of the likelier ones
    kept = order[(before < top_p) & (p[order] > 0)]
    return sorted(kept[p[kept] >= min_p * p.max()].tolist())


# What is drawn, and from what.


@pytest.mark.parametrize("of", ["ours", "transformers"])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_the_record_is_what_the_filters_leave_in_their_order(folder, filters, of):
    lm = load(folder).base if of == "ours" else bloom()
    torch.manual_seed(0)
    # Rows end at different lengths and leave the batch; two batches, in another order than the prompts'.
    sampling = Sampling(TEMPERATURE, LENGTH, tuple(range(0, 263, 6)), **filters)
    responses = tiny.respond(lm, PROMPTS, sampling, batch_size=3)
    assert len({len(response.ids) for response in responses}) > 1
    for prompt, response in zip(PROMPTS, responses, strict=True):
        logits = lm(input_ids=torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1]
        assert lists_of(response.support) == [kept_by_definition(row, **filters) for row in logits]


def test_greedy_and_the_whole_softmax_have_no_record(folder):
    lm = load(folder).base
    for sampling in (sampling_of(), Sampling(0.0, LENGTH, (3,), **FILTERS["together"])):
        assert not sampling.truncates
        for response in tiny.respond(lm, PROMPTS, sampling, batch_size=8):
            assert response.support is None
    likeliest = tiny.generate(lm, PROMPTS, sampling_of(top_k=1), batch_size=8)
    assert likeliest == tiny.generate(lm, PROMPTS, Sampling(0.0, LENGTH, (3,)), batch_size=8)


# The loss.


def policy_of(folder, config, sampler, **filters) -> policy.Policy:
    """The policy of a `folder`, and a reference of other weights; prompts are shared as the config says."""
    lm, other = tiny.load_lm(config), load(folder, loss_from=config.loss_from)
    made = torch.Generator().manual_seed(0)
    for weight in other.parameters():
        weight += 0.02 * torch.randn(weight.shape, generator=made)
    scores = [float(i % 3) for i in range(16)]
    found = fake_policy(config, Plain(lm), [], scores)
    found.sampler, found.sampling = sampler, sampling_of(**filters)
    found.reference = Reference(Plain(other))
    found.costs = packing.Costs(token=1.0, pair=0.0) if config.share_prompts else None
    return found


def all_of(rolled):
    """The rollout as a step's groups, every one of which counts."""
    return Groups(rolled, torch.ones(len(rolled.samples), dtype=torch.bool), {})


GROUPS = [
    Prompt([1, 70, 71], {}),
    Prompt([1, 80], {}),
    Prompt([1, 90, 91, 92, 93], {}),
    Prompt([1, 60], {}),
]


def sets_of(ids: list[int], generator, vocab: int = 263) -> list[list[int]]:
    """Of each token a set: the token alone, a few, many, or the whole vocabulary."""
    made = []
    for nth, token in enumerate(ids):
        size = (0, 5, 200, 1, 17)[nth % 5]
        others = torch.randperm(vocab, generator=generator)[:size].tolist()
        made.append([] if nth % 5 == 3 else list({token, *others}))
    return made


class Decided(tiny.Sampler):
    """Responses of all lengths, one of them empty, with sets of all sizes."""

    records_support = True

    def sample(self, prompts, sampling):
        generator = torch.Generator().manual_seed(1)
        responses = []
        for i in range(len(prompts)):
            ids = torch.randint(10, 200, ((i * 3) % (LENGTH + 1),), generator=generator).tolist()
            responses.append(Response(ids, "length", support=sets_of(ids, generator)))
        return responses


def exact_rows(lm, sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (T, V) of one response, -inf outside of its sets, and those of its tokens (T,); fp64."""
    ids, start = sample.prompt_ids + sample.response.ids, len(sample.prompt_ids)
    logits = lm(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1] / TEMPERATURE
    banned = torch.zeros(logits.shape, dtype=torch.bool)
    for row, kept in zip(banned, sample.response.support, strict=True):
        row[:] = bool(kept)
        row[kept] = False
    logp = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
    return logp, logp.gather(1, torch.tensor(sample.response.ids, dtype=torch.int64)[:, None])[:, 0]


def entropy_of(logp):
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)


WAYS = {"linear": {}, "logits": {"loss_from": "logits"}, "linear, shared": {"share_prompts": True}}
WAYS["logits, shared"] = {"loss_from": "logits", "share_prompts": True}


# A loss of single tokens, and one of sequences.
@grid("way, preset", WAYS, ("grpo", "gspo"))
def test_the_loss_and_its_gradient_are_over_the_sets(folder, way, preset):
    options = {
        "preset": preset,
        "clip_low": 0.1,
        "clip_high": 0.15,
        "kl_coef": 0.3,
        "entropy_coef": 0.05,
    }
    made = policy_of(folder, config_of(folder, **options, **way), Decided(), top_p=0.9)
    rolled = made.roll_out(GROUPS, made.sampling, 4)
    parts, mask = list(torch.arange(16).split(5)), rolled.batch.response_mask
    generator = torch.Generator().manual_seed(3)
    measured = policy.measure(made, rolled.batch, parts, exact_kl=False)
    # Far enough away that some ratios are clipped.
    for values in (
        measured.old_logprobs,
        measured.ref_logprobs,
    ):
        values += torch.where(mask, 0.3 * torch.randn(mask.shape, generator=generator), 0)
    advantages = torch.randn(16, generator=generator)
    sums = grpo.accumulate(made, all_of(rolled), measured, advantages, parts, 1, on_policy=False)

    lm = load(folder).base.double().requires_grad_(True)
    losses, entropies = [], []
    for i, sample in enumerate(rolled.samples):
        logp, chosen = exact_rows(lm, sample)
        entropies.append(entropy_of(logp))
        old, ref = (
            values[i][mask[i]].double() for values in (measured.old_logprobs, measured.ref_logprobs)
        )
        log_ratio, d = chosen - old, chosen - ref
        token_ratio, k3 = log_ratio.exp(), torch.expm1(-d) + d
        ratio = token_ratio if preset == "grpo" else log_ratio.mean().exp().expand(len(old))
        clipped = ratio.clamp(1 - 0.1, 1 + 0.15)
        loss = -torch.minimum(ratio * advantages[i], clipped * advantages[i])
        total = loss + 0.3 * token_ratio * k3 - 0.05 * entropies[-1]
        losses.append(total.mean() if len(old) else total.sum())
    torch.stack(losses).mean().backward()
    assert sums["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert sums["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
    assert 0 < sums["clipfrac"] < 1
    exact = dict(lm.named_parameters())
    for name, weight in made.model.module.lm.named_parameters():
        scale = exact[name].grad.abs().max().item()
        torch.testing.assert_close(
            weight.grad.double(), exact[name].grad, atol=2e-5 * scale + 1e-9, rtol=1e-4, msg=name
        )


def bloom():
    """A model that transformers samples from."""
    sizes = {"vocab_size": 263, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    config = transformers.BloomConfig(**sizes, initializer_range=0.3)
    return transformers.AutoModelForCausalLM.from_config(config).eval()
