"""TRL's trainers on models of a few thousand weights, and everything that a run computes.

A `Cell` names a trainer and its options; `build` makes the trainer, and `record` runs it for some optimizer steps.
"""

import functools
import random
import tempfile
from dataclasses import dataclass, field

import torch

from tests.integrations import tiny_models
from tests.trainers import tiny

MOVED = 0.02  # the policy from its reference
# What a clock says is no metric.
TIMED = ("step_time", "runtime", "per_second", "total_flos")
# Silences TRL's telemetry, and takes the CPU twins: the interpreted kernels are tested op by op.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRITON_INTERPRET": "0"}


@dataclass(frozen=True)
class Cell:
    """A trainer of TRL's, the options of its config, and the model it trains."""

    trainer: str
    options: dict = field(default_factory=dict)
    model: str = "qwen2"
    lora: bool = False

    def __str__(self):
        options = ",".join(f"{name}={_short(value)}" for name, value in self.options.items())
        model = "" if self.model == "qwen2" else f"@{self.model}"
        return f"{self.trainer}{model}{'+lora' if self.lora else ''}({options})"


@dataclass
class Run:
    """What a run computed: losses of micro-batches, metrics of steps, gradients of steps."""

    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)


def _short(value):
    return "+".join(map(str, value)) if isinstance(value, list) else value


@functools.cache
def _tokenizer():
    return tiny.tokenizer(chat=False)


def _config(kind: str):
    """Return a config of tests/integrations/tiny_models.py, two layers deep, for our tokenizer."""
    import transformers

    name, options = tiny_models.MODELS[kind]
    sizes = {
        "vocab_size": len(_tokenizer()),
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    tied = {"tie_word_embeddings": kind in ("qwen2-tied", "cohere"), "initializer_range": 0.2}
    return getattr(transformers, name)(**options | sizes | tied)


@functools.cache
def _folder(kind: str) -> str:
    """A random model of this kind, saved: GRPO and RLOO load their reference from where the policy came from."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(7)
        lm = transformers.AutoModelForCausalLM.from_config(_config(kind))
        if lm.get_output_embeddings().bias is not None:
            lm.get_output_embeddings().bias.data.normal_()
        _shape_head(lm)
    _FOLDERS.append(tempfile.TemporaryDirectory())
    lm.save_pretrained(_FOLDERS[-1].name)
    return _FOLDERS[-1].name


_FOLDERS = []  # removed when the process ends


@torch.no_grad()
def _shape_head(lm) -> None:
    """Three ids are often the likeliest: EOS, so that some responses end early, and `a` and `b`, which always tie."""
    head = lm.get_output_embeddings()
    first, second = _tokenizer().convert_tokens_to_ids(["a", "b"])
    scale = 4 * head.weight.std() / head.weight[[2, first]].std(-1, keepdim=True)
    head.weight[[2, first]] *= scale
    head.weight[second] = head.weight[first]
    if head.bias is not None:
        head.bias[second] = head.bias[first]


def load(kind: str, *, moved: float = 0.0, seed: int = 3):
    """The saved model of this kind, each weight moved by noise of this size."""
    import transformers

    lm = transformers.AutoModelForCausalLM.from_pretrained(_folder(kind), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += moved * torch.randn(parameter.shape, generator=generator)
    _shape_head(lm)
    return lm


@functools.cache
def _words() -> list[str]:
    rng = random.Random(0)
    lengths = [rng.randint(2, 9) for _ in range(64)]
    return ["".join(rng.choices("aaaabbbbcdefgh ", k=length)) for length in lengths]


@functools.cache
def dataset(trainer: str):
    """Sixteen rows in the form that the trainer reads, of ragged lengths."""
    import datasets

    words = _words()
    prompts, ends, others = words[:16], words[16:32], words[32:48]
    if trainer in ("GRPO", "RLOO", "Distillation"):
        return datasets.Dataset.from_dict({"prompt": prompts})
    if trainer == "SFT":
        return datasets.Dataset.from_dict({"prompt": prompts, "completion": ends})
    if trainer == "KTO":
        labels = [i % 3 != 0 for i in range(16)]
        return datasets.Dataset.from_dict({"prompt": prompts, "completion": ends, "label": labels})
    return datasets.Dataset.from_dict({"prompt": prompts, "chosen": ends, "rejected": others})


def reward(completion_ids, **_):
    """A function of the ids alone, different for nearly every response."""
    return [sum(ids) % 13 / 6 + 0.1 * len(ids) for ids in completion_ids]


def build(cell: Cell, folder, **arguments):
    """The trainer of a cell, with every setting that could differ between two runs fixed."""
    import transformers
    import trl

    transformers.set_seed(0)
    steps = {
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    fixed = {"use_cpu": True, "bf16": False, "seed": 0, "per_device_train_batch_size": 4}
    # SGD carries a difference of gradients on as it is; Adam would turn noise around zero into whole steps.
    optimizer = {
        "optim": "sgd",
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
    }
    options = {
        **steps,
        **fixed,
        **optimizer,
        "gradient_checkpointing": False,
        **cell.options,
        **arguments,
    }
    given = {"train_dataset": dataset(cell.trainer), "processing_class": _tokenizer()}
    if cell.trainer in ("GRPO", "RLOO", "Distillation"):
        options.setdefault("max_completion_length", 10)
    if cell.trainer in ("GRPO", "RLOO"):
        options.setdefault("num_generations", 2)
        given["reward_funcs"] = reward
    if cell.trainer in ("DPO", "KTO") and not cell.lora:
        given["ref_model"] = load(cell.model)
    if cell.trainer == "Distillation":
        given["teacher_model"] = load(cell.model, moved=0.1, seed=4)
    if cell.lora:
        import peft

        given["peft_config"] = peft.LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
    model = load(cell.model, moved=MOVED)
    config = getattr(trl, f"{cell.trainer}Config")(output_dir=str(folder), **options)
    return getattr(trl, f"{cell.trainer}Trainer")(model=model, args=config, **given)


def record(trainer) -> Run:
    """Trains, and returns everything that the run computed."""
    import transformers

    run = Run()

    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            named = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
            run.grads.append(
                {name: grad.detach().clone() for name, grad in named if grad is not None}
            )

    training_step = trainer.training_step

    def recorded_step(*args, **kwargs):
        loss = training_step(*args, **kwargs)
        run.losses.append(loss.item())
        return loss

    trainer.add_callback(Gradients())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.training_step = recorded_step
    trainer.train()
    run.metrics = [untimed(logged) for logged in trainer.state.log_history]
    return run


def untimed(logged: dict) -> dict:
    """The metrics of a step without what a clock says."""
    return {
        name: value for name, value in logged.items() if not any(word in name for word in TIMED)
    }
