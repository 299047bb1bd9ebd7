"""Weights that go to servers by CUDA IPC, in the form of vLLM 0.32 and 0.33; on a CPU by shared memory."""

import base64
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.servers import ipc
from tests.trainers import fake_server, served
from tests.trainers.weight_transfer import Transfer, reduce_tensor

GPU = "GPU-1"


def on_gpus(patch, gpu: str = GPU) -> list[str]:
    """Let this process have a GPU; return what it does with it."""
    done: list[str] = []
    properties = SimpleNamespace(uuid=gpu)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    patch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    patch.setattr(ipc, "reduce_tensor", lambda x: done.append("export") or reduce_tensor(x))
    patch.setattr(ipc, "is_possible", lambda model: True)
    return done


@pytest.fixture
def done(monkeypatch):
    return on_gpus(monkeypatch)


def in_one_storage(lm) -> None:
    """Make a model's weights views of one shared storage, as ZeRO 1 and 2 do."""
    weights = list(lm.parameters())
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    flat.untyped_storage().share_memory_()
    parts = flat.split([weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part.view_as(weight)


@pytest.fixture
def policy(folder):
    policy = served.Policy(folder)
    in_one_storage(policy.module.base)
    return policy


@pytest.fixture
def fake(folder):
    with fake_server.serving("vllm", folder, max_model_len=512) as fake:
        fake.transfer = Transfer(GPU)
        yield fake


# The requests of an update, as vLLM 0.32.0 and 0.33.0 read them; HTTPVLLMWeightSyncClient of vLLM sends the same.
UPDATE = [
    ("/init_weight_transfer_engine", {"init_info": {"packed": False}}),
    ("/start_weight_update", None),
    ("/update_weights", {"update_info": "INFO"}),
    ("/finish_weight_update", None),
]
AWAKE = [("/pause?mode=wait", None), *UPDATE, ("/reset_prefix_cache", None), ("/resume", {})]
ASLEEP = [
    ("/wake_up?tags=weights", None),
    *UPDATE,
    ("/wake_up?tags=kv_cache", None),
    ("/reset_prefix_cache", None),
    ("/resume", {}),
]
INFO = {
    "names": ["model.embed_tokens.weight", "lm_head.weight"],
    "dtype_names": ["bfloat16", "float32"],
    "shapes": [[3, 2], [2, 2]],
}


def test_the_fields_of_an_update(done, monkeypatch):
    """Those of each process's GPU, which a server has one of."""
    state = {"model.embed_tokens.weight": torch.ones(2, 3).bfloat16().T, "tied.weight": None}
    state["lm_head.weight"] = torch.eye(2)
    lm = SimpleNamespace(state_dict=lambda: state, all_tied_weights_keys={"tied.weight": ""})
    lm.device = torch.device("cpu")
    other = [{"GPU-2": "a"}, {"GPU-2": "b"}]
    monkeypatch.setattr(ranks, "gather_processes", lambda handles: [handles, other])
    info = ipc.update_info(lm, {})
    assert done == ["export", "export", "synchronize"]
    by_gpu = pickle.loads(base64.b64decode(info.pop("ipc_handles_pickled")))
    assert info == INFO and [handles["GPU-2"] for handles in by_gpu] == ["a", "b"]
    # Where PyTorch has them, and vLLM, which overwrites the seventh, the device.
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[1:4] == ["tensor_size", "tensor_stride", "tensor_offset"] and len(names) == 15
    assert names[6] == "storage_device" and by_gpu[0][GPU][1:4] == ((3, 2), (1, 3), 0)


def calls_of_update(fake, before: int) -> list:
    """Return the calls of an update, without those of the probe."""
    calls = []
    for path, body in fake.calls[before:]:
        if path == "/update_weights":
            body = {"update_info": "INFO"}
        if path != "/v1/completions":
            calls.append((path, body))
    return calls


def test_an_update_by_ipc_writes_no_file_and_is_verified(policy, fake, done, tmp_path, capsys):
    sampler = served.sampler_of([fake.url], policy, tmp_path, sleeps=True)
    assert "weights go to the servers by CUDA IPC\n" in capsys.readouterr().out
    for step, expected in enumerate([AWAKE, AWAKE, ASLEEP]):
        if expected is ASLEEP:
            sampler.rest()
        policy.change(step)
        before = len(fake.calls)
        sampler.publish(step, None)
        assert calls_of_update(fake, before) == expected
        assert (
            done.pop() == "synchronize"
        )  # after the weights have changed, and before they are read
    assert not (tmp_path / "published").exists() and not fake.paused

    # One storage is exported, and once: further exports would stay.
    assert done.count("export") == 1

    # The probe verifies these weights too, and a failure after the first update is no reason for files.
    policy.change(3)
    fake.flaws = {"deaf"}
    with pytest.raises(InputError, match="not the policy's"):
        sampler.publish(3, None)
    fake.script = [("/update_weights", 500)]
    with pytest.raises(InputError, match="HTTP 500: .*it must be on a trainer's GPU, serve this"):
        sampler.publish(4, None)
    assert not fake.paused


REFUSALS = [
    (Transfer("GPU-2"), "IPC handle not found for GPU UUID GPU-2"),
    (Transfer(GPU, insecure=False), "Refusing to deserialize `ipc_handles_pickled`"),
    (None, None),
]


@pytest.mark.parametrize(("transfer", "reason"), REFUSALS)
def test_a_server_that_reads_no_handles_gets_files(
    transfer, reason, policy, fake, done, tmp_path, capsys
):
    """If only one of two does not, too."""
    fake.transfer = transfer
    with fake_server.serving("vllm", policy.folder, max_model_len=512) as other:
        other.transfer = Transfer(GPU)
        sampler = served.sampler_of([other.url, fake.url], policy, tmp_path)
        for step in range(2):
            policy.change(step)
            sampler.publish(step, policy.save)
            for server in (fake, other):
                assert server.loaded[-1][0].name == f"step-{step}" and not server.paused
    said = capsys.readouterr().out
    files = f"by files in {tmp_path / 'published'}\n"
    assert said.count(files) == 1
    if reason is None:
        assert f"weights go to the servers {files}" in said
    else:
        assert said.count("by CUDA IPC: POST http") == 1 and reason in said


def test_which_policy_can_be_read_by_others():
    def is_possible(device="cuda", stage=2, conversions=(), lora=False):
        lm = SimpleNamespace(device=torch.device(device), _weight_conversions=conversions)
        model = SimpleNamespace(module=SimpleNamespace(base=lm, lora=lora))
        model.zero_optimization_stage = lambda: stage
        return ipc.is_possible(model)

    assert is_possible()
    wrong = [{"device": "cpu"}, {"stage": 3}, {"conversions": ["w1"]}, {"lora": True}]
    assert not any(is_possible(**one) for one in wrong)
