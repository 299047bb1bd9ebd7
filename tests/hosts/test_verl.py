"""verl patched against unpatched: each replaced function, the patch itself, and our losses in its registries."""

import functools
import inspect
import re

import pytest
import torch
import verl.models.transformers.dense_common
import verl.models.transformers.monkey_patch
import verl.trainer.distillation.losses  # noqa: F401  as the line above: it takes functions by name
import verl.utils.experimental.torch_functional as fused_module
import verl.utils.kernel.linear_cross_entropy as linear_module
import verl.utils.torch_functional as verl_F
from verl.trainer.ppo import core_algos
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.workers.config import FSDPActorConfig

from fused_rl.integrations import verl as integration
from tests.hosts import cases
from tests.hosts.cases import assert_close, value_and_gradient
from tests.hosts.verl_step import KL_NAMES

LOGPROBS = ("logprobs_from_logits", "logprobs_from_logits_v2", "logprobs_from_logits_naive")
ENTROPIES = ("entropy_from_logits", "entropy_from_logits_with_chunking")


@pytest.fixture(autouse=True)
def unpatched_afterwards():
    yield
    integration.unpatch()


both = functools.partial(cases.both, integration)


# -- the functions


@pytest.mark.parametrize("inplace_backward", [True, False])
def test_the_flash_attn_path_needs_no_flash_attn(inplace_backward):
    logits, labels = cases.hard_logits("plain", torch.float32)
    theirs = value_and_gradient(lambda x: verl_F.logprobs_from_logits_naive(x, labels), logits)
    with integration.patch():
        ours = value_and_gradient(
            lambda x: verl_F.logprobs_from_logits_flash_attn(
                x, labels, inplace_backward=inplace_backward
            ),
            logits,
        )
    assert_close(ours[0], theirs[0])
    assert_close(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", cases.HARD_CASES)
@pytest.mark.parametrize("name", [*LOGPROBS, *ENTROPIES])
def test_hard_cases(name, case, dtype):
    logits, labels = cases.hard_logits(case, dtype)
    what = "logprobs" if name in LOGPROBS else "entropy"
    arguments = (labels,) if name in LOGPROBS else ()
    theirs, ours = both(
        lambda: value_and_gradient(lambda x: getattr(verl_F, name)(x, *arguments), logits)
    )
    cases.assert_no_worse(ours, theirs, cases.truth(what, logits, labels), dtype)
    if what == "entropy":
        assert (ours[0] >= 0).all()


def test_ignored_labels_as_with_flash_attn():
    with integration.patch():
        cases.check_ignored_labels(verl_F.logprobs_from_logits)


def test_inplace_backward_only_where_flash_attn_would(monkeypatch):
    leaf, labels = cases.hard_logits("plain", torch.float32)

    def storage_is_reused():
        logits = leaf.clone().requires_grad_() * 1
        gradients = []
        logits.register_hook(lambda gradient: gradients.append(gradient.data_ptr()))
        verl_F.logprobs_from_logits(
            logits, labels, inplace_backward=inplace_backward
        ).sum().backward()
        return gradients == [logits.data_ptr()]

    with integration.patch():
        inplace_backward = True
        assert not storage_is_reused()
        monkeypatch.setattr(verl_F, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
        assert storage_is_reused()
        inplace_backward = False
        assert not storage_is_reused()
        inplace_backward = True
        monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", "1")
        assert not storage_is_reused()


@pytest.mark.parametrize("name", KL_NAMES)
def test_kl_penalty(name):
    """Beyond the cap the value alone is verl's."""
    logprobs = torch.linspace(-6, 0, 200)
    ref_logprobs = (logprobs + torch.linspace(-2.5, 2.5, 200)).flip(0).flip(0)
    theirs, ours = both(
        lambda: value_and_gradient(lambda x: core_algos.kl_penalty(x, ref_logprobs, name), logprobs)
    )
    assert_close(ours[0], theirs[0])
    assert_close(ours[1], theirs[1])
    assert_close(*both(lambda: core_algos.kl_penalty(logprobs, logprobs + 15, name)))


def test_a_reference_that_requires_a_gradient_is_verls():
    ref_logprobs = torch.linspace(-1, 1, 9)
    theirs, ours = both(
        lambda: value_and_gradient(
            lambda x: core_algos.kl_penalty(torch.zeros(9), x, "k3"), ref_logprobs
        )
    )
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


# -- the fused head


def head(dtype, shape=(24,)):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(*shape, 32, generator=generator)
    weight = torch.randn(300, 32, generator=generator) / 4
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, 300, shape, generator=generator)


def head_gradients(call, hidden, weight, labels, used):
    """Outputs and the gradients of hidden states and weight, from the outputs in `used`."""
    hidden = hidden.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    outputs = call(hidden, weight, labels)
    generator = torch.Generator().manual_seed(6)
    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    torch.autograd.backward([outputs[i] for i in used], [upstream[i] for i in used])
    return outputs[0].detach(), outputs[1].detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("shape", "chunk_size"), [((24,), 512), ((4, 6), 512), ((4, 6), 5)])
