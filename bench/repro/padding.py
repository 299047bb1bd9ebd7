"""A reward read at padding: stock sequence classifiers against `RewardModel` on the same weights and inputs.

    python -m bench.repro.padding

Five texts of 3 to 12 tokens that end in EOS. A score should be that of the text alone; the table shows the largest
deviation from it, in units of the standard deviation of the five scores, by how the batch was padded and by whether
the pad token is the EOS token. Each text's true score is read by hand, at its last token, from an unpadded row.
"""

import torch

from bench.results import table_of

VOCABULARY, PAD, EOS = 61, 1, 2
PADDINGS = ("none", "right", "left", "middle", "middle + right")


def configs():
    """Small models of both kinds of positions: rotary, and learnt by absolute position."""
    import transformers

    shared = {"vocab_size": VOCABULARY, "eos_token_id": EOS}
    blocks = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    rotary = {"intermediate_size": 48, "num_key_value_heads": 2, "bos_token_id": None}
    absolute = {"ffn_dim": 48, "max_position_embeddings": 24, "word_embed_proj_dim": 32}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "bos_token_id": EOS}
    return {
        "Llama": transformers.LlamaConfig(**shared, **blocks, **rotary),
        "Qwen2": transformers.Qwen2Config(**shared, **blocks, **rotary),
        "GPT-2": transformers.GPT2Config(**shared, **gpt2),
        "OPT": transformers.OPTConfig(**shared, **blocks, **absolute),
    }


def classifier(config, pad_id: int):
    """A stock classifier with one label, and weights large enough that every position counts."""
    from transformers import AutoModelForSequenceClassification

    config.num_labels = 1
    config.pad_token_id = pad_id
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    return model


def batches(padding: str, pad_id: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, attention_mask) of the five texts: one batch of 20 columns, or five without padding."""
    texts = []
    generator = torch.Generator().manual_seed(4)
    for n in (11, 2, 6, 8, 3):
        words = torch.randint(3, VOCABULARY, (n,), generator=generator)
        texts.append([*words.tolist(), EOS])
    if padding == "none":
        alone = [torch.tensor([text]) for text in texts]
        return [(ids, torch.ones_like(ids)) for ids in alone]
    ids = torch.full((5, 20), pad_id)
    mask = torch.zeros(5, 20, dtype=torch.long)
    for i, text in enumerate(texts):
        # The columns of a text: some stay free on its left, some before its second half.
        fill = 20 - len(text)
        half = len(text) // 2
        left = fill if padding == "left" else 0
        middle = {"middle": fill, "middle + right": fill // 2}.get(padding, 0)
        start = left + half + middle
        columns = [*range(left, left + half), *range(start, start + len(text) - half)]
        ids[i, columns] = torch.tensor(text)
        mask[i, columns] = 1
    return [(ids, mask)]


@torch.no_grad()
def deviations(config, pad_id: int) -> dict[str, tuple[float, float]]:
    """By padding: the largest deviation of the stock scores, and of ours, in standard deviations of the scores."""
    from fused_rl.trainers.models.reward_model import RewardModel

    stock = classifier(config, pad_id)
    ours = RewardModel(stock)
    scores = []
    for ids, _ in batches("none", pad_id):
        hidden = stock.base_model(input_ids=ids).last_hidden_state[0, -1]
        scores.append(stock.score(hidden)[0])
    true = torch.stack(scores)
    found = {}
    for padding in PADDINGS:
        made = batches(padding, pad_id)
        by_stock = [stock(input_ids=ids, attention_mask=mask).logits[:, 0] for ids, mask in made]
        by_ours = [ours(ids, mask) for ids, mask in made]
        off_by_stock = (torch.cat(by_stock) - true).abs().max()
        off_by_ours = (torch.cat(by_ours) - true).abs().max()
        deviation = true.std()
        found[padding] = (off_by_stock / deviation).item(), (off_by_ours / deviation).item()
    return found


def main() -> None:
    rows = []
    for name, config in configs().items():
        apart = deviations(config, PAD)
        same = deviations(config, EOS)
        for padding in PADDINGS:
            row = {"model": name, "padding": padding}
            for i, scores in enumerate(("stock", "RewardModel")):
                row[f"{scores}, pad != eos"] = apart[padding][i]
                row[f"{scores}, pad = eos"] = same[padding][i]
            rows.append(row)
    print(table_of(rows))


if __name__ == "__main__":
    main()
