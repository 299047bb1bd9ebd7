"""Rows of several sequences: the same scores, log-probabilities and gradients as a row for each sequence."""

import itertools

import pytest
import torch

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.models import masked_rows, packing
from fused_rl.trainers.models.language_model import LanguageModel
from fused_rl.trainers.models.packing import Costs
from fused_rl.trainers.models.reward_model import RewardModel, collate, pack_pairs
from fused_rl.trainers.policy.shared_prompts import responses_per_row

# Three groups of four: prompts and responses of different lengths, an empty response, and a group of nothing else.
LENGTHS = ((3, (2, 0, 5, 1)), (7, (4, 4, 3, 1)), (5, (0, 0, 0, 0)))


def model(kind: str, **options):
    """A model of 97 tokens with weights large enough that every token's place shows."""
    import transformers

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if kind == "GPT2":
        sizes |= {"max_position_embeddings": 16, "initializer_range": 0.3}
        sizes |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    elif kind != "Bloom":
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.3}
        sizes |= {"max_position_embeddings": 64}
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


def with_gradients(made, values) -> tuple:
    """Values, and the gradient of a random combination of them by every weight."""
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    named = dict(made.named_parameters())
    gradients = torch.autograd.grad(
        (values * weights).sum(), list(named.values()), allow_unused=True
    )
    return values.detach(), {
        name: g for name, g in zip(named, gradients, strict=True) if g is not None
    }


def scores_and_gradients(lm, loss_from: str, packed, given) -> tuple:
    """Log-probabilities and entropies (B, T - 1), with gradients."""
    rows = LanguageModel(lm, loss_from)(given.input_ids, given.response_mask, 0.7, packed=packed)
    return with_gradients(lm, torch.stack([rows.logprobs, rows.entropy]))


def assert_same(found: tuple, expected: tuple, atol: float) -> None:
    """Values and gradients agree, the gradients relative to their largest element."""
    torch.testing.assert_close(found[0], expected[0], atol=atol, rtol=0)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[1][name], gradient, atol=atol * scale, rtol=0, msg=name)


# Prompts that several responses share, or whole sequences of all groups.
SHARED = [lambda given, n=n: packing.pack(given, n) for n in (2, 3, 4)]
WHOLE = [
    lambda given, rows=rows: masked_rows.pack_sequences(given, rows)
    for rows in ([[4, 0, 8], [1, 2, 3, 5], [11, 6, 7], [9, 10]], [list(range(12))])
]


@pytest.mark.parametrize("forms", [SHARED, WHOLE], ids=["shared", "whole"])
@pytest.mark.parametrize(
    ("kind", "loss_from", "options"),
    [
        ("Llama", "linear", {}),
        ("Qwen2", "logits", {"attn_implementation": "eager"}),
        # Eager by itself, windows of 4096.
        ("Gemma2", "logits", {"head_dim": 8, "final_logit_softcapping": 5.0}),
        ("GPT2", "linear", {}),  # learned positions, of which a row has more tokens than there are
    ],
)
def test_rows_of_several_sequences_give_the_scores_and_gradients_of_rows_of_their_own(
    kind, loss_from, options, forms
):
    lm, given = model(kind, **options), batch()
    expected = scores_and_gradients(lm, loss_from, None, given)
    for form in forms:
        assert_same(scores_and_gradients(lm, loss_from, form(given), given), expected, 2e-5)


def test_a_sequence_without_a_prompt_has_room_for_all_that_predicts():
    lm = model("Llama")
    given = make_batch([[], [5], []], [[3, 4, 5, 6], [7, 8], [9, 3, 2, 1, 4]], 0, "cpu")
    expected = scores_and_gradients(lm, "linear", None, given)
    for packed in (masked_rows.pack_sequences(given, [[0, 2], [1]]), packing.pack(given, 2)):
        assert_same(scores_and_gradients(lm, "linear", packed, given), expected, 2e-5)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Llama", {}, None),
        ("Mistral", {"sliding_window": 6}, "sliding_window=6"),
        # As long as any sequence: no token is out of sight.
        (
            "Mistral",
            {"sliding_window": 30},
            None,
        ),
        ("Bloom", {}, "takes no mask and positions"),
    ],
)
def test_models_that_cannot_share_a_prompt_say_why(kind, options, reason):
    found = packing.unsupported_reason(model(kind, **options), longest=30)
    assert found is None if reason is None else reason in found


def test_a_model_that_leaves_out_the_mask_is_found_out():
    lm = model("Llama")
    forward = lm.model.forward

    def maskless(*args, attention_mask=None, **kwargs):
        return forward(*args, **kwargs)

    lm.model.forward = maskless
    assert "other logits" in packing.unsupported_reason(lm, longest=30)