def test_fused_linear_for_ppo(shape, chunk_size, temperature, used):
    def call(hidden, weight, labels):
        return FusedLinearForPPO(chunk_size).forward(hidden, weight, labels, temperature)

    theirs, ours = both(lambda: head_gradients(call, *head(torch.float32, shape), used))
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [(torch.float64, 0.7), (torch.float32, torch.linspace(0.5, 1, 24)[:, None])],
    ids=["fp64", "a temperature per token"],
)
def test_what_the_fused_head_cannot_take_is_verls(dtype, temperature):
    hidden, weight, labels = head(torch.float32)

    def call():
        return FusedLinearForPPO(24).forward(
            hidden.to(dtype), weight.to(dtype), labels, temperature
        )

    theirs, ours = both(call)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_liger_s_head_is_replaced_where_it_is_installed(monkeypatch):
    """verl calls Liger's function by `apply`; a stand-in takes its place, as liger-kernel needs a GPU."""

    @functools.wraps(integration.LigerFusedLinear.apply)
    def apply(*_):
        pytest.fail("Liger's function was called")

    class Liger:
        pass

    Liger.apply = staticmethod(apply)

    hidden, weight, labels = head(torch.float32, (4, 6))
    want = FusedLinearForPPO().forward(hidden, weight, labels, 0.7)
    monkeypatch.setattr(fused_module, "_LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY", Liger)
    with integration.patch():
        found = FusedLinearForPPO(impl_backend="liger").forward(hidden, weight, labels, 0.7)
    assert fused_module._LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY is Liger
    for mine, other in zip(found, want, strict=True):
        assert_close(mine, other)


def test_verl_has_no_backend_of_a_fused_head_that_is_not_replaced():
    """A new one would be used unpatched, and nobody would notice."""
    chosen = inspect.getsource(verl.models.transformers.monkey_patch.patch_forward_with_backends)
    (known,) = re.findall(r"fused_kernels_backend not in \[(.*)\]", chosen)
    assert {*re.findall(r"\w+", known)} == {"triton", "torch", "liger"}
    with pytest.raises(ValueError, match="Choose 'torch' or 'liger'"):
        FusedLinearForPPO(impl_backend="another")


@pytest.fixture(scope="module")
def registered():
    """Register once per process: verl refuses another function of the same name."""
    integration.register()


