"""The options of every trainer, in groups, and `RunConfig`, which has all of them.

A room that needs the optimizer's options takes an `OptimConfig`, and so works for a policy and a critic alike.
base/options.py has what declares an option.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
import torch
import yaml
from typing_extensions import Self

from .base import engine
from .base.engine import EngineConfig as EngineConfig  # where own trainers import it
from .base.engine import TrainingConfig
from .base.options import (
    MAY_CHANGE,
    NonNegativeInt,
    Options,
    Positive,
    PositiveInt,
    Requirement,
    Seed,
    Unit,
    may_change,
    without,
)
from .base.text import InputError

DEFAULT_MICRO_BATCH = 8  # sequences, where memory is not measured
# A dataset that ends so is a file, any other a name.
FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def is_file_name(name: str) -> bool:
    """Return True for a name that ends as files of rows do, packed with gzip or not."""
    return name.removesuffix(".gz").endswith(FILES)


def splits(option: str, dataset: str) -> Requirement:
    """Return the requirement of a split, which only a folder or a Hub dataset has."""
    return Requirement(
        option,
        lambda config: (
            getattr(config, option) == type(config).model_fields[option].default
            or not is_file_name(str(getattr(config, dataset)))
        ),
        f"has no meaning, as {dataset} is a file, without splits; write the rows you want into a file of their own",
    )


class LoadConfig(Options):
    """The model, and where it is read from."""

    model: str = pydantic.Field(json_schema_extra=MAY_CHANGE)
    """A causal language model, or adapters to one: a Hub name or a local folder."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the Hub, for its weights, tokenizer and config."""
    attn_implementation: str | None = may_change(None)
    """Attention of every model, by its name in transformers: eager, sdpa, flash_attention_2, …; None is the default of
    the model."""

    @classmethod
    def unknown(cls, names: Collection[str], where: str = "") -> InputError:
        from . import trl_names  # of which only this error needs anything

        return trl_names.unknown_options_error(names, cls.model_fields, where)

    def check(self) -> None:
        super().check()
        if self.revision is not None and Path(self.model).is_dir():
            problem = f"revision={self.revision} is of a model on the Hub"
            raise InputError(f"{problem}, and model={self.model} is a folder")


