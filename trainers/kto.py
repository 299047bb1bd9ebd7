"""KTO: a policy from single responses that are marked good or bad, without pairs and without sampling.

    fused-rl kto --model runs/sft/model --dataset marked.jsonl --output_dir runs/kto

A response y has the score s = beta (log pi(y) - log pi_ref(y)). The reference is the model that the run begins with;
its log-probabilities are measured once, before the first step. Scores are compared with z, an estimate of beta times
the KL to the reference: the mean score of mismatched responses, each after another row's prompt, over the whole step
and all ranks, and at least 0. No gradient flows through z. arXiv:2402.01306, eq. 8:

    good    desirable_weight   (1 - sigmoid(s - z))
    bad     undesirable_weight (1 - sigmoid(z - s))

Left out: responses marked by a number.
"""

import functools
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

import fused_rl

from .base import engine
from .base.options import NonNegative, Positive
from .base.screen import phase
from .data.encode import Encoder
from .data.marked import Marked, MarkedConfig, MarkedRows, batch_plan, marked_rows
from .data.micro_batches import Padding
from .data.reading import RowsLike
from .data.rows import Rows
from .models import language_model
from .models.reward_model import check_finite
from .models.scoring import load_to_score, logprobs_of
from .run import command
from .run.hooks import OnStep
from .run.loop import Run
from .run.metrics import Evaluation


class KTOConfig(MarkedConfig):
    """Kahneman-Tversky optimisation of a causal language model on responses that are marked good or bad."""

    command: ClassVar = "kto"
    main: ClassVar = (*MarkedConfig.main, "beta")

    beta: Positive = 0.1
    """Scale of the scores: the larger it is, the closer the policy stays to the reference."""
    desirable_weight: NonNegative = 1.0
    """Weight of good responses."""
    undesirable_weight: NonNegative = 1.0
    """Weight of bad responses."""


def update(
    model,
    rows: Sequence[Marked],
    reference: torch.Tensor | None,
    config: KTOConfig,
    *,
    backward: bool,
    padding: Padding | None = None,
    right: list[float] | None = None,
) -> dict[str, float]:
    """Run forward, and if wanted `backward`, on the rows of all ranks; return the metrics of the loss.

    `reference` (N, 2) has the reference's log-probabilities of the rows' own and of their mismatched responses; without
    it the reference is the policy as it is. `right`, if given, gets 1 for each row on the right side of the point of
    comparison, 1/2 for one on it.
    """
    # The point of comparison: it moves with the policy, but no gradient flows through it.
    baseline = 0.0
    if reference is not None:
        logprobs = measure(model, rows, "mismatched", config)
        baseline = fused_rl.kl_baseline(config.beta * (logprobs[:, 0] - reference[:, 1])).item()

    def loss_and_metrics(logprobs: torch.Tensor, indices: Sequence[int]):
        logprobs = logprobs[:, 0]
        ref_logprobs = logprobs.detach() if reference is None else reference[indices, 0]
        log_ratios = logprobs - ref_logprobs.to(logprobs.device)
        return fused_rl.unpaired_preference_loss(
            config.beta * log_ratios,
            torch.tensor([rows[i].desirable for i in indices], device=log_ratios.device),
            baseline=baseline,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
            num_sequences=len(rows),
        )

    # Losses are shares of the step's, by micro-batch; metrics are of all responses at once.
    loss = (lambda *micro_batch: loss_and_metrics(*micro_batch)[0]) if backward else None
    logprobs = measure(model, rows, "matched", config, loss=loss, padding=padding)
    _, metrics = loss_and_metrics(logprobs, range(len(rows)))
    if right is not None:
        for i in range(len(rows)):
            _, row_metrics = loss_and_metrics(logprobs[i : i + 1], [i])
            right.append(row_metrics["accuracy"].item() * len(rows))
    # The baseline is a mean of scores, and they are beta times nats.
    means = mean_scores(metrics) | {"kl": baseline / config.beta}
    good = [i for i, row in enumerate(rows) if row.desirable]
    if good:
        num_tokens = sum(len(rows[i].matched[1]) for i in good)
        means["nll"] = -logprobs[good].sum().item() / num_tokens
    return means


