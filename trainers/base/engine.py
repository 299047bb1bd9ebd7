"""DeepSpeed, used directly: one process or many, ZeRO 0 to 3.

A trainer calls `engine.backward(loss * processes())` once per micro-batch, then `engine.step()`. The loss is over a
count over all ranks and micro-batches, so how the batch was split changes nothing. Left out: tensor and pipeline
parallelism, DeepSpeed's own optimizers and schedulers, fp16.
"""

import atexit
import contextlib
import logging
import math
import os
import time
import warnings
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from . import optim, ranks
from .optim import OptimConfig
from .options import NonNegativeInt, Options, PositiveInt, Requirement, may_change
from .ranks import processes, rank
from .text import InputError, in_a_line

models_on_paper: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models of a dry run, which have no weights."""

TIMEOUT = timedelta(
    minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "30"))
)  # to start, and of a collective


class EngineConfig(Options):
    """Memory, precision and the division over processes."""

    micro_batch_size: PositiveInt | None = may_change(None)
    """Sequences per forward and backward pass; the result does not depend on it. None is 8 on a CPU, and on a GPU as
    many as fit into its memory, which is measured when the run begins."""
    micro_batch_tokens: PositiveInt | None = may_change(None)
    """Tokens per forward and backward pass, pads included, instead of micro_batch_size: sequences of similar length go
    together, and a longer one goes alone. None means micro_batch_size on a CPU, and on a GPU as many as fit into its
    memory, unless micro_batch_size is given. Beside it, micro_batch_size still says how many sequences `fused-rl
    reward` scores at a time without training on them: held-out pairs, and those of the normalization."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO: what is partitioned over the ranks (1 optimizer state, 2 gradients, 3 weights)."""
    sequence_parallel: PositiveInt = 1
    """Number of neighbouring processes that each hold a part of the same sequences, for long sequences (DeepSpeed
    Ulysses). It divides the activations, and must divide the number of attention heads."""
    offload: bool = False
    """Keep optimizer state (ZeRO 2, 3) and weights (ZeRO 3) in CPU memory."""
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    """ZeRO 3 leaves weights with fewer elements whole on every rank."""
    deepspeed: str | None = None
    """JSON file of DeepSpeed's own options of speed and memory, such as bucket sizes (docs/scaling.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations: auto is bfloat16 on a GPU and float32 on a CPU; bfloat16 keeps fp32 masters."""
    grad_accum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of bfloat16 weights are added up over micro-batches and processes. bfloat16 takes half
    the memory and communication, and then micro_batch_size changes the gradient by 0.3 to 0.8 %."""

    needs: ClassVar = (
        Requirement(
            "offload",
            lambda config: config.zero_stage >= 2,
            "needs zero_stage 2 or 3, which split what is offloaded",
        ),
        Requirement("deepspeed", lambda config: config.zero_stage > 0, "is of zero_stage 1 to 3"),
    )

    replaces: ClassVar = {"micro_batch_size": "micro_batch_tokens"}

    @property
    def sequences_at_once(self) -> int:
        """Return `micro_batch_size`, which is chosen when the run begins."""
        assert self.micro_batch_size is not None
        return self.micro_batch_size

    def micro_batches_of(self, sequences: int) -> str:
        """Return in words how so many sequences of a process are divided."""
        if self.micro_batch_tokens is not None:
            return f"as many as hold at most {self.micro_batch_tokens} tokens"
        size = self.micro_batch_size
        if size is None:
            return "as many as fit, which is measured when the model is loaded"
        return f"{math.ceil(sequences / size)} of at most {size}"


class TrainingConfig(EngineConfig, OptimConfig):
    """What an engine that trains reads."""


def silence_libraries() -> None:
    """Switch off other libraries' progress bars and notices."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
    import transformers  # imports deepspeed

    warnings.filterwarnings(
        "ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning
    )
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it warns of is refused here, or meant
    logging.getLogger("huggingface_hub").setLevel(
        logging.ERROR
    )  # it logs every retry; the error comes anyway


