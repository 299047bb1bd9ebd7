"""Random models of a few thousand weights of the architectures that differ on the way to the loss, and ragged rows."""

import torch

VOCABULARY = 61
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
_GPT2 |= {"vocab_size": VOCABULARY, "initializer_range": 0.3}
_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}

# Name -> class of its config, and options beyond `_SHAPE` (GPT-2 has names of its own).
MODELS = {
    "qwen2": ("Qwen2Config", {**_SHAPE, "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2Config", {**_SHAPE, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", _SHAPE),
    "gpt2": ("GPT2Config", {**_GPT2, **_IDS, **_NO_DROPOUT}),  # Conv1D, tied
    "phi": ("PhiConfig", _SHAPE),  # an LM head with a bias
    "gemma2": ("Gemma2Config", {**_SHAPE, "head_dim": 8, "final_logit_softcapping": 2.0}),
    "cohere": ("CohereConfig", {**_SHAPE, "logit_scale": 0.37}),
    "granite": ("GraniteConfig", {**_SHAPE, "logits_scaling": 3.0}),
    "mixtral": ("MixtralConfig", {**_SHAPE, **_EXPERTS, "output_router_logits": True}),
}


def config(name: str):
    import transformers

    kind, options = MODELS[name]
    return getattr(transformers, kind)(**options, attn_implementation="eager")


def model(name: str, dtype: torch.dtype = torch.float32):
    """A causal LM whose weights, biases among them, follow from the name alone."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(len(name))
        made = transformers.AutoModelForCausalLM.from_config(config(name))
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return made.to(dtype)


def rows(number: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Token ids of 4 to 20 tokens; the labels of a prompt of 1 to 3 of them do not count."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(number):
        length, prompt = (
            int(torch.randint(*bounds, (), generator=generator)) for bounds in ((4, 21), (1, 4))
        )
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[:prompt] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded on the right."""
    padded = {}
    for key, fill in (("input_ids", 0), ("labels", -100)):
        columns = [row[key] for row in batch]
        padded[key] = torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=fill)
    lengths = torch.tensor([len(row["input_ids"]) for row in batch])
    padded["attention_mask"] = (
        torch.arange(padded["input_ids"].shape[1]) < lengths[:, None]
    ).long()
    return padded
