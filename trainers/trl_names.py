"""TRL's options: what each is called here.

This is the one table of names. docs/from_trl.md prints it, with what has no counterpart, and the error for an unknown
option reads it: a run whose options are all known never imports this file.
"""

import difflib
import re
from collections.abc import Collection

from .base.text import InputError, InputErrors, escaped
from .cli import COMMANDS

# TRL's name -> ours. A clause after "; " is for the trainers that have the options in it. A text that does not begin
# with an option says where the value goes.
NAMES: dict[str, str] = {
    # The model and the rows.
    "model_name_or_path": "--model",
    "model_revision": "--revision",
    "torch_dtype": "--dtype: auto, bfloat16 (with fp32 master weights) or float32",
    "bf16": "--dtype bfloat16, with fp32 master weights",
    "use_peft": "--lora_rank",
    "lora_r": "--lora_rank",
    "lora_target_modules": "--lora_targets",
    "cast_lm_head_to_fp32": "--head_dtype float32",
    "activation_offloading": "--checkpoint_activations_on cpu, with --gradient_checkpointing true",
    "dataset_name": "--dataset",
    "dataset_train_split": "--dataset_split",
    "dataset_test_split": "--eval_split",
    "dataset_prompt_column": "--prompt_column",
    "dataset_text_field": "--prompt_column, of whole texts",
    # The optimizer, and the length of a run.
    "learning_rate": "--lr",
    "lr_scheduler_type": "--lr_schedule: constant, linear or cosine",
    "lr_scheduler_kwargs": "a function of your own, --lr_schedule module:function (docs/hooks.md)",
    "warmup_ratio": "--warmup_steps, in updates",
    "adam_epsilon": "--adam_eps",
    "max_steps": "--steps, which count updates, or rollouts where responses are sampled",
    "total_episodes": "--steps, after division by --prompts_per_step times --group_size",
    # A batch.
    "per_device_train_batch_size": "--micro_batch_size, which changes no result; --batch_size is the rows of an "
    "update; --prompts_per_step is the prompts of a rollout",
    "gradient_accumulation_steps": "no option, but a part of --batch_size, the rows of an update; no option, but a "
    "part of --prompts_per_step, the prompts of a rollout",
    "generation_batch_size": "--prompts_per_step, after division by --group_size",
    "auto_find_batch_size": "no option, as a GPU's memory chooses --micro_batch_size",
    # What is written and when.
    "save_steps": "--save_every",
    "save_strategy": "--save_every, in steps",
    "save_total_limit": "--keep_checkpoints",
    "eval_steps": "--eval_every",
    "eval_strategy": "--eval_every, in steps; --eval_size 0 never evaluates",
    "report_to": "--wandb_project; TensorBoard and metrics.jsonl are always written",
    "resume_from_checkpoint": "--resume, or --resume_from step-4",
    "overwrite_output_dir": "--overwrite",
    "activation_checkpointing": "--gradient_checkpointing",
    # SFT and preferences.
    "max_seq_length": "--max_length",
    "max_length": "--max_prompt_length plus --max_response_length; --max_prompt_length plus --max_new_tokens",
    "max_target_length": "--max_response_length",
    "assistant_only_loss": "--assistant_turns all",
    "center_rewards_coefficient": "--centering",
    "simpo_gamma": "--margin",
    "cpo_alpha": "--nll_coef",
    "rpo_alpha": "--nll_coef",
    # Rollouts.
    "num_generations": "--group_size",
    "num_generations_eval": "--eval_samples",
    "num_iterations": "--epochs",
    "steps_per_generation": "--minibatches, after division by gradient_accumulation_steps",
    "max_completion_length": "--max_new_tokens; --max_response_length",
    "use_vllm": "--server, with the URL of a server",
    "vllm_mode": "--server: you start vLLM, and the run finds it by its URL",
    "vllm_server_base_url": "--server",
    "vllm_server_host": "--server",
    "vllm_server_port": "--server",
    "vllm_server_timeout": "--server_timeout",
    "vllm_enable_sleep_mode": "--server_sleeps",
    # Rewards, advantages and the loss.
    "reward_funcs": "--verifiers",
    "reward_model_name_or_path": "--verifiers reward_model:FOLDER",
    "reward_weights": "--verifier_weights",
    "beta": "--kl_coef; --direction and --jsd_beta",
    "use_bias_correction_kl": "--kl_estimator: rk3 if true, k3 if false",
    "scale_rewards": "--advantage: group-std, group-mean-batch-std or group-mean",
    "multi_objective_aggregation": "--advantage gdpo",
    "loss_type": "--preset of the same name, which also sets clipping, ratio level and advantages",
    "epsilon": "--clip_low and --clip_high",
    "epsilon_high": "--clip_high",
    "importance_sampling_level": "--ratio_level",
    "mask_truncated_completions": "--mask_truncated",
    "top_entropy_quantile": "--top_entropy",
    **dict.fromkeys(
        (
            *("sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_k_neg"),
            *("vespo_lambda_pos", "vespo_lambda_neg"),
        ),
        "--surrogate_options, by the same name",
    ),
    "off_policy_mask_threshold": "--off_policy_threshold",
    "vllm_importance_sampling_correction": "--rollout_correction",
    "vllm_importance_sampling_mode": "--rollout_correction: sequence-mask, …",
    "vllm_importance_sampling_clip_max": "--rollout_high",
    "vllm_importance_sampling_clip_min": "--rollout_low",
    "sync_ref_model": "--ref_sync_every, in steps",
    "ref_model_sync_steps": "--ref_sync_every, in steps",
    "ref_model_mixup_alpha": "--ref_mixup_alpha",
    # Distillation.
    "teacher_model_name_or_path": "--teacher",
    "lmbda": "--on_policy",
    # PPO, which TRL 1.16 has no more.
    "num_ppo_epochs": "--epochs",
    "num_mini_batches": "--minibatches",
    "response_length": "--max_new_tokens",
    "cliprange": "--clip_low and --clip_high",
    "cliprange_value": "--value_clip",
    "lam": "--gae_lambda",
    "target": "--kl_target",
    "horizon": "--kl_horizon",
    "sft_model_path": "--model",
    "reward_model_path": "--verifiers reward_model:FOLDER",
}


