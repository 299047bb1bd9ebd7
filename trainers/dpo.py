"""DPO: a policy from pairs of responses, without a reward model and without sampling.

    fused-rl dpo --model runs/sft/model --dataset pairs.jsonl --output_dir runs/dpo

A response y of n tokens is scored by d = log pi(y) - log pi_ref(y), of which a pair, w chosen and l rejected, has two.
The reference is the model that the run begins with: its log-probabilities are measured once, before the first step.

    sigmoid   arXiv:2305.18290, eq. 7    -log sigmoid(s_w - s_l), s = beta d
    hinge     arXiv:2305.10425, eq. 6    max(0, 1 - (s_w - s_l)), s = beta d
    ipo       arXiv:2310.12036, eq. 17   (s_w - s_l - 1 / (2 beta))^2, s = d / n
    simpo     arXiv:2405.14734, eq. 6    -log sigmoid(s_w - s_l - gamma), s = beta log pi(y) / n, gamma a margin
    nll_coef  arXiv:2404.19733, eq. 1    and -log pi(w), averaged over the step's chosen tokens
"""

import functools
import time
from typing import ClassVar, Literal

import torch

import fused_rl
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.screen import phase
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.preferences import (
    Pair,
    PairEncoder,
    PairsConfig,
    arithmetic,
    pairs_at_once,
    sides_of,
)
from fused_rl.trainers.data.rows import RowsLike, load_train_eval
from fused_rl.trainers.models import language_model
from fused_rl.trainers.models.reward_model import check_finite
from fused_rl.trainers.models.scoring import logprobs_of
from fused_rl.trainers.options import Needs, NonNegative, Positive
from fused_rl.trainers.run import command
from fused_rl.trainers.run.loop import Run

LOSS_TYPES = {
    "sigmoid": "sigmoid",
    "hinge": "hinge",
    "ipo": "squared",
    "simpo": "sigmoid",
}  # of `preference_loss`


class DPOConfig(PairsConfig):
    """Direct preference optimisation of a causal language model on pairs of responses."""

    command: ClassVar = "dpo"
    main: ClassVar = (*PairsConfig.main, "loss_type", "beta")

    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    """Loss of a pair; ipo and simpo score a response by its mean per token, simpo without a reference."""
    beta: Positive = 0.1
    """Scale of the scores; the larger, the closer to the reference."""
    margin: NonNegative = 0.0
    """Least lead of every chosen score, in addition to margin_column: gamma of simpo."""
    nll_coef: NonNegative = 0.0
    """Weight of the chosen responses' negative log-likelihood per token."""

    needs: ClassVar = (
        Needs("label_smoothing", lambda config: config.loss_type != "ipo", "has no effect on ipo"),
    )


def measure(
    model, pairs: list[Pair], config: DPOConfig, reference: torch.Tensor | None = None
) -> torch.Tensor:
    """Return log pi of chosen and rejected (N, 2) in nats, over all ranks; with a `reference` also run backward."""

    def loss_of(logprobs: torch.Tensor, indices: list[int]) -> torch.Tensor:
        loss, _ = pair_loss(
            logprobs, reference[indices], [pairs[i] for i in indices], pairs, config
        )
        return loss

    logprobs = logprobs_of(
        model,
        [(pair.chosen, pair.rejected) for pair in pairs],
        pairs_at_once(config.micro_batch_size),
        loss=None if reference is None else loss_of,
        progress="pairs" if reference is None else None,
    ).float()
    check_finite(logprobs, [pair.where for pair in pairs])
    return logprobs


