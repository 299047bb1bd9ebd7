"""Options that a command must refuse."""

from tests.trainers.bad_inputs.cases import ALL, TRAINERS, Case, of, words


def option(commands: str, name: str, values: str, expected: str) -> list[Case]:
    """Each of the values, with what pydantic expects."""
    cases = []
    for value in values.split():
        cases += of(
            commands,
            f"--{name} {value}",
            rf": {name}=[^ ]+ should be {expected}$",
            f"--{name}",
            value,
        )
    return cases


def yaml(commands: str, text: str | bytes, message: str) -> list[Case]:
    """A config file."""

    def write(folder):
        (folder / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())

    return of(commands, f"YAML {text[:30]!r}", message, "--config", "c.yaml", spoil=write)


OPTIONS = [
    *option(TRAINERS, "lr", "nan inf -1 many", "(a finite|a valid|greater than or equal to) .*"),
    *words(TRAINERS, "--lr_schedule cosin", "expected one of constant, linear, cosine, or module:"),
    *words(TRAINERS, "--lr_schedule nowhere:f", "lr_schedule 'nowhere:f': there is no module 'now"),
    *words(TRAINERS, "--on_step nowhere:f", "on_step 'nowhere:f': there is no module 'nowhere'"),
    *words(TRAINERS, "--on_step json:f", "on_step 'json:f': .* has no function 'f'"),
    *words("sft", "--on_step json:__name__", "on_step .* has no function '__name__'"),
    *words("sft", "--on_step json", "on_step 'json': expected module:function"),
    *words(TRAINERS, "--order no.txt", "order=.*no.txt"),
    *option(TRAINERS, "steps", "0 -3 2.5 x", "(a valid integer|greater than 0)"),
    *option("sft", "zero_stage", "4 -1 two", "0, 1, 2 or 3"),
    *words("grpo ppo", "--kl-coef 1", "unknown option --kl-coef; did you mean --kl_coef"),
    *words(
        "dpo", "--loss_type apo-zero --margin 1", "margin=1.0 has no meaning with loss_type=apo-"
    ),
    *words("dpo", "--loss_type orpo", "loss_type=orpo trains on .* give --nll_coef 1"),
    *words("sft", "--lr", "lr: expected a value after --lr: float >= 0"),
    *words("grpo", "--preset grpp", r"preset='grpp' should be 'ppo', 'grpo', "),
    *words(
        "grpo", "--preset ppo", "preset=ppo takes its advantages from gae, which needs a critic"
    ),
    *words("grpo", "--surrogate clap", "clap"),
    *words("grpo", "--group_size 1", "group_size=1: a response needs others"),
    *words(
        "grpo",
        "--minibatches 4 --share_prompts true",
        "minibatches=4 would split groups, which share",
    ),
    *words(
        "grpo",
        "--zero_variance drop --preset reinforce++",
        "zero_variance=drop has no meaning with advantage=b",
    ),
    *words(
        "grpo",
        "--lag 1 --zero_variance refill",
        "lag=1 draws before refills are known; drop one of them",
    ),
    *words(
        "grpo ppo",
        "--lag 1 --zero_stage 3",
        "lag=1 with zero_stage=3 .* give --server, or --zero_stage 2",
    ),
    *words(
        "grpo",
        "--ref_mixup_alpha 0.5",
        "ref_mixup_alpha=0.5 has no meaning without --ref_sync_every",
    ),
    *words(
        "grpo", "--ref_sync_every 2 --lora_rank 2", "ref_sync_every=2 needs a reference of its own"
    ),
    *words(
        "grpo",
        '--surrogate_options {"sapo_temperature_pos":2.0}',
        "sapo_temperature_pos=2.0 has no meaning with surrogate=clip",
    ),
    *words(
        "grpo",
        '--surrogate_options {"sapo_temperature":2.0}',
        "'sapo_temperature'.*sapo_temperature_pos",
    ),
    *words("grpo", "--minibatches 3", "minibatches=3 does not divide the 4 responses"),
    *words("sft", "--offload --zero_stage 1", "offload=True needs zero_stage 2 or 3"),
    *words("reward", "--loss_from logits", "loss_from=logits has no meaning"),
    *words("reward", "--head_dtype float32", "head_dtype=float32 has no meaning"),
    *words(
        "sft dpo grpo",
        "--head_dtype bfloat16",
        "head_dtype=bfloat16 is of bfloat16 weights, and those of dtype=.* are float32",
    ),
    *words(
        "sft",
        "--loss_from logits --head_dtype float32",
        "head_dtype=float32 has no meaning with loss_from=logits",
    ),
    *words(
        "sft",
        "--eval_size 12",
        "eval_size=12 leaves nothing to train on: rows.jsonl has 12 rows.*a step takes batch_size=2",
    ),
    *words(
        "sft",
        "--resume",
        "resume continues the run .* and overwrite moves it away: give one of them",
    ),
    *words(
        "grpo",
        "--rollout_high 2",
        "rollout_high corrects for a sampler that differs from the policy",
    ),
    *words(
        "sft",
        "--system_prompt x --raw_prompt",
        "system_prompt=x needs the chat template, which raw_prompt=true leaves out",
    ),
    *words(
        "sft", "--revision v2", "revision=v2 is of a model on the Hub, and model=model is a folder"
    ),
    *words(
        TRAINERS,
        "--num_train_epochs 2",
        "num_train_epochs=2.0 and steps=[0-9]+ are both given; give one",
    ),
    *words(
        "sft",
        "--lora_alpha 16",
        "lora_alpha=16.0 says how adapters are made or saved, but there are none",
    ),
    *words("sft", "--load_in_4bit", "load_in_4bit"),
    *words("sft", "--load_in_4bit --lora_rank 2 --zero_stage 3", "load_in_4bit"),
    *words("sft", "--load_in_4bit --lora_rank 2 --save_merged", "save_merged|load_in_4bit"),
    *words(
        "reward",
        "--load_in_4bit",
        "load_in_4bit=True has no meaning: a reward model is saved whole",
    ),
    *words("sft", "--hub_model_id a/b", "says where to push the model; add --push_to_hub"),
    *words(
        "sft",
        "--chat_template_kwargs 3",
        "chat_template_kwargs=3 should be a valid dictionary",
    ),
    *words("grpo", "--kl_in reward", "kl_in=reward has no meaning with kl_coef=0"),
    *words(
        "grpo",
        "--prompts_per_step 24",
        "prompts_per_step=24, but there are 12 rows to train on: .*at most 12",
    ),
    *words(
        "sft", "--batch_size 64", "batch_size=64, but there are 10 rows to train on: .*at most 10"
    ),
    *words(
        "ppo",
        "--preset rloo",
        "preset=rloo takes its advantages from leave-one-out.*ppo has a critic",
    ),
    *words("ppo", "--kl_target 1 --kl_coef 0", "kl_target=1.0 has no meaning with kl_coef=0"),
    *words("ppo", "--kl_horizon 50", "kl_horizon=50.0 has no meaning without --kl_target"),
    *words(
        "ppo",
        "--kl_target 1 --kl_horizon 0.5",
        "kl_horizon=0.5 lets one step turn the sign of kl_coef",
    ),
    *words("distill", "--teacher user:word@host:1", "teacher: expected a URL .*, without a user"),
    *words("distill", "--jsd_beta 0.3", "jsd_beta=0.3 .* without --direction jensen-shannon"),
    *option("distill", "jsd_beta", "1", "less than 1"),
    *words("distill", "--completion_column a", "completion_column=a .* --on_policy below 1"),
    *words("distill", "--lag 1 --on_policy 0.5", "lag=1 samples all rows .*--on_policy"),
    *words("distill", "--teacher_column from", "teacher_column=from .* without several teachers"),
    *words("distill", "--teacher_top_k 5", "teacher_top_k=5 .* without a teacher behind a server"),
    *words(
        "distill",
        "--teacher http://x:1 --distill_temperature 2",
        "distill_temperature=2.0 must be 1 with a teacher",
    ),
    *words("distill", "--loss_from logits", "loss_from=logits has no meaning here"),
    *words("dpo", "--loss_type ipo --label_smoothing 0.1", "label_smoothing=0.1 .* on ipo"),
    *words("grpo", "--server_timeout 5", "server_timeout=5.0 means nothing without --server"),
    *words("grpo", "--server_sleeps", "server_sleeps=True means nothing without --server"),
    *words("grpo", "--published_dir /tmp", "published_dir=/tmp means nothing without --server"),
    *words("grpo", "--server_sleeps --server http://a:1 --lag 1", "server_sleeps=True .* with lag"),
    *words("eval", "--verifiers null --verifier_weights [1]", "verifier_weights=.*--verifiers"),
    *words("eval", "--max_prompt_length 2", "no prompt is left of 12"),
    *words("eval", "--max_new_tokens 200", "the model has 128 positions; lower max_new_tokens"),
    *of("sft", "an output_dir without a name", "output_dir='' is empty", "--output_dir", ""),
    *of(
        "sft",
        "a word of the template",
        "does not read 'thinks'",
        "--chat_template_kwargs",
        '{"thinks": 1}',
    ),
    *yaml(ALL, "learning_rate: 1\n", "c.yaml: unknown option --learning_rate; "),
    *yaml(ALL, "seed: [1\n", "c.yaml: not YAML"),
    *yaml("sft", "seed: 1\nlr: 1\nseed: 2\n", "c.yaml: not YAML: seed is there twice"),
    *yaml("sft", "seed: 1:30\n", "c.yaml: not YAML: .*'1:30'"),
    *yaml("sft", "- lr\n- 1\n", "c.yaml"),
    *yaml("sft", b"lr: 1\nmodel: \xff\n", "c.yaml: not YAML|c.yaml.*UTF-8"),
    *yaml("sft", "model: !!python/object/apply:os.system [true]\n", "c.yaml|python/object"),
]
