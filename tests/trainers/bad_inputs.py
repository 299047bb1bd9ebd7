"""Input that a trainer must refuse, as a table: a row is what is wrong and the line that is expected (a regex).

A case runs in a folder of its own with a `model`, `rows.jsonl`, `pairs.jsonl`, and `run`, the folder of a finished run
that `--overwrite` would replace. `spoil` changes files there; `options` come after those that would train well.
"""

import codecs
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.trainers import tiny

ALL, TRAINERS, READERS = "sft grpo reward kl-report eval", "sft grpo reward", "sft grpo kl-report eval"
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}


class Case(NamedTuple):
    """One bad input of one command."""

    command: str
    title: str
    message: str
    options: tuple[str, ...] = ()
    spoil: Callable[[Path], None] | None = None
    begins: bool = False
    """The run has begun when it is refused: the folder is its own, and what was there has gone."""


def of(commands: str, title: str, message: str, *options: str, **fields) -> list[Case]:
    """The case for each of the commands."""
    return [Case(command, title, message, options, **fields) for command in commands.split()]


# Options.

WHOLE, COUNT, FINITE = "a whole number above 0", "a whole number, 0 or more", "a finite number, 0 or more"
TEMPERATURE = r"a number from 1e-06 to 1e[+]06"
POSITIVE, SEED = "a finite number above 0", r"a whole number from 0 to 2\^31 - 1"


def option(commands: str, name: str, values: str, expected: str) -> list[Case]:
    """Each of the values, which is not what is expected."""
    cases = []
    for value in values.split():
        shown = value.replace("+", "[+]")
        cases += of(commands, f"--{name} {value}", rf": {name}: expected {expected}, got {shown}$", f"--{name}", value)
    return cases


def words(commands: str, line: str, message: str, **fields) -> list[Case]:
    """Other words on the command line."""
    return of(commands, line or "no words", message, *line.split(), **fields)


def yaml(commands: str, text: str | bytes, message: str) -> list[Case]:
    """A config file."""

    def write(folder):
        (folder / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())

    return of(commands, f"YAML {text[:30]!r}", message, "--config", "c.yaml", spoil=write)