def setup(seed: int, *, trains: bool = True, sequence_parallel: int = 1) -> torch.device:
    """Join the process group, seed this rank, and return its device; without training DeepSpeed is not needed."""
    silence_libraries()
    device = torch.device("cpu")
    if torch.cuda.is_available():  # chosen first: NCCL communicates on the current device
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if trains:
        os.environ.setdefault("LOCAL_RANK", "0")
        import deepspeed
        import deepspeed.ops

        deepspeed.utils.logger.setLevel("WARNING")
        # Else init_distributed compiles deepspeed_shm_comm, which is unused.
        cast(Any, deepspeed.ops).__compatible_ops__ = {}
    if not dist.is_initialized() and (trains or "RANK" in os.environ):
        # Objects and tensors of the CPU go over gloo, so only tensors of this rank's GPU go over NCCL.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if "RANK" not in os.environ:  # no launcher: a group of one, without an open port
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, "lo")
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (torch documents it)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
        elif trains:
            import deepspeed

            deepspeed.init_distributed(backend, timeout=TIMEOUT, verbose=False)
        else:
            dist.init_process_group(backend, timeout=TIMEOUT)
        atexit.register(_leave)
    ranks.set_sequence_parallel(sequence_parallel)
    import transformers

    transformers.set_seed(seed + rank() * 100_003)
    return device


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.2)  # gloo's threads must drop their last work before the interpreter goes


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of weights and activations that `config.dtype` stands for on this machine."""
    if config.dtype == "auto":
        # bf16 on a GPU that computes in it (from sm_80 on): an older one would emulate it.
        computes = torch.cuda.is_available() and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return torch.bfloat16 if computes and config.zero_stage else torch.float32
    if config.dtype == "bfloat16" and config.zero_stage == 0:
        raise InputError(
            "dtype=bfloat16 needs fp32 master weights, which zero_stage=0 does not keep; use zero_stage 1"
        )
    return getattr(torch, config.dtype)


def widens_sums(config: EngineConfig) -> bool:
    """Return True if gradients are of 16 bits and are added up in 32."""
    return torch_dtype(config) == torch.bfloat16 and config.grad_accum_dtype == "float32"


def effective_zero_stage(config: EngineConfig) -> int:
    """Return the stage of ZeRO that DeepSpeed gets: 0 for one fp32 process, which has nothing to divide or to widen."""
    is_alone = processes() == 1 and torch_dtype(config) == torch.float32
    keeps_all = not config.offload and not deepspeed_options(config.deepspeed)
    return 0 if is_alone and keeps_all and config.zero_stage < 3 else config.zero_stage


def deepspeed_options(path: str | None) -> dict:
    """Return what a file of DeepSpeed's options holds; nothing without a file."""
    if path is None:
        return {}
    from . import deepspeed_file

    return deepspeed_file.read(path)


def check_deepspeed_file(config: TrainingConfig) -> None:
    """Refuse a file of DeepSpeed's options that has other values than the run, or that DeepSpeed refuses."""
    if config.deepspeed is None:
        return
    silence_libraries()
    from deepspeed.runtime.config import DeepSpeedConfig

    from . import deepspeed_file

    theirs = deepspeed_file.read(config.deepspeed)
    ours = _our_deepspeed_config(config, config.max_grad_norm)
    deepspeed_file.check(config.deepspeed, theirs, ours | {"optimizer": {"type": "AdamW"}})
    try:
        DeepSpeedConfig(deepspeed_file.merged(theirs, ours))
    except Exception as error:  # of many kinds, as many as its sections
        raise InputError(f"deepspeed={config.deepspeed}: {in_a_line(error)}") from error


def _our_deepspeed_config(config: EngineConfig, max_grad_norm: float) -> dict:
    sums = {}
    if widens_sums(config):
        # Over micro-batches, and over processes.
        sums = {
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    partition: dict[str, object] = {
        "stage": config.zero_stage,
        "stage3_param_persistence_threshold": config.stage3_param_persistence_threshold,
    }
    if config.offload:
        partition["offload_optimizer"] = {"device": "cpu"}
        if config.zero_stage == 3:
            partition["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # for a data loader, which we do not use
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # any number of backwards, then one step
        "gradient_clipping": max_grad_norm,  # its default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": torch_dtype(config) == torch.bfloat16},
        "zero_optimization": partition,
        **sums,
    }


def _deepspeed_config(config: EngineConfig, max_grad_norm: float = 0.0) -> dict:
    ours = _our_deepspeed_config(config, max_grad_norm)
    stage = effective_zero_stage(config)
    if widens_sums(config) and stage == 1:
        stage = 2  # DeepSpeed has another optimizer for it, with other checkpoints
    ours["zero_optimization"]["stage"] = stage
    # One rank has nothing to average, and would pass over its gradients again. A user's file may say otherwise: the
    # bits are the same.
    if processes() == 1 and stage < 3:
        ours["zero_optimization"]["reduce_scatter"] = False
    if config.deepspeed is None:
        return ours
    from . import deepspeed_file

    return deepspeed_file.merged(deepspeed_file.read(config.deepspeed), ours)


def initialize(model: nn.Module, config: TrainingConfig, updates: int):
    """Return a DeepSpeed engine that trains `model` with AdamW for `updates` optimizer steps.

    Of a model without weights, as a dry run has it, it is the shell of an engine.
    """
    if is_without_weights(model):
        optim.users_factors(config.lr_schedule, updates)
        return SimpleNamespace(module=model, zero_optimization_stage=lambda: config.zero_stage)
    import deepspeed

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.adamw(parameters, config)
    clipping = None
    has_zero = effective_zero_stage(config) > 0
    if not has_zero:  # DeepSpeed neither clips nor measures the norm there
        clipping = optim.Clipping(optimizer, parameters, config.max_grad_norm)
    # Its annotations refuse torch's schedules, and know no attribute of ours.
    engine = cast(Any, deepspeed).initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=optim.schedule(optimizer, config, updates),
        config=_deepspeed_config(config, config.max_grad_norm if has_zero else 0.0),
    )[0]
    # DeepSpeed's own groups ignore the timeout of init_distributed. torch 2.13 and older have a private name for it.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in {engine.data_parallel_group, engine.seq_data_parallel_group}:
        set_timeout(TIMEOUT, group)
    if processes() == 1 and not has_zero:
        engine.enable_backward_allreduce = (
            False  # which copies every gradient twice, to average one of them
        )
    engine.clipping = clipping
    return engine