# Ours, verl's own of the same formula, and the bounds of ours.
SAME_LOSSES = [
    ("fused_grpo", "vanilla", 0.2, 0.2),
    ("fused_gspo", "gspo", 3e-4, 4e-4),
    ("fused_sapo", "sapo", 0.2, 0.2),
]


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize(("mine", "other", "low", "high"), SAME_LOSSES)
def test_our_losses_in_verl_s_registry(registered, mine, other, low, high, mode):
    """Where verl has the same loss, it says the same, for every way to aggregate and in every release."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(8, 6, generator=generator)
    logprobs = old + 0.3 * torch.randn(8, 6, generator=generator)
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 5, 2, 6, 4, 3])[:, None]
    info = {
        "dp_size": 2,
        "batch_num_tokens": 50,
        "global_batch_size": 12,
        "loss_scale_factor": None,
    }
    clips = {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high}
    config = FSDPActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=8, **clips)
    config.global_batch_info.update(info)
    given = {
        "advantages": torch.randn(8, 1, generator=generator).expand(8, 6),
        "response_mask": mask,
        "loss_agg_mode": mode,
        "config": config,
    }

    def graded(name):
        function = core_algos.get_policy_loss_fn(name)
        return value_and_gradient(lambda x: function(old, x, **given)[0], logprobs, torch.ones(()))

    for got, want in zip(graded(mine), graded(other), strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "Sum"])
@pytest.mark.parametrize("shape", [(24,), (4, 6)])
def test_linear_cross_entropy(shape, reduction):
    """verl's needs a GPU: against its other backend."""
    reduce = {"none": torch.flatten, "sum": torch.sum, "mean": torch.mean}[reduction.lower()]

    def other_backend(hidden, weight, labels):
        logprobs, entropy = FusedLinearForPPO().forward(hidden, weight, labels, 0.7)
        return reduce(logprobs), entropy.flatten()

    theirs = head_gradients(other_backend, *head(torch.float32, shape), (0, 1))
    with integration.patch():
        ours = head_gradients(
            lambda *tensors: linear_module.linear_cross_entropy(*tensors, 0.7, reduction),
            *head(torch.float32, shape),
            (0, 1),
        )
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other)


def test_a_split_head_and_unknown_options_are_verls(monkeypatch):
    calls = []

    @functools.wraps(integration.linear_cross_entropy)
    def theirs(*arguments):
        calls.append(arguments)

    monkeypatch.setattr(linear_module, "linear_cross_entropy", theirs)
    tensors = head(torch.float32)
    with integration.patch():
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group)
        linear_module.linear_cross_entropy(*tensors, 1.0, "none", 2)
        linear_module.linear_cross_entropy(*tensors, torch.tensor(1.0))
        linear_module.linear_cross_entropy(*tensors, 1.0, "median")
        assert len(calls) == 3
        linear_module.linear_cross_entropy(*tensors, 1.0, "none", 1)
        assert len(calls) == 3


# -- the patch


def test_every_place_is_replaced_and_restored():
    before = cases.attributes("verl")
    with integration.patch():
        places = cases.changed(before, cases.attributes("verl"))
        assert "verl.workers.engine.fsdp.transformer_impl.logprobs_from_logits" in places
        assert {name.rpartition(".")[2] for name in places} == {
            name.rpartition(".")[2] for name in integration._PATCH.agreement("").pairs
        }
    assert cases.changed(before, cases.attributes("verl")) == []


def test_what_is_not_served_is_verls():
    """Tensors of other devices, and labels of another shape than the logits' rows."""
    logits = torch.empty(4, 50, device="meta")
    labels = torch.zeros(4, dtype=torch.int64, device="meta")
    with integration.patch():
        for name in LOGPROBS:
            assert getattr(verl_F, name)(logits, labels).device.type == "meta"
        for name in ENTROPIES[:1]:
            assert getattr(verl_F, name)(logits).device.type == "meta"
        with pytest.raises(RuntimeError, match="Size|shape|dimension"):
            verl_F.logprobs_from_logits_naive(
                torch.zeros(4, 50), torch.zeros(4, 1, 2, dtype=torch.int64)
            )


def test_the_documented_example_runs_and_the_import_alone_takes_no_host(tmp_path):
    cases.run_fresh(cases.documented_example("verl"), tmp_path)
    cases.run_fresh(
        "import sys, fused_rl.integrations.verl; assert 'verl' not in sys.modules", tmp_path
    )
