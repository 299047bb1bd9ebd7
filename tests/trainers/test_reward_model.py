"""The score is that of the last attended token, whatever the padding, and a reward is one number."""

import itertools
import math

import pytest
import torch

from fused_rl.trainers.models.reward_model import RewardModel, RewardScorer
from fused_rl.trainers.options import ModelConfig
from tests.lazy import transformers

VOCAB, EOS, PAD = 61, 2, 1
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": EOS,
}
ROPE = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "bos_token_id": None}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**ROPE),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **ROPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    # 24 absolute positions for rows of up to 12 tokens and 8 pads; dropout on, as the Hub's checkpoints have it
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=24,
        eos_token_id=EOS,
        bos_token_id=EOS,
    ),
    "opt": lambda: transformers.OPTConfig(
        **SMALL, ffn_dim=48, max_position_embeddings=24, word_embed_proj_dim=32, layerdrop=0.5
    ),
}
PADDINGS = ("right", "left", "middle", "middle + right")


def reward_model(name: str) -> RewardModel:
    torch.manual_seed(3)
    config = CONFIGS[name]()
    config.num_labels = 1
    model = RewardModel(transformers.AutoModelForSequenceClassification.from_config(config))
    for (
        parameter
    ) in model.parameters():  # the stock start (std 0.02) hides wrong positions: they hardly count
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    model.reset_head()
    return model.train()  # as the trainer uses it: dropout and layer drop must be off all the same


def texts() -> list[list[int]]:
    """Rows of 3 to 12 tokens that end in EOS and contain one elsewhere too, as conversations of several turns do."""
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (12, 3, 7, 9, 4)]
    return [[*row[:-1], EOS] if len(row) < 7 else [*row[:2], EOS, *row[3:-1], EOS] for row in rows]


def padded(rows: list[list[int]], padding: str, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows with up to 8 pads each, placed as told; (input_ids, attention_mask)."""
    width = max(map(len, rows)) + 8
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        fill, place = width - len(row), torch.arange(len(row))
        left = fill if padding == "left" else 0
        middle = {"middle": fill, "middle + right": fill // 2}.get(padding, 0)
        place += left + middle * (place >= len(row) // 2)
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return ids, mask


def stock_score(model: RewardModel, row: list[int]) -> torch.Tensor:
    """By the stock classifier, of one row without padding: nothing is left there to get wrong."""
    return model.classifier(input_ids=torch.tensor([row])).logits[0, 0].float()


@pytest.mark.parametrize("pad_id", [PAD, EOS], ids=["pad", "pad=eos"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_changes_no_score_and_no_gradient(name, pad_id):
    model, rows = reward_model(name), texts()
    upstream = torch.randn(len(rows), generator=torch.Generator().manual_seed(5))
    expected = torch.stack([stock_score(model, row) for row in rows])
    wanted = torch.autograd.grad(expected @ upstream, list(model.parameters()))
    assert expected.std() > 0.1  # else the comparison could not fail
    for padding in PADDINGS:
        scores = model(*padded(rows, padding, pad_id))
        assert scores.shape == (len(rows),) and scores.dtype == torch.float32
        torch.testing.assert_close(
            scores, expected, atol=1e-5, rtol=0, msg=lambda m, p=padding: f"{p}: {m}"
        )
        found = torch.autograd.grad(scores @ upstream, list(model.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_row_is_never_read_at_its_pads():
    model, rows = reward_model("llama"), texts()
    ids, mask = padded(rows, "middle + right", PAD)
    for fill in (0, VOCAB + 7):  # a pad token that was added to the tokenizer has no embedding
        assert torch.equal(model(torch.where(mask.bool(), ids, fill), mask), model(ids, mask))
    assert torch.equal(model(ids, mask.bool()), model(ids, mask.float()))


@pytest.mark.parametrize(("name", "lora_rank"), itertools.product(CONFIGS, (0, 4)))
@torch.no_grad()
def test_what_is_saved_opens_as_a_stock_classifier(name, lora_rank, tmp_path):
    torch.manual_seed(6)
    base = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    base.save_pretrained(tmp_path / "base")
    model = RewardModel.from_pretrained(
        tmp_path / "base", adapters=ModelConfig(model="m", lora_rank=lora_rank)
    )
    for key, parameter in model.named_parameters():
        assert parameter.requires_grad == (lora_rank == 0 or "lora_" in key or "score" in key)
        if "lora_B" in key:
            parameter.normal_(std=0.2)
    ids = torch.randint(3, VOCAB, (4, 9))
    raw = model(ids, torch.ones_like(ids))
    model.set_normalization(0.25, 3.0)
    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path / "reward")
    # What is merged is a copy.
    assert all(torch.equal(weights[key], weight) for key, weight in model.state_dict().items())

    again = RewardModel.from_pretrained(tmp_path / "reward")
    assert (again.score_mean, again.score_std) == (0.25, 3.0)
    torch.testing.assert_close(
        again(ids, torch.ones_like(ids)), (raw - 0.25) / 3, atol=1e-5, rtol=0
    )
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "reward"
    ).eval()
    assert stock.config.num_labels == 1
    logits = torch.cat([stock(ids[i : i + 1]).logits for i in range(4)])
    assert logits.shape == (4, 1)
    torch.testing.assert_close(logits[:, 0], raw, atol=1e-5, rtol=0)


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    # It must not come back with a random one.
    model = reward_model("llama")
    model.save_pretrained(
        tmp_path / "headless", {k: v for k, v in model.state_dict().items() if "score" not in k}
    )
    with pytest.raises(ValueError, match="lacks weights.*score.weight"):
        RewardModel.from_pretrained(tmp_path / "headless")


@torch.no_grad()
def test_normalisation_composes_and_survives_saving(tmp_path):
    model, rows = reward_model("llama"), texts()
    ids, mask = padded(rows, "right", PAD)
    raw = model(ids, mask)
    model.normalize(raw[:3])
    model.normalize(model(ids, mask))  # again, on another reference set
    scores = model(ids, mask)
    assert scores.mean().abs() < 1e-6 and abs(scores.std() - 1) < 1e-6
    torch.testing.assert_close(scores, (raw - raw.mean()) / raw.std(), atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path)
    assert torch.equal(RewardModel.from_pretrained(tmp_path)(ids, mask), scores)
    with pytest.raises(ValueError, match="cannot be normalised"):
        model.normalize(torch.ones(5))


@torch.no_grad()
def test_a_score_that_is_not_finite_names_its_rows():
    model, rows = reward_model("llama"), texts()
    model.classifier.model.embed_tokens.weight[rows[3][0]] = math.inf
    hit = [i for i, row in enumerate(rows) if rows[3][0] in row]
    with pytest.raises(ValueError, match=f"{len(hit)} of 5 rows .*row 3: nan"):
        RewardScorer(model, 2)(rows, [[] for _ in rows])


def test_the_head_is_drawn_with_the_papers_deviation():
    """1 / sqrt(h + 1), here 1 / sqrt(33); 1 / sqrt(h) is 1.5 % more, and 64,000 draws tell it to 0.3 %."""
    model = reward_model("llama")
    weights = []
    for _ in range(2000):
        model.reset_head()
        weights.append(model.classifier.score.weight.detach().clone())
    assert torch.cat(weights).std().item() == pytest.approx(1 / math.sqrt(33), rel=8e-3)
