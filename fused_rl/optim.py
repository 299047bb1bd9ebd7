"""An addition to optimizers: Adam's epsilon as in TensorFlow."""

import math
import weakref

import torch

from fused_rl.base.checks import described

# Weak references: the set must not keep an optimizer alive.
_CHANGED = weakref.WeakSet()


def tf_adam_epsilon(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an Adam add epsilon to the uncorrected second moment, as TensorFlow 1 does:

        p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

    PyTorch adds it to sqrt(v / (1 - beta2^t)), so its epsilon is in effect smaller by sqrt(1 - beta2^t): 31.6 times at
    the first step of beta2 = 0.999, and 3.2 times at the 100th. The two forms are equal if epsilon is eps / sqrt(1 -
    beta2^t). Each parameter group has this epsilon while `optimizer.step()` runs, and its own eps again afterwards, so
    a state dict holds nothing new, and a resumed run continues.

    t is read from the optimizer's state, per parameter group. So it counts optimizer steps, survives a resume, and is
    correct where DeepSpeed's ZeRO calls `step()` once per group (1, 2) or sub-group (3).

    Args:
        optimizer: torch's Adam or AdamW (plain, foreach, fused), DeepSpeed's FusedAdam or DeepSpeedCPUAdam, or another
            that divides by sqrt(v / (1 - beta2^t)) + eps and keeps t as `state[p]["step"]`. If DeepSpeed wraps an
            optimizer, pass the inner one, before `deepspeed.initialize`.

    Returns:
        The same optimizer, changed.

    Raises:
        ValueError: an object that is no optimizer, or none of Adam's kind; Adamax or RAdam, whose epsilon is
            elsewhere; a group without bias correction; a second call; at a step, parameters of one group that have
            taken different numbers of steps, for which no single epsilon is right.

    Source: https://github.com/vwxyzjn/minimal-adam-difference; arXiv:1412.6980, section 2, its last remark.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {described(optimizer)}")
    # Their epsilon stands elsewhere in the formula, where enlarging it has another meaning.
    has_both = all({"betas", "eps"} <= group.keys() for group in optimizer.param_groups)
    if not has_both or isinstance(optimizer, (torch.optim.Adamax, torch.optim.RAdam)):
        raise ValueError(
            f"{type(optimizer).__name__} divides by no sqrt(v / (1 - beta2^t)) + eps; use Adam or AdamW"
        )
    for group in optimizer.param_groups:
        if not group.get("bias_correction", True):
            raise ValueError(
                f"{type(optimizer).__name__} has bias_correction=False, so there is nothing to correct"
            )
    # A second pair of hooks would enlarge epsilon twice.
    if optimizer in _CHANGED:
        raise ValueError("tf_adam_epsilon was applied to this optimizer before")
    _CHANGED.add(optimizer)

    # Each group's own epsilon, from one hook to the other.
    eps_of_groups: list[float] = []

    def enlarge(changed, *_):
        eps_of_groups[:] = [group["eps"] for group in changed.param_groups]
        for group in changed.param_groups:
            group["eps"] /= math.sqrt(1 - float(group["betas"][1]) ** _next_step(changed, group))

    def restore(changed, *_):
        for group, eps in zip(changed.param_groups, eps_of_groups, strict=True):
            group["eps"] = eps

    optimizer.register_step_pre_hook(enlarge)
    optimizer.register_step_post_hook(restore)
    return optimizer


def _next_step(optimizer, group) -> int:
    """The t of the step that a parameter group is about to take."""
    # Before a closure has run there is no gradient yet, and every parameter counts.
    trained = [p for p in group["params"] if p.grad is not None] or group["params"]
    steps = _distinct([optimizer.state.get(p, {}).get("step", 0) for p in trained])
    # FusedAdam has one t for the group, which it keeps in the state of its last parameter alone.
    if len(steps) > 1 and "step" not in group:
        raise ValueError(
            f"parameters of one group have taken {sorted(steps)} steps, and a group has one epsilon: give those that "
            "are not trained at every step a parameter group of their own"
        )
    return 1 + max(steps, default=0)


def _distinct(steps) -> set[int]:
    """Return the values of numbers and scalar tensors; those of a device in one transfer."""
    there = [step for step in steps if isinstance(step, torch.Tensor) and step.device.type != "cpu"]
    here = {
        int(step)
        for step in steps
        if not isinstance(step, torch.Tensor) or step.device.type == "cpu"
    }
    return here | {int(step) for step in torch.stack(there).tolist()} if there else here
