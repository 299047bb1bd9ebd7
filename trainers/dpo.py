"""DPO: a policy from pairs of responses, without a reward model and without sampling.

    fused-rl dpo --model runs/sft/model --dataset pairs.jsonl --output_dir runs/dpo

A response y of n tokens is scored by d = log pi(y) - log pi_ref(y), of which a pair, w chosen and l rejected, has two.
The reference is the model that the run begins with: its log-probabilities are measured once, before the first step.

    sigmoid   arXiv:2305.18290, eq. 7    -log sigmoid(s_w - s_l), s = beta d
    hinge     arXiv:2305.10425, eq. 6    max(0, 1 - (s_w - s_l)), s = beta d
    ipo       arXiv:2310.12036, eq. 17   (s_w - s_l - 1 / (2 beta))^2, s = d / n
    simpo     arXiv:2405.14734, eq. 6    -log sigmoid(s_w - s_l - gamma), s = beta log pi(y) / n, gamma a margin
    orpo      arXiv:2403.07691, eq. 6    -beta log sigmoid(s_w - s_l), s the log-odds of exp(log pi(y) / n)
    apo-zero  arXiv:2408.06266, eq. 7    sigmoid(-s_w) + sigmoid(s_l), s = beta d: w rises above the reference, l falls
    apo-down  arXiv:2408.06266, eq. 8    sigmoid(s_w) + sigmoid(s_l - s_w), s = beta d: both fall, l further
    nll_coef  arXiv:2404.19733, eq. 1    and -log pi(w), averaged over the step's chosen tokens
"""

import functools
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

import fused_rl

from .base import engine
from .base.options import NonNegative, Positive, Requirement
from .base.screen import phase
from .data.micro_batches import Padding
from .data.preferences import (
    Pair,
    PairsConfig,
    batch_plan,
    pairs_at_once,
    pairs_of,
)
from .data.reading import RowsLike
from .models import language_model
from .models.reward_model import check_finite
from .models.scoring import chosen_is_higher, load_to_score, logprobs_of
from .run import command
from .run.hooks import OnStep
from .run.loop import Run
from .run.metrics import Evaluation

LossType = Literal["sigmoid", "hinge", "ipo", "simpo", "orpo", "apo-zero", "apo-down"]
# Names of `preference_loss` for those that it calls otherwise.
PREFERENCE_LOSSES = {"ipo": "squared", "simpo": "sigmoid"}
LENGTH_NORMALISED = ("ipo", "simpo", "orpo")
WITHOUT_REFERENCE = ("simpo", "orpo")
WITHOUT_MARGIN = ("apo-zero", "apo-down")


class DPOConfig(PairsConfig):
    """Direct preference optimisation of a causal language model on pairs of responses."""

    command: ClassVar = "dpo"
    main: ClassVar = (*PairsConfig.main, "loss_type", "beta")

    loss_type: LossType = "sigmoid"
    """Loss of a pair. ipo, simpo and orpo score a response by its mean per token; simpo and orpo have no reference."""
    beta: Positive = 0.1
    """Scale of the scores: the larger it is, the closer the policy stays to the reference. For orpo, the weight of the
    loss of pairs."""
    margin: NonNegative = 0.0
    """By how much every chosen score should lead at least, in addition to margin_column: gamma of simpo; not for
    apo-zero and apo-down."""
    nll_coef: NonNegative = 0.0
    """Weight of the chosen responses' negative log-likelihood per token."""

    needs: ClassVar = (
        Requirement(
            "label_smoothing", lambda config: config.loss_type != "ipo", "has no effect on ipo"
        ),
        *(
            Requirement(
                option,
                lambda config: config.loss_type not in WITHOUT_MARGIN,
                "has no meaning with loss_type=apo-zero or apo-down; leave it out",
            )
            for option in ("margin", "margin_column")
        ),
        Requirement(
            "loss_type",
            lambda config: config.loss_type != "orpo" or config.nll_coef > 0,
            "trains on the chosen responses' likelihood as well; give --nll_coef 1, as in the paper",
        ),
    )


def measure(
    model,
    pairs: Sequence[Pair],
    config: DPOConfig,
    reference: torch.Tensor | None = None,
    padding: Padding | None = None,
) -> torch.Tensor:
    """Return log pi of chosen and rejected (N, 2) in nats, over all ranks; with `padding` also run backward."""

    def loss_of(logprobs: torch.Tensor, indices: list[int]) -> torch.Tensor:
        ref_logprobs = None if reference is None else reference[indices]
        micro_batch = [pairs[i] for i in indices]
        return pair_loss(logprobs, ref_logprobs, micro_batch, pairs, config)[0]

    logprobs = logprobs_of(
        model,
        [(pair.chosen, pair.rejected) for pair in pairs],
        pairs_at_once(config.sequences_at_once),
        loss=None if padding is None else loss_of,
        progress="pairs" if padding is None else None,
        tokens=config.micro_batch_tokens,
        padding=padding,
    ).float()
    # A score that is NaN names its pair here, before the optimizer takes a step.
    check_finite(logprobs, [pair.where for pair in pairs])
    return logprobs


