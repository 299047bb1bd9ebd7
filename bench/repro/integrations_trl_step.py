"""A step of TRL's own GRPO and SFT trainers, patched by `fused_rl.integrations.trl` and unpatched, side by side.

    python bench/repro/integrations_trl_step.py            time and peak memory of a step

One trainer runs on in one process; its steps are patched and unpatched in turn, on batches of the same size.
Generation is no part of a step here: responses are random ids. Time is CPU seconds of all threads; memory is the step's
peak beyond what the process held before it, gradients included.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench import machine
from bench.results import table
from fused_rl.integrations import trl as integration

ROWS, TOKENS, PROMPT = 2, 256, 32
WARM_UP = 2  # steps of each kind that are not counted
# TRL's default runs a model of fp32 weights in bf16 autocast
PRECISIONS = {"fp32": {"bf16": False}, "bf16 autocast": {"bf16": True}}


def model(hidden: int, vocabulary: int, layers: int):
    """A Qwen2 of random weights with a head of its own."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.Qwen2ForCausalLM(config)


def tokenizer():
    """What the trainers ask for; no text is looked at."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2, "a": 3}, unk_token="a")
    core = tokenizers.Tokenizer(words)
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def trainer(kind: str, made, folder: str, steps: int, options: dict):
    """TRL's trainer over `steps` steps of ROWS sequences of TOKENS tokens."""
    import datasets
    import trl

    vocabulary = made.config.vocab_size
    fixed = {"use_cpu": True, "max_steps": steps, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    fixed |= {"per_device_train_batch_size": ROWS, "output_dir": folder, "optim": "sgd", "learning_rate": 1e-3}
    shared = {"model": made, "processing_class": tokenizer()}
    if kind == "SFT":
        ids = torch.randint(10, vocabulary, (8 * ROWS, TOKENS)).tolist()
        data = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
        config = trl.SFTConfig(**fixed, **options, max_length=TOKENS)
        return trl.SFTTrainer(args=config, train_dataset=data, **shared)
    data = datasets.Dataset.from_dict({"prompt": ["a " * PROMPT] * 8})
    config = trl.GRPOConfig(**fixed, **options, num_generations=ROWS, max_completion_length=TOKENS - PROMPT)
    found = trl.GRPOTrainer(args=config, train_dataset=data, reward_funcs=reward, **shared)

    def respond(prompt_ids, *_, **__):
        shape = (len(prompt_ids), TOKENS - PROMPT)
        return torch.randint(10, vocabulary, shape).tolist(), None

    found._generate_single_turn = respond
    return found


def reward(completion_ids, **_):
    return [ids[0] % 7 for ids in completion_ids]


def in_turn(found) -> dict[str, list[tuple[float, int]]]:
    """(CPU seconds, peak bytes) of each step, unpatched and patched."""
    samples = {"TRL": [], "patched": []}
    step = found.training_step
    turns = [0]

    def timed(*args, **kwargs):
        # Two steps of a kind in a row: the first also pays for what the kind before it has left in the caches.
        name = ("TRL", "patched")[turns[0] // 2 % 2]
        turns[0] += 1
        (integration.patch if name == "patched" else integration.unpatch)()
        taken = []

        def run():
            begun = time.process_time()
            taken.append(step(*args, **kwargs))
            taken.append(time.process_time() - begun)

        peak = machine.peak_extra_bytes(run, "cpu")
        samples[name].append((taken[1], peak))
        return taken[0]

    found.training_step = timed
    found.train()
    integration.unpatch()
    return samples


def main() -> None:
    """Prints a table of medians, with the smallest and largest time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="of each kind, after the warm-up")
    parser.add_argument("--trainers", nargs="+", default=["GRPO", "SFT"])
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    rows = []
    for kind in args.trainers:
        for precision, options in PRECISIONS.items():
            with tempfile.TemporaryDirectory() as folder:
                made = model(args.hidden, args.vocabulary, args.layers)
                samples = in_turn(trainer(kind, made, folder, 2 * (args.steps + WARM_UP), options))
            for name, found in samples.items():
                seconds, peaks = zip(*found[WARM_UP:], strict=True)
                spread = f"{min(seconds):.2f}–{max(seconds):.2f}"
                time_of = f"{statistics.median(seconds):.2f} ({spread})"
                rows.append([kind, precision, name, time_of, f"{statistics.median(peaks) / 2**20:.0f}"])
    print(f"{ROWS} x {TOKENS} tokens, H {args.hidden}, V {args.vocabulary}, {args.layers} layers; {torch.__version__}")
    print(table(["trainer", "precision", "", "CPU s per step", "peak extra MiB"], rows))


if __name__ == "__main__":
    main()
