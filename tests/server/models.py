"""A small model as vLLM runs it on a CPU, rows to train it on, and what it says by transformers alone."""

from pathlib import Path

import torch

from fused_rl.recipes import demo

POSITIONS = 512
SHARPENED = 10.0  # of random weights alone the distributions would be flat, whatever goes wrong


def problems() -> list[dict]:
    """The demo's, with its seed 1: the tokenizer is made of them."""
    return demo.problems(1, demo.NUM_TRAIN + demo.NUM_EVAL)


def model_folder(folder: Path, entries: list[dict], seed: int) -> str:
    """The demo's Llama with random weights, heads of 32 and room for 512 tokens; and the demo's tokenizer."""
    import transformers

    demo.build_model(folder, [entry["question"] + entry["answer"] for entry in entries], seed)
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lm.lm_head.weight.data.mul_(SHARPENED)
    lm.config.max_position_embeddings = POSITIONS
    lm.save_pretrained(folder)
    return str(folder)


def load(folder: str):
    """The model of a folder, for evaluation."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy(lm, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation, computed from the start for each token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(lm(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
