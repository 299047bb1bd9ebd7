"""A reward model with two scores: what a stock classifier says of its default, and what ours says to it.

    python -m bench.repro.two_rewards

`AutoModelForSequenceClassification` has two labels where nothing else is said. After TRL's issue 653.
"""

import tempfile

import torch

from bench.repro import padding
from bench.results import table_of
from fused_rl.trainers.models.reward_model import RewardModel


def main() -> None:
    from transformers import AutoModelForSequenceClassification

    config = padding.configs()["Qwen2"]
    ids = torch.arange(3, 15)[None]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for labels in (2, 1):
            config.num_labels, config.pad_token_id = labels, padding.PAD
            model = AutoModelForSequenceClassification.from_config(config)
            model.save_pretrained(folder)
            found = {
                "num_labels": labels,
                "its rewards of one text": str(tuple(model(input_ids=ids).logits.shape[1:])),
            }
            try:
                RewardModel.from_pretrained(folder)
                found["ours"] = "one score, (B,)"
            except ValueError as error:
                found["ours"] = str(error).replace(folder, "FOLDER")
            lines.append(found)
    print(table_of(lines))


if __name__ == "__main__":
    main()
