"""`tf_adam_epsilon` against TensorFlow's formula: P5's numbers, every optimizer, and DeepSpeed's ZeRO 0 to 3."""

import copy
import math

import pytest
import torch

import fused_rl
from tests.distributed import run_distributed, zero_engine
from tests.marks import slow

EPS, BETAS = 1e-5, (0.9, 0.999)
OPTIMIZERS = {
    "Adam, plain": lambda p, **o: torch.optim.Adam(p, foreach=False, **o),
    "Adam, foreach": lambda p, **o: torch.optim.Adam(p, foreach=True, **o),
    "AdamW, fused": lambda p, **o: torch.optim.AdamW(p, weight_decay=0.0, fused=True, **o),
    "like FusedAdam": lambda p, **o: LikeFusedAdam(p, **o),
    "like DeepSpeedCPUAdam": lambda p, **o: LikeCPUAdam(p, **o),
}


class LikeCPUAdam(torch.optim.Optimizer):
    """Keeps its state as DeepSpeedCPUAdam does: a plain number per parameter."""

    def __init__(self, params, lr, betas, eps):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "bias_correction": True})

    def step(self, closure):
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, group, self._count(p))

    def _count(self, p):
        state = self.state[p]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state["step"] += 1
        return state["step"]

    @torch.no_grad()
    def _update(self, p, group, t):
        state, (beta1, beta2) = self.state[p], group["betas"]
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + group["eps"]
        p -= group["lr"] / (1 - beta1**t) * state["exp_avg"] / root


class LikeFusedAdam(LikeCPUAdam):
    """Keeps its state as DeepSpeed's FusedAdam does: of a whole group the last parameter alone counts the steps."""

    def step(self, closure):
        closure()
        for group in self.param_groups:
            group.setdefault("step", 0)
            for p in group["params"]:
                self._count(p)
                self.state[p]["step"] -= 1
            last = self.state[group["params"][-1]]
            last["step"] += 1
            for p in group["params"]:
                self._update(p, group, last["step"])


def tensorflow(gradients: list[torch.Tensor], lr: float) -> list[torch.Tensor]:
    """The displacement after each step, in fp64, as TensorFlow 1's Adam computes it."""
    m = v = p = torch.zeros_like(gradients[0], dtype=torch.float64)
    displacements = []
    for t, g in enumerate(gradients, 1):
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        p = p - lr * math.sqrt(1 - BETAS[1] ** t) / (1 - BETAS[0] ** t) * m / (v.sqrt() + EPS)
        displacements.append(p)
    return displacements


def run(optimizer, parameters, gradients):
    """Displacements after each step; every parameter gets the same gradients."""
    displacements = []
    for g in gradients:

        def fill(g=g):
            for p in parameters:
                p.grad = g.to(p.dtype)

        optimizer.zero_grad()
        optimizer.step(fill)  # before the closure has run there is no gradient
        displacements.append([p.detach().clone() for p in parameters])
    return displacements


