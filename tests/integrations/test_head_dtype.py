"""`logits_dtype` of the patches, and TRL's own setting: log-probabilities against fp64 of the same bf16 operands."""

import pytest
import torch

import fused_rl
from fused_rl.integrations import transformers as of_transformers
from fused_rl.integrations import verl as of_verl
from tests.integrations import tiny_models

BF16, FP32 = torch.bfloat16, torch.float32
EXACT = 3e-6
ROUNDED = 1e-3  # an error that rounding to bf16 makes and fp32 logits do not


pytestmark = pytest.mark.usefixtures("cpu")


def operands(sigma=2.0, rows=24, width=64, vocab=1000):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=generator).to(BF16)
    weight = (torch.randn(vocab, width, generator=generator) * (sigma / width**0.5)).to(BF16)
    return hidden, weight, torch.randint(vocab, (rows,), generator=generator)


def exact(hidden, weight, targets):
    return fused_rl.token_logprobs(hidden.double() @ weight.double().t(), targets)


def error(found, truth):
    return (found.double() - truth).abs().max()


def test_trl_heads():
    pytest.importorskip("trl")
    from trl.kernels import chunked_logprob

    from fused_rl.integrations import trl as of_trl

    hidden, weight, targets = operands()
    truth = exact(hidden, weight, targets)

    def scored(states):
        function = chunked_logprob.ChunkedLogProbFunction
        return function.apply(states, weight, None, targets, 1.0, 512, None, 1.0, ("entropy",))[:2]

    with of_trl.patch(logits_dtype=FP32):
        logprobs, entropy = scored(hidden)
        assert error(logprobs, truth.logprobs) <= EXACT
        assert error(entropy, truth.entropy) <= EXACT
        with pytest.raises(
            ValueError, match=r"patched with {'logits_dtype': torch.float32}.* unpatch\(\) first"
        ):
            of_trl.patch(logits_dtype=BF16)
    with of_trl.patch(logits_dtype=BF16):
        assert error(scored(hidden)[0], truth.logprobs) >= ROUNDED
        with pytest.raises(
            ValueError, match="logits_dtype must be None, torch.float32 or .*float32; got torch.bf"
        ):
            scored(hidden.float())
    with of_trl.patch():  # on a CPU as the operands; with the hidden states in fp32 all of it
        assert error(scored(hidden)[0], truth.logprobs) >= ROUNDED
        assert error(scored(hidden.float())[0], truth.logprobs) <= EXACT


def test_transformers():
    ids, losses, truths = torch.arange(2, 26).view(2, 12), {}, []
    for logits_dtype in (None, BF16, FP32):
        model = tiny_models.model("qwen2").to(BF16)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        seen = []
        model.base_model.register_forward_hook(
            lambda *hook, seen=seen: seen.append(hook[2].last_hidden_state)
        )
        with of_transformers.patch(model, logits_dtype=logits_dtype):
            losses[logits_dtype] = model(ids, labels=ids).loss
            with pytest.raises(ValueError, match="this model is patched with logits_dtype="):
                of_transformers.patch(model, logits_dtype=torch.float16)
        truths.append(-exact(seen[0][:, :-1], model.lm_head.weight, ids[:, 1:]).logprobs.mean())
    assert error(losses[FP32], truths[-1]) <= EXACT
    assert torch.equal(losses[None], losses[BF16])
    assert error(losses[BF16], truths[-1]) >= 10 * EXACT


def test_verl(monkeypatch):
    """Both heads; the patch itself needs verl (tests/hosts)."""
    hidden, weight, targets = operands()
    truth = exact(hidden, weight, targets)
    heads = (of_verl.FusedLinearForPPOFunction.apply, of_verl.linear_cross_entropy)
    for head in heads:
        for logits_dtype, least, most in ((FP32, 0, EXACT), (None, ROUNDED, 0.1)):
            monkeypatch.setattr(of_verl._PATCH, "options", {"logits_dtype": logits_dtype})
            logprobs, entropy = head(hidden, weight, targets)
            assert least <= error(logprobs, truth.logprobs) <= most
            assert error(entropy, truth.entropy) <= most