class ModelConfig(LoadConfig):
    """Which weights of the model are trained."""

    lora_rank: NonNegativeInt = 0
    """Train low-rank adapters (peft) instead of the weights; 0 for none, or for those that `model` holds."""
    lora_alpha: Positive = 32.0
    """Scale of the adapters: alpha / rank."""
    lora_targets: str = "all-linear"
    """Linear layers with adapters: names such as q_proj,v_proj, or all-linear."""
    save_merged: bool = may_change(False)
    """Save whole weights with the adapters merged in, not the adapters alone. Reward models are always merged."""
    load_in_4bit: bool = False
    """Keep the weights under the adapters in 4 bits, NF4 (needs `pip install fused-rl[bnb]`)."""
    gradient_checkpointing: bool = may_change(False)
    """Recompute activations in the backward pass."""
    checkpoint_activations_on: Literal["device", "cpu"] = may_change("device")
    """Where the inputs of the layers that are recomputed wait for the backward pass: cpu frees memory of a GPU."""
    torch_compile: bool = may_change(False)
    """Compile each layer of the model for training passes, with `zero_stage` 0 to 2. The first step takes minutes."""
    loss_from: Literal["linear", "logits"] = may_change("linear")
    """linear: from hidden states and the LM head, one chunk of logits at a time; logits: from the whole logits, also of
    a model whose head does more than multiply, scale and cap."""
    head_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the logits of bfloat16 weights: float32, or bfloat16, which changes log-probabilities by about 0.01.
    auto is float32 on a GPU and bfloat16 on a CPU."""

    needs: ClassVar = (
        Requirement(
            "checkpoint_activations_on",
            lambda config: config.gradient_checkpointing,
            without("--gradient_checkpointing true"),
        ),
        Requirement(
            "torch_compile",
            lambda config: config.zero_stage < 3 and config.sequence_parallel == 1,
            "needs whole layers on every process: zero_stage 2 or lower, and no sequence_parallel",
        ),
        Requirement(
            "torch_compile",
            lambda config: config.checkpoint_activations_on == "device",
            "cannot follow tensors to the CPU: leave out checkpoint_activations_on=cpu",
        ),
        Requirement(
            "head_dtype",
            lambda config: config.loss_from == "linear" or config.head_dtype == "auto",
            "has no meaning with loss_from=logits: leave it out, or choose --loss_from linear",
        ),
    )


NO_TEMPLATE = "needs the chat template, which raw_prompt=true leaves out: drop one of them"


class RowsConfig(Options):
    """The rows, and how they become prompts."""

    dataset: str | list[str] | None = may_change(None)
    """A local file (.jsonl, .json, .csv, .tsv or .parquet, each also with .gz), a pattern such as data/*.jsonl, a
    folder of such files or from save_to_disk, or a name on the Hub; several of these are read one after the other."""
    dataset_config: str | None = None
    """Configuration of the Hub dataset, also of held-out rows from it; None takes the only one, or the one named
    default or main."""
    dataset_split: str = "train"
    """The Hub dataset's split to train on."""
    raw_prompt: bool = False
    """Give text prompts to the model unchanged, even if its tokenizer has a chat template."""
    system_prompt: str | None = None
    """System message before a text prompt; needs a chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further arguments of the chat template, as YAML or JSON: {enable_thinking: false}."""
    max_prompt_length: PositiveInt = 512
    """Longer prompts (in tokens) are dropped, counted and reported; sft and kto have max_length alone."""
    bad_rows: Unit = 0.01
    """Share of the rows that may be left out because they cannot be used; a file of the output lists them. More end the
    run before a model is loaded."""

    needs: ClassVar = (
        *(
            Requirement(option, lambda config: not config.raw_prompt, NO_TEMPLATE)
            for option in ("system_prompt", "chat_template_kwargs")
        ),
        splits("dataset_split", "dataset"),
    )


class PromptConfig(RowsConfig, LoadConfig):
    """What an encoder reads: rows, and the model whose tokens they become."""


class DataConfig(RowsConfig):
    """The rows that are held out."""

    eval_dataset: str | list[str] | None = may_change(None)
    """The held-out rows, named as in `dataset`; None holds out the last `eval_size` rows of `dataset`."""
    eval_split: str = may_change("test")
    """The split of `eval_dataset`, if that is a Hub name or a folder with splits."""
    eval_size: NonNegativeInt = may_change(64)
    """Number of held-out rows to evaluate on; 0 for no evaluation."""

    needs: ClassVar = (
        splits("eval_split", "eval_dataset"),
        Requirement(
            "eval_split",
            lambda config: config.eval_split == "test" or config.eval_dataset is not None,
            without("eval_dataset"),
        ),
    )


class OutputConfig(Options):
    """What a run writes, and whether it resumes."""

    output_dir: str = pydantic.Field(json_schema_extra=MAY_CHANGE)
    """Folder for metrics.jsonl, TensorBoard, curves.png, checkpoints/ and the trained model/."""
    save_every: NonNegativeInt = may_change(100)
    """Steps between checkpoints; 0 saves one only when the run is interrupted."""
    keep_checkpoints: PositiveInt = may_change(2)
    """Number of checkpoints to keep; older ones are deleted."""
    resume: bool = False
    """Continue from the latest checkpoint in `output_dir`; docs/training.md lists the options that may change."""
    resume_from: str | None = None
    """Continue from this checkpoint instead, such as step-4; later ones are moved to <output_dir>/earlier-1."""
    accept_changes: bool = False
    """With resume: continue although rows, models or the chat template have changed since."""
    overwrite: bool = False
    """Start again in an `output_dir` that is not empty: what is in it is moved to <output_dir>/earlier-1."""
    wandb_project: str | None = may_change(None)
    """Also log to this Weights & Biases project (needs `pip install wandb`)."""
    push_to_hub: bool = may_change(False)
    """Upload `model/` to the Hub when it is saved; the token is checked when the run begins."""
    hub_model_id: str | None = may_change(None)
    """Repository: owner/name, or a name in your own account; None is the name of `output_dir`."""
    hub_private_repo: bool = may_change(False)
    """Make that repository private; one that is already public is refused."""

    needs: ClassVar = (
        Requirement(
            "accept_changes",
            lambda config: config.resume or config.resume_from is not None,
            without("--resume"),
        ),
        *(
            Requirement(
                option,
                lambda config: config.push_to_hub,
                "says where to push the model; add --push_to_hub",
            )
            for option in ("hub_model_id", "hub_private_repo")
        ),
    )

    def check(self) -> None:
        super().check()
        # resume_from implies resume.
        if self.resume_from is not None:
            self.resume = True


class StepsConfig(Options):
    """The length of a run."""

    batch_option: ClassVar[str]
    """The option that says how many rows a step takes."""

    steps: PositiveInt | None = may_change(None)
    """Optimizer updates, in grpo and ppo rollouts; None is 100, or follows from num_train_epochs."""
    num_train_epochs: Positive | None = may_change(None)
    """Passes over the training rows, such as 1.5; replaces steps."""
    order: Literal["shuffled", "file"] = "shuffled"
    """Order of the rows: shuffled anew in each pass, or `file`, as they stand in the dataset."""

    @property
    def total_steps(self) -> int:
        """Return `steps`, which are known when the rows are read."""
        assert self.steps is not None
        return self.steps

    @property
    def rows_per_step(self) -> int:
        """Return the value of `batch_option`."""
        return getattr(self, self.batch_option)

    def in_run(self, per_step: int) -> int | str:
        """Return how many of something a run has if a step has `per_step`; in words before the rows are read."""
        return (
            "known when the rows are read (num_train_epochs)"
            if self.steps is None
            else self.steps * per_step
        )

    def check(self) -> None:
        # The passes become steps when the rows are read, so a check that comes before has none.
        if self.num_train_epochs is None:
            self.steps = self.steps or 100
        elif self.steps is not None:
            raise InputError(
                f"num_train_epochs={self.num_train_epochs} and steps={self.steps} are both given; give one of them "
                "(--steps null takes back what a file says)"
            )
        super().check()


# What --help lists of every trainer; --help all lists the rest.
MAIN = (
    "model",
    "dataset",
    "output_dir",
    "eval_dataset",
    "steps",
    "num_train_epochs",
    "lr",
    "micro_batch_size",
    "resume",
    "overwrite",
    "dry_run",
)


class RunConfig(StepsConfig, OutputConfig, TrainingConfig, DataConfig, PromptConfig, ModelConfig):
    """The options of every trainer."""

    seed: Seed = 1
    """Random seed of weights, data order and sampling; on a CPU the same seed gives the same run, bit for bit."""
    eval_every: NonNegativeInt = may_change(50)
    """Steps between evaluations; there is also one before and one after the training, and 0 leaves only these two."""
    on_step: str | None = may_change(None)
    """The user's function that is called after each step, as module:function (docs/hooks.md)."""
    dry_run: bool | Literal["all"] = False
    """Check options, rows, scorers and models as the run does, print what was resolved and one example, and stop. It
    prints the options that were given or follow from others; `--dry_run all` prints all of them."""
    processes: PositiveInt | None = None
    """Number of processes that a dry run plans the batch and the memory for; None means those that it runs on."""

    needs: ClassVar = (
        Requirement("processes", lambda config: config.dry_run, without("--dry_run")),
    )

    def check(self) -> None:
        super().check()
        engine.check_deepspeed_file(self)
        for option in ("head_dtype", "grad_accum_dtype"):
            if getattr(self, option) == "bfloat16" and engine.torch_dtype(self) == torch.float32:
                raise InputError(
                    f"{option}=bfloat16 is of bfloat16 weights, and those of dtype={self.dtype} are float32 here; "
                    "leave it out, or give --dtype bfloat16"
                )

    def for_held_out(self) -> Self:
        """Return the config by which held-out rows are read."""
        return self

    @property
    def may_divide_updates(self) -> bool:
        """Return True if an update may have any number of micro-batches."""
        return True

    @property
    def longest_sequence(self) -> int:
        """Return the most tokens of a sequence that the options allow."""
        raise NotImplementedError

    @property
    def sampled_tokens(self) -> int:
        """Return the most tokens that are sampled after a row and trained on; 0 where the row has all of them."""
        return 0

    def resolve(self) -> None:
        """Choose the micro-batch's size where none is given, when a run begins; on a GPU a run measures it later."""
        is_measured = torch.cuda.is_available() and self.may_divide_updates
        if self.micro_batch_size is None and (self.micro_batch_tokens or not is_measured):
            # On a CPU long micro-batches save nothing.
            self.micro_batch_size = DEFAULT_MICRO_BATCH


# What is done with a run, not what the run is.
ACTIONS = ("resume", "resume_from", "accept_changes", "overwrite", "dry_run", "processes")
# What a reader looks for first, in --help all and config.yaml.
FIRST = ("model", "dataset", "output_dir")


def to_yaml(config: Options, *, everything: bool = True) -> str:
    """Return the config as YAML that `--config` reads back.

    Options that have no meaning beside the others, such as those of a surrogate that is not chosen, are left out unless
    they were given. Without `everything` so are all that have their default value.
    """
    values = config.to_dict()
    if values.get("num_train_epochs") is not None:
        values["steps"] = None  # what they come to is not an option
    # Actions are left out: a run from this file starts anew.
    for action in ACTIONS:
        values.pop(action, None)
    first = {name: values.pop(name) for name in FIRST if name in values}
    rest = {
        name: value
        for name, value in values.items()
        if name in config.model_fields_set or (everything and config.has_meaning(name))
    }
    return yaml.safe_dump(first | rest, sort_keys=False, allow_unicode=True)
