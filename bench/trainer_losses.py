"""PPO's losses beside those of verl and OpenRLHF, whose trainers need a GPU: CPU time on the same tensors.

    python -m bench.trainer_losses
    make .venv-verl/installed && .venv-verl/bin/python -m bench.trainer_losses

Forward and backward of the clipped policy loss and the clipped value loss, token means. Each library has its own
environment, which `make test-integrations` makes: they pin other versions than ours.
"""

import statistics
import time
from collections.abc import Callable

import torch

import fused_rl
from bench import machine, peers, plain, results
from bench.peers import Unavailable

SHAPE = (128, 1024)  # sequences, tokens of each
CLIP = 0.2
TURNS = 9
OP, TASK = "ppo losses", f"{results.sizes(SHAPE, ' × ')} tokens"
NOTE = "the losses alone"


def inputs() -> dict[str, torch.Tensor]:
    """A minibatch after some updates: ratios and values on both sides of their bounds, half of it padding."""
    made = {}
    for seed, name in enumerate(("logprobs", "old_logprobs", "advantages", "values", "old_values", "returns")):
        made[name] = plain.normal(seed, *SHAPE)
    made["old_logprobs"] = made["logprobs"] + 0.2 * made["old_logprobs"]
    made["old_values"] = made["values"] + 0.2 * made["old_values"]
    lengths = torch.linspace(1, SHAPE[1], SHAPE[0])
    made["mask"] = torch.arange(SHAPE[1]) < lengths[:, None]
    return made


def ours() -> Callable:
    """{name: tensor} -> the policy's loss and the value loss, as every function here."""

    def call(x):
        policy, _ = fused_rl.policy_loss(x["logprobs"], x["old_logprobs"], x["advantages"], x["mask"], preset="ppo")
        value, _ = fused_rl.value_loss(x["values"], x["old_values"], x["returns"], x["mask"], value_clip=CLIP)
        return policy, value

    return call


def verl() -> Callable:
    algos = _imported("verl.trainer.ppo.core_algos", "verl")

    def call(x):
        tokens = (x["old_logprobs"], x["logprobs"], x["advantages"], x["mask"])
        policy = algos.compute_policy_loss(*tokens, cliprange=CLIP, clip_ratio_c=1e9)[0]
        value = algos.compute_value_loss(x["values"], x["returns"], x["old_values"], x["mask"], cliprange_value=CLIP)
        return policy, value[0]

    return call


def openrlhf() -> Callable:
    losses = _imported("openrlhf.models.loss", "openrlhf")
    policy, value = losses.PolicyLoss(CLIP, CLIP), losses.ValueLoss(CLIP)

    def call(x):
        found = policy(x["logprobs"], x["old_logprobs"], x["advantages"], x["mask"])
        return found[0], value(x["values"], x["old_values"], x["returns"], x["mask"])

    return call


def _imported(module: str, package: str):
    """The module, or Unavailable with how to get it."""
    try:
        return peers.import_peer(module)
    except Unavailable as reason:
        how = f"make .venv-{package}/installed && .venv-{package}/bin/python -m bench.trainer_losses"
        raise Unavailable(f"{reason}; {how}", reason.status) from reason


MAKERS = {"fused_rl": ours, "verl": verl, "OpenRLHF": openrlhf}


def once(call: Callable, x: dict[str, torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """CPU seconds of both losses and their gradients; the losses and the gradients."""
    x = dict(x)
    wanted = [x[name].requires_grad_() for name in ("logprobs", "values")]
    began = time.thread_time()
    policy, value = call(x)
    gradients = torch.autograd.grad(policy + value, wanted)
    return time.thread_time() - began, [policy.detach(), value.detach(), *gradients]


def rows(wanted: str = "all") -> list[dict]:
    """A row per library: medians of turns, and by how much it differs from ours."""
    calls, found = {}, []
    for name, make in MAKERS.items():
        if name != "fused_rl" and wanted != "all" and name not in wanted.split(","):
            continue
        try:
            calls[name] = make()
        except Unavailable as reason:
            found.append(results.not_run(f"{name} losses", reason.status, str(reason), OP))
    x = inputs()
    taken = {name: [] for name in calls}
    answers = {}
    for _ in range(1 + TURNS):
        for name, call in calls.items():
            seconds, answers[name] = once(call, x)
            taken[name].append(1e3 * seconds)
    return [row_of(name, taken[name][1:], answers) for name in calls] + found


def row_of(name: str, samples: list[float], answers: dict[str, list[torch.Tensor]]) -> dict:
    """A library's row; WRONG where its answer is not ours."""
    errors = [plain.relative(theirs, exact) for theirs, exact in zip(answers[name], answers["fused_rl"], strict=True)]
    row = {
        "op": OP,
        "task": TASK,
        "implementation": name,
        "status": results.OK,
        "note": NOTE,
        "version": None if name == "fused_rl" else machine.version(name.lower()),
        "ms": {"step": statistics.median(samples)},
        "samples_ms": {"step": samples},
        "difference": max(errors),
    }
    if not max(errors) <= 1e-4:
        row |= {"status": results.WRONG, "reason": f"off by {max(errors):.2g} of ours"}
    return row


def show(found: list[dict]) -> None:
    """Print the table."""
    lines = []
    for row in results.measured(found):
        lines.append([row["implementation"], row["ms"]["step"], results.repeats(row), results.remarks(row)])
    print(f"\n{OP}, {TASK}, forward and backward")
    print(results.table(["implementation", "ms", "runs", "note"], lines))
    results.show_missing(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    show(rows())
