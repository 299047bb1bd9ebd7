"""Options that mean something only beside others: each is in a table, and refused by its command."""

import importlib
import re

import pytest

from fused_rl.trainers import cli, grpo, ppo, reward, sft
from fused_rl.trainers.commands import eval
from fused_rl.trainers.options.config import InputError, names_of
from fused_rl.trainers.options.parse import parse
from fused_rl.trainers.policy.credit import adapted, check_credit
from fused_rl.trainers.policy.options import POLICY_NEEDS

TRAINERS = {"sft": sft.SFTConfig, "reward": reward.RewardConfig, "grpo": grpo.GRPOConfig, "ppo": ppo.PPOConfig}
COMMANDS = TRAINERS | {"eval": eval.EvalConfig}

# Options that mean something whatever the others are.
ALWAYS = {
    *("model", "attn_implementation", "gradient_checkpointing", "dataset", "raw_prompt", "max_prompt_length", "seed"),
    *("lr", "lr_schedule", "warmup_steps", "weight_decay", "adam_beta2", "adam_eps", "tf_adam", "max_grad_norm"),
    *("micro_batch_size", "zero_stage", "dtype", "output_dir", "eval_size", "save_every", "resume", "resume_from"),
    *("overwrite", "wandb_project", "trackio_project", "push_to_hub", "dry_run", "prompt_column", "lora_rank"),
    *("batch_size", "max_length", "packing", "completion_column", "chosen_column", "rejected_column", "margin_column"),
    "assistant_turns",
    *("max_response_length", "too_long", "label_smoothing", "centering", "share_prompts", "normalize_pairs"),
    *(
        "verifiers",
        "verifier_weights",
        "solved_at",
        "prompts_per_step",
        "minibatches",
        "epochs",
        "max_new_tokens",
        "mask_truncated",
        "temperature",
    ),
    *("top_p", "top_k", "min_p", "rollout_batch_size", "preset", "surrogate", "loss_agg", "skip_impossible"),
    *("kl_coef", "kl_estimator", "entropy_coef", "off_policy_threshold", "group_size", "advantage", "kl_every"),
    *("gamma", "gae_alpha", "value_gae_lambda", "whiten_advantages", "whiten_rewards", "missing_eos_score"),
    *("missing_eos_penalty", "critic", "value_clip", "stop_token", "max_rows", "samples", "server", "sampler"),
}
# Those whose condition is more than a row can say, and the function that refuses them.
ELSEWHERE = {
    "revision": "config.check_revision",
    "steps": "RunConfig.__post_init__",
    "num_train_epochs": "RunConfig.__post_init__",
    **dict.fromkeys(("lora_alpha", "lora_targets", "save_merged"), "lora.check_options"),
    "load_in_4bit": "four_bit.check",
    "loss_from": "PolicyWithValues",
    "head_dtype": "language_model.head_dtype, ModelConfig.__post_init__",
    **dict.fromkeys(("rollout_correction", "rollout_low", "rollout_high"), "checks.check_correction"),
    **dict.fromkeys(("ratio_level", "clip_low", "clip_high", "delta"), "policy_config.check_loss_options"),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), "policy_config.check_loss_options"),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "check_loss_options"),
    **dict.fromkeys(("top_entropy", "entropy_threshold"), "PolicyLossOptions.__post_init__"),
    **dict.fromkeys(("critic_lr", "critic_lr_schedule", "critic_warmup_steps"), "critic.check_critic"),
    **dict.fromkeys(("critic_weight_decay", "critic_adam_beta2", "critic_max_grad_norm"), "critic.check_critic"),
    "critic_only": "critic.check_critic",
    **dict.fromkeys(("k", "reference", "prompts"), "__post_init__"),
}


def module_of(command):
    return importlib.import_module(cli.COMMANDS[command])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_a_table_or_always_means_something(command):
    config_class, needs = COMMANDS[command], module_of(command).NEEDS
    in_table = {need.option for need in needs}
    unknown = set(names_of(config_class)) - in_table - ALWAYS - set(ELSEWHERE)
    assert not unknown, f"{sorted(unknown)}: a row of NEEDS, or a name in ALWAYS, says what they need to mean something"
    assert in_table <= set(names_of(config_class))


