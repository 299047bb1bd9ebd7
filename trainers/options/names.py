"""What an option is called here that somebody spelled otherwise: by a slip, or by its name in TRL."""

import difflib
from collections.abc import Collection

# TRL's and transformers' names of options, and ours of the same thing; docs/training.md shows them.
OF_TRL = {
    "adam_epsilon": "adam_eps",
    "beta": "kl_coef",
    "center_rewards_coefficient": "centering",
    "cliprange": "clip_low clip_high",
    "cliprange_value": "value_clip",
    "dataset_name": "dataset",
    "dataset_test_split": "eval_split",
    "dataset_train_split": "dataset_split",
    "epsilon": "clip_low clip_high",
    "epsilon_high": "clip_high",
    "eval_steps": "eval_every",
    "importance_sampling_level": "ratio_level",
    "lam": "gae_lambda",
    "learning_rate": "lr",
    "local_rollout_forward_batch_size": "rollout_batch_size",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "loss_type": "preset loss_agg",
    "lr_scheduler_type": "lr_schedule",
    "mask_truncated_completions": "mask_truncated",
    "max_completion_length": "max_new_tokens",
    "max_seq_length": "max_length",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "model_revision": "revision",
    "num_generations": "group_size",
    "num_iterations": "epochs",
    "num_mini_batches": "minibatches",
    "num_ppo_epochs": "epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "ref_model_mixup_alpha": "ref_mixup_alpha",
    "ref_model_sync_steps": "ref_sync_every",
    "report_to": "wandb_project trackio_project",
    "response_length": "max_new_tokens",
    "resume_from_checkpoint": "resume_from",
    "reward_funcs": "verifiers",
    "reward_weights": "verifier_weights",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "scale_rewards": "advantage",
    "steps_per_generation": "minibatches",
    "sync_ref_model": "ref_sync_every",
    "top_entropy_quantile": "top_entropy",
    "vf_coef": "value_coef",
    "warmup_ratio": "warmup_steps",
}


def unknown(name: str, known: Collection[str]) -> str:
    """What is said of an option that is none of those known, with the one that is meant where that can be told."""
    meant = name.replace("-", "_")
    here = [option for option in OF_TRL.get(meant, "").split() if option in known]
    if here:
        return f"unknown option --{name}; its name here is --{' and --'.join(here)}"
    near = difflib.get_close_matches(meant, known, n=1)
    return f"unknown option --{name}; {f'did you mean --{near[0]}?' if near else '--help lists the options'}"
