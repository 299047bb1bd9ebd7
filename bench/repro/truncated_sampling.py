"""Truncated sampling scored with and without the sets that it kept: the ratio of a policy to itself.

    python bench/repro/truncated_sampling.py     prints the table and draws docs/truncated-sampling.png

`generate` samples from a model and returns what its filters left of each step's scores. The same model then scores the
same tokens, no update between: the ratio exp(logprob - the sampler's) should be 1. Over the whole vocabulary it is the
mass of the kept set instead, 0.8 at top_p 0.8 for a flat distribution; over the recorded sets it is 1.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import fused_rl
from bench.results import table
from fused_rl import TokenSupport

VOCAB, PROMPT, TOKENS = 4096, 8, 32
SAMPLERS = {
    "none": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.8": {"top_p": 0.8},
    "top_p 0.8, top_k 20, min_p 0.05, T 0.7": {"top_p": 0.8, "top_k": 20, "min_p": 0.05, "temperature": 0.7},
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
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=False, **shape)
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(0, 0.45)
    return model


@torch.no_grad()
def scored(model, options: dict, sequences: int) -> Scored:
    """Sample with these options, and score the tokens by the same weights with and without the sets."""
    torch.manual_seed(1)
    prompts = torch.randint(VOCAB, (sequences, PROMPT))
    options = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **options}
    sampled = model.generate(
        prompts, do_sample=True, max_new_tokens=TOKENS, output_scores=True, return_dict_in_generate=True,
        eos_token_id=None, pad_token_id=0, **options,
    )  # fmt: skip
    targets = sampled.sequences[:, PROMPT:]
    support = TokenSupport.from_scores(sampled.scores)
    scores = torch.stack(sampled.scores, 1)
    rollout = scores.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    hidden = model.model(sampled.sequences).last_hidden_state[:, PROMPT - 1 : -1]
    arguments = hidden, model.lm_head.weight, targets
    by_sets = {"whole": None, "kept": support}
    ratios = {}
    for name, sets in by_sets.items():
        options_of_op = {"temperature": options["temperature"], "support": sets}
        logprobs = fused_rl.linear_token_logprobs(*arguments, **options_of_op).logprobs
        ratios[name] = (logprobs - rollout).exp().flatten()
    sizes = support.offsets.diff()
    return Scored(**ratios, sizes=torch.where(sizes == 0, VOCAB, sizes))


def row(name: str, found: Scored) -> list[str]:
    """One line of the table."""
    cells = [name, f"{found.sizes.float().mean():.1f}", f"{(found.sizes == 1).float().mean():.0%}"]
    for ratio in (found.whole, found.kept):
        outside = ((ratio < 0.9) | (ratio > 1.1)).float().mean()
        cells += [f"{-ratio.log().mean():.4f}", f"{ratio.mean():.4f}", f"{outside:.1%}"]
    return [*cells, f"{(found.kept - 1).abs().max():.0e}"]


def draw(found: dict[str, Scored], path: Path) -> None:
    """The ratios of each sampler, sorted: a flat line at 1 is a policy that agrees with itself."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, of_sampler in found.items():
        ratio = of_sampler.whole.sort().values
        axes.plot(torch.linspace(0, 1, len(ratio)), ratio, label=f"whole vocabulary: {name}")
    ratio = next(reversed(found.values())).kept.sort().values
    axes.plot(torch.linspace(0, 1, len(ratio)), ratio, "k--", label="with the kept sets: every sampler")
    axes.set(xlabel="share of the tokens", ylabel="first ratio, which should be 1", ylim=(0, 1.1))
    axes.legend(fontsize=7, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--png", type=Path, default=Path(__file__).parents[2] / "docs" / "truncated-sampling.png")
    arguments = parser.parse_args()
    model = small_model()
    found = {name: scored(model, options, arguments.sequences) for name, options in SAMPLERS.items()}
    of_each = ["nats off", "mean ratio", "outside 0.9 .. 1.1"]
    header = ["sampler", "ids kept", "singletons", *of_each, *[f"{name}, sets" for name in of_each], "largest error"]
    print(table(header, [row(name, of_sampler) for name, of_sampler in found.items()]))
    draw(found, arguments.png)
    print(f"\ndrew {arguments.png}")


if __name__ == "__main__":
    main()
