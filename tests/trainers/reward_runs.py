"""A small run of the reward trainer: its model, pairs and config, and what it left."""

import json
from pathlib import Path

import torch

from fused_rl.trainers import reward
from tests.trainers import tiny

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def make_model(folder: Path, *, chat: bool = False, pad_is_eos: bool = False) -> str:
    """A Llama of two layers and a tokenizer of characters, in the Hub format."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # The tokenizer.
    characters = sorted({*"abcdefghijklmnopqrstuvwxyz0123456789 :=+?!\n<>"})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<eos>" if pad_is_eos else "<pad>",
        unk_token="<unk>",
    )
    fast.chat_template = TEMPLATE if chat else None
    # The model.
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


def write_pairs(path: Path, count: int = 20) -> str:
    """Chosen answers repeat the question's letter, rejected ones another; of many lengths, some with a margin."""
    letters = "abcdefghij"
    rows = []
    for i in range(count):
        letter, other = letters[i % 10], letters[(i + 3) % 10]
        row = {
            "prompt": letter * (1 + i % 4) + "=",
            "chosen": letter * (1 + i % 5),
            "rejected": other * (1 + i % 3),
        }
        rows.append({**row, "margin": 0.5} if i % 3 == 0 else row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_marked(path: Path, count: int = 20) -> str:
    """Good answers repeat the question's letter, bad ones another; of many lengths, two of three are good."""
    letters = "abcdefghij"
    rows = []
    for i in range(count):
        is_good = i % 3 != 1
        answer = letters[(i if is_good else i + 3) % 10] * (1 + i % 5)
        prompt = letters[i % 10] * (1 + i % 4) + "="
        rows.append({"prompt": prompt, "completion": answer, "label": is_good})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_config(folder: Path, name: str = "run", **options) -> reward.RewardConfig:
    settings = {
        "eval_size": 4,
        "steps": 4,
        "batch_size": 8,
        "micro_batch_size": 8,
        "lr": 1e-3,
        "dtype": "float32",
        "eval_every": 2,
        "save_every": 0,
        "label_smoothing": 0.05,
        "centering": 0.01,
        "normalize_pairs": 6,
    }
    files = {"dataset": folder / "pairs.jsonl", "output_dir": folder / name}
    return tiny.config_of("reward", folder / "model", **(files | settings | options))
