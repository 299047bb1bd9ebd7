"""What the reproduction of a server's traps pushes and asks: the demo's weights before and after GRPO, long prompts."""

import itertools
import json
import shutil
from pathlib import Path

from bench.repro import ppo_step
from fused_rl.recipes import demo
from fused_rl.trainers import grpo
from fused_rl.trainers.run.parse import parse

STEPS = 60  # of GRPO between the old weights and the new
PROMPTS, SHOTS = 16, 18
POSITIONS = 512
LACKING = "model.layers.0.mlp.down_proj.weight"  # of the partial folder


def prepare(folder: Path) -> tuple[Path, Path]:
    """Folders of the old weights and the new, with room for long prompts; trained where they are not there yet."""
    ppo_step.warm_start(folder)
    if not (folder / "grpo" / "model").exists():
        paths = {
            "model": folder / "sft" / "model",
            "dataset": folder / "data" / "train.jsonl",
            "eval_dataset": folder / "data" / "eval.jsonl",
            "output_dir": folder / "grpo",
            "steps": STEPS,
            "eval_every": STEPS,
        }
        grpo.train(parse(grpo.GRPOConfig, demo.arguments("demo_grpo.yaml", 1, paths)))
    return with_room(folder / "sft" / "model", folder / "old"), with_room(folder / "grpo" / "model", folder / "new")


def with_room(source: Path, target: Path) -> Path:
    """A copy of a model's folder for POSITIONS tokens, with sampling defaults as many a model has them."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (target / "generation_config.json").write_text(json.dumps(defaults))
    return target


def partial(folder: Path) -> Path:
    """A copy that lacks one tensor."""
    from safetensors.torch import load_file, save_file

    target = folder.with_name("partial")
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    del tensors[LACKING]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def long_prompts(tokenizer) -> list[list[int]]:
    """Problems and their answers, SHOTS in a row, and one without its answer."""
    entries = iter(demo.problems(2, PROMPTS * (SHOTS + 1)))
    made = []
    for _ in range(PROMPTS):
        *shown, last = itertools.islice(entries, SHOTS + 1)
        text = "".join(f"{entry['question']}{entry['answer']}{tokenizer.eos_token}" for entry in shown)
        made.append(tokenizer(text + last["question"]).input_ids)
    return made