OPTIONS = [
    *option(TRAINERS, "lr", "nan inf -1 many", FINITE),
    *option("sft", "weight_decay", "-0.1 nan .inf", FINITE),
    *option("sft", "adam_beta2", "1 1.5 -0.1 nan", "a number from 0 to below 1"),
    *option("reward", "max_grad_norm", "-1 nan inf", FINITE),
    *option("sft", "warmup_steps", "-1 1.5", COUNT),
    *option("sft", "lr_schedule", "cosin 1", "one of constant, linear, cosine"),
    *option(TRAINERS, "steps", "0 -3 2.5 x", WHOLE),
    *option("grpo", "seed", "-1 1099511627776 1.5", SEED),
    *option("sft", "eval_every", "0 -1", WHOLE),
    *option("sft", "eval_size", "-5 0.5", COUNT),
    *option("reward", "save_every", "-1", COUNT),
    *option("sft", "keep_checkpoints", "0 -1", WHOLE),
    *option("sft", "batch_size", "0 -8", WHOLE),
    *option("sft", "micro_batch_size", "0", WHOLE),
    *option("sft", "max_length", "0", WHOLE),
    *option("sft", "lora_rank", "-1 0.5", COUNT),
    *option("grpo", "lora_alpha", "0 nan", POSITIVE),
    *option("sft", "zero_stage", "4 -1 two", "one of 0, 1, 2, 3"),
    *option("grpo", "dtype", "float8 half", "one of auto, float32, bfloat16"),
    *option("sft", "resume", "maybe 3", "true or false"),
    *option("grpo", "temperature", "0 -1 nan inf 1e-7 1e7", TEMPERATURE),
    *option("grpo", "top_p", "0 1.5 -0.1 nan", "a number above 0, at most 1"),
    *option("grpo", "top_k", "-1 2.5", COUNT),
    *option("grpo", "min_p", "-0.1 1.5 nan", "a number from 0 to 1"),
    *option("grpo", "kl_coef", "-1 nan inf", FINITE),
    *option("grpo", "clip_low", "-0.1 nan inf", FINITE),
    *option("grpo", "clip_high", "-0.1 nan", "a number, 0 or more, or inf"),
    *option("grpo", "entropy_coef", "nan inf", "a finite number"),
    *option("grpo", "top_entropy", "0 1.5 nan", "a number above 0, at most 1"),
    *option("grpo", "delta", "0 -2", POSITIVE),
    *option("grpo", "max_new_tokens", "0 1.5", WHOLE),
    *option("grpo", "kl_estimator", "k5", r"one of k1, .*k3[+]"),
    *option("grpo", "advantage", "gae", "one of group-std, .*batch-std"),
    *option("grpo", "std_floor", "-1 nan inf", FINITE),
    *option("grpo", "zero_variance", "filter 1", "one of keep, drop, refill"),
    *option("grpo", "max_refills", "0 -1 1.5", WHOLE),
    *option("grpo", "overlong_buffer", "-1 0.5", COUNT),
    *option("grpo", "overlong_factor", "0 -1 nan", POSITIVE),
    *option("grpo", "kl_in", "both", "one of loss, reward"),
    *option("grpo", "ref_sync_every", "-1 1.5", COUNT),
    *option("grpo", "ref_mixup_alpha", "0 1.1 nan", "a number above 0, at most 1"),
    *option("reward", "label_smoothing", "0.5 0.7 -0.1 nan", "a number from 0 to below 0.5"),
    *option("reward", "centering", "-1 nan", FINITE),
    *option("reward", "normalize_pairs", "-1", COUNT),
    *option("reward", "too_long", "cut", "one of drop, truncate"),
    *option("kl-report", "temperature", "0 nan 1e7", TEMPERATURE),
    *option("kl-report", "samples", "0 -1", WHOLE),
    *option("eval", "samples", "-1 1.5", COUNT),
    *option("eval", "k", "0", WHOLE),
    *option("eval", "temperature", "0 nan 1e7", TEMPERATURE),
    *option("eval", "batch_size", "0", WHOLE),
    *words("eval", "--k 3", "k=3 is more than samples=2: pass@k needs k responses to a problem"),
    *words("eval", "--samples 0 --top_p 0.9", "top_p=0.9 has no meaning with samples=0"),
    *words("eval", "--samples 0 --k 1", "k=1 is more than samples=0"),
    *words("eval", "--revision main", "revision=main is of a model on the Hub, and model=model is a folder"),
    *words("eval", "--max_new_tokens 200", "tokens, but the model has 128 positions; lower max_new_tokens"),
    *words("eval", "--max_prompt_length 3", "rows.jsonl: all 12 rows are longer than max_prompt_length"),
    *words("eval", "--prompt_column q", "line 1: column 'q' is missing; .*--prompt_column"),
    *words("eval", "--verifiers exact_match --answer_column a", "line 1: column 'a' is missing; .*--answer_column"),
    *words("eval", "--dataset none.jsonl", "dataset file none.jsonl does not exist"),
    *words(ALL, "--kl-coef 1", "unknown option --kl-coef; (did you mean --kl_coef|--help lists)"),
    *words("grpo", "--grup_size 4", r"unknown option --grup_size; did you mean --group_size\?"),
    *words("sft", "--group_size 4", "unknown option --group_size"),
    *words("sft", "--lr", "lr: expected a finite number, 0 or more|--lr.*expected one argument"),
    *words("sft", "train", "train"),
    *words("sft", "-x", "-x"),
    *words("sft", "--config none.yaml", "none.yaml"),
    *words("sft", "--config rows.jsonl", "rows.jsonl"),
    *words("sft", "--config model", "model"),
    *words("grpo", "--preset grpp", r"preset='grpp' is not one of \['aipo|preset='grpp' is not one of"),
    *words("grpo", "--preset ppo", "preset=ppo takes its advantages from gae, which needs a critic"),
    *words("grpo", "--surrogate clap", "clap"),
    *words("grpo", "--surrogate judges:none_such", "surrogate 'judges:none_such': AttributeError"),
    *words("grpo", "--group_size 1", "group_size=1: a response needs others"),
    *words("grpo", "--minibatches 4 --share_prompts true", "minibatches=4 would split groups, which share"),
    *words("grpo", "--std_floor 0.1 --preset rloo", "std_floor=0.1 has no meaning with this advantage"),
    *words("grpo", "--zero_variance drop --preset reinforce++", "zero_variance=drop has no meaning with advantage=b"),
    *words("grpo", "--max_refills 2", "max_refills=2 has no meaning without --zero_variance refill"),
    *words("grpo", "--overlong_factor 2", "overlong_factor=2.0 has no meaning without --overlong_buffer"),
    *words("grpo", "--overlong_buffer 5", "overlong_buffer=5 is more than max_new_tokens"),
    *words("grpo", "--ref_mixup_alpha 0.5", "ref_mixup_alpha=0.5 has no meaning without --ref_sync_every"),
    *words("grpo", "--ref_sync_every 2 --lora_rank 2", "ref_sync_every=2 needs a reference of its own"),
    *words("grpo", "--ref_sync_every 2 --kl_every 0", "ref_sync_every=2 has no meaning with kl_coef=0 and kl_every=0"),
    *words("grpo", "--sapo_temperature_pos 2", "sapo_temperature_pos=2.0 has no meaning with surrogate=clip"),
    *words("grpo", "--vespo_k_pos 1 --preset gspo", "vespo_k_pos=1.0 has no meaning with surrogate=clip"),
    *words("grpo", "--clip_low 0.1 --preset rloo", "clip_low=0.1 has no meaning with surrogate=policy-gradient"),
    *words("grpo", "--minibatches 3", "minibatches=3 does not divide the 4 responses"),
    *words("sft", "--offload --zero_stage 1", "offload=True needs zero_stage 2 or 3"),
    *words("sft", "--dtype bfloat16", "dtype=bfloat16 needs fp32 master weights"),
    *words("reward", "--loss_from logits", "loss_from=logits has no meaning"),
    *words("reward", "--head_dtype float32", "head_dtype=float32 has no meaning"),
    *words("sft", "--loss_from logits --head_dtype float32", "head_dtype=float32 has no meaning with loss_from=logits"),
    *words("grpo", "--dtype float32 --head_dtype bfloat16", "head_dtype=bfloat16 would round .* of float32 weights"),
    *option("sft", "head_dtype", "float16 fp32", "one of auto, float32, bfloat16"),
    *words("sft", "--eval_size 12", "eval_size=12 leaves nothing to train on: rows.jsonl has 12 rows"),
    *words("sft", "--resume", "resume continues .* and overwrite deletes it.*--overwrite false takes back"),
    *words("grpo", "--verifier_weights [0]", "verifier_weights: every weight is 0"),
    *words("grpo", "--rollout_high 2", "rollout_high corrects for a sampler that differs from the policy"),
    *words("sft", "--system_prompt x --raw_prompt", "system_prompt needs a tokenizer with a chat template"),
    *words("sft", "--attn_implementation fast", "attn_implementation=fast cannot be used for model='model'"),
    *words("sft", "--revision v2", "revision=v2 is of a model on the Hub, and model=model is a folder"),
    *words(TRAINERS, "--num_train_epochs 2", "num_train_epochs=2.0 and steps=[0-9]+ are both given; give one"),
    *words(
        "sft", "--lora_rank 2 --lora_targets q_prj", "lora_targets: .* no linear layer 'q_prj'.*there are down_proj"
    ),
    *words("sft", "--lora_alpha 16", "lora_alpha says how adapters are made or saved, but there are none"),
    *words("sft", "--lora_targets q_proj", "lora_targets says how adapters are made or saved, but there are none"),
    *words("grpo", "--save_merged", "save_merged says how adapters are made or saved, but there are none"),
    *words("sft", "--load_in_4bit", "load_in_4bit: weights of 4 bits are not trained, only adapters"),
    *words("reward", "--load_in_4bit", "load_in_4bit=True has no meaning: a reward model is saved whole"),
    *words("sft", "--hub_model_id a/b", "says where to push the model; add --push_to_hub"),
    *words("sft", "--chat_template_kwargs 3", "chat_template_kwargs: expected a mapping from names to values"),
    *words("sft", "--eval_every 3 --eval_size 0", "eval_every=3 has no meaning with eval_size=0"),
    *words("sft", "--dataset_split dev", "dataset_split=dev has no meaning for a file"),
    *words("reward", "--lora_alpha 3", "lora_alpha=3.0 has no meaning without --lora_rank"),
    *words("grpo", "--kl_in reward", "kl_in=reward has no meaning with kl_coef=0"),
    *words("grpo", "--answer_column answer", "answer_column=answer has no meaning with these verifiers"),
    *words("grpo", "--ref_sync_every 9 --kl_coef 0.1", "ref_sync_every=9 is more than steps"),
    *words("grpo", "--prompts_per_step 24", "prompts_per_step=24, but there are 12 rows to train on: .*at most 12"),
    *words("sft", "--batch_size 64", "batch_size=64, but there are 10 rows to train on: .*at most 10"),
    *words("eval", "--overwrite", "overwrite=True has no meaning without --output_dir"),
    *words("ppo", "--kl_target 1 --kl_coef 0", "kl_target=1.0 has no meaning with kl_coef=0"),
    *words("ppo", "--kl_horizon 50", "kl_horizon=50.0 has no meaning without --kl_target"),
    *words("ppo", "--kl_target 1 --kl_horizon 0.5", "kl_horizon=0.5: 4 responses per step .* turns its sign"),
    *words("ppo", "--value_coef 0.5", "value_coef=0.5 has no meaning for a critic of its own"),
    *words("grpo", "--beta 0.1", "unknown option --beta; its name here is --kl_coef$"),
    *words("grpo", "--num_generations 4", "unknown option --num_generations; its name here is --group_size$"),
    *words("grpo", "--surrogate judges:Called", "surrogate 'judges:Called' is a class"),
    *words("grpo", "--surrogate judges:even", "surrogate 'judges:even' cannot be called: too many positional"),
    *words("grpo", "--surrogate judges:three_is", "int is not a function"),
    *words("grpo", "--surrogate judges:loss_none", "'judges:loss_none' returned None; it must", begins=True),
    *words("grpo", "--surrogate judges:loss_sum", "'judges:loss_sum' returned torch.float32 ..; it must", begins=True),
    *words("grpo", "--surrogate judges:loss_raises", "'judges:loss_raises' raised ValueError: mm", begins=True),
    *of("sft", "an output_dir without a name", "output_dir='' is empty", "--output_dir", ""),
    *of("sft", "a word of the template", "does not read 'role'", "--chat_template_kwargs", '{"role": 1}'),
    *yaml(ALL, "learning_rate: 1\n", "c.yaml, line 1: unknown option --learning_rate; "),
    *option("sft", "num_train_epochs", "0 -1 nan inf", POSITIVE),
    *option("sft", "packing", "maybe", "true or false"),
    *words("kl-report", "--model", "model"),
    *yaml(ALL, "seedd: 1\n", "seedd"),
    *yaml(ALL, "seed: 1\nseed: 2\n", "c.yaml, line 2: key 'seed' stands on line 1 too"),
    *yaml(ALL, "seed: [1\n", "c.yaml: not YAML"),
    *yaml("sft", "- lr\n- 1\n", "c.yaml"),
    *yaml("sft", "lr\n", "c.yaml"),
    *yaml("sft", "3\n", "c.yaml"),
    *yaml("sft", "lr: [1]\n", "lr: expected a finite number"),
    *yaml("sft", "lr: {a: 1}\n", "lr: expected a finite number"),
    *yaml("sft", "lr: .nan\n", "lr: expected a finite number"),
    *yaml("sft", "lr: null\n", "lr=None: expected a finite number"),
    *yaml("sft", "lr: true\n", "lr: expected a finite number"),
    *yaml("sft", "steps: true\n", "steps: expected a whole number"),
    *yaml("sft", "model: [a, b]\n", "model: expected text"),
    *yaml("sft", "raw_prompt: 3\n", "raw_prompt: expected true or false"),
    *yaml("sft", b"lr: 1\nmodel: \xff\n", "c.yaml: not YAML|c.yaml.*UTF-8"),
    *yaml("sft", "lr:\t1\n\t- 2\n", "c.yaml: not YAML"),
    *yaml("sft", "model: !!python/object/apply:os.system [true]\n", "c.yaml|python/object"),
    *yaml("sft", "lr: 1\n---\nlr: 2\n", "c.yaml"),
    *yaml("sft", "? [1]\n: 2\n", "c.yaml"),
    *yaml("sft", "model: &a\n  b: *a\n", "c.yaml|model: expected text"),
    *yaml("sft", "1: 2\n", "c.yaml|1"),
    *yaml("sft", "config: c.yaml\n", "c.yaml|config"),
]