def pair_loss(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    pairs: list[Pair],
    step: list[Pair],
    config: DPOConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of pairs from their (b, 2), as a share of that of all pairs of the step, and its metrics."""
    scores = logprobs if config.loss_type == "simpo" else logprobs - reference.to(logprobs.device)
    if config.loss_type in ("ipo", "simpo"):
        scores = scores / torch.tensor([pair.predicted() for pair in pairs]).to(logprobs.device)
    scores = scores if config.loss_type == "ipo" else config.beta * scores
    least = config.margin + (0.5 / config.beta if config.loss_type == "ipo" else 0.0)
    margin = torch.tensor([pair.margin + least for pair in pairs]).to(logprobs.device)
    options = {
        "loss_type": LOSS_TYPES[config.loss_type],
        "label_smoothing": config.label_smoothing,
        "margin": margin,
    }
    loss, metrics = fused_rl.preference_loss(*scores.unbind(1), num_sequences=len(step), **options)
    nll = -logprobs[:, 0].sum() / sum(pair.predicted()[0] for pair in step)
    loss = loss + config.nll_coef * nll
    return loss, metrics | {"loss": loss, "nll": nll}


def pair_metrics(
    logprobs, reference, pairs: list[Pair], config: DPOConfig, prefix: str
) -> dict[str, float]:
    """Return `train/dpo/*` or `eval/dpo/*` of all pairs, from their (N, 2)."""
    _, metrics = pair_loss(logprobs.double(), reference.double(), pairs, pairs, config)
    return {prefix + name: value.item() for name, value in metrics.items()}


def evaluate(
    model, pairs: list[Pair], reference: torch.Tensor, config: DPOConfig
) -> dict[str, float]:
    """Return `eval/dpo/*` of the held-out pairs."""
    with phase("evaluated on held-out pairs") as found:
        metrics = pair_metrics(measure(model, pairs, config), reference, pairs, config, "eval/dpo/")
        found["accuracy"] = metrics["eval/dpo/accuracy"]
    return metrics


def train(config: DPOConfig, dataset: RowsLike = None, eval_dataset: RowsLike = None) -> str:
    """Run the whole training, on pairs that are given or that the config names; return the trained model's folder."""
    run = Run(config, arithmetic)

    # What is read: tokenizer, pairs, model.
    with phase("read tokenizer and pairs"):
        tokenizer = encode.load_tokenizer(config.model, config.revision)
        encoder = PairEncoder(config, tokenizer)
        pairs, held_out = (
            encoder.pairs(rows) for rows in load_train_eval(config, dataset, eval_dataset)
        )
    config = run.check_inputs(config, tokenizer, {}, rows=pairs, held_out=held_out)
    with phase("loaded the model"):
        lm = language_model.load_lm(config, run.device)
        rows = sides_of([*pairs, *held_out])
        language_model.check_fits(
            lm.base, tokenizer, rows, 0, "max_prompt_length or max_response_length"
        )
        model = engine.initialize(lm, config, config.steps)

    # The reference is the model as it is now, before a checkpoint is restored: of the pairs that the run will take.
    every = [*pairs, *held_out]
    reference = torch.zeros(len(every), 2)
    if config.loss_type != "simpo":
        taken = run.order.first(config.steps) + [*range(len(pairs), len(every))]
        with phase("measured the reference"):
            reference[taken] = measure(model, [every[i] for i in taken], config)

    # The run.
    run.start({"policy": model})
    if run.begins and held_out:
        run.log(evaluate(model, held_out, reference[len(pairs) :], config))
    for step, indices in run:
        began = time.monotonic()
        batch = [pairs[i] for i in indices]
        logprobs = measure(model, batch, config, reference[indices])
        metrics = pair_metrics(logprobs, reference[indices], batch, config, "train/dpo/")
        metrics |= engine.optimizer_step(model, step)
        metrics["time/train"] = time.monotonic() - began
        metrics["perf/tokens_per_second"] = sum(map(Pair.tokens, batch)) / metrics["time/train"]
        if run.evaluates and held_out:
            metrics |= evaluate(model, held_out, reference[len(pairs) :], config)
        run.log(metrics)
    return run.finish(
        lambda folder: language_model.save_lm(model, tokenizer, folder, merged=config.save_merged)
    )


main = functools.partial(command.run, DPOConfig, arithmetic, train)

if __name__ == "__main__":
    main()
