"""transformers: the loss of causal language models, in its `Trainer` or in any loop that reads `model(...).loss`.

    Trainer(model, args, compute_loss_func=causal_lm_loss)  # from the logits, without an fp32 copy or softmax of them
    patch(model)  # from hidden states and LM head: the logits never exist

`patch` lets the model's own forward run. Only two things in it are replaced while it runs with labels: the LM head
returns `UnformedLogits` where gradients are recorded, which know what the forward then does to logits (a soft cap, a
scale, a cast), and the model's `loss_function` makes the loss of them. What the backbone does, how an auxiliary loss is
added, what is returned: all that stays the model's. A forward that does anything else to its logits is refused by the
operation's name, so there is no list of known architectures to fall behind, and no model whose loss is silently
another one.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fused_rl.base.checks import check_range
from fused_rl.integrations.patching import Patch
from fused_rl.integrations.primitives import IGNORED
from fused_rl.integrations.self_test import normal, self_test
from fused_rl.integrations.unformed import INSTEAD, UnformedLogits
from fused_rl.ops.logprobs import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["causal_lm_loss", "patch", "unpatch"]

# Nothing of the package is replaced: the patch is here for what it knows of versions.
_HOST = Patch("transformers", ">=5.12,<5.25", ())


def causal_lm_loss(
    outputs: Any,
    labels: Tensor | None,
    num_items_in_batch: Tensor | int | None = None,
    *,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The mean negative log-likelihood in nats of the labels, from logits: `Trainer(compute_loss_func=causal_lm_loss)`.

    Args:
        outputs: what the model returned; its `logits` (B, T, V) at t score the label at t + 1.
        labels: (B, T) int64, the input ids, `ignore_index` where a token does not count.
        num_items_in_batch: number of labels that count in the whole batch, over micro-batches and processes, as
            `Trainer` passes it; None means those of this call.
        ignore_index: the label of a token that does not count.
        shift_labels: (B, T) int64, labels that are already shifted, in place of `labels`: the logits at t score the
            label at t. accelerate's context parallelism and DeepSpeed's sequence parallelism pass them for the shards
            of a sequence, because the label of a shard's last token is in the next shard.
        label_smoothing, z_loss: as in `fused_rl.linear_cross_entropy`; the first reads the logits once more, and needs
            memory for another gradient of them.

    Returns:
        A scalar fp32 (fp64 for fp64 logits), differentiable once with respect to the logits. Where no label counts and
        the count is 0, it is NaN, as transformers' loss is, and the gradients are 0.

    Raises:
        ValueError: no labels; an auxiliary loss beside the logits, whose coefficient only the model knows; shapes that
            do not fit; a label_smoothing or z_loss out of range.
    """
    check_range("label_smoothing", label_smoothing, "a number from 0 to 1")
    check_range("z_loss", z_loss, "a finite number, 0 or more")
    shift = shift_labels is None
    targets = labels if shift_labels is None else shift_labels
    if targets is None:
        raise ValueError(
            "causal_lm_loss got labels=None: the batches have no `labels`; a collator must add them"
        )
    # A model returns a ModelOutput, which is a dictionary, or with return_dict=False a tuple.
    by_name = isinstance(outputs, dict)
    if by_name and outputs.get("aux_loss") is not None:
        raise ValueError(
            "the model returned an aux_loss, which it weighs itself where it gets the labels, and compute_loss_func "
            "takes them away: use patch(model) instead of compute_loss_func, or output_router_logits=False"
        )
    logits = outputs["logits"] if by_name else outputs[0]
    targets = targets.to(logits.device)
    mask = (targets[:, 1:] if shift else targets) != ignore_index
    logprobs, _, lse = token_logprobs(logits, targets, mask=mask, shift=shift)
    losses = -(1 - label_smoothing) * logprobs
    if label_smoothing:
        mean = logits.mean(-1, dtype=logprobs.dtype)
        rest = lse - (mean[:, :-1] if shift else mean)
        losses = losses + label_smoothing * torch.where(mask, rest, 0)
    if z_loss:
        losses = losses + z_loss * lse.square()
    count = (
        mask.sum()
        if num_items_in_batch is None
        else torch.as_tensor(num_items_in_batch, device=mask.device)
    )
    return losses.sum() / count