TRAIN = "--model=m --dataset=d.jsonl --output_dir=o"
POLICY = f"{TRAIN} --verifiers=length:3"
NO_EVAL = "--eval_size=0"
REFUSED = {
    "sft": {
        "--accept_changes=true": "add --resume",
        "--dataset_config=c": "has no meaning for a file",
        "--dataset_split=c": "has no meaning for a file",
        "--system_prompt=c --raw_prompt": "needs the chat template, which raw_prompt=true leaves out",
        "--chat_template_kwargs={a: 1} --raw_prompt": "needs the chat template",
        f"--eval_dataset=e.jsonl {NO_EVAL}": "has no meaning with eval_size=0",
        f"--eval_every=3 {NO_EVAL}": "has no meaning with eval_size=0",
        "--eval_dataset_config=c": "without an eval_dataset of the Hub",
        "--eval_split=c --eval_dataset=e.parquet": "without an eval_dataset of the Hub",
        "--offload --zero_stage=1": "needs zero_stage 2 or 3",
        "--stage3_param_persistence_threshold=3": "without --zero_stage 3",
        "--keep_checkpoints=3 --save_every=0": "has no meaning with save_every=0",
        "--hub_model_id=a/b": "add --push_to_hub",
        "--hub_private_repo": "add --push_to_hub",
    },
    "reward": {
        "--loss_from=logits": "never forms logits",
        "--load_in_4bit": "saved whole",
        "--head_dtype=float32": "never forms logits",
        "--save_merged": "saved whole",
        "--lora_alpha=3": "without --lora_rank",
        "--lora_targets=q_proj": "without --lora_rank",
        "--reference_dataset=r.jsonl --normalize_pairs=0": "without --normalize_pairs",
    },
    "grpo": {
        "--answer_column=a": "none of which compares with an answer .math,",
        f"--eval_samples=3 {NO_EVAL}": "has no meaning with eval_size=0",
        f"--show_samples=3 {NO_EVAL}": "has no meaning with eval_size=0",
        "--std_floor=1 --preset=rloo": "divides by no standard deviation",
        "--zero_variance=drop --preset=reinforce++": "compares with the whole batch",
        "--max_refills=2": "without --zero_variance refill",
        "--lag=1 --zero_variance=refill": "draws before refills are known; drop one of them",
        "--lag=2 --zero_stage=3": "give --server, or --zero_stage 2",
        "--overlong_factor=2": "without --overlong_buffer",
        "--overlong_buffer=999": "is more than max_new_tokens",
        "--kl_in=reward": "has no meaning with kl_coef=0",
        "--ref_sync_every=2 --kl_every=0": "has no meaning with kl_coef=0 and kl_every=0",
        "--kl_estimator=k3 --kl_every=0": "has no meaning with kl_coef=0 and kl_every=0",
        "--ref_mixup_alpha=0.5": "without --ref_sync_every",
    },
    "ppo": {
        "--answer_column=a": "none of which compares with an answer .math,",
        "--kl_in=loss --kl_coef=0": "has no meaning with kl_coef=0",
        "--kl_target=3 --kl_coef=0": "no factor moves a zero",
        "--kl_horizon=300": "without --kl_target",
        "--gae_lambda=0.5 --gae_alpha=1 --value_gae_lambda=1": "which take its place",
        "--value_coef=0.3": "--critic shared",
        "--target_kl=0.1 --minibatches=1": "with one update per step",
    },
    "eval": {
        **dict.fromkeys(("--temperature=2 --samples=0", "--top_p=0.5 --samples=0"), "has no meaning with samples=0"),
        **dict.fromkeys(("--top_k=2 --samples=0", "--min_p=0.5 --samples=0"), "has no meaning with samples=0"),
        "--answer_column=a --verifiers=format": "none of which compares with an answer",
        **dict.fromkeys(("--verifier_weights=[1]", "--solved_at=[1]"), "without --verifiers"),
        "--overwrite": "without --output_dir",
    },
}
GIVEN = dict.fromkeys(COMMANDS, TRAIN) | {"grpo": POLICY, "ppo": POLICY, "eval": "--model=m --dataset=d.jsonl"}
CASES = sum(([(command, words) for words in refused] for command, refused in REFUSED.items()), [])


def option_of(words):
    return words.split("=")[0].split()[0].removeprefix("--")


@pytest.mark.parametrize(("command", "words"), CASES, ids=[f"{command} {words}" for command, words in CASES])
def test_an_option_without_its_condition_is_one_line(command, words, capsys):
    argv = [f"--{word.strip()}" for word in f"{GIVEN[command]} {words}".split("--")[1:]]
    with pytest.raises(SystemExit) as refused:
        module_of(command).main([*argv, *(["--dry_run"] if command in TRAINERS else [])])
    (said,) = (refused.value.code if isinstance(refused.value.code, str) else capsys.readouterr().err).splitlines()
    assert said.startswith(f"fused-rl {command}: error: {option_of(words)}=")
    assert re.search(REFUSED[command][words], said), said


def test_every_row_has_a_case():
    for command, cases in REFUSED.items():
        shared = [] if command == "sft" else [*module_of("sft").NEEDS, *POLICY_NEEDS]
        rows = {need.option for need in module_of(command).NEEDS} - {need.option for need in shared}
        assert rows <= set(map(option_of, cases)), command


def test_a_controller_never_turns_the_sign_of_its_coefficient():
    config = parse(ppo.PPOConfig, f"{POLICY} --kl_target=1 --kl_horizon=6.5".split(), "ppo")
    check_credit(config)  # 32 responses: 0.2 * 32 = 6.4
    assert adapted(0.1, 0.0, 32, 1.0, 6.5) > 0 and adapted(0.1, -9.0, 32, 1.0, 6.5) > 0
    config.kl_horizon = 6.4
    with pytest.raises(InputError, match=r"kl_horizon=6.4: 32 responses .* 1 - 0.2 \* 32 / 6.4 = 0, .*more than 6.4$"):
        ppo.arithmetic(config, 1)
