"""TRL's options: what each is called here, and why some have no counterpart.

This is the one table of names. docs/from_trl.md prints it, and the error for an unknown option reads it: a run whose
options are all known never imports this file.
"""

import difflib
import re
from collections.abc import Collection

from fused_rl.trainers.base.text import InputError, UnknownOptions, escaped

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

# What is left out -> why, and TRL's names of it. A name that ends in * stands for all that begin so.
ABSENT: dict[str, tuple[str, tuple[str, ...]]] = {
    "Logging": (
        "every step is logged, and samples of each evaluation are in samples.jsonl",
        (
            "logging_*",
            "log_*",
            "num_completions_to_print",
            "disable_tqdm",
            "run_name",
            "project",
            "trackio_*",
            "include_for_metrics",
            "include_num_input_tokens_seen",
            "include_tokens_per_second",
            "generate_during_eval",
        ),
    ),
    "vLLM's own options": (
        "you start the server with them, and --server names it",
        ("vllm_*", "use_transformers_*", "transformers_*", "cache_implementation"),
    ),
    "Sampling that the loss does not know": (
        "the tokens would not come from the policy that is trained; a scorer may judge repetition and form",
        ("repetition_penalty", "generation_kwargs"),
    ),
    "Cutting rows": (
        "longer rows are dropped, counted and reported; of pairs, --too_long truncate cuts responses",
        ("truncation_mode", "pad_to_multiple_of", "padding_free", "padding_value", "max_pixels"),
    ),
    "Tools and environments": (
        "a sampler of your own can hold the conversation (docs/rollouts.md)",
        ("tools", "environment_factory", "rollout_func", "max_tool_calling_iterations"),
    ),
    "Callbacks, collators, custom losses": (
        "--on_step (docs/hooks.md), scorers, a sampler and a surrogate of your own take their place",
        ("callbacks", "compute_loss_func", "data_collator", "compute_metrics", "formatting_func")
        + ("preprocess_logits_for_metrics", "optimizers"),
    ),
    "Objects in memory": (
        "the reference is the starting model and the tokenizer is in its folder; both are loaded by name, so that a "
        "run can resume",
        ("ref_model", "ref_model_init_kwargs", "processing_class", "tokenizer")
        + ("reward_processing_classes", "force_use_ref_model"),
    ),
    "Scores of the reference beforehand": (
        "a run on pairs or marked responses always measures the reference once, before its first step",
        ("precompute_ref_*",),
    ),
    "Special tokens and templates": (
        "set them on the tokenizer, save it and the model into one folder by save_pretrained, and give that as --model",
        ("eos_token", "pad_token", "chat_template", "chat_template_path"),
    ),
    "Distribution": (
        "DeepSpeed divides the work: --zero_stage, --offload, --sequence_parallel",
        ("fsdp*", "ddp_*", "parallelism_config", "accelerator_config", "ds3_gather_for_generation")
        + ("average_tokens_across_devices", "local_rank"),
    ),
    "Other optimizers": (
        "AdamW only, with the moments' first decay at 0.9",
        ("optim", "optim_*", "adam_beta1"),
    ),
    "Compilation and Liger": (
        "the loss comes from kernels of this project",
        ("torch_compile*", "use_liger_*", "liger_kernel_config"),
    ),
    "How memory is saved": (
        "--gradient_checkpointing and --checkpoint_activations_on choose; training keeps no cache of keys and values",
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "use_cache")
        + ("torch_empty_cache_steps",),
    ),
    "The device": (
        "a run takes the GPUs that it finds, and a CPU without any; CUDA_VISIBLE_DEVICES chooses among them",
        ("use_cpu", "no_cuda"),
    ),
    "Code of models": (
        "models are those of transformers, whose code is installed; no code of a model's folder is run",
        ("trust_remote_code",),
    ),
    "Reproducing and measuring": (
        "--seed is all that a run's chance follows from; measure a run with tools of your own",
        ("full_determinism", "debug", "benchmark", "benchmark_*"),
    ),
    "Half precision and 8 bits": (
        "bfloat16 or float32, and 4 bits under adapters by --load_in_4bit",
        ("fp16*", "load_in_8bit", "bf16_full_eval", "tf32", "bnb_*", "use_bnb_nested_quant")
        + ("quantization_config",),
    ),
    "Other adapters": (
        "adapters are plain LoRA on linear layers, without dropout, and no whole layer is trained beside them",
        ("lora_dropout", "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora")
        + ("lora_target_parameters", "bias", "task_type"),
    ),
    "The best checkpoint": (
        "the model of the last step is saved, and checkpoints have the others",
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ),
    "Dropout and NEFTune": (
        "a run trains without dropout, and without noise on the embeddings",
        ("neftune_noise_alpha", "disable_dropout"),
    ),
    "Other terms of the loss": (
        "the loss here has no such term, weight or divergence, and is trained without it",
        ("use_adaptive_entropy", "entropy_coef_*", "entropy_target", "router_aux_loss_coef")
        + ("f_divergence_type", "f_alpha_divergence_coef", "use_weighting", "discopop_tau")
        + ("loss_weights", "label_smoothing_factor", "seq_kd", "alpha", "ld_alpha"),
    ),
    "Clipped and normalized scores": (
        "scores are taken as they are, and --advantage says how they are compared; a scorer can bound its own",
        ("reward_clip_range", "normalize_advantages"),
    ),
    "Loading of rows": (
        "rows are read, encoded and shuffled by the run itself",
        ("dataloader_*", "dataset_num_proc", "dataset_kwargs", "dataset_streaming")
        + ("dataset_batch_size", "remove_unused_columns", "shuffle_dataset", "data_seed")
        + ("group_by_length", "train_sampling_strategy", "length_column_name", "label_names")
        + ("packing_strategy", "eval_packing", "completion_only_loss", "ignore_data_skip")
        + ("is_encoder_decoder", "ignore_bias_buffers"),
    ),
    "Mixtures of datasets": (
        "write the rows into one file",
        ("datasets", "dataset_mixture", "dataset_mixer", "dataset_splits", "dataset_configs")
        + ("concatenate_datasets",),
    ),
    "Evaluation by the Trainer": (
        "a run evaluates before its first step, after its last and every --eval_every steps, and chooses the batches",
        ("per_device_eval_batch_size", "eval_*", "do_*", "prediction_loss_only")
        + ("batch_eval_metrics", "skip_memory_metrics"),
    ),
    "The Hub and files": (
        "--push_to_hub uploads the model at the end; checkpoints hold all that a resumed run needs",
        ("hub_*", "save_only_model", "save_safetensors", "save_on_each_node")
        + ("model_init_kwargs", "teacher_model_init_kwargs", "teacher_model_revision")
        + ("restore_callback_states_from_checkpoint", "enable_jit_checkpoint"),
    ),
}