def gradients_of(steps: int) -> list[torch.Tensor]:
    """(60,) fp64 each, from far below epsilon to far above."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2], dtype=torch.float64).repeat(10)
    return [torch.randn(60, dtype=torch.float64, generator=generator) * scale for _ in range(steps)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_hundred_steps_in_two_groups_are_the_formula(name):
    a, b, c = (torch.nn.Parameter(torch.zeros(60, dtype=torch.float64)) for _ in range(3))
    groups = [{"params": [a, b], "lr": 1e-5}, {"params": [c], "lr": 3e-5}]
    optimizer = fused_rl.tf_adam_epsilon(OPTIMIZERS[name](groups, lr=1.0, eps=EPS, betas=BETAS))
    gradients = gradients_of(200)
    for found, once, thrice in zip(
        run(optimizer, [a, b, c], gradients),
        tensorflow(gradients, 1e-5),
        tensorflow(gradients, 3e-5),
        strict=True,
    ):
        for p, expected in zip(found, (once, once, thrice), strict=True):
            torch.testing.assert_close(p, expected, atol=1e-15, rtol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_optimizer_continues_and_its_state_is_that_of_any_adam(name):
    gradients = gradients_of(20)

    def made(changed=True):
        p = torch.nn.Parameter(torch.zeros(60, dtype=torch.float64))
        optimizer = OPTIMIZERS[name]([p], lr=1e-5, eps=EPS, betas=BETAS)
        return p, fused_rl.tf_adam_epsilon(optimizer) if changed else optimizer

    (whole, optimizer) = made()
    (first, stopped) = made()
    (second, resumed) = made()
    run(optimizer, [whole], gradients)
    run(stopped, [first], gradients[:7])
    saved = copy.deepcopy(stopped.state_dict())
    second.data.copy_(first.data)
    resumed.load_state_dict(saved)
    run(resumed, [second], gradients[7:])
    assert torch.equal(second, whole)
    _, plain = made(changed=False)
    plain.load_state_dict(saved)  # and back, without the change
    assert plain.param_groups[0]["eps"] == EPS
    assert plain.param_groups[0].keys() == saved["param_groups"][0].keys()


def test_what_it_cannot_serve_is_refused():
    a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    for kind in (torch.optim.Adamax, torch.optim.RAdam):
        with pytest.raises(ValueError, match=f"{kind.__name__} divides by no sqrt"):
            fused_rl.tf_adam_epsilon(kind([a]))
    with pytest.raises(ValueError, match="SGD divides by no sqrt"):
        fused_rl.tf_adam_epsilon(torch.optim.SGD([a]))
    with pytest.raises(
        ValueError,
        match="optimizer must be a torch.optim.Optimizer, got Linear, whose .weight is a",
    ):
        fused_rl.tf_adam_epsilon(torch.nn.Linear(2, 2))
    optimizer = fused_rl.tf_adam_epsilon(torch.optim.Adam([a, b]))
    with pytest.raises(ValueError, match="applied to this optimizer before"):
        fused_rl.tf_adam_epsilon(optimizer)
    without = LikeCPUAdam([a], lr=1.0, betas=BETAS, eps=EPS)
    without.param_groups[0]["bias_correction"] = False
    with pytest.raises(ValueError, match="bias_correction=False"):
        fused_rl.tf_adam_epsilon(without)
    a.grad = torch.ones(3)
    optimizer.step()
    b.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"\[0, 1\] steps.*a parameter group of their own"):
        optimizer.step()


class Scaled(torch.nn.Module):
    """Loss `sum(g * p)` over its parameters: every gradient is what was asked for."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.zeros(60)) for _ in range(3))

    def forward(self, g):
        return ((self.a + self.b + self.c) * g).sum()


def through_deepspeed(rank, world, stage, steps):
    """Two parameter groups, sub-groups of one parameter, two micro-batches per step; returns the displacements."""
    import deepspeed

    model = Scaled()
    groups = [{"params": [model.a, model.b], "lr": 1e-5}, {"params": [model.c], "lr": 3e-5}]
    adamw = torch.optim.AdamW(groups, lr=1.0, eps=EPS, betas=BETAS, weight_decay=0.0)
    optimizer = fused_rl.tf_adam_epsilon(adamw)
    engine = zero_engine(model, optimizer, stage, sub_group_size=60)
    for g in gradients_of(steps):
        for _ in range(2):
            engine.backward(engine(g.float()) / 2)
        engine.step()
    parameters = [model.a, model.b, model.c]
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        return [p.detach().tolist() for p in parameters]


@pytest.mark.parametrize(("stage", "steps"), [(2, 20), slow(0, 200), slow(1, 200), slow(3, 200)])
def test_steps_through_zero_with_groups_and_sub_groups(stage, steps):
    once, thrice = (tensorflow(gradients_of(steps), lr)[-1] for lr in (1e-5, 3e-5))
    for found in run_distributed(through_deepspeed, 1 if stage < 2 else 2, stage, steps):
        for p, expected in zip(found, (once, once, thrice), strict=True):
            # fp32 against fp64: 200 roundings of a displacement of up to 2e-3
            torch.testing.assert_close(torch.tensor(p).double(), expected, atol=3e-9, rtol=2e-5)