def is_without_weights(model: nn.Module) -> bool:
    """Return True for the model of a dry run, whose weights have shapes and no numbers."""
    return next(model.parameters()).is_meta


def load_engine(engine, folder: Path, name: str) -> None:
    """Restore weights, optimizer state and the schedule's position; the optimizer's options stay as they are here."""
    optimizer = engine.optimizer
    if optimizer is None:  # weights alone
        engine.load_checkpoint(str(folder), tag=name)
        return
    schedule = engine.lr_scheduler
    peaks = schedule.base_lrs
    options = [
        {name: group[name] for name in group if name != "params"}
        for group in optimizer.param_groups
    ]
    engine.load_checkpoint(str(folder), tag=name)
    schedule.base_lrs = peaks
    factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    for group, options_here, peak, factor in zip(
        optimizer.param_groups, options, peaks, factors, strict=True
    ):
        group.update(options_here, lr=peak * factor)


def optimizer_step(engine, step: int) -> dict[str, float]:
    """Do one optimizer step; return its learning rate and gradient norm. One that is not finite changes no weight."""
    lr = engine.optimizer.param_groups[0]["lr"]  # before the schedule moves on
    engine.step()
    norm = float(engine.get_global_grad_norm() if engine.clipping is None else engine.clipping.norm)
    if not math.isfinite(norm):
        problem = f"step {step}: the norm of the gradient is {norm}, and no weight was changed"
        raise InputError(f"{problem}; lower the learning rate, or look for extreme rewards or rows")
    return {"lr": lr, "optim/grad_norm": norm}


def initialize_frozen(model: nn.Module, config: EngineConfig):
    """Return `model` for forward passes alone; ZeRO 3 partitions its weights too."""
    if config.zero_stage < 3 or is_without_weights(model):
        return model
    import deepspeed

    return deepspeed.initialize(model=model, config=_deepspeed_config(config))[0]


def partitioning(config: EngineConfig) -> object:
    """Return what has transformers read models part by part while it is kept, so that no rank ever holds a whole one.

    It is for ZeRO 3: the first rank reads the files, and each rank keeps its part of every weight.
    """
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    options = _deepspeed_config(config)
    # DeepSpeed makes these groups once, so of several models the first has a copy in each machine.
    if groups._get_zero_param_intra_parallel_group() is not None:
        options["zero_optimization"].pop("zero_hpz_partition_size", None)
    return HfDeepSpeedConfig(options)


@contextlib.contextmanager
def gathered_in_turn(model: nn.Module, *, backward: bool = False):
    """Have a model in eval mode, in which a partitioned one may run without an engine: modules that run are whole.

    Call on all ranks. With `backward` it may run backward too.
    """
    own: dict[nn.Module, list[Any]] = {}
    for module in model.modules():
        # An adapter of peft reads the weights of the layer under it.
        weights = module.parameters(recurse=hasattr(module, "base_layer"))
        partitioned = [weight for weight in weights if hasattr(weight, "ds_id")]
        if partitioned:
            own[module] = partitioned

    def gather(module, *_) -> None:
        own[module][0].all_gather(own[module])

    def release(module, *_) -> None:
        own[module][0].partition(own[module])

    hooks = []
    for module in own:
        hooks += [module.register_forward_pre_hook(gather), module.register_forward_hook(release)]
        if backward:
            hooks += [module.register_full_backward_pre_hook(gather)]
            hooks += [module.register_full_backward_hook(release)]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
        # What an error has left whole.
        for module in own:
            release(module)


@torch.no_grad()
def collected_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's weights and saved buffers, whole on the first rank's CPU. Call on all ranks."""
    weights: dict[torch.Tensor, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for tensor in state.values():
        # Every rank takes part in gathering, one weight at a time; a weight of two names stays one.
        if isinstance(tensor, nn.Parameter) and tensor not in weights:
            with gathered(tensor):
                weights[tensor] = tensor.detach()
                if ranks.process_index() == 0:
                    weights[tensor] = tensor.detach().cpu().clone()
    return {name: weights.get(tensor, tensor) for name, tensor in state.items()}


@contextlib.contextmanager
def gathered(*parameters: nn.Parameter, written: bool = False):
    """Make parameters whole on every rank inside the block, to change them there if `written`. Call on all ranks."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if written else None):
        yield
