"""What a layer saves for its backward pass, as `--dry_run` counts it, beside what autograd keeps."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from fused_rl.trainers.base import memory
from fused_rl.trainers.grpo import GRPOConfig

SHAPE = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4}


def kept(layers: int, kv_heads: int) -> float:
    """Return the elements per token that a Llama's forward pass keeps, weights left out."""
    config = transformers.LlamaConfig(
        **SHAPE, num_hidden_layers=layers, num_key_value_heads=kv_heads
    )
    lm = transformers.LlamaModel(config)
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = lm(input_ids=torch.zeros(2, 32, dtype=torch.long), use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(found.values()) / 64


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_layer_saves_what_is_counted(kv_heads, tmp_path):
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=2, num_key_value_heads=kv_heads)
    config.save_pretrained(tmp_path)
    lm = transformers.LlamaForCausalLM(config)
    sizes = memory.sizes_of(str(tmp_path), None)
    assert sizes.weights == sum(p.numel() for p in lm.parameters())
    assert sizes.saved == pytest.approx(kept(3, kv_heads) - kept(2, kv_heads), rel=0.05)


@pytest.mark.parametrize(("gib", "chosen"), [(4, 1), (24, 16), (80, 64), (1000, 256)])
def test_a_gpu_gets_the_micro_batch_that_it_holds(gib, chosen, tmp_path, monkeypatch):
    shape = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        **shape, vocab_size=151936, num_hidden_layers=24, tie_word_embeddings=True
    )
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gib << 30)
    )
    options = {
        "model": str(tmp_path),
        "dataset": "rows.jsonl",
        "output_dir": "run",
        "verifiers": "exact",
    }
    config = GRPOConfig(**options, dtype="bfloat16")
    assert config.micro_batch_size is None  # making a config reads no model
    config.resolve()
    assert config.micro_batch_size == chosen
    # As many tokens as so many sequences of the most tokens have, which share their prompt by eights.
    assert config.micro_batch_tokens == chosen * 256 + -(-chosen // 8) * 512
    given = GRPOConfig(**options, micro_batch_size=3)
    given.resolve()
    assert (given.micro_batch_size, given.micro_batch_tokens) == (3, None)
    given = GRPOConfig(**options, dtype="bfloat16", micro_batch_tokens=4096)
    given.resolve()
    assert given.micro_batch_tokens == 4096
    sizes = memory.sizes_of(config.model, None)
    needed = memory.bytes_per_process(sizes, config.footprint(), chosen)
    assert chosen == 1 or sum(needed.values()) < 0.75 * (gib << 30)
