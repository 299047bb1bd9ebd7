"""Truncated sampling: the kept sets are recorded where tokens are drawn, and everything of the loss is over them."""

import functools
from dataclasses import replace

import pytest
import torch

from fused_rl import TokenSupport
from fused_rl.trainers import grpo
from fused_rl.trainers.data import encode
from fused_rl.trainers.policy import policy
from fused_rl.trainers.policy.groups import Groups
from fused_rl.trainers.policy.reference import Reference
from fused_rl.trainers.rollouts import types
from fused_rl.trainers.rollouts.roll_out import batch_of
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.marks import grid
from tests.trainers import tiny
from tests.trainers.runs import forget_after, on_ranks
from tests.trainers.steps import Plain, Scorer

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


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_the_record_is_what_the_filters_leave_in_their_order(folder, filters):
    lm = load(folder).base
    torch.manual_seed(0)
    # Rows end at different lengths and leave the batch; two batches, in another order than the prompts'.
    sampling = Sampling(TEMPERATURE, LENGTH, tuple(range(0, 263, 6)), **filters)
    responses = tiny.respond(lm, PROMPTS, sampling, batch_size=3)
    assert len({len(response.ids) for response in responses}) > 1
    sizes = []
    for prompt, response in zip(PROMPTS, responses, strict=True):
        logits = lm(input_ids=torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1]
        expected = [kept_by_definition(row, **filters) for row in logits]
        assert lists_of(response.support) == expected
        sizes += map(len, expected)
    assert 1 < sum(sizes) / len(sizes) < 200


def test_draws_are_from_the_kept_ids_and_in_their_proportions(folder):
    lm, prompt, filters = load(folder), [1, 70, 71], FILTERS["together"]
    logits = lm.base(input_ids=torch.tensor([prompt])).logits[0, -1]
    kept = kept_by_definition(logits, **filters)
    torch.manual_seed(0)
    one = Sampling(TEMPERATURE, 1, (3,), **filters)
    first = [r.ids[0] for r in tiny.respond(lm.base, [prompt] * 20000, one, batch_size=20000)]
    counts = torch.bincount(torch.tensor(first), minlength=len(logits)).double()
    assert set(first) <= set(kept)
    p = (logits[kept].double() / TEMPERATURE).softmax(-1)
    chi2 = ((counts[kept] - 20000 * p).square() / (20000 * p)).sum()
    # Five standard deviations.
    assert len(kept) > 5 and chi2 < len(kept) + 5 * (2 * len(kept)) ** 0.5


@pytest.mark.parametrize(
    "filters", [FILTERS["together"], {"top_p": 0.9999999}], ids=["together", "all but nothing"]
)
def test_models_that_transformers_samples_from_have_the_same_record(filters):
    import transformers

    config = transformers.BloomConfig(
        vocab_size=264, hidden_size=16, initializer_range=0.3, n_layer=1, n_head=2
    )
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(config).eval()
    # So many that rows are padded.
    sampling = Sampling(TEMPERATURE, 6, tuple(range(0, 264, 4)), **filters)
    responses = tiny.respond(lm, PROMPTS, sampling, batch_size=3)
    assert len({len(response.ids) for response in responses}) > 1
    for prompt, response in zip(PROMPTS, responses, strict=True):
        logits = lm(input_ids=torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1]
        expected = [kept_by_definition(row, **filters) for row in logits]
        # Nothing left out is written as nothing.
        whole = [[] if len(ids) == 264 else ids for ids in expected]
        assert lists_of(response.support) == whole


def test_greedy_and_the_whole_softmax_have_no_record(folder):
    lm = load(folder).base
    for sampling in (sampling_of(), Sampling(0.0, LENGTH, (3,), **FILTERS["together"])):
        assert not sampling.truncates
        for response in tiny.respond(lm, PROMPTS, sampling, batch_size=8):
            assert response.support is None
    likeliest = tiny.generate(lm, PROMPTS, sampling_of(top_k=1), batch_size=8)
    assert likeliest == tiny.generate(lm, PROMPTS, Sampling(0.0, LENGTH, (3,)), batch_size=8)


# The record on its way to the loss.


