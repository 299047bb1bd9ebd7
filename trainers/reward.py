"""A reward model from preferences: the Bradley-Terry loss of pairs of responses, one scalar per response.

    fused-rl reward --config recipes/reward.yaml
    torchrun --nproc-per-node 2 -m fused_rl.trainers.reward --model ... --dataset ... --output_dir ...

Scores are read as PPO and GRPO read them (`RewardScorer`): of the token ids of a prompt followed by those of a response
that ends in EOS. Left out: rankings of more than two, process rewards, ensembles.
"""

import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import torch

import fused_rl

from .base import engine, ranks
from .base.files import as_json, write_atomically
from .base.options import NonNegative, NonNegativeInt, may_change, refusal
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
from .models.packing import Costs, packing_costs
from .models.reward_model import (
    RewardModel,
    RewardScorer,
    check_finite,
    collate,
    load_reward_model,
    pack_pairs,
    save_reward_model,
)
from .models.scoring import chosen_is_higher, score_all
from .run import command
from .run.hooks import OnStep
from .run.loop import Run
from .run.metrics import Evaluation

__all__ = ["RewardConfig", "RewardModel", "RewardScorer", "train"]


MERGED = "has no meaning: a reward model is saved whole, with its adapters merged in; leave it out"
NO_LOGITS = "has no meaning for a reward model, which never forms logits; leave it out"


class RewardConfig(PairsConfig):
    """A scalar reward model from pairs of a chosen and a rejected response."""

    command: ClassVar = "reward"

    centering: NonNegative = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores around 0."""
    share_prompts: bool | None = None
    """Compute the tokens with which both sides of a pair begin only once, where that is cheaper. None does so if the
    model's attention allows it."""
    normalize_pairs: NonNegativeInt = 128
    """Number of reference pairs whose scores get mean 0 and standard deviation 1, before and after training; 0 for
    none."""
    reference_dataset: str | None = may_change(None)
    """File or Hub name of the reference pairs; None takes the first training pairs."""

    needs: ClassVar = (
        refusal("loss_from", NO_LOGITS),
        refusal("head_dtype", NO_LOGITS),
        refusal("load_in_4bit", MERGED),
        refusal("save_merged", MERGED),
    )


def train_step(
    model, pairs: Sequence[Pair], config: RewardConfig, step: int, costs: Costs | None = None
) -> dict[str, float]:
    """Do one optimizer step on all its `pairs`; by `costs`, if given, the sides of a pair may share a row."""
    device = next(model.parameters()).device
    padding = Padding()
    model.train()

    def score(indices: list[int]) -> torch.Tensor:
        # Both sides go through the model at once, because the loss compares them.
        sides = [
            prompt + ids for i in indices for prompt, ids in (pairs[i].chosen, pairs[i].rejected)
        ]
        packed = None if costs is None else pack_pairs(sides, costs, device)
        if packed is None:
            input_ids, mask = collate(sides, device)
            padding.computed += input_ids.numel()
            padding.tokens += sum(map(len, sides))
            both = model(input_ids, mask)
        else:
            padding.add(packed)
            both = model(packed=packed)
        chosen, rejected = both.view(-1, 2).unbind(1)

        # arXiv:2203.02155, eq. 1, over the step: -log sigmoid(chosen - rejected - margin).
        margin = torch.tensor([pairs[i].margin for i in indices]).to(device, non_blocking=True)
        loss, _ = preference_loss(chosen, rejected, margin, config, num_sequences=len(pairs))
        # The engine averages gradients over ranks, but the loss is already divided by all pairs.
        model.backward(loss * ranks.processes())
        return torch.stack([chosen, rejected], 1)

    # The scores are compared before the step, while the weights are still good.
    lengths = [pair.tokens() for pair in pairs]
    tokens = config.micro_batch_tokens
    is_padded = costs is None or costs.masked
    if tokens is not None and is_padded:
        lengths = [pair.padded_tokens() for pair in pairs]
    size = pairs_at_once(config.sequences_at_once)
    scores = score_all(lengths, size, score, tokens=tokens, costs=costs)
    if not scores.isfinite().all():
        score_pairs(model, pairs, config.sequences_at_once)  # each by itself, to name the bad one
    check_finite(scores, [pair.where for pair in pairs])
    metrics = pair_metrics(scores, pairs, config, "train/rm/")
    metrics["perf/padding"] = padding.fraction()
    return metrics | engine.optimizer_step(model, step)


def preference_loss(chosen, rejected, margin, config: RewardConfig, **counts):
    """The loss of scores (N,) and its metrics, as the options say."""
    options = {"label_smoothing": config.label_smoothing, "centering": config.centering}
    return fused_rl.preference_loss(chosen, rejected, margin=margin, **options, **counts)


def pair_metrics(
    scores: torch.Tensor, pairs: Sequence[Pair], config: RewardConfig, prefix: str
) -> dict[str, float]:
    """`train/rm/*` or `eval/rm/*` of scores (N, 2), chosen and rejected."""
    margin = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
    chosen, rejected = scores.unbind(1)
    _, metrics = preference_loss(chosen, rejected, margin, config)
    return {prefix + name: value.item() for name, value in metrics.items()}