def measure(
    model,
    rows: Sequence[Marked],
    kind: Literal["matched", "mismatched"],
    config: KTOConfig,
    **options,
) -> torch.Tensor:
    """Return log pi (N, 1) in nats of the rows' responses of a kind, over all ranks; options as of `logprobs_of`."""
    sequences = [(getattr(row, kind),) for row in rows]
    size, tokens = config.sequences_at_once, config.micro_batch_tokens
    logprobs = logprobs_of(model, sequences, size, tokens=tokens, **options)
    check_finite(logprobs, [row.where for row in rows])
    return logprobs


def measure_both(model, rows: Sequence[Marked], config: KTOConfig) -> torch.Tensor:
    """Return log pi (N, 2) of the rows' own responses and of the mismatched ones."""
    columns = []
    for kind in ("matched", "mismatched"):
        columns.append(measure(model, rows, kind, config, progress=f"{kind} responses"))
    return torch.cat(columns, 1)


def checked_rows(config: KTOConfig, rows: Rows, encoder: Encoder) -> MarkedRows:
    """Return the rows, which are mismatched among themselves: training rows must not enter an evaluation."""
    marked = marked_rows(config, rows, encoder)
    marked.check_prompts()
    return marked


def mean_scores(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the loss's metrics with the mean score of each kind of response that there is, in place of sums."""
    means = {name: value.item() for name, value in metrics.items()}
    fractions = {"desirable": means["desirable"], "undesirable": 1 - means["desirable"]}
    for kind, fraction in fractions.items():
        total = means.pop(f"{kind}_rewards")
        # Without a response of a kind there is no mean of it, and no key.
        if fraction > 0:
            means[f"{kind}_rewards"] = total / fraction
    return means


def evaluate(
    model, rows: Sequence[Marked], reference: torch.Tensor, config: KTOConfig
) -> Evaluation:
    """Return `eval/kto/*` of the held-out rows."""
    right = []
    with phase("evaluated on held-out rows") as figures:
        metrics = update(model, rows, reference, config, backward=False, right=right)
        figures["accuracy"] = metrics["accuracy"]
    metrics = {f"eval/kto/{name}": value for name, value in metrics.items()}
    return Evaluation(metrics, by_row={"eval/kto/accuracy": [right]})


def train(
    config: KTOConfig,
    dataset: RowsLike = None,
    eval_dataset: RowsLike = None,
    *,
    on_step: OnStep | None = None,
) -> str:
    """Run the whole training, on rows that are given or that the config names; return the trained model's folder."""
    run = Run(config, batch_plan, on_step)
    config = run.read(config, checked_rows, dataset, eval_dataset)
    model = run.load(load_to_score)
    reference = run.measure_reference(lambda rows: measure_both(model, rows, config), torch.float64)
    of_held_out = reference[len(run.rows) :]
    run.start(
        {"policy": model}, evaluate=lambda: evaluate(model, run.held_out, of_held_out, config)
    )
    for step, indices in run:
        batch = [run.rows[i] for i in indices]
        padding = Padding()
        # Until the weights move, which a warm-up begins one step later, all scores are 0 and no rounding errors.
        batch_reference = reference[indices] if step > 1 + bool(config.warmup_steps) else None
        metrics = update(model, batch, batch_reference, config, backward=True, padding=padding)
        metrics = {f"train/kto/{name}": value for name, value in metrics.items()}
        metrics |= engine.optimizer_step(model, step) | {"perf/padding": padding.fraction()}
        run.log(metrics, sum(map(Marked.tokens, batch)))
    return run.finish(
        lambda folder: language_model.save_lm(
            model, run.tokenizer, folder, merged=config.save_merged
        )
    )


main = functools.partial(command.run, KTOConfig, train)

if __name__ == "__main__":
    main()
