"""What the options of TRL's configs are called here, or what to do instead: the table behind docs/from_trl.md.

`python -m bench docs` writes the page; a name of TRL's on our command line is answered from it (names.py).
"""

from typing import NamedTuple


class Here(NamedTuple):
    """What there is here for an option of TRL's."""

    names: str = ""
    """Our options, separated by spaces; none where nothing is asked for."""
    note: str = ""
    """What differs, or what to do instead."""


def same(*names: str) -> dict[str, Here]:
    """Options of the same name and meaning."""
    return {name: Here(name) for name in names}


# In GRPOConfig, SFTConfig and RewardConfig, or in two of them.
SHARED = {
    "activation_offloading": Here("gradient_checkpointing", "activations are recomputed, never moved to the CPU"),
    "chat_template_path": Here("", "save the tokenizer with its template into the folder of --model"),
    "dataset_num_proc": Here("", "rows are tokenised once, in the process that trains"),
    "disable_dropout": Here("", "there is no dropout"),
    "eos_token": Here("", "the tokenizer's, and those of the model's generation config"),
    "model_init_kwargs": Here("dtype attn_implementation revision", "one option each"),
    "pad_to_multiple_of": Here("", "rows are packed, or padded to the longest"),
    "pad_token": Here("", "the tokenizer's; what it is changes nothing"),
    "router_aux_loss_coef": Here("", "no auxiliary loss of routers"),
    "shuffle_dataset": Here("seed", "rows are always shuffled, by it"),
    "trust_remote_code": Here("", "code of models is never run"),
}
NO_VLLM = Here("server", "vLLM is started by you: its own command has this option")
CORRECTION = "always on where the sampler tells log-probabilities"
GRPO = same("temperature", "top_p", "top_k", "min_p", "chat_template_kwargs", "delta", "entropy_coef") | {
    **same("sapo_temperature_neg", "sapo_temperature_pos"),
    **same("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    "beta": Here("kl_coef", "the estimator is --kl_estimator, in the loss or the reward as --kl_in says"),
    "cache_implementation": Here("", "the built-in sampler has a cache of its own"),
    "cast_lm_head_to_fp32": Here("head_dtype", "float32"),
    "ds3_gather_for_generation": Here("", "ZeRO 3 gathers a layer at a time"),
    "entropy_coef_delta": Here("entropy_coef", "constant"),
    "entropy_coef_max": Here("entropy_coef", "constant"),
    "entropy_coef_min": Here("entropy_coef", "constant"),
    "entropy_target": Here("entropy_coef", "constant"),
    "epsilon": Here("clip_low clip_high"),
    "epsilon_high": Here("clip_high"),
    "generation_batch_size": Here("prompts_per_step", "in prompts, over all processes: divided by num_generations"),
    "generation_kwargs": Here("temperature top_p top_k min_p", "what the loss knows of; nothing else shapes sampling"),
    "importance_sampling_level": Here("ratio_level"),
    "log_completions": Here("show_samples", "samples.jsonl always"),
    "log_completions_hub_repo": Here("", "samples.jsonl is in output_dir"),
    "log_multimodal": Here("", "text alone"),
    "log_unique_prompts": Here("show_samples"),
    "loss_type": Here("preset loss_agg", "grpo, dapo, dr_grpo, cispo, sapo, luspo, vespo are presets (docs/losses.md)"),
    "mask_truncated_completions": Here("mask_truncated"),
    "max_completion_length": Here("max_new_tokens"),
    "max_tool_calling_iterations": Here("sampler", "a function of yours that converses (docs/rollouts.md)"),
    "multi_objective_aggregation": Here("verifier_weights", "the weighted sum is normalised, never each score alone"),
    "num_completions_to_print": Here("show_samples"),
    "num_generations": Here("group_size"),
    "num_generations_eval": Here("eval_samples"),
    "num_iterations": Here("epochs"),
    "off_policy_mask_threshold": Here("off_policy_threshold"),
    "ref_model_mixup_alpha": Here("ref_mixup_alpha"),
    "ref_model_sync_steps": Here("ref_sync_every"),
    "repetition_penalty": Here("", "tokens would not be drawn from the policy that is trained; a scorer may punish it"),
    "reward_weights": Here("verifier_weights", "a list beside --verifiers"),
    "scale_rewards": Here("advantage", "group: group-std, batch: group-mean-batch-std, none: group-mean"),
    "steps_per_generation": Here("minibatches", "optimizer updates per pass over a rollout"),
    "sync_ref_model": Here("ref_sync_every", "0 is never"),
    "top_entropy_quantile": Here("top_entropy"),
    "transformers_continuous_batching_config": Here("rollout_batch_size", "finished responses make room by themselves"),
    "use_adaptive_entropy": Here("entropy_coef", "constant"),
    "use_bias_correction_kl": Here("kl_estimator", "rk3, the default, is it; k3 is without"),
    "use_transformers_continuous_batching": Here("rollout_batch_size", "the built-in sampler is not generate()"),
    "use_transformers_paged": Here("rollout_batch_size", "the built-in sampler is not generate()"),
    "use_vllm": Here("server", "URLs of servers (docs/rollouts.md)"),
    "vllm_enable_sleep_mode": NO_VLLM,
    "vllm_gpu_memory_utilization": NO_VLLM,
    "vllm_group_port": NO_VLLM,
    "vllm_importance_sampling_cap": Here("rollout_high"),
    "vllm_importance_sampling_clip_max": Here("rollout_high"),
    "vllm_importance_sampling_clip_min": Here("rollout_low"),
    "vllm_importance_sampling_correction": Here("rollout_correction", CORRECTION),
    "vllm_importance_sampling_mode": Here("rollout_correction", "token-truncate, token-mask, sequence-…"),
    "vllm_max_model_length": NO_VLLM,
    "vllm_mode": Here("server", "never in the process that trains"),
    "vllm_model_impl": NO_VLLM,
    "vllm_server_base_url": Here("server"),
    "vllm_server_host": Here("server", "the whole URL"),
    "vllm_server_port": Here("server", "the whole URL"),
    "vllm_server_timeout": Here("", "fixed: ten minutes of silence, three tries (docs/rollouts.md)"),
    "vllm_structured_outputs_regex": Here("verifiers", "the whole vocabulary is drawn from; score the form instead"),
    "vllm_tensor_parallel_size": NO_VLLM,
}
SFT = same("max_length", "packing") | {
    "assistant_only_loss": Here("assistant_turns", "all; the default trains the last turn"),
    "completion_only_loss": Here("", "prompts are never trained; a row of text is, after its first token"),
    "dataset_kwargs": Here("", "rows are always tokenised here"),
    "dataset_text_field": Here("", "rename the column to text, or give prompt and completion"),
    "eval_packing": Here("packing", "of both"),
    "loss_type": Here("", "negative log-likelihood alone; TRL's dft is not here"),
    "packing_strategy": Here("packing", "demonstrations are never cut, and none sees another"),
    "padding_free": Here("packing"),
    "truncation_mode": Here("max_length", "longer rows are dropped, counted and reported, never cut"),
}
REWARD = {
    "center_rewards_coefficient": Here("centering"),
    "max_length": Here("max_prompt_length max_response_length", "--too_long drops or cuts"),
}
# TRL 1.16 has no PPO; these are the names of the config that it had.
PPO = same("kl_coef", "kl_estimator", "gamma", "temperature", "missing_eos_penalty", "whiten_rewards") | {
    "batch_size": Here("prompts_per_step group_size", "responses per step are their product"),
    "cliprange": Here("clip_low clip_high"),
    "cliprange_value": Here("value_clip"),
    "exp_name": Here("output_dir"),
    "lam": Here("gae_lambda"),
    "local_batch_size": Here("prompts_per_step", "over all processes"),
    "local_mini_batch_size": Here("minibatches"),
    "local_rollout_forward_batch_size": Here("rollout_batch_size"),
    "micro_batch_size": Here("micro_batch_size", "of one process, not of all"),
    "mini_batch_size": Here("minibatches", "how many there are, not how large"),
    "model_adapter_name": Here("lora_rank", "one adapter"),
    "num_mini_batches": Here("minibatches"),
    "num_ppo_epochs": Here("epochs"),
    "num_sample_generations": Here("show_samples", "at each evaluation"),
    "num_total_batches": Here("steps"),
    "ref_adapter_name": Here("", "the reference is the starting model"),
    "response_length": Here("max_new_tokens"),
    "reward_model_path": Here("verifiers", "reward_model:FOLDER; --critic starts from it too"),
    "sft_model_path": Here("model", "also the reference"),
    "stop_token": Here("stop_token", "one besides EOS, which always ends a response"),
    "stop_token_id": Here("stop_token", "as text"),
    "total_episodes": Here("steps", "a step has prompts_per_step × group_size of them"),
    "vf_coef": Here("value_coef", "of a shared critic alone; one of its own has critic_lr"),
    "world_size": Here("", "the launcher's"),
}
# transformers' TrainingArguments, those that somebody would set.
TRAINING = same("seed", "output_dir", "weight_decay", "adam_beta2", "max_grad_norm", "gradient_checkpointing") | {
    **same("num_train_epochs", "push_to_hub", "hub_model_id", "hub_private_repo"),
    "adam_beta1": Here("", "0.9"),
    "adam_epsilon": Here("adam_eps"),
    "bf16": Here("dtype", "bfloat16, with fp32 master weights"),
    "data_seed": Here("seed", "of everything"),
    "dataloader_num_workers": Here("", "token ids are in memory"),
    "ddp_timeout": Here("", "the launcher's"),
    "deepspeed": Here("zero_stage offload", "no file of its own"),
    "do_eval": Here("eval_size", "0 is without"),
    "eval_on_start": Here("", "always"),
    "eval_steps": Here("eval_every"),
    "eval_strategy": Here("eval_every"),
    "fp16": Here("dtype", "float32 or bfloat16 alone"),
    "fsdp": Here("zero_stage", "3 partitions the weights"),
    "gradient_accumulation_steps": Here("micro_batch_size", "a step's batch is divided by it, and the sum is the same"),
    "hub_token": Here("", "from the environment: HF_TOKEN"),
    "label_smoothing_factor": Here("", "not in the loss of tokens"),
    "learning_rate": Here("lr", "its default differs"),
    "load_best_model_at_end": Here("", "a model is saved at the end; checkpoints by --save_every"),
    "logging_steps": Here("", "every step is logged"),
    "lr_scheduler_kwargs": Here("", "none to give"),
    "lr_scheduler_type": Here("lr_schedule", "constant, linear, cosine"),
    "max_steps": Here("steps"),
    "neftune_noise_alpha": Here("", "no noise"),
    "optim": Here("", "AdamW"),
    "per_device_eval_batch_size": Here("micro_batch_size", "of both"),
    "per_device_train_batch_size": Here("micro_batch_size", "a step's batch is --batch_size or --prompts_per_step"),
    "project": Here("wandb_project trackio_project"),
    "remove_unused_columns": Here("", "scorers may read every column"),
    "report_to": Here("wandb_project trackio_project", "TensorBoard and metrics.jsonl always"),
    "resume_from_checkpoint": Here("resume_from resume"),
    "run_name": Here("output_dir", "its last part"),
    "save_only_model": Here("", "model/ holds the model alone"),
    "save_steps": Here("save_every"),
    "save_strategy": Here("save_every"),
    "save_total_limit": Here("keep_checkpoints"),
    "torch_compile": Here("", "the kernels are compiled, the model is as it is"),
    "use_liger_kernel": Here("loss_from", "linear, the default, forms no whole logits"),
    "warmup_steps": Here("warmup_steps", "in updates, never a fraction"),
}
MODEL = same("load_in_4bit", "attn_implementation", "dtype", "lora_alpha") | {
    "model_name_or_path": Here("model"),
    "model_revision": Here("revision"),
    "lora_dropout": Here("", "there is no dropout"),
    "lora_r": Here("lora_rank"),
    "lora_target_modules": Here("lora_targets"),
    "use_peft": Here("lora_rank", "above 0"),
}
SCRIPT = same("dataset_config") | {
    "dataset_name": Here("dataset"),
    "dataset_streaming": Here("", "rows are read whole"),
    "dataset_test_split": Here("eval_split"),
    "dataset_train_split": Here("dataset_split"),
}
# Of earlier releases, and arguments of the trainers that are no fields of a config.
OTHERS = {
    "max_seq_length": Here("max_length"),
    "overwrite_output_dir": Here("overwrite"),
    "peft_config": Here("lora_rank lora_alpha lora_targets"),
    "ref_model": Here("", "the reference is the starting model"),
    "reward_funcs": Here("verifiers", "a name, or my_module:function"),
    "reward_model": Here("verifiers", "reward_model:FOLDER"),
    "train_dataset": Here("dataset", "a file, a folder or a Hub name"),
    "value_model": Here("critic"),
    "warmup_ratio": Here("warmup_steps", "in updates"),
}
TABLES = {
    "GRPOConfig": GRPO,
    "SFTConfig": SFT,
    "RewardConfig": REWARD,
    "PPOConfig": PPO,
    "GRPOConfig, SFTConfig, RewardConfig": SHARED,
    "TrainingArguments": TRAINING,
    "ModelConfig": MODEL,
    "ScriptArguments": SCRIPT,
    "earlier names, and arguments of the trainers": OTHERS,
}


def of_trl(name: str) -> list[Here]:
    """What there is for an option of TRL's, in each of its configs that has it; [] for a name that is none of TRL's."""
    return [table[name] for table in TABLES.values() if name in table]
