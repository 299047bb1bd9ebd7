"""What the options of TRL's configs are called here, or what to do instead: the table behind docs/from_trl.md.

`python -m bench docs` writes the page; a name of TRL's on our command line is answered from it (names.py).
"""

from typing import NamedTuple


class Here(NamedTuple):
    """What there is here for an option of TRL's."""

    names: str = ""
    """Our options that its value becomes, separated by spaces; none where there is no such option."""
    note: str = ""
    """How the value is converted and what differs, or what to do instead."""


def same(*names: str) -> dict[str, Here]:
    """Options of the same name and meaning."""
    return {name: Here(name) for name in names}


def none(note: str, names: str) -> dict[str, Here]:
    """Options that there are not, separated by spaces, for one reason."""
    return {name: Here("", note) for name in names.split()}


# In GRPOConfig, SFTConfig and RewardConfig, or in two of them.
SHARED = {
    "activation_offloading": Here("", "activations are recomputed (--gradient_checkpointing), never moved to the CPU"),
    "chat_template_path": Here("", "save the tokenizer with its template into the folder of --model"),
    "dataset_num_proc": Here("", "rows are tokenised once, in the process that trains"),
    "disable_dropout": Here("", "there is no dropout"),
    "eos_token": Here("", "the tokenizer's, and those of the model's generation config"),
    "model_init_kwargs": Here("dtype attn_implementation revision", "one option each"),
    "pad_to_multiple_of": Here("", "rows are packed, or padded to the longest"),
    "pad_token": Here("", "the tokenizer's; what it is changes nothing"),
    "router_aux_loss_coef": Here("", "no auxiliary loss of routers"),
    "shuffle_dataset": Here("", "rows are always shuffled, by --seed"),
    "trust_remote_code": Here("", "code of models is never run"),
}
CONSTANT = "entropy_coef is constant"
OVER_REST = "the loss is over what was left, TRL's over all tokens"
OF_VLLM = "vLLM is started by you, with its own options, and --server names its URL"
LOSS_TYPES = (
    "of the same name, which also sets clipping, ratio level and advantages: for TRL's give --clip_high 0.2 with dapo, "
    "--advantage group-std with dr_grpo, --ratio_level token --clip_low 0.2 --clip_high 0.2 with luspo"
)
GRPO = same("temperature", "chat_template_kwargs", "sapo_temperature_neg", "sapo_temperature_pos") | {
    **same("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    **none(CONSTANT, "entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target use_adaptive_entropy"),
    **none(OF_VLLM, "vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length"),
    **none(OF_VLLM, "vllm_model_impl vllm_tensor_parallel_size"),
    "beta": Here("kl_coef", "in the loss, by rk3, as TRL's; --kl_estimator and --kl_in choose others"),
    "cache_implementation": Here("", "the built-in sampler has a cache of its own"),
    "cast_lm_head_to_fp32": Here("head_dtype", "float32"),
    "delta": Here("delta", "above 1 + clip_high"),
    "ds3_gather_for_generation": Here("", "ZeRO 3 gathers a layer at a time"),
    "entropy_coef": Here(
        "entropy_coef", "the bonus is averaged as the loss is, TRL's over the tokens of a micro-batch"
    ),
    "epsilon": Here("clip_low clip_high", "both, where epsilon_high is not given"),
    "epsilon_high": Here("clip_high", "with cispo less 1: TRL's is the bound there, ours always the offset from 1"),
    "generation_batch_size": Here("prompts_per_step", "in prompts: divided by num_generations"),
    "generation_kwargs": Here("temperature top_p top_k min_p", "what the loss knows of; nothing else shapes sampling"),
    "importance_sampling_level": Here("ratio_level", "token or sequence; the KL of a token is weighted by its own"),
    "log_completions": Here("", "samples.jsonl always, and --show_samples of them on the screen"),
    "log_completions_hub_repo": Here("", "samples.jsonl is in output_dir"),
    "log_multimodal": Here("", "text alone"),
    "log_unique_prompts": Here("", "samples.jsonl always, and --show_samples of them on the screen"),
    "loss_type": Here("preset", LOSS_TYPES),
    "mask_truncated_completions": Here("mask_truncated"),
    "max_completion_length": Here("max_new_tokens"),
    "max_tool_calling_iterations": Here("", "--sampler: a function of yours that converses (docs/rollouts.md)"),
    "min_p": Here("min_p", OVER_REST),
    "multi_objective_aggregation": Here("", "the weighted sum is normalised, never each score alone"),
    "num_completions_to_print": Here("show_samples", "at each evaluation"),
    "num_generations": Here("group_size"),
    "num_generations_eval": Here("eval_samples"),
    "num_iterations": Here("epochs"),
    "off_policy_mask_threshold": Here("off_policy_threshold"),
    "ref_model_mixup_alpha": Here("ref_mixup_alpha"),
    "ref_model_sync_steps": Here("ref_sync_every", "in steps, which are rollouts: divided by the updates of each"),
    "repetition_penalty": Here("", "tokens would not be drawn from the policy that is trained; a scorer may punish it"),
    "reward_weights": Here("verifier_weights", "a list beside --verifiers"),
    "scale_rewards": Here("advantage", "group: group-std, batch: group-mean-batch-std, none: group-mean"),
    "steps_per_generation": Here("minibatches", "divided by gradient_accumulation_steps; TRL's own is then 1, ours 2"),
    "sync_ref_model": Here("", "--ref_sync_every says how often; 0 is never"),
    "top_entropy_quantile": Here("top_entropy", "above 0; the entropy bonus stays on every token"),
    "top_k": Here("top_k", OVER_REST),
    "top_p": Here("top_p", OVER_REST),
    "transformers_continuous_batching_config": Here("", "finished responses make room by themselves"),
    "use_bias_correction_kl": Here("kl_estimator", "true: rk3, the default; false: k3"),
    "use_transformers_continuous_batching": Here("", "the built-in sampler is not generate()"),
    "use_transformers_paged": Here("", "the built-in sampler is not generate()"),
    "use_vllm": Here("server", "URLs of servers (docs/rollouts.md)"),
    "vllm_importance_sampling_cap": Here("rollout_high"),
    "vllm_importance_sampling_clip_max": Here("rollout_high", "null: inf"),
    "vllm_importance_sampling_clip_min": Here("rollout_low", "null: 0"),
    "vllm_importance_sampling_correction": Here("", "always on where the sampler tells log-probabilities"),
    "vllm_importance_sampling_mode": Here("rollout_correction", "with a hyphen: sequence-mask; vespo is weighted too"),
    "vllm_mode": Here("", "never in the process that trains: --server names URLs"),
    "vllm_server_base_url": Here("server"),
    "vllm_server_host": Here("server", "the whole URL"),
    "vllm_server_port": Here("server", "the whole URL"),
    "vllm_server_timeout": Here("", "fixed: ten minutes of silence, three tries (docs/rollouts.md)"),
    "vllm_structured_outputs_regex": Here(
        "", "the whole vocabulary is drawn from; score the form (--verifiers regex:…)"
    ),
}
CLIPPED = (
    "preset rloo clips nothing; TRL's is --surrogate clip --ratio_level sequence-sum --loss_agg seq-mean-token-mean"
)
# What it has beside the names of GRPOConfig, or means otherwise.
RLOO = {
    "beta": Here("kl_coef", "with --kl_in reward, as TRL's: k1 of the response, less from its reward"),
    "epsilon": Here("clip_low clip_high", CLIPPED),
    "normalize_advantages": Here(
        "", "--advantage group-mean-batch-std divides by the deviation of the rewards, TRL by theirs"
    ),
    "reward_clip_range": Here("", "a function of yours that scores (--verifiers) may clip"),
}
SFT = {
    "assistant_only_loss": Here(
        "assistant_turns", "true: all; false, where TRL trains the user's turns too, is not here"
    ),
    "completion_only_loss": Here("", "prompts are never trained; a row of text is, after its first token"),
    "dataset_kwargs": Here("", "rows are always tokenised here"),
    "dataset_text_field": Here("", "rename the column to text, or give prompt and completion"),
    "eval_packing": Here("packing", "of both"),
    "loss_type": Here("", "negative log-likelihood alone; TRL's dft is not here"),
    "max_length": Here("max_length", "longer rows are dropped, not cut, and so are prompts above max_prompt_length"),
    "packing": Here("packing", "of demonstrations that do not see each other; changes no result"),
    "packing_strategy": Here("", "demonstrations are never cut, and none sees another"),
    "padding_free": Here("packing"),
    "truncation_mode": Here("", "rows longer than --max_length are dropped, counted and reported, never cut"),
}
REWARD = {
    "center_rewards_coefficient": Here("centering"),
    "max_length": Here("max_prompt_length max_response_length", "TRL's is of both; --too_long drops or cuts"),
}
# TRL 1.16 has no PPO; these are the names of the two configs that it had.
PPO = same("kl_coef", "gamma", "temperature", "missing_eos_penalty", "whiten_rewards") | {
    **none("a function of yours that scores (--verifiers) may", "use_score_norm use_score_scaling score_clip"),
    "batch_size": Here("prompts_per_step group_size", "responses per step are their product"),
    "cliprange": Here("clip_low clip_high"),
    "cliprange_value": Here("value_clip"),
    "exp_name": Here("output_dir"),
    "horizon": Here("kl_horizon"),
    "init_kl_coef": Here("kl_coef", "moves with --kl_target alone"),
    "kl_estimator": Here("kl_estimator", "in the reward, as TRL's"),
    "kl_penalty": Here("kl_estimator", "kl: k1, mse: k2"),
    "lam": Here("gae_lambda"),
    "local_batch_size": Here("prompts_per_step", "times the processes"),
    "local_mini_batch_size": Here("minibatches", "how many there are, not how large"),
    "local_rollout_forward_batch_size": Here("rollout_batch_size"),
    "micro_batch_size": Here("micro_batch_size", "of one process, not of all"),
    "mini_batch_size": Here("minibatches", "how many there are, not how large"),
    "model_adapter_name": Here("", "one adapter: --lora_rank"),
    "num_mini_batches": Here("minibatches"),
    "num_ppo_epochs": Here("epochs"),
    "num_sample_generations": Here(
        "eval_every", "steps divided by it: TRL's says how often, ours after how many steps"
    ),
    "num_total_batches": Here("steps"),
    "ppo_epochs": Here("epochs"),
    "ref_adapter_name": Here("", "the reference is the starting model"),
    "response_length": Here("max_new_tokens"),
    "reward_model_path": Here("verifiers", "reward_model:FOLDER; --critic starts from it too"),
    "sft_model_path": Here("model", "also the reference"),
    "stop_token": Here("stop_token", "a text beside EOS, which always ends a response: leave out TRL's eos"),
    "stop_token_id": Here("stop_token", "as text"),
    "target": Here("kl_target"),
    "total_episodes": Here("steps", "divided by prompts_per_step × group_size"),
    "vf_coef": Here("value_coef", "of a shared critic alone; one of its own has critic_lr"),
    "world_size": Here("", "the launcher's"),
}
# transformers' TrainingArguments.
SCREEN = "every step is logged, on one line of the screen"
OF_DTYPE = "precision is what --dtype makes it"
STEPS_ARE = "steps of grpo and ppo are rollouts"
UPDATES = "of sft and reward; of grpo and ppo divided by the updates of a rollout (minibatches × epochs)"
TRAINING = same("output_dir", "weight_decay", "adam_beta2", "max_grad_norm", "gradient_checkpointing") | {
    **same("push_to_hub", "hub_model_id", "hub_private_repo", "seed"),
    **none(OF_DTYPE, "bf16_full_eval fp16_full_eval tf32"),
    **none(SCREEN, "logging_strategy logging_first_step logging_nan_inf_filter log_on_each_node log_level"),
    **none(SCREEN, "log_level_replica disable_tqdm include_num_input_tokens_seen"),
    **none("AdamW, with its own options", "optim optim_args optim_target_modules"),
    **none("the metrics of docs/metrics.md", "prediction_loss_only include_for_metrics batch_eval_metrics label_names"),
    **none("an evaluation has no such parts", "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps"),
    **none("a model is saved at the end", "load_best_model_at_end metric_for_best_model greater_is_better"),
    **none(
        "rows and random numbers go on where they stopped", "ignore_data_skip restore_callback_states_from_checkpoint"
    ),
    **none("token ids are in memory", "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers"),
    **none("token ids are in memory", "dataloader_prefetch_factor dataloader_multiprocessing_context"),
    **none(
        "the rows are shuffled, each pass whole", "dataloader_drop_last dataloader_in_order train_sampling_strategy"
    ),
    **none("the rows are shuffled, each pass whole", "length_column_name"),
    **none("DeepSpeed divides the work (--zero_stage)", "ddp_find_unused_parameters ddp_bucket_cap_mb fsdp_config"),
    **none("DeepSpeed divides the work (--zero_stage)", "ddp_broadcast_buffers ddp_static_graph accelerator_config"),
    **none("DeepSpeed divides the work (--zero_stage)", "parallelism_config local_rank"),
    **none("the launcher's", "ddp_timeout ddp_backend"),
    **none("the kernels are compiled, the model is as it is", "torch_compile torch_compile_backend torch_compile_mode"),
    **none("a GPU where there is one", "use_cpu torch_empty_cache_steps"),
    **none("fused-rl doctor looks at machine and run", "skip_memory_metrics debug"),
    **none("checkpoints are DeepSpeed's", "save_on_each_node enable_jit_checkpoint"),
    **none("the model is pushed once, at the end", "hub_strategy hub_always_push hub_revision"),
    **none("of this machine's trackio", "trackio_space_id trackio_bucket_id trackio_static_space_id"),
    **none("a command trains; fused-rl eval evaluates", "do_train do_predict"),
    "activation_checkpointing": Here("gradient_checkpointing"),
    "activation_checkpointing_kwargs": Here("", "--gradient_checkpointing has none"),
    "adam_beta1": Here("", "0.9"),
    "adam_epsilon": Here("adam_eps"),
    "auto_find_batch_size": Here("", "--micro_batch_size is given"),
    "average_tokens_across_devices": Here("", "always: a loss has the denominators of the whole step"),
    "bf16": Here("dtype", "bfloat16, with fp32 master weights"),
    "data_seed": Here("seed", "of everything"),
    "deepspeed": Here("", "--zero_stage and --offload, no file of its own"),
    "do_eval": Here("", "--eval_size 0 is without"),
    "eval_delay": Here("", "there is an evaluation before the first step"),
    "eval_on_start": Here("", "always"),
    "eval_steps": Here("eval_every", STEPS_ARE),
    "eval_strategy": Here("", "--eval_every so many steps; --eval_size 0 is without"),
    "fp16": Here("", "--dtype is float32 or bfloat16"),
    "fsdp": Here("", "--zero_stage 3 partitions the weights"),
    "full_determinism": Here("", "the same seed is the same run, bit for bit, on a CPU"),
    "gradient_accumulation_steps": Here("", "a step's batch (--batch_size, --prompts_per_step) is divided by itself"),
    "gradient_checkpointing_kwargs": Here("", "--gradient_checkpointing has none"),
    "hub_token": Here("", "from the environment: HF_TOKEN"),
    "label_smoothing_factor": Here("", "not in the loss of tokens"),
    "learning_rate": Here("lr"),
    "liger_kernel_config": Here("", "--loss_from linear, the default, forms no whole logits"),
    "logging_steps": Here("", "every step is logged"),
    "lr_scheduler_kwargs": Here("", "none to give"),
    "lr_scheduler_type": Here("lr_schedule", "constant, linear, cosine; the first with --warmup_steps, too"),
    "max_steps": Here("steps", UPDATES),
    "neftune_noise_alpha": Here("", "no noise"),
    "num_train_epochs": Here("num_train_epochs", "where neither is given --steps is 100"),
    "per_device_eval_batch_size": Here("micro_batch_size", "of both"),
    "per_device_train_batch_size": Here(
        "micro_batch_size", "what a step trains on is --batch_size, --prompts_per_step"
    ),
    "project": Here("wandb_project trackio_project"),
    "remove_unused_columns": Here("", "scorers may read every column"),
    "report_to": Here("wandb_project trackio_project", "TensorBoard and metrics.jsonl always"),
    "resume_from_checkpoint": Here("resume_from", "step-4, for example; true: --resume"),
    "run_name": Here("output_dir", "its last part"),
    "save_only_model": Here("", "model/ holds the model alone"),
    "save_steps": Here("save_every", STEPS_ARE),
    "save_strategy": Here("", "--save_every so many steps; 0 is none but where a run is interrupted"),
    "save_total_limit": Here("keep_checkpoints"),
    "use_cache": Here("", "in sampling, never in training"),
    "use_liger_kernel": Here("", "--loss_from linear, the default, forms no whole logits"),
    "warmup_steps": Here("warmup_steps", "in updates, never a fraction"),
}
MODEL = same("load_in_4bit", "attn_implementation", "dtype", "lora_alpha") | {
    **none("NF4, by --load_in_4bit", "load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"),
    **none(
        "plain LoRA of linear layers", "lora_modules_to_save lora_task_type use_rslora use_dora lora_target_parameters"
    ),
    "model_name_or_path": Here("model"),
    "model_revision": Here("revision"),
    "lora_dropout": Here("", "there is no dropout"),
    "lora_r": Here("lora_rank"),
    "lora_target_modules": Here("lora_targets", "names with commas between them, or all-linear"),
    "use_peft": Here("", "--lora_rank above 0"),
}
SCRIPT = same("dataset_config") | {
    "dataset_name": Here("dataset"),
    "dataset_streaming": Here("", "rows are read whole"),
    "dataset_test_split": Here("eval_split", "of --eval_dataset, which may be the same dataset"),
    "dataset_train_split": Here("dataset_split"),
    "ignore_bias_buffers": Here("", "DeepSpeed divides the work (--zero_stage)"),
}
# Of earlier releases, and arguments of the trainers that are no fields of a config.
WHOLE_RUN = "a run is all that its config says; what is yours goes into --verifiers, --sampler and --surrogate"
OTHERS = {
    **none(WHOLE_RUN, "callbacks compute_metrics compute_loss_func data_collator optimizers optimizer_cls_and_kwargs"),
    **none(WHOLE_RUN, "preprocess_logits_for_metrics"),
    **none(
        "--sampler: a function of yours that converses (docs/rollouts.md)", "rollout_func environment_factory tools"
    ),
    **none("the tokenizer in the folder of --model", "processing_class tokenizer reward_processing_classes"),
    **none("DPO and KTO are not here", "precompute_ref_log_probs precompute_ref_batch_size loss_weights ld_alpha"),
    **none("DPO and KTO are not here", "f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau"),
    **none("DPO and KTO are not here", "desirable_weight undesirable_weight rpo_alpha force_use_ref_model"),
    **none("metrics.jsonl and TensorBoard are in --output_dir", "logging_dir log_with wandb_log_unique_prompts"),
    **none(OF_VLLM, "vllm_device vllm_dtype vllm_max_model_len vllm_enable_prefix_caching vllm_guided_decoding_regex"),
    **none("rows are shuffled, and packed where that is cheaper", "group_by_length num_of_sequences chars_per_token"),
    **none("rows are shuffled, and packed where that is cheaper", "dataset_batch_size"),
    **none("models are saved as safetensors", "save_safetensors"),
    **none("--loss_from linear, the default, forms no whole logits", "use_liger use_liger_loss"),
    "adap_kl_ctrl": Here("", "--kl_target switches it on"),
    "args": Here("", "the config is the first argument of train(), and names the model too"),
    "eval_dataset": Here("eval_dataset", "a file, a folder or a Hub name; --eval_size of its rows"),
    "evaluation_strategy": TRAINING["eval_strategy"],
    "formatting_func": Here("", "write the rows as prompt and completion, or as text"),
    "max_prompt_length": Here("max_prompt_length", "longer prompts are dropped, never cut"),
    "max_seq_length": Here("max_length", "longer rows are dropped, never cut"),
    "model_name": Here("model"),
    "no_cuda": TRAINING["use_cpu"],
    "overwrite_output_dir": Here("overwrite"),
    "peft_config": Here("lora_rank lora_alpha lora_targets", "one option each"),
    "per_gpu_train_batch_size": TRAINING["per_device_train_batch_size"],
    "quantization_config": Here("load_in_4bit", "NF4, under adapters"),
    "ref_model": Here("", "the reference is the starting model"),
    "reward_funcs": Here("verifiers", "a name, or my_module:function"),
    "reward_model": Here("verifiers", "reward_model:FOLDER"),
    "rloo_k": Here("group_size"),
    "torch_dtype": Here("dtype"),
    "train_dataset": Here("dataset", "a file, a folder or a Hub name"),
    "value_model": Here("critic"),
    "warmup_ratio": Here("warmup_steps", "in updates"),
}
TABLES = {
    "GRPOConfig": GRPO,
    "SFTConfig": SFT,
    "RewardConfig": REWARD,
    "RLOOConfig": RLOO,
    "PPOConfig": PPO,
    "GRPOConfig, SFTConfig, RewardConfig": SHARED,
    "TrainingArguments": TRAINING,
    "ModelConfig": MODEL,
    "ScriptArguments": SCRIPT,
    "earlier names, and arguments of the trainers": OTHERS,
}


# The config whose words a command's options are: it answers first.
OF_COMMAND = {"sft": SFT, "reward": REWARD, "grpo": GRPO, "ppo": PPO}
NAMES = sorted(set().union(*TABLES.values()))


def of_trl(name: str, command: str | None = None) -> list[Here]:
    """What there is for an option of TRL's: in the command's own config if that has it, else in each that does."""
    own = OF_COMMAND.get(command, {})
    return [own[name]] if name in own else [table[name] for table in TABLES.values() if name in table]
