"""`--head_dtype`: logits of bfloat16 weights in fp32, the same ones in sampling, in measuring and in the loss."""

import pytest
import torch

import fused_rl
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.models.head import WideHead
from fused_rl.trainers.models.logits import ReferenceStates
from tests.trainers import tiny

BF16, FP32 = torch.bfloat16, torch.float32


def load(folder, **options):
    config = tiny.config_of("grpo", folder, **{"dtype": "bfloat16", "zero_stage": 1} | options)
    return tiny.load_lm(config, trainable=False)


@pytest.fixture
def batch():
    return make_batch([[1, 70, 71, 72], [1, 80]], [[90, 91, 3], [92, 93, 94, 95, 96]], 0, "cpu")


def fp64_logits(lm, batch):
    """Of the head's own operands: hidden states and weights as the model rounds them."""
    hidden = lm.base.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    hidden, head = hidden[:, :-1][batch.response_mask], lm.base.get_output_embeddings()
    return torch.nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double())


@torch.no_grad()
@pytest.mark.parametrize(
    ("head_dtype", "least", "most"),
    [("float32", 0, 3e-6), ("bfloat16", 1e-4, 0.1), ("auto", 1e-4, 0.1)],
)
def test_scores_and_logits_are_those_of_an_exact_head(folder, batch, head_dtype, least, most):
    mask, targets = batch.response_mask, batch.input_ids[:, 1:][batch.response_mask]
    lm = load(folder, head_dtype=head_dtype)
    head = lm.base.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.linspace(-1, 1, head.out_features, dtype=BF16))
    rows = lm(batch.input_ids, mask, 0.7)
    logits = lm.base(input_ids=batch.input_ids, use_cache=False).logits[:, :-1][mask]
    exact = fp64_logits(lm, batch)
    truth = fused_rl.token_logprobs(exact, targets, temperature=0.7).logprobs
    assert least <= (rows.logprobs[mask] - truth).abs().max() <= most
    # What the sampler draws from.
    assert logits.dtype == (FP32 if head_dtype == "float32" else BF16)
    of_logits = fused_rl.token_logprobs(logits, targets, temperature=0.7).logprobs
    torch.testing.assert_close(of_logits, rows.logprobs[mask], rtol=0, atol=most)

    # What is measured beside an exact KL has the same bits, and the KL no more rounding.
    states = lm(batch.input_ids, mask, under_head=lambda states, _: states)
    compared = lm(batch.input_ids, mask, 0.7, reference=ReferenceStates(lm, states * 0.5))
    assert torch.equal(compared.logprobs, rows.logprobs)
    own, other = ((x / 0.7).log_softmax(-1) for x in (exact, (exact + head.bias.double()) / 2))
    kl = (own.exp() * (own - other)).sum(-1)
    torch.testing.assert_close(compared.kl[mask].double(), kl, rtol=0, atol=most)


def test_the_head_stays_the_models_own(folder, tmp_path):
    """Tied weights stay tied, and what is saved has the same names and values."""
    for name in (folder, tiny.model_folder(tmp_path / "tied", tie=True)):
        plain, wide = load(name).base, load(name, head_dtype="float32").base
        a, b = plain.state_dict(), wide.state_dict()
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        assert isinstance(wide.get_output_embeddings(), WideHead)
    assert wide.get_input_embeddings().weight is wide.get_output_embeddings().weight
    narrow = load(folder, dtype="float32", head_dtype="float32").base.get_output_embeddings()
    assert type(narrow) is torch.nn.Linear
