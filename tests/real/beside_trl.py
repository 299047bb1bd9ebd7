"""TRL's trainers on the rows of ours: their token ids and the figures of their first step."""

from pathlib import Path
from typing import Any

import pytest

OPTIONS = {
    "max_steps": 1,
    "per_device_train_batch_size": 8,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "model_init_kwargs": {"dtype": "float32"},
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def trainer(name: str, model: str, rows: list[dict], folder: Path, config=(), **given) -> Any:
    """Return a trainer of TRL, by the name of its algorithm."""
    trl = pytest.importorskip("trl")
    import accelerate
    import datasets

    # It would keep what the trainer before it chose.
    accelerate.state.AcceleratorState._shared_state = {}
    options = OPTIONS | dict(config)
    args = getattr(trl, f"{name}Config")(str(folder), **options)
    dataset = datasets.Dataset.from_list(rows)
    made = getattr(trl, f"{name}Trainer")(model=model, args=args, train_dataset=dataset, **given)
    # The model pads with a token that it also reads, to which transformers gives no gradient, and we do.
    made.model.get_input_embeddings().padding_idx = None
    return made


def without_newline(made: Any, columns: list[str]) -> list[dict]:
    """Return a trainer's encoded rows, and take off their last token, the newline after ChatML's end token.

    TRL trains it, and a sampler stops before it.
    """
    newline = made.processing_class("\n", add_special_tokens=False).input_ids

    def cut(row: dict) -> dict:
        for column in columns:
            assert row[column][-1:] == newline
        return {column: row[column][:-1] for column in columns}

    made.train_dataset = made.train_dataset.map(cut)
    return list(made.train_dataset)


def first_step(made: Any) -> dict[str, float]:
    """Return what a trainer logs of its first step."""
    made.train()
    return made.state.log_history[0]
