"""What trainers are compared at: models, rows and hyperparameters, the same for each of them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from bench import machine
from bench.trainer_ours import PPO, SFT, Reward
from bench.trainer_steps import GRPO, Ours
from fused_rl.recipes import demo as recipe
from fused_rl.recipes import demo_reward
from fused_rl.trainers import grpo, ppo, reward, sft
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.models.reward_model import RewardModel
from fused_rl.trainers.run.parse import parse

WORK = machine.ROOT / "runs" / "bench-trainers"
WARM_STEPS = 100  # enough that responses end, which is all that their time depends on


class Task(NamedTuple):
    """Something to train on."""

    op: str
    name: str
    kind: type[Ours]
    config: Callable[[Path], object]
    """Makes the files in a folder, and the config that names them."""
    share: float
    """Of the group's time."""
    bf16_weights: bool = False
    """Whether a peer with bf16 weights runs, too."""


# The demo's small Llama and its three-number sums.


def _of_recipe(kind, name: str, seed: int, paths: dict, **changed):
    """A recipe's config on these files; `changed` are options beside it."""
    return parse(kind, recipe.arguments(name, seed, paths)).changed(**changed)


def demo_sft(folder: Path, seed: int = 1, **changed) -> sft.SFTConfig:
    """The demo's warm start."""
    if not (folder / "init").exists():
        recipe.prepare(folder, seed)
    paths = {
        "model": folder / "init",
        "dataset": folder / "data" / "demonstrations.jsonl",
        "output_dir": folder / "ours",
    }
    return _of_recipe(sft.SFTConfig, "demo_sft.yaml", seed, paths, eval_size=0, eval_every=50, **changed)


def warmed(seed: int, steps: int | None = WARM_STEPS) -> Path:
    """The demo's folder after its warm start, of so many steps (None: the recipe's); kept for the next time."""
    kept = WORK / f"demo-{seed}-{steps or 'whole'}"
    if not (kept / "sft" / "model" / "config.json").exists():
        changed = {} if steps is None else {"steps": steps}
        sft.train(demo_sft(kept, seed, output_dir=str(kept / "sft"), overwrite=True, **changed))
    return kept


def demo_grpo(folder: Path, seed: int = 1, warm_steps: int | None = WARM_STEPS) -> grpo.GRPOConfig:
    """The demo's reinforcement."""
    config = recipe.grpo_config(warmed(seed, warm_steps), seed)
    return config.changed(output_dir=str(folder / "ours"))


