"""A training step of a host as it is installed, patched and unpatched: `python -m tests.releases.steps HOST`.

The last line printed is JSON: release, self-tests and differences. The exit status is 0 if all agree.
"""

import contextlib
import functools
import json
import sys
import tempfile
import traceback
from pathlib import Path

import torch

# As the integrations promise; relative where a value is above 1.
TOLERANCE = 1e-5
# What needs a GPU or flash-attn in a host cannot be compared here.
NOT_RUN = "the host's own raises"


def difference(ours, theirs) -> float:
    """Return the largest difference of two nested collections of numbers, relative where a value is above 1."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), f"{ours.keys()} for {theirs.keys()}"
        ours, theirs = [ours[key] for key in theirs], list(theirs.values())
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), f"{len(ours)} values for {len(theirs)}"
        return max(map(difference, ours, theirs), default=0.0)
    exact = torch.as_tensor(theirs).double()
    relative = (torch.as_tensor(ours).double() - exact).abs() / exact.abs().clamp(1)
    # A NaN is no agreement, whatever it is compared with.
    return relative.nan_to_num(torch.inf).max().item()


def gradients(model, loss) -> list:
    """Return a loss and the gradient of every weight, some of them other than 0."""
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert any(gradient.abs().sum() > 0 for gradient in found), "no gradient: nothing is compared"
    return [loss.detach(), *found]


def patched_and_not(integration, step):
    """Return a function that compares a step with the host's own."""

    def compare():
        theirs = step()
        with integration.patch(strict=True):
            return difference(step(), theirs)

    return compare


def transformers_steps():
    """Two steps of Trainer, an evaluation and its logits, with `causal_lm_loss` and patched."""
    from fused_rl.integrations.transformers import patch
    from tests.integrations import tiny_models, trainer_runs

    def run(name, way):
        model = tiny_models.model(name)
        with tempfile.TemporaryDirectory() as folder:
            trained = vars(trainer_runs.train(model, folder, way))
        batch = tiny_models.collate(tiny_models.rows(3))
        patched = patch(model, strict=True) if way == "fused" else contextlib.nullcontext()
        with patched, torch.no_grad():
            return trained | {"logits": model.eval()(**batch).logits + 0.0}

    def compare(name, ways):
        stock = run(name, "stock")
        return max(difference(run(name, way), stock) for way in ways)

    # A plain head, a cap, a scale, and an auxiliary loss, which causal_lm_loss refuses.
    for name in ("qwen2", "gemma2", "cohere", "mixtral"):
        ways = ("fused",) if name == "mixtral" else ("logits", "fused")
        yield name, functools.partial(compare, name, ways)


def liger_steps():
    """Liger's cross-entropy beside the patch is right, and its fused head is refused."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen2

    from fused_rl.integrations.transformers import patch
    from tests.integrations import tiny_models

    # Triton's other kernels need a GPU.
    off = {"rope": False, "rms_norm": False, "swiglu": False}
    batch = tiny_models.collate(tiny_models.rows(3))

    def loss_and_gradients(patched):
        model = tiny_models.model("qwen2")
        if patched:
            patch(model)
        return gradients(model, model(**batch).loss)

    def beside_cross_entropy():
        stock = loss_and_gradients(False)
        apply_liger_kernel_to_qwen2(**off, cross_entropy=True, fused_linear_cross_entropy=False)
        return difference(loss_and_gradients(True), stock)

    def fused_head_is_refused():
        earlier = tiny_models.model("qwen2")
        patch(earlier)
        apply_liger_kernel_to_qwen2(**off)
        for late in (lambda: patch(tiny_models.model("qwen2")), lambda: earlier(**batch)):
            try:
                late()
            except ValueError as error:
                assert "is Liger's" in str(error), error
            else:
                raise AssertionError("Liger's fused head was not refused")
        return 0.0

    yield "cross-entropy", beside_cross_entropy
    yield "fused head refused", fused_head_is_refused


def verl_steps():
    """A micro-batch through verl's FSDP engine and PPO loss: as tests/hosts, of which it takes the step."""
    import pytest

    from fused_rl.integrations import verl as integration
    from tests.hosts import verl_step

    forms = {"unpadded": {}, "padded": {"remove_padding": False}, "fused": {"fused_kernels": True}}
    for name, options in forms.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            step = functools.partial(verl_step.step, monkeypatch, **options)
            yield name, patched_and_not(integration, step)