def test_parts_of_a_batch_have_the_sets_of_their_tokens():
    kept = [[[5, 9], [6]], [], [[7, 1, 2], [], [8]], [[9]]]
    ids = [[5, 6], [], [7, 3, 8], [9]]
    samples = [
        types.Sample({}, [1, 2, 4][: i + 1], Response(ids[i], "length", support=kept[i]), "")
        for i in range(3)
    ]
    samples.append(types.Sample({}, [1], Response([9], "length"), ""))  # without log-probabilities
    batch = batch_of(samples, 0, torch.device("cpu"))
    assert lists_of(batch.support) == [[5, 9], [6], [1, 2, 7], [], [8], []]
    part = batch.rows(torch.tensor([3, 2, 1, 0]))
    assert lists_of(part.support) == [[], [1, 2, 7], [], [8], [5, 9], [6]]
    assert part.input_ids[:, 1:][part.response_mask].tolist() == [9, 7, 3, 8, 5, 6]
    empty = batch.rows(torch.tensor([1]))
    assert len(empty.support) == 0 and not empty.response_mask.any()
    assert batch.rows(torch.tensor([1, 3])).rows(torch.tensor([1])).support.offsets.tolist() == [
        0,
        0,
    ]
    assert batch_of(samples[-1:], 0, torch.device("cpu")).support is None


# The loss.


class Drawing(tiny.Sampler):
    """Draws by transformers' `generate` alone, and remembers its own log-probabilities."""

    records_support = True

    def __init__(self, lm, filters):
        self.lm, self.filters, self.logprobs = lm, filters, []

    def sample(self, prompts, sampling):
        import transformers

        options = transformers.GenerationConfig(
            do_sample=True,
            temperature=TEMPERATURE,
            max_new_tokens=LENGTH,
            eos_token_id=3,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **({"top_k": 0} | self.filters),
        )
        responses = []
        for ids in prompts:
            output = self.lm.generate(input_ids=torch.tensor([ids]), generation_config=options)
            drawn, scores = output.sequences[0, len(ids) :], torch.cat(output.scores)
            self.logprobs.append(scores.log_softmax(-1).gather(1, drawn[:, None])[:, 0])
            finish = "stop" if drawn[-1] == 3 else "length"
            responses.append(
                Response(drawn.tolist(), finish, support=TokenSupport.from_scores(scores))
            )
        return responses


def policy_of(folder, config, sampler=None, **filters) -> policy.Policy:
    """The policy of a `folder`, and a reference of other weights; prompts are shared as the config says."""
    lm, other = tiny.load_lm(config), load(folder, loss_from=config.loss_from)
    for weight in other.parameters():
        weight += 0.02 * torch.randn(
            weight.shape, generator=torch.Generator().manual_seed(weight.numel())
        )
    costs = policy.Costs(token=1.0, pair=0.0) if config.share_prompts else None
    tokenizer, device = encode.load_tokenizer(folder), torch.device("cpu")
    scorers = [Scorer([float(i % 3) for i in range(16)])]
    sampler = Drawing(lm.base, filters) if sampler is None else sampler
    return policy.Policy(
        config,
        Plain(lm),
        Reference(Plain(other)),
        sampler,
        sampling_of(**filters),
        scorers,
        tokenizer,
        device,
        costs=costs,
    )


def all_of(rolled):
    """The rollout as a step's groups, every one of which counts."""
    return Groups(rolled, torch.ones(len(rolled.samples), dtype=torch.bool), {})


GROUPS = [
    Prompt([1, 70, 71], {}),
    Prompt([1, 80], {}),
    Prompt([1, 90, 91, 92, 93], {}),
    Prompt([1, 60], {}),
]


