"""What of a run may be another when it is resumed: one table, and the comparison.

A resumed run is the same run. An option stands in `MAY_CHANGE` where the run goes on with a new value from the next
step on; all others must be as they were, because what is behind would not have been the same.
"""

import dataclasses
import os
from pathlib import Path

from fused_rl.trainers.options.config import ACTIONS, InputError, Options

MAY_CHANGE = frozenset(
    (
        # The optimizer's options: used from the next update on, the schedule at the update where the run is.
        *("steps", "num_train_epochs", "lr", "lr_schedule", "warmup_steps", "weight_decay"),
        *("adam_beta2", "adam_eps", "max_grad_norm"),
        *("critic_lr", "critic_lr_schedule", "critic_warmup_steps", "critic_weight_decay", "critic_adam_beta2"),
        *("critic_max_grad_norm",),
        # Speed and memory: the same sums, rounded in another order; the same distribution, drawn in another order.
        *("micro_batch_size", "rollout_batch_size", "attn_implementation", "gradient_checkpointing", "loss_from"),
        "server",  # where it answers
        "model",
        "critic",
        "dataset",
        "reference_dataset",  # where they are: hashes say whether they are the same
        # What is measured, kept and shown. Rows held out of the dataset are missed in training: `Loop` counts those.
        *("eval_dataset", "eval_dataset_config", "eval_split", "eval_size", "eval_every", "eval_samples"),
        *("show_samples", "kl_every", "save_every", "keep_checkpoints", "output_dir", "save_merged"),
        *("wandb_project", "trackio_project", "push_to_hub", "hub_model_id", "hub_private_repo"),
    )
)
CHOSEN = ("verifiers",)  # by the rows where it is None: then what was chosen before holds
SAME_FILES = {"zero_stage": {1, 2}}  # values between which a checkpoint is the same: both partition the optimizer alone


def changes(config: Options, facts: dict[str, object], recorded: dict[str, object], where: Path) -> list[str]:
    """What differs between a run and the checkpoint that it continues, one `option old -> new` each.

    Args:
        config, facts: of the run: its options, and what else must be as it was (command, processes, precision).
        recorded: both, of the checkpoint `where`.

    Raises:
        InputError: something differs that must not; names every such option with both values.
    """
    current = {**dataclasses.asdict(config), **facts}
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    taken, refused = [], []
    for name, new in current.items():
        old = recorded.get(name, defaults.get(name))  # an option that is younger than the checkpoint had its default
        if name in ACTIONS or _same(old, new) or (name in CHOSEN and new is None):
            continue
        same_files = name in SAME_FILES and {old, new} <= SAME_FILES[name]
        (taken if same_files or name in MAY_CHANGE else refused).append(f"{name} {old} -> {new}")
    if refused:
        raise InputError(
            f"resume: {where} was made with other options: {', '.join(refused)}; give the first value of each again "
            f"(--config {where / 'config.yaml'} --resume), or start another run: --overwrite or another output_dir"
        )
    return taken


def _same(old, new) -> bool:
    """Whether two values are one; two ways to write the path of a file are."""
    if [old] == new:  # a list of one word may be that word
        return True
    if old == new or not (isinstance(old, str) and isinstance(new, str)):
        return old == new
    return os.path.exists(old) and os.path.exists(new) and os.path.samefile(old, new)
