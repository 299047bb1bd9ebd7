"""DeepSpeed, used directly: one process or many, ZeRO 0 to 3.

A trainer calls `engine.backward(loss * world_size())` once per micro-batch, where `loss` is a sum over the rank's
micro-batch divided by a count over the whole optimizer step and all ranks, and then `engine.step()` once. The result
does not depend on how the batch was split over ranks and micro-batches.

Left out: tensor and pipeline parallelism, DeepSpeed's own optimizers and schedulers, fp16.
"""

import concurrent.futures
import contextlib
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn

from fused_rl.trainers.base import launch, optim
from fused_rl.trainers.base.launch import JOINING, TIMEOUT
from fused_rl.trainers.base.screen import silent
from fused_rl.trainers.options.config import EngineConfig, InputError, OptimConfig, RunConfig

PATIENCE = timedelta(seconds=60)  # of a rank that has failed, for the others to hear of it
HEARING = 5.0  # seconds, of a rank that has left the group
LAST_WORDS, HEARD = "fused_rl/last words", "fused_rl/heard"  # keys in the store
# What Gloo, NCCL and the store say where another process is gone, whichever operation hears of it.
GONE = ("gloo/", "NCCL", "TCPStore", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
IN_TOUCH = 10.0  # seconds
_agreements = itertools.count()
Part = TypeVar("Part")


def quiet() -> None:
    """Keep other libraries' progress bars and notices off the screen: a run shows its own."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
    import transformers  # imports deepspeed

    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it warns of is refused here, or meant
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every retry; the error comes anyway
    import datasets

    datasets.disable_progress_bars()


def setup(seed: int) -> torch.device:
    """Join the process group (of one process, without a launcher), seed this rank, and return its device."""
    quiet()
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    launch.processes()  # refuses what a launcher should not say
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    import deepspeed.ops

    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.ops.__compatible_ops__ = {}  # else init_distributed compiles deepspeed_shm_comm, which nothing here uses
    _meet(lambda: deepspeed.init_distributed(backend, timeout=JOINING, verbose=False), lambda: _join_alone(backend))
    return _seeded(seed)


def join(seed: int) -> torch.device:
    """As `setup`, for a command that trains nothing: without DeepSpeed, alone without a process group."""
    quiet()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    _meet(lambda: dist.init_process_group(backend, timeout=JOINING), lambda: None)
    return _seeded(seed)


def _meet(launched: Callable[[], None], alone: Callable[[], None]) -> None:
    """Join the process group; raises what another rank was refused before it came."""
    if not dist.is_initialized():
        launch.meet(launched, alone)
        agree(None)


def refused(error: Exception) -> None:
    """Have the other processes of a launched run hear why this one never joins them; alone it does nothing."""
    try:
        if launch.processes() == 1 or dist.is_initialized():
            return
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
        with contextlib.suppress(type(error)):
            agree(error)
    except (RuntimeError, InputError):  # nobody came, or the launcher tells nonsense: this process says so itself
        pass
    launch.leave()


def _seeded(seed: int) -> torch.device:
    """Seed this rank, and take its device."""
    import transformers

    transformers.set_seed(seed + rank() * 100_003)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join_alone(backend: str) -> None:
    """A process group of this process, without a port that others could reach.

    The store that DeepSpeed would open listens on all interfaces and asks nobody who they are; gloo and NCCL listen
    where they are told to.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


def teardown(orderly: bool = True) -> None:
    """End a command: wait for the others where all ranks came to their end, else two processes can abort at exit.

    The process group stays for the next run in this process: DeepSpeed keeps groups of it and never makes them again.
    """
    if orderly:
        barrier()


def rank() -> int:
    """This process's rank; 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_ranks():
    """The process group of all ranks; None where there is but one."""
    return dist.group.WORLD if world_size() > 1 else None


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def gather(part: Part) -> list[Part]:
    """Every rank's `part`, by rank, on every rank."""
    parts = [part] * world_size()
    if world_size() > 1:
        dist.all_gather_object(parts, part)
    return parts


def on_first_rank(work: Callable[[], None]) -> None:
    """Have rank 0 do something while the others wait; an InputError that it raises is raised on every rank."""
    refusal = None
    if rank() == 0:
        try:
            work()
        except InputError as error:
            refusal = error
    refusal = gather(refusal)[0]
    if refusal is not None:
        raise _known(refusal)


def on_first_rank_at_length(work: Callable[[], None]) -> None:
    """`on_first_rank` for work that may take longer than ranks wait for each other: they keep in touch meanwhile."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work if rank() == 0 else lambda: None)
        ended = False
        while not ended:
            concurrent.futures.wait([future], timeout=IN_TOUCH)
            ended = gather(future.done())[0]
    on_first_rank(future.result)


def global_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of a tensor of any shape, in fp64 on the CPU."""
    values = values.detach().double().clone()
    if world_size() > 1:
        values = values.cuda() if dist.get_backend() == "nccl" else values
        dist.all_reduce(values)
    return values.cpu()


def global_sums(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """The sums over ranks of scalars by name, which every rank names alike."""
    totals = global_sum(torch.stack([value.double().cpu() for value in values.values()]))
    return dict(zip(values, totals.tolist(), strict=True))


def global_max(value: torch.Tensor) -> float:
    """The largest of a scalar over ranks."""
    value = value.detach().double().clone()
    if world_size() > 1:
        value = value.cuda() if dist.get_backend() == "nccl" else value
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


@contextlib.contextmanager
def together():
    """All ranks leave the block, or none: an error on one of them is an error on all, in bounded time.

    The rank that failed raises its own error, the others an InputError that begins with `rank 1: `; a rank that died is
    one too. For what one rank alone may stumble over, such as its rows or its verifier. Every rank must enter.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if error is not None and _all_know(error):
        raise error
    agree(error)


@contextlib.contextmanager
def shared_fate():
    """Around a whole run: what ends one rank, outside of `together` too, ends the others with a line, in seconds.

    The rank that fails leaves its error in the store and then the process group, so that no collective waits for it; of
    one that was killed the others hear by its closed connections.
    """
    try:
        yield
    except Exception as error:
        if world_size() == 1 or _all_know(error):
            raise
        store, world = c10d._get_default_store(), world_size()
        if isinstance(error, RuntimeError) and any(words in str(error) for words in GONE):
            with silent():
                told = InputError(_told(store, LAST_WORDS))
            _wait_until_heard(store, 0)
            raise told from error
        _tell(store, LAST_WORDS, error)
        dist.destroy_process_group()
        _wait_until_heard(store, world)
        raise


def _wait_until_heard(store, ranks: int) -> None:
    """Count this rank, and wait for so many: the store may be this process's, and others may still read in it."""
    until = time.monotonic() + HEARING
    with contextlib.suppress(RuntimeError), silent():  # it may go with its rank, and warns of that in 30 lines
        heard = store.add(HEARD, 1)
        while heard < ranks and time.monotonic() < until:
            time.sleep(0.05)
            heard = store.add(HEARD, 0)


def _all_know(error: Exception) -> bool:
    """Whether all ranks have raised for this error already, each its own."""
    return getattr(error, "all_ranks_know", False)


def _known(error: Exception) -> Exception:
    error.all_ranks_know = True
    return error


def agree(error: Exception | None) -> None:
    """Raise on every rank if one of them has an error; `together` without the block."""
    if world_size() == 1:
        if error is not None:
            raise error
        return
    # The store is beside the ranks' connections: what went wrong is known even where a collective never ends.
    store, key = c10d._get_default_store(), f"fused_rl/error/{next(_agreements)}"
    first = error is None or _tell(store, key, error)

    # A rank that failed in the middle of a collective must not wait for others that wait for it.
    flag = torch.tensor([float(error is not None)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    try:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True).wait(TIMEOUT if error is None else PATIENCE)
    except RuntimeError as lost:
        if error is None:
            raise InputError(_told(store, key, LAST_WORDS)) from lost
    if error is not None and (first or isinstance(error, InputError)):
        raise _known(error)
    if flag.item():  # of another rank; an error of ours that came later may be no more than a lost connection
        raise _known(InputError(_told(store, key))) from error


def _tell(store, key: str, error: Exception) -> bool:
    """Leave the error in the store for the other ranks; whether it is the first there."""
    said = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    line = f"rank {rank()}: {' '.join(said.split())}"
    try:
        return store.compare_set(key, "", line).decode() == line
    except RuntimeError:  # the store has gone with its rank
        return True


def _told(store, *keys: str) -> str:
    """The first error that a rank left in the store; else all that can be said."""
    with contextlib.suppress(RuntimeError):  # the store may have gone with its rank
        for key in keys:
            if store.check([key]):
                return store.get(key).decode()
    return "another process of the run ended or does not answer; its own output says why"


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype of weights and activations that `config.dtype` stands for on this machine."""
    if config.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() and config.zero_stage else torch.float32
    if config.dtype == "bfloat16" and config.zero_stage == 0:
        raise InputError("dtype=bfloat16 needs fp32 master weights, which zero_stage=0 does not keep; use zero_stage 1")
    return getattr(torch, config.dtype)


def head_dtype(config: RunConfig) -> torch.dtype | None:
    """The dtype of logits that `config.head_dtype` stands for; None is what the weights and the device make best."""
    if config.head_dtype == "bfloat16" and torch_dtype(config) == torch.float32:
        raise InputError(
            f"head_dtype=bfloat16 would round the logits of float32 weights (dtype={config.dtype}); leave it out, or "
            "give --dtype bfloat16 as well"
        )
    return None if config.head_dtype == "auto" else getattr(torch, config.head_dtype)


def _deepspeed_config(config: EngineConfig, *, max_grad_norm: float) -> dict:
    zero = {
        "stage": config.zero_stage,
        "stage3_param_persistence_threshold": config.stage3_param_persistence_threshold,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if config.offload:
        if config.zero_stage < 2:
            raise InputError(f"offload needs zero_stage 2 or 3, got zero_stage={config.zero_stage}")
        zero["offload_optimizer"] = {"device": "cpu"}
        if config.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # any number of backwards, then one step
        "gradient_clipping": max_grad_norm,  # its default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": torch_dtype(config) == torch.bfloat16},
        "zero_optimization": zero,
    }


def initialize(model: nn.Module, optim_config: OptimConfig, config: EngineConfig, updates: int):
    """A DeepSpeed engine that trains `model` with AdamW for `updates` optimizer steps."""
    import deepspeed

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.adamw(parameters, optim_config)
    last_step = optim.LastStep(optimizer)
    if not config.zero_stage:  # DeepSpeed neither clips nor tells the norm there
        last_step.clip(parameters, optim_config.max_grad_norm)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=optim.schedule(optimizer, optim_config, updates),
        config=_deepspeed_config(config, max_grad_norm=optim_config.max_grad_norm if config.zero_stage else 0.0),
    )
    for group in list(c10d._world.pg_map):  # DeepSpeed's own groups ignore the timeout of init_distributed
        c10d._set_pg_timeout(TIMEOUT, group)
    if world_size() == 1 and not config.zero_stage:
        engine.enable_backward_allreduce = False  # which copies every gradient twice, to average one of them
    engine.last_step = last_step
    return engine


def load_engine(engine, folder: Path, name: str) -> None:
    """Restore weights, optimizer state and the schedule's position, saved as `folder / name`.

    DeepSpeed would also put the saved learning rate, betas and weight decay back: those stay as they are here.
    """
    if engine.last_step is None:  # weights alone
        engine.load_checkpoint(str(folder), tag=name)
        return
    with optim.options_stay(engine.last_step.optimizer, engine.lr_scheduler):
        engine.load_checkpoint(str(folder), tag=name)


def optimizer_step(engine, step: int) -> dict[str, float]:
    """One optimizer step of an engine; returns its learning rate and the norm of its gradient before clipping.

    A gradient that is not finite is an error in which no weight has changed: without ZeRO the step raises before it
    begins, and ZeRO leaves it out.
    """
    engine.step()
    last = engine.last_step
    norm = float(engine.get_global_grad_norm() if last.grad_norm is None else last.grad_norm)
    if not math.isfinite(norm):
        raise InputError(
            f"step {step}: the norm of the gradient is {norm}, and no weight was changed; lower the learning rate, or "
            "look for extreme rewards or rows; the last checkpoint is good"
        )
    return {"lr": last.lr, "optim/grad_norm": norm}


def initialize_frozen(model: nn.Module, config: EngineConfig):
    """`model` ready for forward passes alone; under ZeRO 3 its weights are partitioned too."""
    if config.zero_stage < 3:
        return model
    import deepspeed

    return deepspeed.initialize(model=model, config=_deepspeed_config(config, max_grad_norm=0.0))[0]


@contextlib.contextmanager
def whole(parameter: nn.Parameter, *, written: bool = False):
    """Inside, a parameter is whole on every rank, also under ZeRO 3; for all ranks at once.

    Args:
        parameter: of a model that is trained or frozen.
        written: it is changed inside, by every rank alike.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if written else None):
        yield