# Models.


def model(commands: str, change: Callable[[Path], None], message: str, **fields) -> list[Case]:
    """A model folder that is not as it should be."""
    title = "a model " + change.__name__.replace("_", " ")
    return of(commands, title, message, spoil=lambda folder: change(folder / "model"), **fields)


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def is_not_there(folder):
    shutil.rmtree(folder)


def is_an_empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def is_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("weights")


def without_config(folder):
    (folder / "config.json").unlink()


def with_a_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")


def with_a_config_that_is_a_list(folder):
    (folder / "config.json").write_text("[]")


def with_an_empty_config(folder):
    (folder / "config.json").write_text("")


def of_no_known_type(folder):
    change_config(folder, model_type="qwen99")


def whose_layers_are_negative(folder):
    change_config(folder, num_hidden_layers=-1)


def whose_size_is_text(folder):
    change_config(folder, hidden_size="large")


def of_other_shapes(folder):
    change_config(folder, intermediate_size=48)


def that_asks_for_remote_code(folder):
    change_config(folder, model_type="mine", auto_map=dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "mine.M"))
    (folder / "mine.py").write_text(f"open({str(folder.parent / 'executed')!r}, 'w')\nclass M: pass\n")


def without_a_layer(folder):
    change_weights(folder, lambda w: [w.pop(k) for k in list(w) if "layers.1.mlp" in k])


def without_head(folder):
    change_weights(folder, lambda w: w.pop("lm_head.weight"))


def with_a_weight_too_many(folder):
    change_weights(folder, lambda w: w.update({"model.extra": w["lm_head.weight"].clone()}))


def with_nan(folder):
    change_weights(folder, lambda w: w["model.layers.0.mlp.up_proj.weight"][3, 2].fill_(float("nan")))


def with_inf(folder):
    change_weights(folder, lambda w: w["model.norm.weight"][2].fill_(float("inf")))


def whose_weights_are_cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def whose_weights_are_empty(folder):
    (folder / "model.safetensors").write_bytes(b"")


def whose_weights_are_text(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def whose_weights_are_a_pickle(folder):
    import pickle

    class Harm:
        def __reduce__(self):
            return Path.touch, (folder.parent / "executed",)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Harm()}))


def without_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)


def whose_tokenizer_is_no_json(folder):
    (folder / "tokenizer.json").write_text("{")


def whose_tokenizer_config_is_no_json(folder):
    (folder / "tokenizer_config.json").write_text("{")


def whose_tokenizer_is_too_large(folder):
    change_config(folder, vocab_size=100)
    cut = {"model.embed_tokens.weight", "lm_head.weight"}
    change_weights(folder, lambda w: w.update({k: w[k][:100].clone() for k in cut}))


def without_end_of_sequence(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))


def whose_chat_template_is_broken(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")


def whose_chat_template_raises(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")


def whose_chat_template_is_empty(folder):
    (folder / "chat_template.jinja").write_text("{# nothing #}")


def with_too_few_positions(folder):
    change_config(folder, max_position_embeddings=8)


def another(folder: Path, kind: str, **sizes) -> None:
    """A model of another architecture, with the tokenizer that was there."""
    import transformers

    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").unlink()
    config = getattr(transformers, f"{kind.split('-')[0]}Config")(vocab_size=263, **sizes)
    getattr(transformers, kind.replace("-", ""))(config).save_pretrained(folder)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def that_is_bert(folder):
    another(folder, "Bert-LMHeadModel", initializer_range=0.5, **SMALL)


def that_is_t5(folder):
    another(folder, "T5-ForConditionalGeneration", d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)


def that_is_bart(folder):
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    another(folder, "Bart-ForConditionalGeneration", d_model=16, **heads, encoder_ffn_dim=16, decoder_ffn_dim=16)


def that_is_a_vision_model(folder):
    import transformers

    (folder / "model.safetensors").unlink()
    transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL)).save_pretrained(folder)


def that_is_a_classifier_of_three(folder):
    another(folder, "Qwen2-ForSequenceClassification", num_labels=3, num_key_value_heads=1, **SMALL)