def patch(
    model: nn.Module,
    *,
    workspace_mb: float | None = None,
    logits_dtype: torch.dtype | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    strict: bool = False,
) -> contextlib.ExitStack:
    """Let `model(input_ids, labels=...)` make its loss from hidden states and LM head; the logits never exist.

    Evaluation, gradient checkpointing, autocast, LoRA, gradient accumulation, several threads and processes work as
    before, and checkpoints are the same. Calls without labels (generation, and losses that take the labels away: label
    smoothing, `compute_loss_func`) and calls under `torch.no_grad()` form logits as before, so that `compute_metrics`
    gets them. A training step with labels has none: using its `outputs.logits` is an error, and `nn.DataParallel`
    returns none.

    The loss is that of transformers also if no label counts: 0, or NaN if `num_items_in_batch` is None or 0. The
        gradients are then 0, so that such a batch or shard adds nothing to those of others.

    Args:
        model: a causal LM of transformers, or a peft model around one; before Trainer or accelerate wrap it, before or
            after peft does. Its class, config and weights stay as they are. A model patched twice is patched once.
        workspace_mb: MiB for tiles of logits; None as in `fused_rl.linear_token_loss`.
        logits_dtype: of the logits that the loss of a training step is made of, as there.
        label_smoothing: as in `fused_rl.linear_cross_entropy`, in place of `TrainingArguments(label_smoothing_factor)`,
            with which Trainer computes a loss of its own from logits.
        z_loss: coefficient of the squared log-sum-exp of the logits that is added to each token's loss, as there.
        strict: raise for a release of transformers that this integration does not know. Otherwise a model of a few
            hundred weights is tried first, patched and not.

    Returns:
        A context manager: at the end of its `with`, the model is as before.

    Raises:
        ImportError: a release of transformers in which that model's loss or gradients differ, or any unknown one with
            `strict`.
        TypeError: not a causal LM of transformers.
        ValueError: a model that is patched with other options; a loss that is not `ForCausalLMLoss`, tensor
            parallelism, an LM head that is not a plain `nn.Linear` (LoRA on it, quantization), a forward that was
            replaced.
        RuntimeError: later, in a forward that does something else to its logits than scale, cap or cast them.
    """
    check_range("label_smoothing", label_smoothing, "a number from 0 to 1")
    check_range("z_loss", z_loss, "a finite number, 0 or more")
    options = {"logits_dtype": logits_dtype, "label_smoothing": label_smoothing, "z_loss": z_loss}
    release = _HOST.release()
    if strict:
        _HOST.check_version()
    elif not _HOST.knows(release):
        _try_release(release)
    model = _base(model)
    # A model is patched once, and only over its own forward.
    forward = vars(model).get(_ATTRIBUTE)
    if forward is not None:
        for name, value in options.items():
            if forward.options[name] != value:
                raise ValueError(
                    f"this model is patched with {name}={forward.options[name]}, and now with {value}; unpatch it first"
                )
        return contextlib.ExitStack()
    if "forward" in vars(model):
        raise ValueError(
            f"the forward of this {type(model).__name__} was replaced already, by accelerate's mixed precision or by "
            "another patch; call patch(model) before Trainer or accelerate get the model"
        )
    # Everything is checked before anything is replaced.
    forward = _FusedForward(model, options | {"workspace_mb": workspace_mb})
    _linears(model)
    forward.install()
    patched = contextlib.ExitStack()
    patched.callback(forward.remove)
    return patched


def unpatch(model: nn.Module) -> None:
    """Give a model its own forward back; nothing if it is not patched."""
    forward = vars(_base(model)).get(_ATTRIBUTE)
    if forward is not None:
        forward.remove()


# A patched model is known by this attribute, also when accelerate has wrapped its forward.
_ATTRIBUTE = "fused_rl_forward"


class _Lock:
    """A lock that several calls of one thread may hold; a copy of it is another lock."""

    def __init__(self):
        self.lock = threading.RLock()

    def __reduce__(self):
        return _Lock, ()


