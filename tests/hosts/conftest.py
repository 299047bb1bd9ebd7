"""A host's tests run in an environment of its own (`make test-integrations`); elsewhere they are not collected."""

import importlib.util
import sys
from pathlib import Path

import pytest

# Our own folder is named kernels, too.
HOSTS = {
    "verl": "verl",
    "openrlhf": "openrlhf",
    "kernels": "kernels.layer",
}
collect_ignore_glob = [
    f"test_{host}*.py" for host, module in HOSTS.items() if importlib.util.find_spec(module) is None
]
if importlib.util.find_spec("openrlhf"):
    # flash-attn and vllm need a GPU to build or to run; what OpenRLHF imports of them stands in stubs/, after what is
    # installed
    sys.path.append(str(Path(__file__).parent / "stubs"))


@pytest.fixture(autouse=True)
def on_the_cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