@pytest.mark.parametrize(
    ("filters", "share_prompts"),
    [
        *(
            pytest.param(FILTERS[name], True, id=name, marks=pytest.mark.slow)
            for name in ("top_p", "top_k", "min_p")
        ),
        pytest.param(FILTERS["together"], True, id="together"),
        pytest.param(FILTERS["together"], False, id="together, own prompts"),
    ],
)
def test_replayed_log_probabilities_are_the_samplers_and_the_first_ratios_are_1(
    folder, filters, share_prompts
):
    config = config_of(folder, minibatches=2, share_prompts=share_prompts, **filters)
    made = policy_of(folder, config, **filters)
    torch.manual_seed(0)
    rolled = made.roll_out(GROUPS, made.sampling, 4)
    parts, mask = list(torch.arange(16).split(4)), rolled.batch.response_mask
    measured, reported = policy.measure(made, rolled.batch, parts), torch.cat(made.sampler.logprobs)
    torch.testing.assert_close(measured.old_logprobs[mask], reported, atol=1e-5, rtol=0)

    # The first minibatch by itself and the second as it was measured; nothing was trained in between.
    for index, on_policy in ((parts[:2], True), (parts[2:], False)):
        sums = grpo.accumulate(
            made, all_of(rolled), measured, torch.ones(16), index, 1, on_policy=on_policy
        )
        assert sums["ratio_minus_1"] == sums["ratio_minus_1_square"] == sums["approx_kl"] == 0

    # Over the whole vocabulary they are off by the logarithm of the mass that was kept, token by token.
    whole = policy.measure(made, replace(rolled.batch, support=None), parts).old_logprobs[mask]
    off, kept = whole - reported, rolled.batch.support
    log_mass = []
    for sample in rolled.samples:
        ids, start = sample.prompt_ids + sample.response.ids, len(sample.prompt_ids)
        logits = (
            made.model.module.base(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].double()
        )
        log_mass.append((logits / TEMPERATURE).log_softmax(-1).detach())
    sets = lists_of(kept)
    expected = torch.stack(
        [row[ids].logsumexp(0) for row, ids in zip(torch.cat(log_mass), sets, strict=True)]
    )
    torch.testing.assert_close(off.double(), expected, atol=1e-5, rtol=0)
    assert off.mean() < -0.1 and (off.exp() < 0.9).double().mean() > 0.5, off.mean()


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


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_measured_is_over_the_sets_of_both_models(folder, way):
    made = policy_of(folder, config_of(folder, **way), Decided(), top_p=0.9)
    rolled = made.roll_out(GROUPS, made.sampling, 4)
    measured = policy.measure(made, rolled.batch, list(torch.arange(16).split(5)))
    lm, other = (model.module.base.double() for model in (made.model, made.reference.model))
    for i, sample in enumerate(rolled.samples):
        (logp, chosen), (ref_logp, ref_chosen) = exact_rows(lm, sample), exact_rows(other, sample)
        difference = (logp - ref_logp).masked_fill(logp == -torch.inf, 0)
        expected = {"old_logprobs": chosen, "ref_logprobs": ref_chosen, "entropy": entropy_of(logp)}
        expected["kl"] = (logp.exp() * difference).sum(-1)
        for name, values in expected.items():
            found = getattr(measured, name)[i][rolled.batch.response_mask[i]]
            torch.testing.assert_close(found.double(), values.detach(), atol=1e-5, rtol=0, msg=name)
        alone = [nth for nth, kept in enumerate(sample.response.support) if len(kept) == 1]
        for name in expected:  # one id to choose from is certain
            assert (getattr(measured, name)[i][rolled.batch.response_mask[i]][alone] == 0).all(), (
                name
            )
    assert measured.kl.max() > 1e-3


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


# Runs.

ALL = FILTERS["together"] | {"temperature": TEMPERATURE}


def run(files, output_dir, **options) -> list[dict]:
    """The metrics of a run of grpo."""
    settings = {
        "dataset": files[1],
        "output_dir": str(output_dir),
        "verifiers": "tests.trainers.tiny:odd_characters",
    }
    settings |= {
        "eval_size": 4,
        "eval_samples": 2,
        "steps": 2,
        "lr": 1e-3,
        "kl_coef": 0.1,
        "save_every": 0,
        **ALL,
    }
    grpo.train(config_of(files[0], **(settings | options)))
    return tiny.untimed(tiny.read_metrics(output_dir))


@pytest.mark.slow
def test_a_run_draws_from_the_sets(files, tmp_path, capsys):
    first = run(files, tmp_path / "a")
    assert "warning" not in capsys.readouterr().out  # the first ratio is 1
    # A choice among 20 at most has at most this entropy, held-out evaluation too; among all 263 it is larger.
    whole = run(files, tmp_path / "whole", steps=1, top_p=1.0, top_k=0, min_p=0.0)
    bound = torch.tensor(20.0).log().item()
    for key, step in (("eval/entropy", 0), ("policy/entropy_avg", 1)):
        assert first[step][key] < bound < whole[step][key]
    assert first[0]["eval/accuracy_greedy"] == whole[0]["eval/accuracy_greedy"]


def on_two_ranks(rank, world, files, output_dir, stage):
    # Groups without a signal are dropped: the others, with their sets, are dealt to the ranks anew.
    options = {
        "steps": 3,
        "save_every": 1,
        "keep_checkpoints": 9,
        "zero_stage": stage,
        "zero_variance": "drop",
    }
    whole = run(files, f"{output_dir}/whole", **options)
    forget_after(f"{output_dir}/whole", f"{output_dir}/stopped", 1)
    return whole, run(files, f"{output_dir}/stopped", resume=True, **options)


@pytest.mark.slow
def test_two_ranks_with_and_without_partitioned_weights(files, tmp_path):
    made = {}
    for stage in (0, 3):
        (tmp_path / str(stage)).mkdir()
        for whole, stopped in on_ranks(on_two_ranks, 2, files, str(tmp_path / str(stage)), stage):
            assert whole == stopped
            made.setdefault(stage, whole)
    for x, y in zip(made[0], made[3], strict=True):
        assert x == pytest.approx(y, rel=1e-3, abs=1e-4)