class _FusedForward:
    """A model's forward with the LM head and the loss function replaced while it runs; pickles with the model."""

    def __init__(self, model: "PreTrainedModel", options: dict[str, Any]):
        self.model = model
        # Of `linear_cross_entropy`.
        self.options = options
        self.active = True
        self.calls = _Lock()
        if "labels" not in self.__signature__.parameters:
            raise TypeError(
                f"{type(model).__name__}.forward takes no labels; patch takes a causal language model"
            )
        _check_loss_function(model)

    @property
    def __signature__(self) -> inspect.Signature:
        # `Trainer` reads from it which columns the model takes.
        return inspect.signature(functools.partial(type(self.model).forward, self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # accelerate's unwrap_model may have made a method of the model of this.
        if args and args[0] is self.model:
            args = args[1:]
        labels = self.__signature__.bind(*args, **kwargs).arguments.get("labels")
        # Without labels there is no loss, and generation needs the logits.
        if labels is None or not self.active:
            return type(self.model).forward(self.model, *args, **kwargs)
        # The loss function leaves its results here.
        losses: list[Tensor] = []
        # The modules are not another call's while it runs.
        with self.calls.lock:
            outputs = self._forward(losses, *args, **kwargs)
        if not losses:
            raise RuntimeError(
                f"{type(self.model).__name__}.forward did not give the logits of its LM head to its loss_function: "
                f"there is nothing to fuse; {INSTEAD}"
            )
        # nn.DataParallel gathers what its replicas return.
        is_replica = getattr(self.model, "_is_replica", False)
        return _without_logits(outputs) if is_replica else outputs

    def _forward(self, losses: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        _check_loss_function(self.model)
        # Attributes of the instances hide the originals while the forward runs, so classes,
        # checkpoints and other models stay what they are.
        with contextlib.ExitStack() as stack:
            for linear in _linears(self.model):
                forward = functools.partial(_head_forward, threading.get_ident(), linear)
                stack.enter_context(_attribute(linear, "forward", forward))
            loss_function = functools.partial(_loss_function, losses, self.options)
            stack.enter_context(_attribute(self.model, "_loss_function", loss_function))
            return type(self.model).forward(self.model, *args, **kwargs)

    def install(self) -> None:
        """Put it before the model's own forward."""
        setattr(self.model, _ATTRIBUTE, self)
        self.model.forward = self
        self.model._replicate_for_data_parallel = self.replicate

    def remove(self) -> None:
        """Take it off the model; where accelerate has wrapped it, it stays inside and does nothing."""
        self.active = False
        vars(self.model).pop(_ATTRIBUTE, None)
        vars(self.model).pop("_replicate_for_data_parallel", None)
        if vars(self.model).get("forward") is self:
            del self.model.forward

    def replicate(self) -> "PreTrainedModel":
        """The model's replica in `nn.DataParallel`, patched: this forward would run the model that was copied."""
        replica = type(self.model)._replicate_for_data_parallel(self.model)
        if vars(replica)["forward"] is not self:
            raise RuntimeError(
                "nn.DataParallel cannot copy a patched model whose forward accelerate has wrapped; start one process "
                "per GPU with torchrun or accelerate launch, or leave one GPU visible (CUDA_VISIBLE_DEVICES)"
            )
        _FusedForward(replica, self.options).install()
        return replica


@contextlib.contextmanager
def _attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute of the instance, for a while."""
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


def _without_logits(outputs: Any) -> Any:
    """What a model returned in a training step, less its logits."""
    if isinstance(outputs, tuple):
        return tuple(value for value in outputs if not isinstance(value, UnformedLogits))
    names = [name for name, value in outputs.items() if not isinstance(value, UnformedLogits)]
    return type(outputs)(**{name: outputs[name] for name in names})


@torch.compiler.disable
def _head_forward(thread: int, linear: nn.Linear, hidden: Tensor) -> Tensor | UnformedLogits:
    # A call without labels may run in another thread.
    if threading.get_ident() != thread or not torch.is_grad_enabled():
        return nn.Linear.forward(linear, hidden)
    return UnformedLogits(linear, hidden)


# torch.compile would break its graph at every one of our operators.
@torch.compiler.disable
def _loss_function(
    losses,
    options,
    logits,
    labels,
    vocab_size,
    num_items_in_batch=None,
    ignore_index=IGNORED,
    shift_labels=None,
    **_,
):
    """`ForCausalLMLoss` of logits that were not formed, or without gradients of those that were; leaves a trace in
    `losses`.
    """
    if not (isinstance(logits, UnformedLogits) or torch.is_grad_enabled()):
        kinds = {name: options[name] for name in ("label_smoothing", "z_loss") if name in options}
        shifted = {"ignore_index": ignore_index, "shift_labels": shift_labels}
        losses.append(causal_lm_loss((logits,), labels, num_items_in_batch, **shifted, **kinds))
        return losses[-1]
    if not isinstance(logits, UnformedLogits):
        raise RuntimeError(
            f"the forward does more to its logits than scale, cap and cast them; {INSTEAD}"
        )
    if vocab_size != logits.shape[-1]:
        raise ValueError(
            f"the model's vocab_size is {vocab_size}, and its LM head has {logits.shape[-1]} rows"
        )
    targets = (
        nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if shift_labels is None
        else shift_labels
    )
    targets = targets.to(logits.device)
    loss = logits.mean_loss(targets, num_items_in_batch, ignore_index=ignore_index, **options)
    losses.append(loss)
    return loss


@functools.cache
def _try_release(release: str) -> None:
    """Raise ImportError unless a tiny model has one loss and gradient, patched and not."""
    result = _self_test()
    if result != "passed":
        raise ImportError(
            f"transformers {release} is not a release that this integration knows ({_HOST.versions}), and a tiny model "
            f"patched beside stock {result}; {INSTEAD}"
        )


def _self_test() -> str:
    """Compare loss and gradient of a Llama of a few hundred weights, patched and stock: "passed", or what differs."""
    import transformers

    shape: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 37,
    }
    config = transformers.LlamaConfig(**shape, num_attention_heads=1, num_key_value_heads=1)
    with torch.random.fork_rng(), torch.device("cpu"):
        model = transformers.LlamaForCausalLM(config)
    patched = _FusedForward(model, {})

    def theirs(inputs_embeds, labels, num_items_in_batch):
        stock = functools.partial(type(model).forward, model.to(inputs_embeds))
        batch = {"inputs_embeds": inputs_embeds, "labels": labels}
        return stock(**batch, num_items_in_batch=num_items_in_batch).loss

    def ours(inputs_embeds, labels, num_items_in_batch):
        model.to(inputs_embeds)
        batch = {"inputs_embeds": inputs_embeds, "labels": labels}
        return patched(**batch, num_items_in_batch=num_items_in_batch).loss

    def samples(dtype):
        generator = torch.Generator().manual_seed(0)
        embedded = normal(generator, dtype, 2, 5, 8)
        labels = torch.randint(37, (2, 5), generator=generator, device="cpu")
        labels[0, 2] = IGNORED
        batch = {"inputs_embeds": embedded, "labels": labels}
        # None in evaluation; in training Trainer passes a tensor.
        for items in (None, torch.tensor(11, dtype=torch.int64, device="cpu")):
            yield batch | {"num_items_in_batch": items}

    return self_test(theirs, ours, samples)


def _base(model: nn.Module) -> "PreTrainedModel":
    """The causal LM inside a peft model, or the model itself."""
    import transformers

    # No peft model exists before its module is imported.
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        # peft is found by its name alone, so no checker knows its classes
        model = cast(Any, model).get_base_model()
    # An encoder's labels are not shifted.
    if not isinstance(model, transformers.PreTrainedModel) or model.config.is_encoder_decoder:
        raise TypeError(
            f"patch takes a causal language model of transformers, before anything wraps it; got {type(model).__name__}"
        )
    return model


def _check_loss_function(model: "PreTrainedModel") -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    # Liger replaces a model's forward by one that has a fused head of its own.
    if type(model).forward.__module__.partition(".")[0] == "liger_kernel":
        raise ValueError(
            f"{type(model).__name__}.forward is Liger's, which fuses the LM head too: keep one of the two, Liger's "
            "other kernels with apply_liger_kernel_to_...(fused_linear_cross_entropy=False)"
        )
    if model.loss_function is not ForCausalLMLoss:
        name = getattr(model.loss_function, "__name__", repr(model.loss_function))
        raise ValueError(
            f"the loss of {type(model).__name__} is {name}; patch knows transformers' ForCausalLMLoss"
        )


def _linears(model: "PreTrainedModel") -> list[nn.Linear]:
    """The modules that may serve as LM head: one, or with peft's `modules_to_save` the original and its copies."""
    head: Any = model.get_output_embeddings()
    peft = sys.modules.get("peft")
    heads = [head]
    if peft is not None and isinstance(head, peft.utils.ModulesToSaveWrapper):
        heads = [head.original_module, *head.modules_to_save.values()]
    for linear in heads:
        # Judged by its forward, because FSDP2 gives a module of its own group a class of its own.
        if getattr(type(linear), "forward", None) is not nn.Linear.forward or "forward" in vars(
            linear
        ):
            kind = f"{type(linear).__module__}.{type(linear).__name__}"
            raise ValueError(
                f"the LM head of {type(model).__name__} is a {kind}, and patch needs an nn.Linear with its own "
                "forward: keep lm_head out of LoRA's target_modules (modules_to_save is fine), out of quantization "
                f"and out of offloading; {INSTEAD}"
            )
    if model.tp_size is not None and model.tp_size > 1:
        raise ValueError("the model is tensor parallel, so its LM head is in parts; " + INSTEAD)
    return heads