def that_is_a_reward_model(folder):
    another(folder, "Qwen2-ForSequenceClassification", num_labels=1, num_key_value_heads=1, **SMALL)


MODELS = [
    *model(ALL, is_not_there, "model"),
    *model(ALL, is_an_empty_folder, "model"),
    *model("sft", is_a_file, "model"),
    *model(ALL, without_config, "model.* neither a local folder|comes without a tokenizer|cannot be loaded"),
    *model(ALL, with_a_config_that_is_no_json, "model.*(neither|cannot be loaded)"),
    *model("sft reward", with_a_config_that_is_a_list, "model.*(neither|cannot be loaded)"),
    *model("sft", with_an_empty_config, "model.*(neither|cannot be loaded)"),
    *model(ALL, of_no_known_type, "qwen99"),
    *model("sft reward", whose_layers_are_negative, "model"),
    *model("sft reward", whose_size_is_text, "model.*(neither|cannot be loaded)"),
    *model(ALL, of_other_shapes, "model.*(damaged|mismatched|other shapes)"),
    *model(ALL, that_asks_for_remote_code, "model.*(neither|cannot be loaded)"),
    *model(ALL, without_a_layer, "model.*(missing|lacks) weights"),
    *model(READERS, without_head, "1 missing weights for Qwen2ForCausalLM: lm_head.weight"),
    *model(READERS, with_a_weight_too_many, "1 unexpected weights for Qwen2ForCausalLM: model.extra"),
    *model(ALL, with_nan, "1 weights hold NaN or infinite values, among them model.layers.0.mlp.up_proj.weight"),
    *model("sft", with_inf, "1 weights hold NaN or infinite values, among them model.norm.weight"),
    *model(ALL, whose_weights_are_cut, "model.*damaged"),
    *model(ALL, whose_weights_are_empty, "model.*damaged"),
    *model("sft", whose_weights_are_text, "model.*damaged"),
    *model("sft reward kl-report", without_weights, "model.*(neither|damaged)"),
    *model(ALL, whose_weights_are_a_pickle, "model.*(neither|damaged)"),
    *model(ALL, without_tokenizer, "comes without a tokenizer|tokenizer cannot be loaded"),
    *model("sft", whose_tokenizer_is_no_json, "tokenizer cannot be loaded"),
    *model("sft", whose_tokenizer_config_is_no_json, "tokenizer cannot be loaded"),
    *model(ALL, whose_tokenizer_is_too_large, r"the tokenizer has \d+ tokens, but the model embeds 100"),
    *model(ALL, without_end_of_sequence, "has no EOS token"),
    *model(ALL, whose_chat_template_is_broken, "template"),
    *model(ALL, whose_chat_template_raises, "template|no such role"),
    *model(READERS, whose_chat_template_is_empty, "line 1: (the prompt is empty|.*template)"),
    *model(ALL, with_too_few_positions, r"rows.jsonl, line \d+: .*model has 8 positions|pairs.jsonl.* 8 positions"),
    *model(READERS, that_is_bert, r"\(bert\) is not causal"),
    *model(ALL, that_is_t5, "t5|T5"),
    *model(ALL, that_is_bart, "(?i)bart"),
    *model("sft reward", that_is_a_vision_model, "(?i)vit"),
    *model("sft grpo", that_is_a_reward_model, r"(missing|unexpected) weights for Qwen2ForCausalLM"),
    *model("reward", that_is_a_classifier_of_three, "3 labels|num_labels"),
    *words(TRAINERS, "--model Qwen/Qwen2.5-0.5B-Instrukt", "model='Qwen/Qwen2.5-0.5B-Instrukt'.*: its tokenizer"),
    *words("sft", "--model ./nobody/here", "nobody/here"),
    *words("sft", "--model a/b/c/d", "a/b/c/d"),
    *words("grpo", "--revision nowhere --model nobody/nothing", "nobody/nothing"),
    *words("kl-report", "--reference nobody", "reference='nobody' is neither"),
    *words("kl-report", "--behaviour nobody", "behaviour='nobody' is neither"),
    *of("sft", "a model whose name is empty", "model", "--model", ""),
]


# Data.


def columns_of(command: str) -> dict:
    pair = {"prompt": "a=", "chosen": "b", "rejected": "c"}
    return pair if command == "reward" else {"question": "1+1?", "answer": "2"}


def data(commands: str, title: str, content: str | bytes, message: str, name="data.jsonl", **fields) -> list[Case]:
    """A dataset with this content."""
    which = {"kl-report": "--prompts"}
    made, more = [], fields.pop("options", ())
    for command in commands.split():
        write = _writer(name, content)
        made += of(command, title, message, which.get(command, "--dataset"), name, *more, spoil=write, **fields)
    return made


def _writer(name: str, content: str | bytes) -> Callable[[Path], None]:
    content = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return lambda folder: (folder / name).write_bytes(content)


def line(commands: str, text: str | bytes, message: str, **fields) -> list[Case]:
    """Six good rows, of which the third is this text instead; the error must name the line."""
    made = []
    for command in commands.split():
        good = json.dumps(columns_of(command)).encode() + b"\n"
        content = good * 2 + (text if isinstance(text, bytes) else text.encode()) + b"\n" + good * 3
        made += data(command, f"line {text[:40]!r}", content, f"data.jsonl, line 3.*{message}", **fields)
    return made


def cell(commands: str, column: str, value, message: str, **fields) -> list[Case]:
    """Six good rows, of which the third has this in a column."""
    made = []
    for command in commands.split():
        made += line(command, json.dumps(columns_of(command) | {column: value}), message, **fields)
    return made


def files(commands: str, title: str, spoil: Callable[[Path], None], name: str, message: str, *more: str) -> list[Case]:
    """A dataset that `spoil` makes."""
    which = {"kl-report": "--prompts"}
    return [Case(c, title, message, (which.get(c, "--dataset"), name, *more), spoil) for c in commands.split()]


def a_table(folder: Path, rows: list[dict], name: str = "data.parquet") -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)


def half_a_table(folder: Path) -> None:
    a_table(folder, tiny.sums(50))
    path = folder / "data.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def a_folder(folder: Path, **names: str) -> None:
    (folder / "set").mkdir()
    for name, text in names.items():
        (folder / "set" / f"{name}.jsonl").write_text(text)


