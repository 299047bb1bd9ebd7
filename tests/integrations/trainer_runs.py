"""Runs of transformers' own `Trainer` on tiny models, stock and with our losses, and all that they compute."""

import contextlib
import functools
from dataclasses import dataclass, field

import torch

from fused_rl.integrations.transformers import causal_lm_loss, patch
from tests.integrations import tiny_models

WAYS = ("stock", "logits", "fused")


@dataclass
class Run:
    """What a run logged at each step, the gradient of each parameter at each step, and the weights at its end."""

    logs: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)


def make_trainer(
    model, folder, way: str, run: Run, *, rows=12, compute_metrics=None, loss=None, **options
):
    """A Trainer in the way named: `stock`, `logits` (compute_loss_func) or `fused` (a model that is patched).

    `loss` holds options of ours.
    """
    import transformers

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            trained = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
            run.gradients.append(trained)

        def on_log(self, args, state, control, logs=None, **kwargs):
            run.logs.append(
                {key: value for key, value in logs.items() if key in ("loss", "grad_norm")}
            )

    quiet = {
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
    }
    # SGD: Adam would turn a rounding of a small gradient into a step of full size
    numbers = {
        "optim": "sgd",
        "learning_rate": 0.05,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 2,
    }
    arguments = {**quiet, **numbers, "max_steps": 2, "remove_unused_columns": False, **options}
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **arguments),
        data_collator=tiny_models.collate,
        train_dataset=tiny_models.rows(rows),
        eval_dataset=tiny_models.rows(5, seed=1),
        compute_loss_func=functools.partial(causal_lm_loss, **loss or {})
        if way == "logits"
        else None,
        compute_metrics=compute_metrics,
        callbacks=[Watch()],
    )


def train(model, folder, way: str = "stock", loss=None, **options) -> Run:
    """Two steps of training and an evaluation."""
    run = Run()
    with patch(model, **loss or {}) if way == "fused" else contextlib.nullcontext():
        trainer = make_trainer(model, folder, way, run, loss=loss, **options)
        trainer.train()
        evaluation = trainer.evaluate()
    run.evaluation = {"eval_loss": evaluation["eval_loss"]}
    run.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return run


def assert_equal_runs(run: Run, stock: Run, tolerance: float = 1e-5) -> None:
    """Logged values, gradients and weights, within the tolerance, absolute and relative."""
    close = {"atol": tolerance, "rtol": tolerance}
    assert len(run.logs) == len(stock.logs)
    assert len(run.gradients) == len(stock.gradients) > 0
    for ours, theirs in zip(
        [*run.logs, run.evaluation], [*stock.logs, stock.evaluation], strict=True
    ):
        torch.testing.assert_close(ours, theirs, **close)
    for ours, theirs in zip(
        [*run.gradients, run.weights], [*stock.gradients, stock.weights], strict=True
    ):
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours, theirs, **close)