def unknown_options_error(
    names: Collection[str], options: Collection[str], where: str = ""
) -> InputError:
    """Return the error for names that are no options, all of them at once; `where` says where they stand."""
    names = list(dict.fromkeys(names))
    named = [f"--{name}; {suggestion_for(name, options)}" for name in names]
    if len(named) == 1:
        return InputError(f"{where}unknown option {named[0]}")
    lines = [f"{where}{len(named)} unknown options", *named]
    if any(name.replace("-", "_") in NAMES for name in names):
        lines.append("docs/from_trl.md has all names of TRL, and how batch sizes and steps convert")
    return InputErrors("\n  ".join(map(escaped, lines)))


def suggestion_for(name: str, options: Collection[str]) -> str:
    """Return what is meant by a name that is no option: its name here, or the nearest one."""
    meant = name.replace("-", "_")
    if meant in NAMES:
        return _name_here(meant, options)
    configs = {key: listed.config_class() for key, listed in COMMANDS.items() if listed.config}
    if owners := [key for key, config in configs.items() if name in config.model_fields]:
        return f"it is an option of {', '.join(owners)}"
    # Less alike are options of TRL that have no counterpart.
    nearest = difflib.get_close_matches(meant, [*options, *NAMES], n=1, cutoff=0.8)
    if not nearest:
        return "--help all lists the options, and docs/from_trl.md what TRL has and a run here does without"
    if nearest[0] in NAMES:
        return f"did you mean {nearest[0]}, as in TRL? {_name_here(nearest[0], options)}"
    return f"did you mean --{nearest[0]}?"


def _name_here(name: str, options: Collection[str]) -> str:
    """Return the name of one of TRL's options here, for the trainer which has `options`."""
    clauses = NAMES[name].split("; ")
    usable = [text for text in clauses if {*re.findall(r"--(\w+)", text)} <= {*options}]
    text = "; ".join(usable or clauses)
    return f"its name here is {text}" if text.startswith("--") else f"here it is {text}"