TEXT_OR_MESSAGES = "column 'question' must be text or a list of messages"
LONG = json.dumps({"question": "9" * 20_000, "answer": "2"}) + "\n"
DATA = [
    *data(ALL, "an empty file", "", "data.jsonl has no rows"),
    *data("sft", "nothing but newlines", "\n\r\n\n", "data.jsonl has no rows"),
    *data("sft", "spaces", "   \n", "data.jsonl has no rows"),
    *data("sft", "a BOM and nothing else", codecs.BOM_UTF8, "data.jsonl has no rows"),
    *data("sft", "UTF-16", '{"question": "a", "answer": "b"}\n'.encode("utf-16"), "line 1, byte 1: not UTF-8"),
    *data("sft", "NULs", bytes(100), "line 1, character 1: not JSON"),
    *data("sft", "random bytes", bytes(range(128, 256)), "line 1, byte 1: not UTF-8"),
    *data("sft", "a JSON list over lines", "[\n{}\n]\n", "line 1.*not JSON"),
    *data("sft", "a number", "3\n", "line 1: expected a JSON object, got int"),
    *data("sft", "null", "null\n", "line 1: expected a JSON object, got NoneType"),
    *data("sft", "a CSV file", "question,answer\n1,2\n", "only .jsonl and .parquet files are read", "data.csv"),
    *data("sft", "a JSON file", "[]", "only .jsonl and .parquet files are read", "data.json"),
    *data("sft", "text as Parquet", "PAR1 no", "data.parquet is not a whole Parquet file", "data.parquet"),
    *data("sft", "an empty Parquet file", "", "data.parquet is not a whole Parquet file", "data.parquet"),
    *data(READERS, "all prompts too long", LONG * 12, r"(all \d+ rows are longer|20\d+ tokens, but the model has 128)"),
    *data("sft", "a huge line", "x" * 20_000_000, "data.jsonl, line 1, character 1: not JSON"),
    *data("sft", "a huge line of other text", "[" + "1," * 10_000_000, "data.jsonl, line 1, character .*: not JSON"),
    *files("sft", "half a Parquet file", half_a_table, "data.parquet", "data.parquet is not a whole Parquet file"),
    *files(ALL, "no such file", lambda folder: None, "none.jsonl", "dataset file none.jsonl does not exist"),
    *files(
        "sft",
        "a folder named as a file",
        lambda f: (f / "d.jsonl").mkdir(),
        "d.jsonl",
        "not exist, or is a folder",
    ),
    *files(ALL, "an empty folder", a_folder, "set", "dataset='set'"),
    *files("sft", "a folder of broken rows", lambda f: a_folder(f, train="{"), "set", "dataset='set'"),
    *files(
        "sft",
        "no such configuration",
        lambda f: a_folder(f, train='{"question": "a", "answer": "b"}\n'),
        "set",
        "dataset='set' .configuration b",
        "--dataset_config",
        "b",
    ),
    *files(
        "sft",
        "no such split",
        lambda f: a_folder(f, train='{"question": "a", "answer": "b"}\n'),
        "set",
        "dataset='set' .*split dev",
        "--dataset_split",
        "dev",
    ),
    *files(
        "sft",
        "numbers in Parquet",
        lambda f: a_table(f, [{"question": 1, "answer": 2}] * 5),
        "data.parquet",
        "data.parquet, row 1: " + TEXT_OR_MESSAGES,
    ),
    *files(
        "sft",
        "bytes in Parquet",
        lambda f: a_table(f, [{"question": b"\xff", "answer": b"2"}] * 5),
        "data.parquet",
        "data.parquet, row 1: " + TEXT_OR_MESSAGES,
    ),
    *files("sft", "Parquet without rows", lambda f: a_table(f, tiny.sums(1)[:0]), "data.parquet", "has no rows"),
    *words("sft", "--dataset openai/gsm9k", "dataset='openai/gsm9k'"),
    *words("sft", "--dataset /", "dataset='/'"),
    *of("sft", "a dataset whose name is empty", "dataset", "--dataset", ""),
    *words("sft", "--eval_dataset none.jsonl", "dataset file none.jsonl does not exist"),
    *words("reward", "--reference_dataset none.jsonl", "dataset file none.jsonl does not exist"),
    *words("reward", "--reference_dataset rows.jsonl", "rows.jsonl, line 1: column 'chosen' is missing"),
    *words(
        "sft",
        "--prompt_column q",
        "line 1: column 'q' is missing; .*--prompt_column",
    ),
    *words("sft", "--completion_column a", "line 1: column 'a' is missing; .*--completion_column"),
    *words("grpo", "--answer_column a --verifiers math", "line 1: column 'a' is missing; .*--answer_column"),
    *words("reward", "--dataset rows.jsonl", "rows.jsonl, line 1: column 'chosen' is missing; .*--chosen_column"),
    *words("sft", "--dataset pairs.jsonl", "pairs.jsonl, line 1: column 'answer' is missing; .*--completion_column"),
    *words("sft", "--max_length 3", "rows.jsonl: all 10 rows are longer than .*max_length"),
    *words("grpo", "--max_prompt_length 3", "rows.jsonl: all 12 rows are longer than max_prompt_length"),
    *words("reward", "--max_prompt_length 1", "pairs.jsonl: no pair is left of 10: 10 with a prompt longer"),
    *words("reward", "--max_response_length 1", "pairs.jsonl: no pair is left of 10: 10 with a response longer"),
    *line(ALL, "{", "character 2: not JSON"),
    *line(ALL, b'{"question": "\xff"}', "not UTF-8"),
    *line(ALL, "[1]", "expected a JSON object, got list"),
    *line("sft", '{"question": "a", "answer": "b"} {}', "not JSON: Extra data"),
    *line("sft", '{"question": "a", "answer": "b",}', "not JSON"),
    *line("sft", "{'question': 'a'}", "not JSON"),
    *line("sft", '{"question": "a", "question": "b", "answer": "c"}', "key 'question' stands 2 times"),
    *line("sft", '{"question": "a\tb", "answer": "c"}', "not JSON: Invalid control character"),
    *cell(READERS, "question", "a\ud800", "half a surrogate"),
    *cell("reward", "chosen", "\udfffa", "half a surrogate"),
    *line("sft", '{"question": "a", "answer": "b\\udfff"}', "half a surrogate"),
    *line(ALL, "[" * 100_000, "nested too deeply"),
    *line("sft", '{"question": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    *line("sft", '{"question": ' + "9" * 5000 + ', "answer": "b"}', "question.* must be text|too many digits|not JSON"),
    *line("sft", "{}", r"column '\w+' is missing"),
    *cell(READERS, "question", None, "column 'question' is null; mend or remove the row"),
    *cell("sft", "answer", "b<end>c", "the completion spells '<end>', the token that ends a response"),
    *cell("reward", "chosen", "b<end>c", "the completion spells '<end>'"),
    *cell("sft", "question", [USER, CALLS], "the assistant's turn has tool_calls, but the chat template leaves it out"),
    *cell("reward", "chosen", [CALLS], "column 'chosen' is a turn with tool_calls; give the whole conversation"),
    *cell("reward", "chosen", [USER, CALLS], "the assistant's turn has tool_calls, but the chat template leaves it"),
    *cell(READERS, "tools", [{"name": "f"}], "the row has tools, but the chat template does not read them"),
    *cell("sft grpo", "tools", "[]", "column 'tools' must be a list of functions as JSON objects"),
    *cell(READERS, "question", 5, TEXT_OR_MESSAGES),
    *cell("sft", "question", True, TEXT_OR_MESSAGES),
    *cell("sft", "question", float("nan"), TEXT_OR_MESSAGES),
    *cell("sft", "question", {"role": "user"}, TEXT_OR_MESSAGES),
    *cell(READERS, "question", [], TEXT_OR_MESSAGES),
    *cell("sft", "question", ["a"], TEXT_OR_MESSAGES),
    *cell("sft", "question", [USER, "a"], TEXT_OR_MESSAGES),
    *cell("sft", "question", [{"role": "user"}], TEXT_OR_MESSAGES),
    *cell("sft", "question", [{"content": "a"}], TEXT_OR_MESSAGES),
    *cell(READERS, "question", [{"role": "user", "content": None}], TEXT_OR_MESSAGES),
    *cell("sft", "question", [{"role": "user", "content": [{"type": "text", "text": "a"}]}], TEXT_OR_MESSAGES),
    *cell("sft", "question", [{"role": 1, "content": "a"}], TEXT_OR_MESSAGES),
    *cell(READERS, "question", [ASSISTANT], "the assistant's messages alone"),
    *cell("sft", "answer", 5, "column 'answer' must be text, got int"),
    *cell("sft", "answer", None, "column 'answer' is null; mend or remove the row"),
    *cell("sft", "answer", ["a"], "column 'answer' must be text, got list"),
    *cell("sft", "answer", {"a": 1}, "column 'answer' must be text, got dict"),
    *cell("reward", "chosen", None, "column 'chosen' is null"),
    *cell("reward", "chosen", 3, "column 'chosen' must be text"),
    *cell("reward", "chosen", ["a"], "column 'chosen' must be text or messages"),
    *cell("reward", "chosen", [], "column 'chosen' must be text"),
    *cell("reward", "chosen", {"role": "assistant"}, "column 'chosen' must be text"),
    *cell("reward", "chosen", [{"role": "assistant"}], "column 'chosen' (must be text|is missing)"),
    *cell("reward", "chosen", [{"role": "assistant", "content": 3}], "column 'chosen' must be text"),
    *cell("reward", "chosen", [USER, {"role": "assistant", "content": None}], "column 'chosen' must be text"),
    *cell("reward", "rejected", [ASSISTANT, USER], "column 'rejected' must be text, or messages that end"),
    *cell("reward", "rejected", [{"content": "a"}], "column 'rejected' must be text"),
    *cell("reward", "prompt", 3, "column 'prompt' must be text"),
    *cell("reward", "prompt", ["a"], "column 'prompt' must be text or messages"),
    *cell("reward", "prompt", [], "column 'prompt' must be text"),
    *cell("reward", "prompt", [USER, ASSISTANT], "column 'prompt' ends with the assistant's turn"),
    *cell("reward", "prompt", [{"role": "user", "content": None}], "column 'prompt' must be text"),
    *cell("reward", "margin", float("nan"), "column 'margin' must be a number, got nan"),
    *cell("reward", "margin", float("inf"), "column 'margin' must be a number, got inf"),
    *cell("reward", "margin", "much", "column 'margin' must be a number, got 'much'"),
    *cell("reward", "margin", True, "column 'margin' must be a number, got True"),
    *cell("reward", "margin", [1], r"column 'margin' must be a number, got \[1\]"),
    *cell("reward", "margin", 10**400, "column 'margin' must be a number"),
    *cell("reward", "margin", 1e300, "column 'margin' must be a number"),
]


# Verifiers: functions of judges.py, which stands in the folder of each case.

JUDGES = """
import asyncio, os, sys, time
import torch

def even(responses, rows): return [len(r) % 2 for r in responses]
def raises(responses, rows): return [1 / 0 for r in responses]
def raises_lines(responses, rows): raise ValueError("one\\ntwo")
def raises_key(responses, rows): return [row["nothing"] for row in rows]
def exits(responses, rows): sys.exit(0)
def quits(responses, rows): raise SystemExit("told to")
def interrupts(responses, rows): raise KeyboardInterrupt
def recurs(responses, rows): return recurs(responses, rows)
def sleeps(responses, rows): time.sleep(3600)
def nothing(responses, rows): return None
def text(responses, rows): return "1" * len(responses)
def number(responses, rows): return 1.0
def dictionary(responses, rows): return dict.fromkeys(responses, 1.0)
def few(responses, rows): return [1.0]
def many(responses, rows): return [1.0] * 99
def words(responses, rows): return ["1"] * len(responses)
def nan(responses, rows): return [float("nan")] * len(responses)
def inf(responses, rows): return [-float("inf")] * len(responses)
def large(responses, rows): return [1e39] * len(responses)
def huge(responses, rows): return [10 ** 400] * len(responses)
def almost(responses, rows): return [3e38] * len(responses)
def lists(responses, rows): return [[1.0]] * len(responses)
def complexes(responses, rows): return [1j] * len(responses)
def generator(responses, rows):
    yield 1.0
    raise ValueError("half way")
def trl(completions, answers, **columns): return [1.0]
def one(response, row): return 1 / 0
async def awaited(response, row): return 1 / 0
async def waits(response, row): await asyncio.sleep(3600)
def zero_d(responses, rows): return torch.tensor(1.0)
def long(responses, rows): raise ValueError("m" * 100_000)
class Base(BaseException): pass
def base(responses, rows): raise Base("one\\ntwo")
class Mute(Exception):
    def __str__(self): raise KeyError("no text")
def mute(responses, rows): raise Mute
def loss_none(log_ratio, advantages, logprobs, sequences, options): return None
def loss_sum(log_ratio, advantages, logprobs, sequences, options): return (-log_ratio * advantages).sum()
def loss_raises(log_ratio, advantages, logprobs, sequences, options): raise ValueError("m" * 100_000)
def three(texts, rows, answers): return [1.0]
def none(): return []
def keywords(*, responses, rows): return []
class Called: pass
three_is = 3
"""
MODULES = {
    "broken_syntax": "def f(:",
    "broken_import": "import no_such_module",
    "broken_raise": "raise RuntimeError('a key\\nis missing')",
    "broken_exit": "import sys; sys.exit(0)",
    "broken_bytes": "\udcff",
}


def judge(name: str, message: str, **fields) -> list[Case]:
    """A function of judges.py as the verifier: what it does is found when the first responses are scored."""
    return of("grpo", f"verifier {name}", message, "--verifiers", f"judges:{name}", begins=True, **fields)


def verifiers(spelled: str, message: str, *more: str) -> list[Case]:
    """What is refused before the run."""
    return of("grpo", f"verifiers {spelled!r}", message, "--verifiers", spelled, *more)


def unfit(answers: str) -> list[Case]:
    """Answers that mathematics cannot judge."""
    made = []
    for answer in answers.split():
        message = f"verifier 'math' cannot judge the answer {re.escape(repr(answer))}: .*exact_match"
        made += cell("grpo", "answer", answer, message, options=("--verifiers", "math"))
    return made


ROWS_OF = r"it was called with 4 responses, to rows.jsonl, line \d+ … rows.jsonl, line \d+"
VERIFIERS = [
    *judge("raises", rf"verifier 'judges:raises' raised ZeroDivisionError: .* \(judges.py, line \d+\).*{ROWS_OF}"),
    *judge("raises", r"alone it raises on rows.jsonl, line \d+$"),
    *judge("one", r"'judges:one' raised ZeroDivisionError: .* with the response to rows.jsonl, line \d+$"),
    *judge("awaited", r"'judges:awaited' raised ZeroDivisionError: .* with the response to rows.jsonl, line \d+$"),
    *judge("waits", "'judges:waits' did not return within 0.3 s"),
    *judge("raises_lines", "'judges:raises_lines' raised ValueError: one two"),
    *judge("raises_key", "'judges:raises_key' raised KeyError: 'nothing'"),
    *judge("exits", r"'judges:exits' called sys.exit\(0\)"),
    *judge("quits", r"'judges:quits' called sys.exit\('told to'\)"),
    *judge("interrupts", "'judges:interrupts' raised KeyboardInterrupt"),
    *judge("base", "'judges:base' raised Base: one two"),
    *judge("mute", "'judges:mute' raised Mute: its message cannot be read"),
    *judge("long", "'judges:long' raised ValueError: mm"),
    *judge("zero_d", r"'judges:zero_d' returned tensor\(1.\) \(Tensor\); it must return a list"),
    *judge("recurs", "'judges:recurs' raised RecursionError"),
    *judge("sleeps", "'judges:sleeps' did not return within 0.3 s"),
    *judge("generator", "'judges:generator' raised ValueError: half way"),
    *judge("nothing", "'judges:nothing' returned None; it must return a list"),
    *judge("text", r"'judges:text' returned '1111' \(str\); it must return a list"),
    *judge("number", r"'judges:number' returned 1.0 \(float\); it must return a list"),
    *judge("dictionary", r"'judges:dictionary' returned .* \(dict\); it must return a list"),
    *judge("few", "'judges:few' returned 1 scores for 4 responses"),
    *judge("many", "'judges:many' returned 99 scores for 4 responses"),
    *judge("words", r"'judges:words' returned '1' \(str\) as the score of rows.jsonl, line \d+"),
    *judge("nan", r"'judges:nan' returned nan \(float\) as the score of rows.jsonl, line \d+"),
    *judge("inf", r"'judges:inf' returned -inf \(float\) as the score of rows.jsonl, line \d+"),
    *judge("large", r"'judges:large' returned 1e[+]39 \(float\) as the score of"),
    *judge("huge", r"'judges:huge' returned 1000+….* \(int\) as the score of"),
    *judge("lists", r"'judges:lists' returned \[1.0\] \(list\) as the score of"),
    *judge("complexes", r"'judges:complexes' returned 1j \(complex\) as the score of"),
    *of(
        "grpo",
        "scores times a weight are too large",
        r"the reward of rows.jsonl, line \d+ is inf: the weighted sum",
        *("--verifiers", "judges:almost", "--verifier_weights", "[2]"),
        begins=True,
    ),
    *verifiers("judges:trl", "rows.jsonl, line 1: verifier 'judges:trl' takes the column 'answers'; the row has"),
    *verifiers("regex:(a", r"'regex': the pattern '\(a' does not compile"),
    *verifiers("regex:(a)", "column 'a' is missing", "--answer_column", "a"),
    *verifiers("exact_match", "column 'a' is missing", "--answer_column", "a"),
    *verifiers("length", "expected length:<tokens>"),
    *verifiers("length:0", "expected a whole number above 0 after the colon, in tokens"),
    *verifiers("exact_macth", "verifier 'exact_macth': expected .*; did you mean 'exact_match'"),
    *verifiers("judges:three", r"'judges:three' must take \(responses, rows\)"),
    *verifiers("judges:none", r"'judges:none' must take \(responses, rows\)"),
    *verifiers("judges:keywords", r"'judges:keywords' must take \(responses, rows\)"),
    *verifiers("judges:Called", r"'judges:Called' must take \(responses, rows\)"),
    *verifiers("judges:three_is", "int is not a function"),
    *verifiers("judges:none_such", "verifier 'judges:none_such': AttributeError"),
    *verifiers("judges", "verifier 'judges': expected math, reasoning_gym"),
    *verifiers("judges:", "verifier 'judges:': expected"),
    *verifiers(":even", "verifier ':even'"),
    *verifiers("", "verifier ''"),
    *verifiers(",", "verifier ',': this spelling is of before: several verifiers are a list"),
    *verifiers("math,", "verifier 'math,': this spelling is of before: several verifiers are a list"),
    *verifiers("[]", "verifiers=.. is empty"),
    *verifiers("[math", "is no list"),
    *verifiers("no_such_module:f", "verifier 'no_such_module:f': ModuleNotFoundError"),
    *verifiers("broken_syntax:f", "verifier 'broken_syntax:f': SyntaxError"),
    *verifiers("broken_import:f", "verifier 'broken_import:f': ModuleNotFoundError: No module named 'no_such_module'"),
    *verifiers("broken_raise:f", "verifier 'broken_raise:f': RuntimeError: a key is missing"),
    *verifiers("broken_exit:f", "verifier 'broken_exit:f': SystemExit: 0"),
    *verifiers("broken_bytes:f", "verifier 'broken_bytes:f': (SyntaxError|UnicodeDecodeError)"),
    *verifiers("[judges:even, judges:even]", "'judges:even' is named 2 times"),
    *verifiers("2*judges:even", "verifier '2[*]judges:even': .* weights are a list of their own"),
    *verifiers("judges:even>=1", "verifier 'judges:even>=1': .* thresholds are a list of their own"),
    *words("grpo", "--verifier_weights [nan]", "verifier_weights.*expected a (list of )?finite number"),
    *words("grpo", "--verifier_weights [x]", "verifier_weights: expected a list of finite numbers"),
    *words("grpo", "--verifier_weights x", "verifier_weights: expected a list of finite numbers"),
    *words("grpo", "--solved_at [inf]", "solved_at.*expected a (list of )?finite number"),
    *words("grpo", "--solved_at y", "solved_at: expected a list of finite numbers, or of null"),
    *verifiers("judges:even", "has 2 numbers for 1 verifiers", "--verifier_weights", "[1, 2]"),
    *verifiers("judges:even", "has 2 numbers for 1 verifiers", "--solved_at", "[1, null]"),
    *verifiers("mth", "verifier 'mth': expected math, reasoning_gym"),
    *verifiers("reasoning_gym:chain_sums", "no dataset 'chain_sums'; did you mean 'chain_sum'"),
    *verifiers("reasoning_gym", "rows.jsonl, line 1: metadata has no source_dataset"),
    *verifiers("reward_model:./rm", "reward_model.*'./rm'|'./rm'"),
    *verifiers("reward_model:nobody/a2.5-v1.0", "nobody/a2.5-v1.0"),
    *unfit("Paris yes B (A) 12:30 2024-01-05 v1.0 H2O sqrt(2) ½ n/a"),
    *cell("grpo", "answer", "[1, 2]", "cannot judge the answer '.1, 2.': a list", options=("--verifiers", "math")),
    *cell("eval", "answer", "Paris", "nothing says what judges the answer 'Paris'", options=("--verifiers", "null")),
    *cell("grpo", "answer", None, "'answer' is null; mend or remove the row", options=("--verifiers", "math")),
]


# The output folder.


def place(title: str, spoil: Callable[[Path], None], message: str, *options: str, commands: str = "sft") -> list[Case]:
    """Something about output_dir."""
    return of(commands, f"output_dir {title}", message, *options, spoil=spoil)


def be_a_file(folder: Path) -> None:
    shutil.rmtree(folder / "run")
    (folder / "run").write_text("kept")


def be_a_broken_link(folder: Path) -> None:
    shutil.rmtree(folder / "run")
    (folder / "run").symlink_to("nowhere")


def lose_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "checkpoints")