def test_as_many_responses_share_a_row_as_is_cheapest():
    # Without attention every response more saves a prompt; with nothing but attention a row is as cheap as it is short.
    assert responses_per_row(Costs(token=1.0, pair=0.0), 100, 10, 8) == 8
    assert responses_per_row(Costs(token=0.0, pair=1.0), 10, 1000, 8) == 1
    # Qwen2.5-0.5B: a prompt of 500 and answers of 100 tokens share; answers of 4000 tokens do not.
    costs = Costs(token=2 * 358e6, pair=4 * 24 * 896)
    assert responses_per_row(costs, 500, 100, 8) == 8
    assert responses_per_row(costs, 100, 4000, 8) == 1


# Pairs: what both begin with once, the score at the last token of each.

TOKENS_ALONE = Costs(token=1.0, pair=0.0)
PAIRS = (
    # A prompt, and the first token of the responses too.
    (
        [5, 6, 7, 8, 9, 1],
        [5, 6, 7, 8, 3, 4, 1],
    ),
    ([5, 6, 1], [5, 6, 1, 2, 1]),  # one is the beginning of the other
    ([5, 6, 1, 2, 1], [5, 6, 1]),  # and the other way round; its prompt is that of the pair before
    ([9, 8, 1], [8, 9, 9, 9, 1]),  # nothing in common
    ([8, 1], [1]),  # a single token; the first is what the pair before ended with
)
SEQUENCES = list(itertools.chain(*PAIRS))


def reward_model(kind: str, **options) -> RewardModel:
    import transformers

    causal = model(kind, **options)
    name = f"{kind}ForSequenceClassification"
    config = causal.config
    config.num_labels = 1
    torch.manual_seed(1)
    return RewardModel(getattr(transformers, name)(config))


def pair_scores_and_gradients(made: RewardModel, packed):
    """Scores (N,), with gradients."""
    return with_gradients(
        made, made(*collate(SEQUENCES, "cpu")) if packed is None else made(packed=packed)
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Llama", {}), ("Qwen2", {"attn_implementation": "eager"}), ("GPT2", {"pad_token_id": 0})],
)
def test_pairs_in_a_row_give_the_scores_and_gradients_of_rows_of_their_own(kind, options):
    made = reward_model(kind, **options)
    assert packing.unsupported_reason(made.classifier, longest=16) is None
    packed = pack_pairs(SEQUENCES, TOKENS_ALONE, "cpu")
    # Nothing shared: a row of each side's own.
    assert packed.input_ids.shape == (6, 9) and packed.states.shape == (10,)
    assert_same(
        pair_scores_and_gradients(made, packed), pair_scores_and_gradients(made, None), 1e-5
    )


def test_pairs_keep_rows_of_their_own_where_that_is_as_cheap():
    # One token of nine is shared: a row of 17 is cheaper than two of 9 in tokens, and not in attention.
    pair = [[5, 1, 2, 3, 4, 5, 6, 7, 1], [5, 2, 3, 4, 5, 6, 7, 8, 1]]
    assert pack_pairs(pair, TOKENS_ALONE, "cpu").input_ids.shape == (1, 17)
    assert pack_pairs(pair, Costs(token=0.0, pair=1.0), "cpu") is None
    assert pack_pairs([[5, 1], [6, 1]], TOKENS_ALONE, "cpu") is None  # nothing saved


# Whole sequences in a row.


def test_rows_are_filled_with_every_sequence_once_where_that_is_cheaper():
    lengths = [9, 2, 7, 3, 5, 4, 1, 9, 8]
    rows = masked_rows.cheapest_rows(lengths, TOKENS_ALONE)
    assert sorted(sum(rows, [])) == list(range(len(lengths)))
    width = max(sum(lengths[i] for i in row) for row in rows)
    assert len(rows) * width <= 54  # of 48 tokens; a row each is 81
    # Attention alone: a token of a long row pays for all of it, so no row is longer than the longest sequence.
    rows = masked_rows.cheapest_rows(lengths, Costs(token=0.0, pair=1.0))
    assert max(sum(lengths[i] for i in row) for row in rows) == 9 and len(rows) < len(lengths)
    # Nothing to gain.
    assert masked_rows.cheapest_rows([4, 4, 4], Costs(token=1.0, pair=1.0)) == [[0], [1], [2]]


def test_a_model_that_cannot_share_is_reported_or_refused(capsys):
    lm, words = model("Mistral", sliding_window=6), {"option": "packing", "otherwise": "padded"}
    with pytest.raises(InputError, match="packing: sliding_window=6 is shorter .*; drop --packing"):
        packing.packing_costs(lm, 30, True, **words)
    assert packing.packing_costs(lm, 30, False, **words) is None
    assert packing.packing_costs(lm, 30, None, **words) is None
    assert capsys.readouterr().out.startswith("padded: sliding_window=6")
    lm = model("Llama")
    assert packing.packing_costs(lm, 30, True, **words) == packing.costs_of(lm)
