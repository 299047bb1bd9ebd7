"""A small Llama with random weights and a tokenizer that is learned from your rows, as a folder: nothing needs the Hub.

    python -m fused_rl.recipes.tiny_model --dataset train.jsonl --output_dir tiny

It has a chat template, and every trainer takes its folder as a model. It knows nothing yet, so begin with
`fused-rl sft`.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fused_rl.trainers.base import engine
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.rows import load_rows
from fused_rl.trainers.run.command import around
from fused_rl.trainers.run.parse import HelpPrinted

PAD, EOS = "<pad>", "<eos>"
CHAT = (PAD, EOS, "<system>", "<user>", "<assistant>")
# A message begins with its role, and only those of the assistant end with EOS, which is where generation stops.
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def learn_tokenizer(texts: Iterable[str], vocab_size: int, *, chat: bool):
    """Return a byte-pair tokenizer of at most `vocab_size` tokens that is learned from texts; each digit is a token.

    With `chat` it has a chat template, it can encode any text, and no token crosses the border of a word. Otherwise it
    can only encode characters that are in `texts`, and a token may hold several words.
    """
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    # Each digit is a token, so that a small model can learn to calculate.
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=chat)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    # With every byte in the alphabet any text can be encoded. Without, the few tokens are spent on what occurs.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CHAT if chat else (PAD, EOS)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if chat else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS
    )
    if chat:
        fast.chat_template = TEMPLATE
    return fast


def save_llama(
    folder: Path, tokenizer, seed: int, *, layers: int, hidden_size: int, positions: int
) -> int:
    """Write a Llama with random weights and its tokenizer in the Hub format, and return the number of its weights.

    Args:
        folder: the folder of the model.
        tokenizer: its tokenizer, whose size is that of the vocabulary.
        seed: the seed of the weights.
        layers: the number of layers.
        hidden_size: the width of the hidden states, a multiple of 32, the size of an attention head.
        positions: the longest sequence, in tokens.
    """
    import transformers

    transformers.set_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        # The base of the rotary embeddings is chosen so that the slowest rotation turns about once over 256 positions.
        # With the usual base, which is for thousands of positions, the slow rotations would hardly turn at all.
        rope_parameters={"rope_type": "default", "rope_theta": min(positions, 256) / 6.4},
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def texts_of(value: object) -> Iterator[str]:
    """Yield every text in a row, including those of its messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_of(part)


class Parser(argparse.ArgumentParser):
    """Ends the process after `--help` in the way that `around` knows."""

    def exit(self, status=0, message=None):
        if message:
            sys.stderr.write(message)
        raise HelpPrinted(status)


@around("tiny_model")
def main(argv: list[str] | None = None) -> None:
    """Run `python -m fused_rl.recipes.tiny_model`."""
    parser = Parser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument(
        "--dataset", required=True, help="rows whose texts the tokenizer learns from"
    )
    parser.add_argument("--output_dir", required=True, type=Path, help="new folder of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--max_length", type=int, default=512, help="positions, in tokens")
    parser.add_argument("--seed", type=int, default=1, help="of the weights")
    given = parser.parse_args(argv)
    if given.output_dir.exists():
        raise InputError(f"{given.output_dir} exists; give --output_dir a new folder")
    engine.silence_libraries()
    tokenizer = learn_tokenizer(texts_of([*load_rows(given.dataset)]), 512, chat=True)
    sizes = {
        "layers": given.layers,
        "hidden_size": given.hidden_size,
        "positions": given.max_length,
    }
    weights = save_llama(given.output_dir, tokenizer, given.seed, **sizes)
    print(
        f"{given.output_dir}: a Llama with {weights:,} random weights and {len(tokenizer)} tokens"
    )


if __name__ == "__main__":
    main()