def pair_loss(
    logprobs: torch.Tensor,
    reference: torch.Tensor | None,
    pairs: Sequence[Pair],
    step: Sequence[Pair],
    config: DPOConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of pairs from their (b, 2), as a share of that of all pairs of the step, and its metrics."""
    loss_type = config.loss_type
    scores = pair_scores(logprobs, reference, pairs, config)
    options = {
        "loss_type": PREFERENCE_LOSSES.get(loss_type, loss_type),
        "label_smoothing": config.label_smoothing,
    }
    # The squared loss has its minimum where the lead is the margin, 1 / (2 beta) for ipo.
    if loss_type not in WITHOUT_MARGIN:
        least = config.margin + (0.5 / config.beta if loss_type == "ipo" else 0.0)
        margin = torch.tensor([pair.margin + least for pair in pairs])
        options["margin"] = margin.to(logprobs.device)
    # The mean is over all pairs of the step, however they are divided into micro-batches.
    loss, metrics = fused_rl.preference_loss(*scores.unbind(1), num_sequences=len(step), **options)
    if loss_type == "orpo":
        loss = config.beta * loss
    # A lead can also grow while both sides become less likely: this term holds the chosen one up.
    nll = -logprobs[:, 0].sum() / sum(pair.predicted()[0] for pair in step)
    loss = loss + config.nll_coef * nll
    return loss, metrics | {"loss": loss, "nll": nll}


def pair_scores(
    logprobs: torch.Tensor, reference: torch.Tensor | None, pairs: Sequence[Pair], config: DPOConfig
) -> torch.Tensor:
    """Return the scores (b, 2) of the sides of pairs, which the loss compares, from their log-probabilities.

    Without a `reference` it is the policy as it is.
    """
    loss_type = config.loss_type
    scores = logprobs
    # beta log(pi / pi_ref) is the reward under which the policy would be optimal, but for a term of
    # the prompt, which cancels in a pair: arXiv:2305.18290, eq. 5.
    if loss_type not in WITHOUT_REFERENCE:
        scores = scores - (
            logprobs.detach() if reference is None else reference.to(logprobs.device)
        )
    # A sum grows with the length, so that a short and a long response would not compare.
    if loss_type in LENGTH_NORMALISED:
        scores = scores / torch.tensor([pair.predicted() for pair in pairs]).to(logprobs.device)
    # In ipo beta decides the margin instead, and in orpo it is the weight of the whole loss.
    return scores if loss_type in ("ipo", "orpo") else config.beta * scores


def pair_metrics(
    logprobs, reference, pairs: Sequence[Pair], config: DPOConfig, prefix: str
) -> dict[str, float]:
    """Return `train/dpo/*` or `eval/dpo/*` of all pairs, from their (N, 2)."""
    _, metrics = pair_loss(logprobs.double(), reference, pairs, pairs, config)
    return {prefix + name: value.item() for name, value in metrics.items()}


def evaluate(
    model, pairs: Sequence[Pair], reference: torch.Tensor, config: DPOConfig
) -> Evaluation:
    """Return `eval/dpo/*` of the held-out pairs."""
    with phase("evaluated on held-out pairs") as figures:
        logprobs = measure(model, pairs, config)
        metrics = pair_metrics(logprobs, reference, pairs, config, "eval/dpo/")
        figures["accuracy"] = metrics["eval/dpo/accuracy"]
    scores = pair_scores(logprobs.double(), reference, pairs, config)
    right = chosen_is_higher(scores).tolist()
    return Evaluation(metrics, by_row={"eval/dpo/accuracy": [right]})


def train(
    config: DPOConfig,
    dataset: RowsLike = None,
    eval_dataset: RowsLike = None,
    *,
    on_step: OnStep | None = None,
) -> str:
    """Run the whole training, on pairs that are given or that the config names; return the trained model's folder."""
    run = Run(config, batch_plan, on_step)
    config = run.read(config, pairs_of, dataset, eval_dataset)
    model = run.load(load_to_score)
    reference = torch.zeros(len(run.rows) + len(run.held_out), 2)
    if config.loss_type not in WITHOUT_REFERENCE:
        reference = run.measure_reference(
            lambda pairs: measure(model, pairs, config), torch.float32
        )
    of_held_out = reference[len(run.rows) :]
    run.start(
        {"policy": model}, evaluate=lambda: evaluate(model, run.held_out, of_held_out, config)
    )
    for step, indices in run:
        batch = [run.rows[i] for i in indices]
        padding = Padding()
        # Until the weights move, which a warm-up begins one step later, all scores are 0 and no rounding errors.
        batch_reference = reference[indices] if step > 1 + bool(config.warmup_steps) else None
        logprobs = measure(model, batch, config, batch_reference, padding)
        # The metrics are of the weights before the step, as the loss is.
        metrics = pair_metrics(logprobs, batch_reference, batch, config, "train/dpo/")
        metrics |= engine.optimizer_step(model, step) | {"perf/padding": padding.fraction()}
        run.log(metrics, sum(map(Pair.tokens, batch)))
    return run.finish(
        lambda folder: language_model.save_lm(
            model, run.tokenizer, folder, merged=config.save_merged
        )
    )


main = functools.partial(command.run, DPOConfig, train)

if __name__ == "__main__":
    main()
