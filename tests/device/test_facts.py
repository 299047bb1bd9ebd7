"""What `make gpu` asks first, at tiny sizes on the device that is not there: nothing mixes devices."""

import pytest
import torch

from bench import gpu_facts, gpu_right, plain

# What needs a real device: its timer, its graphs, its compiler.
LEFT_OUT = ("environment", "compiled")


def call_once(call, device, ms=60):
    call()
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in gpu_facts.FACTS if not name.startswith(LEFT_OUT)])
def test_a_fact_of_the_device(device, name, monkeypatch, tmp_path):
    for module in (gpu_facts, gpu_right):
        monkeypatch.setattr(module, "at", lambda device, real, tiny: tiny)
    monkeypatch.setattr(gpu_facts, "milliseconds", call_once)
    monkeypatch.setattr(gpu_facts, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(gpu_right, "captured", lambda step: (step, None))
    # The generator of a device is CUDA's own.
    drawn = plain.normal
    monkeypatch.setattr(plain, "normal", lambda *args, device="cpu": drawn(*args).to(device))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    assert gpu_facts.tell(name, device.type, str(tmp_path / "facts.jsonl")) == 0
