"""A step of every trainer on the device: the numbers of the CPU, and how often the host waits."""

import subprocess
import sys

import pytest
import torch

from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.models import packing
from tests.device import steps, tensors
from tests.marks import slow
from tests.trainers import tiny

CPU = torch.device("cpu")
ONE_BATCH = {"minibatches": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    model = tiny.model_folder(folder / "model")
    return model, tiny.reward_folder(folder / "reward", model)


# Of four micro-batches each: how often a step waits for what the device has computed. Nowhere does it wait to send.
# No pass waits in transformers, which would look for sequences in one row or for pads. A pass over kept sets waits
# once, to know how many rows it gathers, and once on its way back for the ids.
STEPS = {
    "sft": (steps.sft_step, {}, 3),  # metrics; the norm of the gradient, twice
    "reward": (steps.reward_step, {}, 3),  # scores; the norm of the gradient, twice
    "reward, padded": (steps.reward_step, {"packed": False}, 3 + 4),  # lengths
    "ppo": (steps.ppo_step, {"critic": "reward"}, 15),  # two updates
    "ppo, one update": (steps.ppo_step, ONE_BATCH | {"critic": "reward"}, 9),
    # Two updates: what has a gradient, metrics, and the norm of the gradient, twice; entropy and KL.
    "grpo": (
        steps.grpo_step,
        {},
        10,
    ),
    "grpo, one update": (steps.grpo_step, ONE_BATCH, 6),
    "grpo, prompts apart": (steps.grpo_step, {"share_prompts": False}, 10),
    "grpo, from logits": (steps.grpo_step, {"loss_from": "logits"}, 10),
    # One of the four has no gradient, and no way back; its scores are read once, beside those of the reference.
    "grpo, top_p and top_k": (steps.grpo_step, {"top_p": 0.9, "top_k": 20}, 10 + 4 * (3 + 1) - 3),
    "grpo, KL in the reward": (steps.grpo_step, {"kl_in": "reward", "kl_coef": 0.1}, 11),
    "gspo": (steps.grpo_step, {"preset": "gspo"}, 10),
    "dapo": (
        steps.grpo_step,
        {"preset": "dapo", "mask_truncated": True, "zero_variance": "drop"},
        10,
    ),
    "grpo, top entropy": (steps.grpo_step, {"top_entropy": 0.2, "entropy_coef": 0.01}, 10),
}


FAST = ("sft", "ppo, one update", "grpo, one update")


def drawn(folders, make, options):
    """The responses of a step, as its sampling draws them."""
    names = ("top_p", "top_k")
    truncation = {name: options[name] for name in names if name in options}
    return steps.responses_of(steps.small_config("grpo", folders[0], **truncation))


def named(options, folders):
    """The options, with the folder of the critic."""
    return options | ({"critic": folders[1]} if "critic" in options else {})


def timeless(metrics):
    return {key: value for key, value in metrics.items() if not key.startswith(("time/", "perf/"))}


def found_on(device, folders, make, options, responses):
    options = named(options, folders)
    torch.manual_seed(0)
    step = make(folders[0], device, responses, **options)
    torch.manual_seed(1)
    with tensors.counted() as waits:
        found = step()
    return found, waits


@pytest.mark.parametrize("name", [*FAST, *map(slow, [name for name in STEPS if name not in FAST])])
def test_a_step_is_that_of_the_cpu(device, folders, name):
    make, options, reads = STEPS[name]
    with steps.process_group():
        responses = drawn(folders, make, options)
        cpu, _ = found_on(CPU, folders, make, options, responses)
        found, waits = found_on(device, folders, make, options, responses)
    assert waits.reads.total() == reads, waits.reads
    assert not waits.uploads
    expected = {}
    for key, value in timeless(cpu.metrics).items():
        # A mean of differences of log-probabilities near -6, each of which is rounded to 5e-7.
        smallest = 5e-6 if key.startswith("objective/kl") else 1e-6
        expected[key] = pytest.approx(value, rel=1e-4, abs=smallest, nan_ok=True)
    assert timeless(found.metrics) == expected
    for ours, theirs in zip(found.modules, cpu.modules, strict=True):
        for (key, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.inner, b.detach(), rtol=1e-4, atol=1e-6, msg=key)


OF_RANKS = {
    "sft": (steps.sft_step, {}),
    "reward": (steps.reward_step, {}),
    "ppo": (steps.ppo_step, ONE_BATCH | {"critic": "reward"}),
    "grpo": (steps.grpo_step, ONE_BATCH),
    "grpo, over all ranks": (
        steps.grpo_step,
        ONE_BATCH | {"preset": "reinforce++", "top_entropy": 0.2},
    ),
}


@pytest.mark.slow
def test_a_step_on_two_devices_is_that_of_one_process(folders, tmp_path):
    responses = steps.responses_of(steps.small_config("grpo", folders[0]))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    asked = {name: (make, named(options, folders)) for name, (make, options) in OF_RANKS.items()}
    torch.save({"steps": asked, "model": folders[0], "responses": responses}, tmp_path / "asked.pt")
    done = subprocess.run(
        [*launch, "-m", "tests.device.two_ranks", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    found = torch.load(tmp_path / "found.pt")
    for name, (metrics, weights) in found.items():
        cpu, _ = found_on(CPU, folders, *OF_RANKS[name], responses)
        assert timeless(metrics) == pytest.approx(
            timeless(cpu.metrics), rel=1e-4, abs=1e-6, nan_ok=True
        ), name
        expected = [weight.detach() for module in cpu.modules for weight in module.parameters()]
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6, msg=name)


# Of at most 32 tokens: transformers looks at the mask of the padded prompts, twice; then the sampler looks every 16.
OF_PROMPTS = 2
SAMPLED = {
    "whole vocabulary": ({}, OF_PROMPTS + 2),
    "kept sets": ({"top_p": 0.9, "top_k": 20}, OF_PROMPTS + 4),
}


def sample(sampler, prompts, sampling):
    """The token ids of responses from a seed, and how often the host waits."""
    torch.manual_seed(0)
    with tensors.counted() as waits:
        responses = sampler.sample(prompts, sampling)
    return [response.ids for response in responses], waits


@pytest.mark.parametrize("name", ["whole vocabulary", slow("kept sets")])
def test_a_sampled_step_is_one_launch_and_the_sampler_waits_once_for_eight(device, folders, name):
    options, reads = SAMPLED[name]
    config = steps.small_config("grpo", folders[0], max_new_tokens=32, **options)
    sampler, *inputs = steps.sampler_of(config, device)
    sampler.graphs.unchecked = 0
    captured, waits = sample(sampler, *inputs)
    sampler.graphs.is_on = False
    plain, plain_waits = sample(sampler, *inputs)
    assert captured == plain and max(map(len, plain)) == 32
    for counts in (waits, plain_waits):
        assert counts.reads.total() == reads, counts.reads
        assert reads - OF_PROMPTS <= 32 / 8
        assert not counts.uploads
    # The prompts, the first step, which is computed once and captured, and no other.
    assert waits.launches["replay"] == 31
    assert waits.launches["mm"] / 3 == plain_waits.launches["mm"] / 32


def test_a_step_that_waits_is_not_captured(device, folders, capsys):
    sampler, *inputs = steps.sampler_of(steps.small_config("grpo", folders[0]), device)
    sampler.graphs.is_on = False
    plain, _ = sample(sampler, *inputs)
    sampler.graphs.is_on = True
    sampler.lm.register_forward_hook(lambda lm, _, output: output.logits.max().tolist() and None)
    found, waits = sample(sampler, *inputs)
    assert found == plain and not waits.launches["replay"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "without CUDA graphs" in line and "synchronizing CUDA operation" in line


def test_rows_of_blocks_are_made_without_a_wait(device):
    """The mask that flex_attention takes, of groups over several blocks, and what its backward pass reads."""
    prompts = [[1] * 150] * 3 + [[2] * 40] * 2
    responses = [[3] * count for count in (90, 0, 200, 30, 7)]
    batch = make_batch(prompts, responses, 0, device)
    with tensors.counted() as waits:
        packed = packing.pack(batch, None)
        mask = packed.attention["attention_mask"]
    assert not waits.reads and not waits.uploads
    assert mask.q_indices.device.type == "cuda" and packed.input_ids.shape == (1, 150 + 40 + 323)
