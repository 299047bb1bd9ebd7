"""Truncated sampling: the kept sets are recorded where tokens are drawn; test_metrics.py has the loss over them."""

import pytest
import torch

from fused_rl import TokenSupport
from fused_rl.trainers.rollouts.sampling import Sampling
from tests.lazy import transformers
from tests.trainers import tiny

PROMPTS = [[1, 70, 71], [1, 70, 71], [1, 80], [1, 90, 91, 92, 93], [1, 90, 91, 92, 93]]
TOP_P, TOP_K, MIN_P = {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}
FILTERS = {"top_p": TOP_P, "top_k": TOP_K, "min_p": MIN_P, "together": TOP_P | TOP_K | MIN_P}
TEMPERATURE, LENGTH = 0.7, 8


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
    lm = load(folder) if of == "ours" else bloom()
    torch.manual_seed(0)
    # Rows end at different lengths and leave the batch; two batches, in another order than the prompts'.
    sampling = Sampling(TEMPERATURE, LENGTH, tuple(range(0, 263, 6)), **filters)
    responses = tiny.respond(lm, PROMPTS, sampling, batch_size=3)
    assert len({len(response.ids) for response in responses}) > 1
    for prompt, response in zip(PROMPTS, responses, strict=True):
        logits = lm(input_ids=torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1]
        assert lists_of(response.support) == [kept_by_definition(row, **filters) for row in logits]


def test_greedy_and_the_whole_softmax_have_no_record(folder):
    lm = load(folder)
    for sampling in (sampling_of(), Sampling(0.0, LENGTH, (3,), **FILTERS["together"])):
        assert not sampling.truncates
        for response in tiny.respond(lm, PROMPTS, sampling, batch_size=8):
            assert response.support is None
    likeliest = tiny.generate(lm, PROMPTS, sampling_of(top_k=1), batch_size=8)
    assert likeliest == tiny.generate(lm, PROMPTS, Sampling(0.0, LENGTH, (3,)), batch_size=8)


def load(folder):
    return tiny.load_lm(tiny.config_of("grpo", folder), trainable=False).base


def bloom():
    """A model that transformers samples from."""
    sizes = {"vocab_size": 263, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    config = transformers.BloomConfig(**sizes, initializer_range=0.3)
    return transformers.AutoModelForCausalLM.from_config(config).eval()
