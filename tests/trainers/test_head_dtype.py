"""`--head_dtype`: logits of bfloat16 weights in fp32, the same ones in sampling, in measuring and in the loss."""

import pytest
import torch

import fused_rl
from fused_rl.trainers import grpo
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.models import language_model
from fused_rl.trainers.models.logits import ReferenceStates
from tests.trainers import tiny

BF16, FP32 = torch.bfloat16, torch.float32


def load(folder, **options):
    options = {"model": folder, "dataset": "", "output_dir": "", "dtype": "bfloat16", **options}
    return tiny.load_lm(grpo.GRPOConfig(**options), trainable=False)


@pytest.fixture
def batch():
    return make_batch([[1, 70, 71, 72], [1, 80]], [[90, 91, 3], [92, 93, 94, 95, 96]], 0, "cpu")


def fp64_logits(lm, batch):
    """Of the head's own operands: hidden states and weights as the model rounds them."""
    hidden = lm.base.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    hidden = hidden[:, :-1][batch.response_mask]
    return hidden.double() @ lm.base.get_output_embeddings().weight.double().t()


@torch.no_grad()
def test_scores_and_logits_are_those_of_an_exact_head(folder, batch):
    mask, targets = batch.response_mask, batch.input_ids[:, 1:][batch.response_mask]
    for head_dtype, least, most in (
        ("float32", 0, 3e-6),
        ("bfloat16", 1e-4, 0.1),
        ("auto", 1e-4, 0.1),
    ):
        lm = load(folder, head_dtype=head_dtype)
        rows = lm(batch.input_ids, mask, 0.7)
        logits = lm.base(input_ids=batch.input_ids, use_cache=False).logits[:, :-1][mask]
        truth_logits = fp64_logits(lm, batch)
        truth = fused_rl.token_logprobs(truth_logits, targets, temperature=0.7)
        assert least <= (rows.logprobs[mask] - truth.logprobs).abs().max() <= most
        # what the sampler draws from
        assert logits.dtype == (FP32 if head_dtype == "float32" else BF16)
        of_logits = fused_rl.token_logprobs(logits, targets, temperature=0.7).logprobs
        torch.testing.assert_close(of_logits, rows.logprobs[mask], rtol=0, atol=most)

        # what is measured beside an exact KL has the same bits, and the KL no more rounding
        states = lm(batch.input_ids, mask, under_head=lambda states, _: states)
        other = ReferenceStates(lm, states * 0.5)
        compared = lm(batch.input_ids, mask, 0.7, reference=other)
        assert torch.equal(compared.logprobs, rows.logprobs)
        pair = [(x / 0.7).log_softmax(-1) for x in (truth_logits, truth_logits * 0.5)]
        kl = (pair[0].exp() * (pair[0] - pair[1])).sum(-1)
        torch.testing.assert_close(compared.kl[mask].double(), kl, rtol=0, atol=most)


def test_the_head_stays_the_models_own(folder, tmp_path):
    """Tied weights stay tied, and what is saved has the same names and values."""
    tied = tiny.model_folder(tmp_path / "tied", tie=True)
    for name in (folder, tied):
        plain, wide = load(name), load(name, head_dtype="float32")
        assert isinstance(wide.base.get_output_embeddings(), language_model.WideHead)
        a, b = plain.base.state_dict(), wide.base.state_dict()
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    embedded, head = wide.base.get_input_embeddings(), wide.base.get_output_embeddings()
    assert embedded.weight is head.weight
    assert (
        type(load(folder, dtype="float32", head_dtype="float32").base.get_output_embeddings())
        is torch.nn.Linear
    )
