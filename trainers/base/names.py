"""The error for an option that does not exist, with the option that is meant: after a slip, or by its name in TRL."""

import difflib
from collections.abc import Collection

# The names of TRL's options that people type, and what each is called here; docs/from_trl.md has the differences.
NAMES: dict[str, str] = {
    # Every trainer.
    "learning_rate": "--lr",
    "max_steps": "--steps",
    "per_device_train_batch_size": "--micro_batch_size; the batch of a step is --batch_size or --prompts_per_step",
    "gradient_accumulation_steps": "--batch_size or --prompts_per_step, the batch of a whole step",
    "warmup_ratio": "--warmup_steps, in updates",
    "lr_scheduler_type": "--lr_schedule: constant, linear or cosine",
    "adam_epsilon": "--adam_eps",
    "save_steps": "--save_every",
    "save_total_limit": "--keep_checkpoints",
    "eval_steps": "--eval_every",
    "eval_strategy": "--eval_every; --eval_size 0 evaluates never",
    "bf16": "--dtype bfloat16",
    "report_to": "--wandb_project",
    "resume_from_checkpoint": "--resume, or --resume_from step-4",
    "overwrite_output_dir": "--overwrite",
    "deepspeed": "--zero_stage and --offload",
    "model_name_or_path": "--model",
    "dataset_name": "--dataset",
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
    "steps_per_generation": "--minibatches",
    "max_completion_length": "--max_new_tokens",
    "reward_funcs": "--verifiers",
    "reward_weights": "--verifier_weights",
    "loss_type": "--preset",
    "scale_rewards": "--advantage: group-std, group-mean-batch-std or group-mean",
    "epsilon": "--clip_low and --clip_high",
    "epsilon_high": "--clip_high",
    "mask_truncated_completions": "--mask_truncated",
    "use_vllm": "--server, with the URL of a server",
    "vllm_server_base_url": "--server",
}

# The same option in another command.
SAME = {"answer_column": "completion_column", "completion_column": "answer_column", "epochs": "num_train_epochs"}


def unknown(name: str, known: Collection[str], command: str | None = None) -> str:
    """Return the message for an option that is not among those known, with the one that is meant if that is clear."""
    meant = name.replace("-", "_")
    nearest = difflib.get_close_matches(meant, [*known, *NAMES], n=1)
    remedy = f"did you mean --{nearest[0]}?" if nearest else "--help lists the options"
    if (command, meant) == ("eval", "eval_size"):
        remedy = "all rows of --dataset are evaluated: give a file of fewer"
    elif SAME.get(meant) in known:
        remedy = f"did you mean --{SAME[meant]}?"
    elif meant in NAMES:
        remedy = f"its name here is {NAMES[meant]}"
    elif nearest and nearest[0] in NAMES:
        remedy = f"did you mean {nearest[0]}, as in TRL? its name here is {NAMES[nearest[0]]}"
    return f"unknown option --{name}; {remedy}"
