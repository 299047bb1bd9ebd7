"""Models of a few thousand weights in the Hub format, and small data files, as the trainers read them."""

import json
import re
from pathlib import Path

from fused_rl.trainers import cli
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.forms import RowReader
from fused_rl.trainers.rollouts import types

CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<end>", "<user>", "<assistant>", "<system>"]


def tokenizer(*, chat: bool = True, pad_is_eos: bool = False, adds_bos: bool = False):
    """One token per byte, and `<end>` as EOS of chats."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=0, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["a"], learner)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    eos = "<end>" if chat else "<eos>"
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=eos if pad_is_eos else "<pad>",
        bos_token="<bos>",
        eos_token=eos,
    )
    if chat:
        made.chat_template = CHAT_TEMPLATE
    return made


def model_folder(
    folder: Path,
    *,
    chat: bool = True,
    pad_is_eos: bool = False,
    tie: bool = False,
    seed: int = 0,
    heads: int = 2,
    key_heads: int | None = None,
) -> str:
    """A Qwen2 with random weights, its tokenizer and a generation config that would bias sampling."""
    import torch
    import transformers

    made = tokenizer(chat=chat, pad_is_eos=pad_is_eos)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.Qwen2Config(
            vocab_size=len(made),
            hidden_size=8 * heads,
            intermediate_size=16 + 8 * heads,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=key_heads or heads // 2,
            max_position_embeddings=128,
            tie_word_embeddings=tie,
            initializer_range=0.2,
            attention_dropout=0.5,  # the trainers must switch it off
            bos_token_id=1,
            eos_token_id=made.eos_token_id,
            pad_token_id=made.pad_token_id,
        )
        lm = transformers.Qwen2ForCausalLM(config)
    lm.generation_config = transformers.GenerationConfig(
        do_sample=True,
        top_k=1,
        repetition_penalty=5.0,
        eos_token_id=[made.eos_token_id, 2],
        pad_token_id=0,
    )
    lm.save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)


def reward_folder(folder: Path, model: str, *, seed: int = 5) -> str:
    """A reward model on the backbone of a `model_folder`, its head random, with normalisation and tokenizer."""
    import torch
    import transformers

    from fused_rl.trainers.models.reward_model import RewardModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = RewardModel.from_pretrained(model)
    made.set_normalization(0.1, 0.7)
    made.save_pretrained(str(folder))
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


def jsonl(path: Path, rows: list[dict]) -> str:
    """The rows as a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(count: int) -> list[dict]:
    """Rows in gsm8k's form: a question, and a worked answer that ends in `#### n`."""
    return [
        {"question": f"{i}+{i % 7}?", "answer": f"Add them.\n#### {i + i % 7}"}
        for i in range(count)
    ]


def odd_characters(response: str, row: dict) -> float:
    """A verifier that random weights satisfy often enough: the fraction of characters with odd codes."""
    return sum(ord(c) % 2 for c in response) / max(len(response), 1)


def first_is_odd(response: str, row: dict) -> float:
    """A verifier that says right or wrong, so that in many small groups all rewards are equal."""
    return float(ord(response[:1] or "a") % 2)


def config_of(trainer: str, model="m", dataset="d.jsonl", output_dir="o", **options):
    """The config of a small run of a trainer, in which ZeRO 3 would partition every weight."""
    given = {"model": model, "dataset": dataset, "output_dir": output_dir, "zero_stage": 0}
    given |= {"stage3_param_persistence_threshold": 0} | options
    return cli.TRAINERS[trainer].config_class()(**given)


def read_metrics(folder) -> list[dict]:
    """The run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def untimed(metrics: list[dict]) -> list[dict]:
    """Metrics without what a clock says."""
    return [{k: v for k, v in m.items() if not k.startswith(("time/", "perf/"))} for m in metrics]


def documented(trainer: str) -> set[str]:
    """The keys that docs/metrics.md describes for a trainer; some have a {name} or {k} in them."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    keys = set()
    for section in page.split("\n## ")[1:]:
        trainers = re.search(r"^In runs of (.*)\.$", section, re.MULTILINE)[1]
        if f"`{trainer}`" not in trainers:
            continue
        named = set(re.findall(r"\*\*`(.+?)`\*\*", section))
        if "is also measured on held-out" in section:
            named |= {key.replace("train/", "eval/", 1) for key in named}
        keys |= named
    return keys - {"perf/peak_memory_gb", "perf/rank_imbalance"}  # of GPUs, and of several ranks


def usual(trainer: str) -> set[str]:
    """The documented keys that every run of a trainer logs: those without a name in them and of no other sampler."""
    return {key for key in documented(trainer) if "{" not in key and not key.startswith("rollout/")}


def weights(folder) -> dict:
    """The tensors of a saved model."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def load_lm(config, **options):
    """The language model that a run's config names, on the CPU."""
    import torch

    from fused_rl.trainers.models import language_model

    return language_model.load_lm(config, torch.device("cpu"), **options)


def load_reward_model(config):
    """The reward model that a run's config starts from, on the CPU."""
    import torch

    from fused_rl.trainers.models import reward_model

    return reward_model.load_reward_model(config, torch.device("cpu"))


def respond(lm, prompts: list[list[int]], sampling, batch_size: int) -> list:
    """A response of the model to each prompt."""
    from fused_rl.trainers.rollouts.generate import TransformersSampler

    return TransformersSampler(lm, pad_id=0, batch_size=batch_size).sample(prompts, sampling)


def generate(lm, prompts: list[list[int]], sampling, batch_size: int) -> list[list[int]]:
    """The token ids of these."""
    return [response.ids for response in respond(lm, prompts, sampling, batch_size)]


class Sampler(types.Sampler):
    """One that draws from nothing, so that there is nothing to publish: the ground of those that tests make."""

    def publish(self, step, save):
        pass


class Telling(Sampler):
    """The policy's own sampler, as another program would be: it tells log-probabilities, of -5, and versions."""

    reports_logprobs = True

    def __init__(self, built, tokenizer):
        self.built, self.step = built, None

    def publish(self, step, save):
        self.step = step
        self.built.publish(step, save)

    def sample(self, prompts, sampling):
        responses = self.built.sample(prompts, sampling)
        for prompt, response in zip(prompts, responses, strict=True):
            response.logprobs = self.reported(prompt, response.ids, sampling)
        return responses

    def reported(self, prompt, ids, sampling) -> list[float]:
        return [-5.0] * len(ids)


def pairs(
    encoder: Encoder, row: dict, column: str | None, completion_column: str, turns: str = "last"
) -> list[tuple[list[int], list[int]]]:
    """The token ids of each turn that a row trains, apart from the others."""
    read = encoder.demonstrations(RowReader(row), column, completion_column, turns, joined=False)
    return [(one.prompt, one.response) for one in read]


def prompt(encoder: Encoder, row: dict, column: str | None) -> list[int]:
    """The token ids of a row's prompt."""
    return encoder.prompt(RowReader(row), column)[1]
