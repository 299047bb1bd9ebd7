"""Model folders that a command must refuse."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.trainers.bad_inputs.cases import ALL, Case, of, words


def model(commands: str, change: Callable[[Path], None], message: str, **fields) -> list[Case]:
    """A model folder that is not as it should be."""
    title = "a model " + change.__name__.replace("_", " ")
    options = fields.pop("options", ())
    return of(
        commands, title, message, *options, spoil=lambda folder: change(folder / "model"), **fields
    )


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


def of_other_shapes(folder):
    change_config(folder, intermediate_size=48)


def that_asks_for_remote_code(folder):
    change_config(
        folder,
        model_type="mine",
        auto_map=dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "mine.M"),
    )
    (folder / "mine.py").write_text(
        f"open({str(folder.parent / 'executed')!r}, 'w')\nclass M: pass\n"
    )


def without_a_layer(folder):
    change_weights(folder, lambda w: [w.pop(k) for k in list(w) if "layers.1.mlp" in k])


def with_a_weight_too_many(folder):
    change_weights(folder, lambda w: w.update({"model.extra": w["lm_head.weight"].clone()}))


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


def whose_tokenizer_is_too_large(folder):
    change_config(folder, vocab_size=100)
    cut = {"model.embed_tokens.weight", "lm_head.weight"}
    change_weights(folder, lambda w: w.update({k: w[k][:100].clone() for k in cut}))


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


def of_adapters(folder):
    import peft
    import transformers

    lm = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    shutil.copytree(folder, folder.parent / "base")
    (folder / "model.safetensors").unlink()
    peft.get_peft_model(lm, config).save_pretrained(folder)
    file = folder / "adapter_config.json"
    text = file.read_text().replace(
        json.dumps(str(folder)), json.dumps(str(folder.parent / "base"))
    )
    file.write_text(text)


def of_adapters_in_a_list(folder):
    (folder / "adapter_config.json").write_text("[]")


def of_adapters_of_an_unknown_kind(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "NEW"}')


SYNCED = ("--ref_sync_every", "1", "--kl_coef", "0.1")
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def that_is_a_classifier_of_three(folder):
    another(folder, "Qwen2-ForSequenceClassification", num_labels=3, num_key_value_heads=1, **SMALL)


def run(folder):
    """Make the folder of a run, with the model in it."""
    shutil.copytree(folder / "model", folder / "its" / "model")
    (folder / "its" / "config.yaml").write_text("steps: 3")


MODELS = [
    *of("sft", "a run", "it is the folder of a run: give its/model", "--model", "its", spoil=run),
    *words(
        "sft",
        "--model Qwen/Qwen2.5-0.5B-Instrukt",
        "0.5B-Instrukt.*: its tokenizer cannot be loaded",
    ),
    *of("sft", "a model whose name is empty", "model", "--model", ""),
    *model(ALL, is_not_there, "model"),
    *words(ALL, "--model run/modle", "run/modle does not exist; the current folder is"),
    *words("distill", "--teacher ./none", "./none does not exist"),
    *model("grpo", of_adapters, "ref_sync_every=1 needs .* holds adapters", options=SYNCED),
    *model("sft", of_adapters_in_a_list, r"adapter_config.json: expected a JSON object, got \[\]"),
    *model("sft", of_adapters_of_an_unknown_kind, "holds adapters that cannot be read: KeyError"),
    *model("sft reward", of_other_shapes, "model.*damaged"),
    *model("sft reward", that_asks_for_remote_code, "model.*(neither|cannot be loaded)"),
    *model("sft reward", without_a_layer, "model.*(missing|lacks) weights"),
    *model("sft", with_a_weight_too_many, "1 unexpected weights for Qwen2ForCausalLM: model.extra"),
    *model("sft reward", whose_weights_are_a_pickle, "model.*(neither|damaged)"),
    *model("sft", without_tokenizer, "comes without a tokenizer|tokenizer cannot be loaded"),
    *model(
        ALL,
        whose_tokenizer_is_too_large,
        r"the tokenizer has ids up to \d+, but the model embeds 100",
    ),
    *model("sft grpo", whose_chat_template_is_empty, "line 1: (the prompt is empty|.*template)"),
    *model(
        ALL,
        with_too_few_positions,
        r"rows.jsonl, line \d+: .*model has 8 positions|pairs.jsonl.* 8 positions",
    ),
    *model("reward", that_is_a_classifier_of_three, "num_labels=3"),
]
