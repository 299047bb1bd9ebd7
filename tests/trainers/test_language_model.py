"""What a language model's forward returns for its options, and two models whose hidden states meet."""

import pytest
import torch

import fused_rl
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.models import language_model
from fused_rl.trainers.options import EngineConfig
from tests.distributed import run_distributed
from tests.trainers import tiny

CPU = torch.device("cpu")
ASKED = {
    "logits": {"want_logits": True},
    "loss": {"token_loss": lambda logp, _: -logp},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, and a teacher of the same vocabulary and other weights."""
    folder = tmp_path_factory.mktemp("models")
    return tiny.model_folder(folder / "policy"), tiny.model_folder(folder / "teacher", seed=3)


def load(folders, name: str, **options):
    """Any model by the options of a run whose own is another."""
    config = tiny.config_of("grpo", name, **options)
    return language_model.load_lm(config, CPU, trainable=name == folders[0])


def batch():
    return make_batch([[1, 70, 71, 72], [1, 80]], [[90, 91, 3], [92, 93, 94, 95, 96]], 0, "cpu")


@pytest.mark.parametrize("wanted", [(), ("logits",), ("loss",), ("logits", "loss")])
def test_what_is_not_wanted_is_none_and_the_rest_is_unchanged(folders, wanted):
    lm, given = load(folders, folders[0]), batch()
    inputs = (given.input_ids, given.response_mask, 0.7)
    options = {}
    for name in wanted:
        options |= ASKED[name]
    found, plain = lm(*inputs, **options), lm(*inputs)
    assert isinstance(found, language_model.Scored)
    assert {name for name, value in found._asdict().items() if value is not None} == {
        "logprobs",
        "entropy",
        *wanted,
    }
    assert torch.equal(found.logprobs, plain.logprobs) and torch.equal(found.entropy, plain.entropy)
    assert found.logprobs.requires_grad == ("loss" not in wanted)
    if "loss" in wanted:
        torch.testing.assert_close(found.loss, -plain.logprobs.sum())


def test_a_model_that_is_not_the_runs_own_is_loaded_by_its_name_and_frozen(folders, tmp_path):
    teacher = load(folders, folders[1], lora_rank=2)
    assert not teacher.lora and not any(weight.requires_grad for weight in teacher.parameters())
    weights = tiny.weights(folders[1])
    assert torch.equal(teacher.head.weight, weights["lm_head.weight"])
    with pytest.raises(InputError, match=f"^model='{tmp_path}/nothing' is neither"):
        load(folders, f"{tmp_path}/nothing")


def kl_of_heads(policy, reference, ref_weight):
    """The hidden states of the reference meet the policy's in its forward pass, where its head is whole."""
    given = batch()
    inputs = (given.input_ids, given.response_mask)
    ref_hidden = reference(*inputs, under_head=lambda hidden, _: hidden)

    def meet(hidden, lm):
        return fused_rl.linear_token_kl(
            hidden, lm.head.weight, ref_hidden, ref_weight, temperature=0.7
        )

    return policy(*inputs, under_head=meet)


@torch.no_grad()
def test_hidden_states_of_two_models_meet_in_the_exact_kl(folders):
    policy, teacher, given = load(folders, folders[0]), load(folders, folders[1]), batch()
    rows, ref_rows = (
        lm(given.input_ids, given.response_mask, want_logits=True) for lm in (policy, teacher)
    )
    expected = fused_rl.token_kl(rows.logits, ref_rows.logits, temperature=0.7)
    assert expected.min() > 0.1
    torch.testing.assert_close(kl_of_heads(policy, teacher, teacher.head.weight), expected)


def ask_under_zero_3(rank, world, folders):
    """Through two engines: all results at once, the gradient of a loss, and the KL of the heads."""
    config = tiny.config_of("grpo", folders[0], zero_stage=3)
    engine.setup(rank)
    lm, ref_lm = load(folders, folders[0], zero_stage=3), load(folders, folders[1], zero_stage=3)
    ref_weight = ref_lm.head.weight.clone()
    policy, reference = (
        engine.initialize(lm, config, 1),
        engine.initialize_frozen(ref_lm, config),
    )
    assert lm.head.weight.shape == (0,) and ref_lm.head.weight.shape == (0,)
    given = batch()
    inputs = (given.input_ids, given.response_mask, 0.7)
    with torch.no_grad():
        rows = policy(*inputs, want_logits=True)
        kl = kl_of_heads(policy, reference, ref_weight)
    scored = policy(*inputs, **ASKED["loss"])
    policy.backward(scored.loss)
    norm = engine.optimizer_step(policy, 1)["optim/grad_norm"]
    return [kl.tolist(), rows.logits.tolist(), rows.logprobs.tolist(), scored.loss.item(), norm]


@pytest.mark.slow
def test_partitioned_models_return_the_same(folders):
    policy, teacher, given = load(folders, folders[0]), load(folders, folders[1]), batch()
    inputs = (given.input_ids, given.response_mask, 0.7)
    rows, ref_rows = (lm(*inputs, want_logits=True) for lm in (policy, teacher))
    kl = fused_rl.token_kl(rows.logits, ref_rows.logits, temperature=0.7)
    loss = policy(*inputs, **ASKED["loss"]).loss
    loss.backward()
    norm = torch.cat([weight.grad.flatten() for weight in policy.parameters()]).norm().item()
    expected = [kl, rows.logits, rows.logprobs, loss]
    for found in run_distributed(ask_under_zero_3, 2, folders, timeout=200):
        for value, wanted in zip(found, expected, strict=False):
            torch.testing.assert_close(torch.tensor(value), wanted.detach(), rtol=1e-5, atol=1e-5)
        assert found[-1] == pytest.approx(norm, rel=1e-4)


def test_a_gpu_that_only_emulates_bf16_takes_fp32_and_zero_0_keeps_no_masters(monkeypatch):
    config = EngineConfig(dtype="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert engine.torch_dtype(config) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert engine.torch_dtype(config) == torch.bfloat16
    with pytest.raises(
        InputError,
        match="dtype=bfloat16 needs fp32 master weights, which zero_stage=0 does not keep",
    ):
        engine.torch_dtype(EngineConfig(dtype="bfloat16", zero_stage=0))