def score_pairs(model, pairs: Sequence[Pair], micro_batch_size: int) -> torch.Tensor:
    """Scores (N, 2) fp64 of chosen and rejected, computed by all ranks together, the same on each."""
    share = ranks.share_of_rank(len(pairs))
    sides = [pairs[i].chosen for i in share] + [pairs[i].rejected for i in share]
    # PPO and GRPO read scores in this way too, so their rewards are the scores seen here.
    scorer = RewardScorer(model, micro_batch_size)
    share_scores = scorer.unchecked(
        [prompt for prompt, _ in sides], [response for _, response in sides]
    )
    scores = ranks.gather_share(share_scores.view(2, -1).T, share, len(pairs))
    check_finite(scores, [pair.where for pair in pairs])
    return scores


def evaluate(model, tokenizer, pairs: Sequence[Pair], config: RewardConfig) -> Evaluation:
    """Return the metrics `eval/rm/*` of the held-out pairs and a few of these with their scores."""
    with phase("evaluated on held-out pairs") as figures:
        scores = score_pairs(model, pairs, config.sequences_at_once)
        metrics = pair_metrics(scores, pairs, config, "eval/rm/")
        figures["accuracy"] = metrics["eval/rm/accuracy"]

    # A few of them as text, from all over the set, with their scores.
    samples = []
    stride = math.ceil(len(pairs) / 4)
    for pair, (chosen, rejected) in zip(pairs[::stride], scores[::stride].tolist(), strict=True):
        row = {
            "row": pair.where,
            "prompt": tokenizer.decode(pair.chosen[0]),
            "chosen": tokenizer.decode(pair.chosen[1]),
            "score": chosen,
            "rejected": tokenizer.decode(pair.rejected[1]),
            "its score": rejected,
        }
        samples.append(row)
    return Evaluation(metrics, samples, {"eval/rm/accuracy": [chosen_is_higher(scores).tolist()]})


def normalize(model, pairs: Sequence[Pair], micro_batch_size: int) -> list[float]:
    """Give the reference pairs' scores mean 0 and std 1; returns the model's constants, mean and std."""
    # The loss is of differences, so the mean of the scores is arbitrary until it is set.
    if pairs:
        model.module.normalize(score_pairs(model, pairs, micro_batch_size).flatten())
    return [model.module.score_mean, model.module.score_std]


def train(
    config: RewardConfig,
    dataset: RowsLike = None,
    eval_dataset: RowsLike = None,
    *,
    on_step: OnStep | None = None,
) -> str:
    """Run the whole training, on rows that are given or that the config names; returns the model's folder."""
    run = Run(config, batch_plan, on_step)
    # The reference pairs decide the scale of the scores, so a resumed run compares them, too.
    source = config.reference_dataset
    config = run.read(config, pairs_of, dataset, eval_dataset, reference_dataset=source)
    reference = run.others.get("reference_dataset", run.rows).chosen(slice(config.normalize_pairs))
    model, costs = _load(config, run.device)
    run.fit_micro_batches(model)

    # The run: `constants` normalise the scores, before training and again after it.
    constants = {}
    restored = run.start(
        {"reward": model},
        lambda: {"normalization": constants},
        evaluate=lambda: evaluate(model, run.tokenizer, run.held_out, config),
    )
    # Measured again after a resume, the first constants would be those of trained weights.
    if restored:
        constants |= restored["normalization"]
        model.module.set_normalization(*constants["before"])
    else:
        constants["before"] = normalize(model, reference, config.sequences_at_once)
    for step, indices in run:
        batch = [run.rows[i] for i in indices]
        metrics = train_step(model, batch, config, step, costs)
        run.log(metrics, sum(map(Pair.tokens, batch)))

    # The evaluation of the last step is in the scale of the training loss.
    last_metrics = run.last_metrics()
    # Training has moved the scores, so the model is saved with constants of its own.
    constants["after"] = normalize(model, reference, config.sequences_at_once)
    if run.held_out and ranks.process_index() == 0:
        evaluation = as_json({**last_metrics, "normalization": constants}, indent=2)
        write_atomically(run.store.path / "evaluation.json", evaluation)
    return run.finish(lambda folder: save_reward_model(model, run.tokenizer, folder))


def _load(config: RewardConfig, device: torch.device) -> tuple:
    """Return the engine with the model, and what shared prompts cost in it or None."""
    with phase("loaded the model"):
        model = load_reward_model(config, device)
        options = {"option": "share_prompts", "otherwise": "prompts are computed once per response"}
        costs = packing_costs(
            model.classifier, config.longest_sequence, config.share_prompts, **options
        )
        return engine.initialize(model, config, config.total_steps), costs


main = functools.partial(command.run, RewardConfig, train)

if __name__ == "__main__":
    main()
