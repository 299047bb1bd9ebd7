"""A model of one's own to try things with: a small Llama with random weights, its tokenizer learnt from the data.

    fused-rl tiny-model --dataset train.jsonl --output_dir tiny

It has a chat template, and every trainer takes its folder. It knows nothing: begin with `fused-rl sft`.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import storing
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data.rows import load_rows
from fused_rl.trainers.models import tiny
from fused_rl.trainers.options.config import InputError, Options, PositiveInt, Seed
from fused_rl.trainers.run import command


@dataclass(kw_only=True)
class TinyModelConfig(Options):
    """A small Llama with random weights and a chat template, its tokenizer learnt from the text of a dataset."""

    command: ClassVar[str] = "tiny-model"
    sections: ClassVar[dict[str, str]] = {"*": "model", "dataset": "data", "output_dir": "run"}

    dataset: str
    """A local file (.jsonl, .json, .csv, .parquet) or folder, or the name of a Hub dataset (its split train): the
    tokenizer learns from all text in its rows."""
    output_dir: str
    """The model's folder, new or empty."""
    vocab_size: PositiveInt = 512
    """Tokens at most: one for every byte, and the commonest parts of words."""
    layers: PositiveInt = 2
    """Layers of the model."""
    hidden_size: PositiveInt = 128
    """Its width, a multiple of 32: a head of attention has 32."""
    max_length: PositiveInt = 256
    """Tokens that it has positions for, prompt and response together."""
    seed: Seed = 1
    """Of the weights."""

    def __post_init__(self):
        super().__post_init__()
        if self.vocab_size < tiny.SMALLEST_VOCABULARY:
            raise InputError(
                f"vocab_size={self.vocab_size} has no room for every byte and the special tokens; give at least "
                f"{tiny.SMALLEST_VOCABULARY}"
            )
        if self.hidden_size % 32:
            raise InputError(f"hidden_size={self.hidden_size} is no multiple of 32, which a head of attention has")


def texts_of(value: object) -> Iterator[str]:
    """Every text in a row, those of its messages too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_of(part)


def make(config: TinyModelConfig) -> str:
    """Write the model; returns its folder."""
    folder = Path(config.output_dir)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"output_dir={folder} is there and not empty; delete it yourself, or choose another folder")
    texts = list(texts_of(load_rows(config.dataset).rows))
    if not texts:
        raise InputError(f"dataset={config.dataset}: there is no text in its rows to learn a tokenizer from")
    tokenizer = tiny.learn_tokenizer(texts, config.vocab_size, chat=True)
    sizes = {"layers": config.layers, "hidden_size": config.hidden_size, "positions": config.max_length}
    with storing("the model", folder):
        folder.mkdir(parents=True, exist_ok=True)
        weights = tiny.save_llama(folder, tokenizer, config.seed, **sizes)
    tell(f"{folder}: a Llama with {weights:,} random weights and {len(tokenizer)} tokens, learnt from {config.dataset}")
    return str(folder)


def main(argv: list[str] | None = None) -> None:
    """`fused-rl tiny-model`."""
    with command.around("fused-rl tiny-model"):
        engine.quiet()
        make(command.options(TinyModelConfig, sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    main()