def hold_the_model(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "model")
    shutil.copytree(folder / "model", folder / "run" / "model")


def hold_the_rows(folder: Path) -> None:
    shutil.copy(folder / "rows.jsonl", folder / "run" / "checkpoints" / "rows.jsonl")


def hold_the_base(folder: Path) -> None:
    """The run's `model` is what adapters elsewhere belong to, by a path that is not the shortest."""
    hold_the_model(folder)
    hold_adapters(folder / "adapters", "./run/../run/model")


def hold_adapters(adapters: Path, base: str) -> None:
    """Adapters to a base, which must not be read before it is found to be in the way."""
    adapters.mkdir()
    told = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 2, "target_modules": ["q_proj"]}
    (adapters / "adapter_config.json").write_text(json.dumps(told))


def link_to_the_model(folder: Path) -> None:
    hold_the_model(folder)
    (folder / "linked").symlink_to(folder / "run" / "model")


def be_linked(folder: Path) -> None:
    """The run's `model` is a link to what the run reads."""
    shutil.rmtree(folder / "run" / "model")
    (folder / "run" / "model").symlink_to(folder / "model")


def hold_a_function(folder: Path) -> None:
    shutil.copy(folder / "judges.py", folder / "run" / "model" / "judge_in_run.py")


def hold_a_config(folder: Path) -> None:
    (folder / "run" / "config.yaml").write_text("seed: 3\n")