def demo_rewards(folder: Path, seed: int = 1) -> reward.RewardConfig:
    """The reward demo's pairs, and a head that every trainer starts from."""
    demo_reward.prepare(folder, seed)
    headed = RewardModel.from_pretrained(folder / "init")
    headed.classifier.config.pad_token_id = 0
    headed.save_pretrained(folder / "headed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "headed" / name).write_bytes((folder / "init" / name).read_bytes())
    return demo_reward_config(folder, seed)


def demo_reward_config(folder: Path, seed: int) -> reward.RewardConfig:
    """On the files that `demo_rewards` makes."""
    paths = {
        "model": folder / "headed",
        "dataset": folder / "data" / "train.jsonl",
        "eval_dataset": folder / "data" / "eval.jsonl",
        "output_dir": folder / "ours",
    }
    return _of_recipe(reward.RewardConfig, "demo_reward.yaml", seed, paths, normalize_pairs=0)


def demo_ppo(folder: Path, seed: int = 1) -> ppo.PPOConfig:
    """PPO of the demo's model against the truth, with a critic that starts from the policy."""
    warm = warmed(seed)
    paths = {
        "model": warm / "sft" / "model",
        "dataset": warm / "data" / "train.jsonl",
        "eval_dataset": warm / "data" / "eval.jsonl",
        "output_dir": folder / "ours",
        "critic": "null",
        "verifiers": "reasoning_gym",
        "verifier_weights": "null",
    }
    return _of_recipe(ppo.PPOConfig, "demo_ppo.yaml", seed, paths)


# A large head: a Llama of Qwen2.5-0.5B's widths and vocabulary, few layers of random weights, on random words.


def word_tokenizer(vocabulary: int):
    """Token i is the word `wi`; pad is 0 and EOS 1."""
    import tokenizers
    import transformers

    words = {f"w{i}": i for i in range(2, vocabulary)}
    words |= {"<pad>": 0, "<eos>": 1}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def large_head(folder: Path, *, vocabulary=151_936, hidden=896, layers=2, dtype="bfloat16") -> str:
    """The folder of the model, made where it is not there; a layer has 15 million weights, the head 136 million."""
    import transformers

    if (folder / "tokenizer.json").exists():
        return str(folder)
    transformers.set_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 38 // 7,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    lm = transformers.LlamaForCausalLM(shape).to(getattr(torch, dtype))
    lm.save_pretrained(folder)
    word_tokenizer(vocabulary).save_pretrained(folder)
    return str(folder)


def random_words(seed: int, count: int, length: int, vocabulary: int) -> list[str]:
    """So many texts of random words."""
    ids = torch.randint(2, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(f"w{i}" for i in row) for row in ids]


def qwen(
    folder: Path,
    *,
    kept: Path | None = None,
    vocabulary=151_936,
    hidden=896,
    layers=2,
    prompts=1,
    prompt=48,
    response=8,
    dtype="bfloat16",
) -> grpo.GRPOConfig:
    """GRPO with a large head; the model is `kept` there for the next time."""
    place = kept or folder / "model"
    model = large_head(place, vocabulary=vocabulary, hidden=hidden, layers=layers, dtype=dtype)
    rows = [{"question": text} for text in random_words(1, 64, prompt, vocabulary)]
    write_rows(folder / "rows.jsonl", rows)
    return grpo.GRPOConfig(
        model=model,
        dataset=str(folder / "rows.jsonl"),
        output_dir=str(folder / "ours"),
        verifiers="bench.trainer_tasks:odd_words",
        steps=100,
        prompts_per_step=prompts,
        group_size=8,
        minibatches=1,  # the optimizer's time is that of all its weights, whatever the batch
        micro_batch_size=8 * prompts,
        rollout_batch_size=8 * prompts,
        max_new_tokens=response,
        kl_coef=0.001,
        lr=1e-6,
        dtype=dtype,
        zero_stage=1 if dtype == "bfloat16" else 0,
        eval_size=0,
    )


def qwen_sft(
    folder: Path,
    *,
    kept: Path | None = None,
    vocabulary=151_936,
    hidden=896,
    layers=2,
    prompt=8,
    completion=24,
    dtype="bfloat16",
) -> sft.SFTConfig:
    """SFT with a large head; the model is `kept` there for the next time."""
    place = kept or folder / "model"
    model = large_head(place, vocabulary=vocabulary, hidden=hidden, layers=layers, dtype=dtype)

    # Words that follow words: nothing to learn, and every token counts.
    rows = []
    prompts, completions = (random_words(seed, 64, n, vocabulary) for seed, n in ((1, prompt), (2, completion)))
    for prompt_text, text in zip(prompts, completions, strict=True):
        rows.append({"prompt": prompt_text, "completion": text})
    write_rows(folder / "rows.jsonl", rows)
    return sft.SFTConfig(
        model=model,
        dataset=str(folder / "rows.jsonl"),
        output_dir=str(folder / "ours"),
        steps=100,
        batch_size=4,
        micro_batch_size=4,
        lr=1e-6,
        dtype=dtype,
        zero_stage=1 if dtype == "bfloat16" else 0,
        eval_size=0,
    )


def odd_words(response: str, row: dict) -> float:
    """Return the share of words that end in an odd digit, which differs between random responses."""
    words = response.split()
    odd = sum(word[-1] in "13579" for word in words)
    return odd / max(1, len(words))


SMALL, LARGE = "demo", "Qwen2-like head"
TASKS = (
    Task("sft", SMALL, SFT, demo_sft, 0.02),
    Task("reward", SMALL, Reward, demo_rewards, 0.03),
    Task("ppo", SMALL, PPO, demo_ppo, 0.04),
    Task("grpo", SMALL, GRPO, demo_grpo, 0.06),
    Task("sft", LARGE, SFT, partial(qwen_sft, kept=WORK / "large-2"), 0.25, bf16_weights=True),
    Task("grpo", LARGE, GRPO, partial(qwen, kept=WORK / "large-2"), 0.6, bf16_weights=True),
)
LARGER = partial(qwen, kept=WORK / "large-4", layers=4, prompts=2)
MORE = (Task("grpo", f"{LARGE}, twice the layers and responses", GRPO, LARGER, 2.0, bf16_weights=True),)
"""With --all-shapes."""
