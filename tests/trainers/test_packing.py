"""Rows in which responses share their prompt: the same log-probabilities and gradients as a row for each response."""

import pytest
import torch

from fused_rl.trainers import packing
from fused_rl.trainers.data import make_batch
from fused_rl.trainers.models import LanguageModel
from fused_rl.trainers.packing import Costs

# Three groups of four: prompts and responses of different lengths, an empty response, and a group of nothing else.
LENGTHS = ((3, (2, 0, 5, 1)), (7, (4, 4, 3, 1)), (5, (0, 0, 0, 0)))


def model(kind: str, **options):
    """A model of 97 tokens with weights large enough that every token's place shows."""
    import transformers

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    if kind == "GPT2":
        sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "initializer_range": 0.3}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    elif kind == "Bloom":
        sizes = {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def batch(seed: int = 1):
    generator = torch.Generator().manual_seed(seed)

    def ids(count):
        return torch.randint(1, 97, (count,), generator=generator).tolist()

    prompts, responses = [], []
    for prompt_length, lengths in LENGTHS:
        prompt = ids(prompt_length)
        prompts += [prompt] * len(lengths)
        responses += [ids(length) for length in lengths]
    return make_batch(prompts, responses, 0, "cpu")


def scores_and_gradients(lm, loss_from: str, packed, given):
    """Log-probabilities and entropies (B, T - 1), and the gradient of a random combination of them by every weight."""
    weights = torch.randn(2, *given.response_mask.shape, generator=torch.Generator().manual_seed(2))
    lm.zero_grad()
    rows = LanguageModel(lm, loss_from)(given.input_ids, given.response_mask, 0.7, packed=packed)
    (rows.logprobs * weights[0] + rows.entropy * weights[1]).sum().backward()
    values = torch.stack([rows.logprobs, rows.entropy]).detach()
    return values, {name: weight.grad.clone() for name, weight in lm.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "loss_from", "options"),
    [
        ("Llama", "linear", {}),
        ("Llama", "logits", {}),
        ("Qwen2", "linear", {"attn_implementation": "eager"}),
        ("Gemma2", "logits", {"head_dim": 8, "final_logit_softcapping": 5.0}),  # eager by itself, windows of 4096
        ("GPT2", "logits", {}),  # learned positions, of which a row has more tokens than there are
    ],
)
def test_shared_prompts_give_the_scores_and_gradients_of_own_prompts(kind, loss_from, options):
    lm, given = model(kind, **options), batch()
    values, gradients = scores_and_gradients(lm, loss_from, None, given)
    for in_row in (2, 3, 4):
        packed = packing.pack(given, in_row)
        found, found_gradients = scores_and_gradients(lm, loss_from, packed, given)
        torch.testing.assert_close(found, values, atol=2e-5, rtol=0)
        for name, gradient in gradients.items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(found_gradients[name], gradient, atol=2e-5 * scale, rtol=0, msg=name)


def test_a_row_holds_a_prompt_once_and_no_last_token():
    given = batch()
    packed = packing.pack(given, 4)
    # Prompt, and of each response all but its last token, which predicts nothing that counts.
    lengths = [prompt + sum(max(length - 1, 0) for length in responses) for prompt, responses in LENGTHS]
    assert packed.input_ids.shape == (3, max(lengths))
    assert (packed.input_ids > 0).sum(1).tolist() == lengths
    assert len(packed.states) == given.response_mask.sum()
    # The third response of the first group begins after the prompt and one token of the first.
    assert packed.position_ids[0, :8].tolist() == [0, 1, 2, 3, 3, 4, 5, 6]
    seen = packed.attention_mask[0, 0]
    assert seen[5].nonzero()[:, 0].tolist() == [0, 1, 2, 4, 5]


def test_parts_of_a_batch_are_packed_alone():
    lm, given = model("Llama"), batch()
    part = given.rows(torch.tensor([4, 5, 1, 2]))
    alone, _ = scores_and_gradients(lm, "linear", None, part)
    found, _ = scores_and_gradients(lm, "linear", packing.pack(part, 4), part)
    torch.testing.assert_close(found, alone, atol=2e-5, rtol=0)
    assert packing.pack(part, 4).input_ids.shape[0] == 2


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Llama", {}, None),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_window=8"),
        ("Mistral", {"sliding_window": 6}, "sliding_window=6"),
        ("Mistral", {"sliding_window": 30}, None),  # as long as any sequence: no token is out of sight
        ("Bloom", {}, "takes no mask and positions"),
    ],
)
def test_models_that_cannot_share_a_prompt_say_why(kind, options, reason):
    found = packing.why_not(model(kind, **options), longest=30)
    assert found is None if reason is None else reason in found


def test_a_model_that_leaves_out_the_mask_is_found_out():
    lm = model("Llama")
    forward = lm.model.forward

    def maskless(*args, attention_mask=None, **kwargs):
        return forward(*args, **kwargs)

    lm.model.forward = maskless
    assert "other logits" in packing.why_not(lm, longest=30)


def test_as_many_responses_share_a_row_as_is_cheapest():
    # Without attention every response more saves a prompt; with nothing but attention a row is as cheap as it is short.
    assert packing.responses_per_row(Costs(token=1.0, pair=0.0), 100, 10, 8) == 8
    assert packing.responses_per_row(Costs(token=0.0, pair=1.0), 10, 1000, 8) == 1
    # Qwen2.5-0.5B: a prompt of 500 and answers of 100 tokens share; answers of 4000 tokens do not.
    costs = Costs(token=2 * 358e6, pair=4 * 24 * 896)
    assert packing.responses_per_row(costs, 500, 100, 8) == 8
    assert packing.responses_per_row(costs, 100, 4000, 8) == 1