def hold_notes(folder: Path) -> None:
    (folder / "run" / "model" / "notes.txt").write_text("mine")


def be_in_a_model(folder: Path) -> None:
    """The run lies in the folder of the model that it trains, which keeps the run's deletions out of nothing."""
    shutil.copytree(folder / "model", folder / "run", dirs_exist_ok=True)
    (folder / "run" / "checkpoints" / "notes.txt").write_text("mine")


def hold_a_link(folder: Path) -> None:
    (folder / "run" / "checkpoints" / "linked").symlink_to(folder / "model")


def be_no_run(folder: Path) -> None:
    (folder / "run" / "written.json").unlink()


def be_told_of_wrongly(folder: Path) -> None:
    (folder / "run" / "written.json").write_text("[" * 100_000)


def unchanged(folder: Path) -> None:
    """Nothing."""


OVER, GO_ON = ("--overwrite", "false"), ("--overwrite", "false", "--resume")
PLACES = [
    *place("is a file", be_a_file, "output_dir=run cannot be used: File exists", commands=TRAINERS),
    *place("is below a file", unchanged, "cannot be used: Not a directory", "--output_dir", "rows.jsonl/run"),
    *place("is a link to nothing", be_a_broken_link, "output_dir=run cannot be used"),
    *place("cannot be written", unchanged, "/proc/run cannot be used", "--output_dir", "/proc/run", commands=TRAINERS),
    *place("has too long a name", unchanged, "cannot be used: File name too long", "--output_dir", "x" * 300),
    *place("holds a run", unchanged, r"run already holds a run \(checkpoints, .*--overwrite", *OVER, commands=TRAINERS),
    *place(
        "holds the model", hold_the_model, "overwrite would delete .*model=", "--model", "run/model", commands=TRAINERS
    ),
    *place(
        "holds the rows", hold_the_rows, "overwrite would delete .*dataset=", "--dataset", "run/checkpoints/rows.jsonl"
    ),
    *place("holds the base", hold_the_base, "overwrite would delete .*adapters to .*lies there", "--model", "adapters"),
    *place(
        "holds a linked model", link_to_the_model, "overwrite would delete run/model, .*model=", "--model", "linked"
    ),
    *place("holds a link", be_linked, "overwrite would delete run/model, and model=model lies there"),
    *place(
        "holds a reward model",
        hold_the_model,
        "overwrite would delete run/model, and verifiers: reward_model:run/model lies",
        *("--verifiers", "reward_model:run/model"),
        commands="grpo",
    ),
    *place(
        "holds a critic",
        hold_the_model,
        "overwrite would delete run/model, and critic=run/model lies there",
        *("--critic", "run/model"),
        commands="ppo",
    ),
    *place(
        "holds a function",
        hold_a_function,
        "overwrite would delete run/model, and verifiers: run.model.judge_in_run:even lies there",
        *("--verifiers", "run.model.judge_in_run:even"),
        commands="grpo",
    ),
    *place(
        "holds reference rows",
        hold_the_rows,
        "overwrite would delete .*reference_dataset=",
        *("--reference_dataset", "run/checkpoints/rows.jsonl"),
        commands="reward",
    ),
    *place("holds the config", hold_a_config, "overwrite would delete .*--config run/c", "--config", "run/config.yaml"),
    *place(
        "is a model's and holds others'",
        be_in_a_model,
        "no run wrote checkpoints/notes.txt",
        *("--model", "run"),
        commands=TRAINERS,
    ),
    *place("is read", unchanged, "overwrite would delete .*which lies in dataset=run;", "--dataset", "run"),
    *place("holds notes", hold_notes, "no run wrote model/notes.txt", commands=TRAINERS),
    *place("holds a link of others", hold_a_link, "no run wrote checkpoints/linked"),
    *place("was no run", be_no_run, "holds checkpoints, .*no written.json that says what", commands=TRAINERS),
    *place("has a damaged list", be_told_of_wrongly, "written.json is not what was written"),
    *place("accepts", unchanged, "accept_changes=.* add --resume", "--accept_changes", "rows"),
    *place("accepts nonsense", unchanged, "'ros, modl' is none of rows,", *GO_ON, "--accept_changes", "ros", "modl"),
    *place("has no checkpoint", lose_checkpoints, "resume: there is no checkpoint in", *GO_ON, commands=TRAINERS),
    *place("is new to resume", unchanged, "resume: there is no checkpoint in", *GO_ON, "--output_dir", "new"),
    *place("has another step", unchanged, "resume_from='step-9' is not in", *OVER, "--resume_from", "step-9"),
    *place("has no such step", unchanged, "resume_from='../../model' is not", *OVER, "--resume_from", "../../model"),
]
CASES = {"options": OPTIONS, "models": MODELS, "data": DATA, "verifiers": VERIFIERS, "output_dir": PLACES}
