"""The error for an option that does not exist, with the option that is meant: after a slip, or by its name in TRL."""

import difflib
from collections.abc import Collection

# The names of TRL's options that people type, and what each is called here; docs/from_trl.md has the differences.
NAMES: dict[str, str] = {
    # Every trainer.
    "learning_rate": "--lr",
    "max_steps": "--steps",
    "per_device_train_batch_size": "--micro_batch_size; the batch of a step is --batch_size or --prompts_per_step",
    "per_device_eval_batch_size": "--micro_batch_size",
    "gradient_accumulation_steps": "--batch_size or --prompts_per_step, the batch of a whole step",
    "warmup_ratio": "--warmup_steps, in updates",
    "lr_scheduler_type": "--lr_schedule: constant, linear or cosine",
    "adam_epsilon": "--adam_eps",
    "save_steps": "--save_every",
    "save_total_limit": "--keep_checkpoints",
    "eval_steps": "--eval_every",
    "eval_strategy": "--eval_every; --eval_size 0 evaluates never",
    "bf16": "--dtype bfloat16",
    "torch_dtype": "--dtype",
    "report_to": "--wandb_project or --trackio_project",
    "run_name": "--output_dir",
    "resume_from_checkpoint": "--resume, or --resume_from step-4",
    "overwrite_output_dir": "--overwrite",
    "deepspeed": "--zero_stage and --offload",
    "model_name_or_path": "--model",
    "model_revision": "--revision",
    "dataset_name": "--dataset",
    "train_dataset": "--dataset",
    "dataset_train_split": "--dataset_split",
    "lora_r": "--lora_rank",
    "lora_target_modules": "--lora_targets",
    # SFT and reward.
    "max_seq_length": "--max_length",
    "assistant_only_loss": "--assistant_turns all",
    "center_rewards_coefficient": "--centering",
    # GRPO and PPO.
    "beta": "--kl_coef",
    "num_generations": "--group_size",
    "num_iterations": "--epochs",
    "num_ppo_epochs": "--epochs",
    "steps_per_generation": "--minibatches",
    "generation_batch_size": "--prompts_per_step, in prompts",
    "max_completion_length": "--max_new_tokens",
    "response_length": "--max_new_tokens",
    "reward_funcs": "--verifiers",
    "reward_weights": "--verifier_weights",
    "loss_type": "--preset",
    "scale_rewards": "--advantage: group-std, group-mean-batch-std or group-mean",
    "importance_sampling_level": "--ratio_level",
    "epsilon": "--clip_low and --clip_high",
    "epsilon_high": "--clip_high",
    "cliprange": "--clip_low and --clip_high",
    "cliprange_value": "--value_clip",
    "lam": "--gae_lambda",
    "mask_truncated_completions": "--mask_truncated",
    "use_vllm": "--server, with the URL of a server",
    "vllm_server_base_url": "--server",
}

# What is the same thing in another command, and what that one has none of.
SAME = {"answer_column": "completion_column", "completion_column": "answer_column", "epochs": "num_train_epochs"}
NONE = {("eval", "eval_size"): "all rows of --dataset are evaluated: give a file of fewer"}


def unknown(name: str, known: Collection[str], command: str | None = None) -> str:
    """Return the message for an option that is not among those known, with the one that is meant if that is clear."""
    meant = name.replace("-", "_")
    nearest = difflib.get_close_matches(meant, [*known, *NAMES], n=1)
    if (command, meant) in NONE:
        told = NONE[command, meant]
    elif SAME.get(meant) in known:
        told = f"did you mean --{SAME[meant]}?"
    elif meant in NAMES:
        told = f"its name here is {NAMES[meant]}"
    elif nearest and nearest[0] in NAMES:
        told = f"did you mean {nearest[0]}, as in TRL? its name here is {NAMES[nearest[0]]}"
    else:
        told = f"did you mean --{nearest[0]}?" if nearest else "--help lists the options"
    return f"unknown option --{name}; {told}"
