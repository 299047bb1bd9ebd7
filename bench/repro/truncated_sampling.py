"""Truncated sampling scored with and without the sets that it kept: the ratio of a policy to itself.

    python -m bench.repro.truncated_sampling     prints the table

`generate` samples from a model and returns what its filters left of each step's scores. The same model then scores the
same tokens, no update between: the ratio exp(logprob - the sampler's) should be 1. Over the whole vocabulary it is the
mass of the kept set instead, 0.8 at top_p 0.8 for a flat distribution; over the recorded sets it is 1.
"""

from typing import NamedTuple

import torch

import fused_rl
from bench import plain, results
from fused_rl import TokenSupport

VOCAB, PROMPT, TOKENS, SEQUENCES = 4096, 8, 32, 48
SAMPLERS = {
    "none": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.8": {"top_p": 0.8},
    "top_p 0.8, top_k 20, min_p 0.05, T 0.7": {
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.05,
        "temperature": 0.7,
    },
}


class Scored(NamedTuple):
    """Of every token: the ratio of the policy to itself, and how many ids its set kept."""

    whole: torch.Tensor
    kept: torch.Tensor
    sizes: torch.Tensor


def small_model():
    """Random weights, with logits spread as a trained model's: some tokens are nearly certain, some are open."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(0, 0.45)
    return model


@torch.no_grad()
def scored(model, options: dict) -> Scored:
    """Sample with these options, and score the tokens by the same weights with and without the sets."""
    torch.manual_seed(1)
    prompts = torch.randint(VOCAB, (SEQUENCES, PROMPT))
    options = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **options}
    length = {"max_new_tokens": TOKENS, "eos_token_id": None, "pad_token_id": 0}
    wanted = {"do_sample": True, "output_scores": True, "return_dict_in_generate": True}
    sampled = model.generate(prompts, **options, **length, **wanted)
    targets = sampled.sequences[:, PROMPT:]
    support = TokenSupport.from_scores(sampled.scores)
    scores = torch.stack(sampled.scores, 1)
    rollout = plain.chosen(scores.log_softmax(-1), targets)

    # The same tokens by the same weights.
    hidden = model.model(sampled.sequences).last_hidden_state[:, PROMPT - 1 : -1]
    given = (hidden, model.lm_head.weight, targets)
    temperature = options["temperature"]
    whole = fused_rl.linear_token_logprobs(*given, temperature=temperature).logprobs
    kept = fused_rl.linear_token_logprobs(*given, temperature=temperature, support=support).logprobs
    ratios = [(logprobs - rollout).exp().flatten() for logprobs in (whole, kept)]
    sizes = support.offsets.diff()
    return Scored(*ratios, torch.where(sizes == 0, VOCAB, sizes))


def row(name: str, found: Scored) -> dict:
    """One line of the table."""
    cells = {"sampler": name, "ids kept": f"{found.sizes.float().mean():.1f}"}
    cells["singletons"] = f"{(found.sizes == 1).float().mean():.0%}"
    for ratio, word in ((found.whole, ""), (found.kept, ", sets")):
        outside = (ratio < 0.9) | (ratio > 1.1)
        cells[f"nats off{word}"] = f"{-ratio.log().mean():.4f}"
        cells[f"mean ratio{word}"] = f"{ratio.mean():.4f}"
        cells[f"outside 0.9 .. 1.1{word}"] = f"{outside.float().mean():.1%}"
    return cells | {"largest error": f"{(found.kept - 1).abs().max():.0e}"}


def main() -> None:
    model = small_model()
    found = {name: scored(model, options) for name, options in SAMPLERS.items()}
    rows = [row(name, of_sampler) for name, of_sampler in found.items()]
    print(results.table_of(rows))


if __name__ == "__main__":
    main()
