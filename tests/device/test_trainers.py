"""A step of every trainer on the device: the numbers of the CPU, and how often the host waits."""

import pytest
import torch

from tests.device import steps, tensors
from tests.trainers import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    model = tiny.model_folder(folder / "model")
    return model, tiny.reward_folder(folder / "reward", model)


STEPS = {
    "sft": (steps.sft_step, {}),
    "sft, padded": (steps.sft_step, {"packed": False}),
    "reward": (steps.reward_step, {}),
    "reward, padded": (steps.reward_step, {"packed": False}),
    "ppo": (steps.ppo_step, {"critic": "reward"}),
    "ppo, shared critic": (steps.ppo_step, {"critic": "shared"}),
    "grpo": (steps.grpo_step, {}),
    "grpo, prompts apart": (steps.grpo_step, {"share_prompts": False}),
    "grpo, from logits": (steps.grpo_step, {"loss_from": "logits"}),
    "grpo, top_p and top_k": (steps.grpo_step, {"top_p": 0.9, "top_k": 20}),
    "grpo, KL in the reward": (steps.grpo_step, {"kl_in": "reward", "kl_coef": 0.1}),
    "gspo": (steps.grpo_step, {"preset": "gspo"}),
    "dapo": (steps.grpo_step, {"preset": "dapo", "mask_truncated": True, "zero_variance": "drop"}),
    "grpo, top entropy": (steps.grpo_step, {"top_entropy": 0.2, "entropy_coef": 0.01}),
}


def drawn(folders, make, options):
    """The responses of a step, as its sampling draws them."""
    names = ("top_p", "top_k")
    truncation = {name: options[name] for name in names if name in options}
    return steps.responses_of(steps.config_of(steps.grpo.GRPOConfig, folders[0], **truncation))


def found_on(device, folders, make, options, responses):
    options = dict(options)
    if options.get("critic") == "reward":
        options["critic"] = folders[1]
    torch.manual_seed(0)
    step = make(folders[0], device, responses, **options)
    torch.manual_seed(1)
    with tensors.counted() as waits:
        found = step()
    return found, waits


def show(name, waits):
    """`pytest -s` or a failure shows where the host waited."""
    print(f"\n{name}: {sum(waits.reads.values())} reads, {sum(waits.uploads.values())} uploads")
    for kind in ("reads", "uploads"):
        for where, count in getattr(waits, kind).most_common():
            print("   ", kind, count, where)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_the_cpu(device, folders, name):
    make, options = STEPS[name]
    with steps.process_group():
        responses = drawn(folders, make, options)
        cpu, _ = found_on(CPU, folders, make, options, responses)
        found, waits = found_on(device, folders, make, options, responses)
    show(name, waits)
    for key, value in cpu.metrics.items():
        if not key.startswith(("time/", "perf/")):
            assert found.metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for ours, theirs in zip(found.modules, cpu.modules, strict=True):
        for (key, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.inner, b.detach(), rtol=1e-4, atol=1e-6, msg=key)