def reason_of(name: str) -> str | None:
    """Return why an option of TRL has no counterpart; None for names of other kinds."""
    for reason, names in ABSENT.values():
        for listed in names:
            is_beginning = listed.endswith("*") and name.startswith(listed[:-1])
            if name == listed or is_beginning:
                return reason
    return None


def unknown_options_error(
    names: Collection[str], known: Collection[str], where: str = ""
) -> InputError:
    """Return the error for names that are no options, all of them at once; `where` says where they stand."""
    names = list(dict.fromkeys(names))
    if len(names) == 1:
        return InputError(where + unknown(names[0], known))
    lines = [f"{where}{len(names)} unknown options"]
    lines += [f"--{name}; {suggestion_for(name, known)}" for name in names]
    if any(name.replace("-", "_") in NAMES for name in names):
        lines.append("docs/from_trl.md has all names of TRL, and how batch sizes and steps convert")
    return UnknownOptions("\n  ".join(map(escaped, lines)))


def unknown(name: str, known: Collection[str]) -> str:
    """Return the message for an option that is not `known`, with the one that is meant if that is clear."""
    return f"unknown option --{name}; {suggestion_for(name, known)}"


def suggestion_for(name: str, known: Collection[str]) -> str:
    """Return what is meant by a name that is no option: its name here, why it has none, or the nearest one."""
    meant = name.replace("-", "_")
    if meant in NAMES:
        return _name_here(meant, known)
    reason = reason_of(meant)
    if reason is not None:
        return f"it has no counterpart: {reason}"
    nearest = difflib.get_close_matches(meant, [*known, *NAMES], n=1)
    if not nearest:
        return "--help all lists the options"
    if nearest[0] in NAMES:
        return f"did you mean {nearest[0]}, as in TRL? {_name_here(nearest[0], known)}"
    return f"did you mean --{nearest[0]}?"


def _name_here(name: str, known: Collection[str]) -> str:
    """Return the name of one of TRL's options here, for the trainer whose options are `known`."""
    clauses = NAMES[name].split("; ")
    fitting = [text for text in clauses if {*re.findall(r"--(\w+)", text)} <= {*known}]
    text = "; ".join(fitting or clauses)
    return f"its name here is {text}" if text.startswith("--") else f"here it is {text}"