def openrlhf_steps():
    """An actor's policy loss, KL and entropy."""
    from openrlhf.models import PolicyLoss, utils
    from openrlhf.models.actor import Actor

    from fused_rl.integrations import openrlhf as integration
    from tests.integrations import tiny_models

    def step(temperature, entropy):
        model = tiny_models.model("qwen2")
        batch = tiny_models.collate(tiny_models.rows(3))
        ids, attention = batch["input_ids"], batch["attention_mask"]
        mask = attention[:, 1:].bool()
        actor = Actor(model, temperature=temperature)
        # Set where the actor loads its model itself.
        actor.packing_samples = False
        logprobs, output = actor(ids, mask, attention, return_output=True, return_entropy=entropy)
        old = logprobs.detach() + torch.linspace(-0.3, 0.3, mask.shape[1])
        loss, *_ = PolicyLoss()(
            logprobs, old, torch.linspace(-1, 1, 3)[:, None].expand_as(mask), mask
        )
        for estimator in ("k1", "k2", "k3"):
            loss = (
                loss
                + 0.1
                * (utils.compute_approx_kl(logprobs, old, kl_estimator=estimator) * mask).mean()
            )
        return gradients(model, loss - 0.01 * (output.entropy * mask).mean() if entropy else loss)

    # Until 0.11.0 a temperature scales the logits that the entropy has saved, so it has no gradient.
    yield "temperature", patched_and_not(integration, functools.partial(step, 0.7, False))
    yield "entropy", patched_and_not(integration, functools.partial(step, 1.0, True))


def kernels_steps():
    """The layer of a build of the library, which Hugging Face's kernels puts into a model's slot."""
    from tests.hosts import test_kernels

    def loaded(check):
        def run():
            with tempfile.TemporaryDirectory() as folder:
                check(Path(folder))
            return 0.0

        return run

    yield "load", loaded(test_kernels.test_the_build_is_loaded_beside_the_installed_library)
    yield "kernelize", loaded(test_kernels.test_kernelize_finds_the_layer)


STEPS = {
    "transformers": transformers_steps,
    "liger-kernel": liger_steps,
    "verl": verl_steps,
    "openrlhf": openrlhf_steps,
    "kernels": kernels_steps,
}


def self_tests(host: str) -> tuple[dict[str, str], list[str]]:
    """Return the results by function, and the functions that are left to the host."""
    import fused_rl.integrations
    from fused_rl.integrations import transformers

    if host in ("transformers", "liger-kernel"):
        return {"LlamaForCausalLM.forward": transformers._self_test()}, []
    if host == "kernels":
        return {}, []
    rows = fused_rl.integrations.status(host)
    left = [row.function for row in rows if row.state == "left to the host"]
    return {row.function: row.self_test for row in rows}, left


def main(host: str) -> int:
    """Print the result as a line of JSON, and return the exit status."""
    from importlib.metadata import version

    tests, left = self_tests(host)
    failed = [
        name for name, result in tests.items() if result != "passed" and NOT_RUN not in result
    ]
    steps = {}
    for name, compare in STEPS[host]():
        try:
            steps[name] = {"difference": compare()}
        # A release may fail in any way, and the other steps are of interest still.
        except Exception as error:
            traceback.print_exc()
            steps[name] = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    agree = all(step.get("difference", 1.0) <= TOLERANCE for step in steps.values())
    result = {"release": version(host), "self_test": tests, "left": left, "steps": steps}
    print(json.dumps(result | {"ok": agree and not failed and not left}))
    return not (agree and not failed and not left)


if __name__ == "__main__":
    if sys.argv[1] == "openrlhf":
        # What OpenRLHF imports of flash-attn and vllm, which need a GPU.
        sys.path.append(str(Path(__file__).parent.parent / "hosts" / "stubs"))
    sys.exit(main(sys.argv[1]))
