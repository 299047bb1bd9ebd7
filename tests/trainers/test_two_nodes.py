"""Two nodes, as network namespaces of this machine: a run that loses its network ends, and resumes exactly."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.trainers.killed import ROOT, words_of
from tests.trainers.runs import assert_same_weights, grpo_config

FIRST, SECOND = NODES = [f"fused-rl-{os.getpid()}-{i}" for i in range(2)]
# On the wire between them, whose ends have the nodes' numbers.
HERE = {FIRST: "10.213.77.1", SECOND: "10.213.77.2"}
LAUNCH = [
    "-m",
    "torch.distributed.run",
    "--nnodes",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
]


def ip(words: str) -> str:
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def nodes():
    """Two namespaces with a wire between them."""
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", FIRST]).returncode:
        pytest.skip("network namespaces are not permitted here")
    ip(f"netns add {SECOND}")
    ip(f"link add wire netns {FIRST} type veth peer name wire netns {SECOND}")
    for node in NODES:
        ip(f"-n {node} addr add {HERE[node]}/24 dev wire")
        ip(f"-n {node} link set lo up")
        ip(f"-n {node} link set wire up")
    yield
    for node in NODES:
        for pid in ip(f"netns pids {node}").split():
            os.kill(int(pid), signal.SIGKILL)
        ip(f"netns del {node}")


def start(config, logs, *, processes: int = 1, **options) -> list[subprocess.Popen]:
    """One torchrun on each node, of so many processes; what they print is in `logs`."""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "wire", "DEEPSPEED_TIMEOUT": "1"}
    logs.mkdir()
    started, given = [], words_of(config, **options)
    for node in NODES:
        # No host name leads to an address of a namespace, so torchrun must be given who listens.
        words = ["ip", "netns", "exec", node, sys.executable, *LAUNCH, HERE[FIRST]]
        words += [
            "--local-addr",
            HERE[node],
            "--rdzv-conf",
            f"is_host={node == FIRST}",
            "--nproc-per-node",
            str(processes),
            "-m",
            "fused_rl.trainers.grpo",
        ]
        with (logs / node).open("w") as log:
            started.append(
                subprocess.Popen(words + given, env=env, cwd=ROOT, stdout=log, stderr=log)
            )
    return started


quiet = pytest.mark.skipif(
    "FUSED_RL_NODES" not in os.environ,
    reason="its time-outs are of a quiet machine: make test-nodes",
)


@pytest.mark.slow
@quiet
@pytest.mark.usefixtures("nodes")
def test_a_run_that_loses_its_network_ends_and_resumes_bit_for_bit(files, tmp_path):
    config = grpo_config(
        files, tmp_path / "whole", steps=24, save_every=4, zero_stage=2, micro_batch_size=1
    )
    assert [process.wait(300) for process in start(config, tmp_path / "logs")] == [0, 0]
    cut, logs, metrics = tmp_path / "cut", tmp_path / "logs-cut", tmp_path / "cut" / "metrics.jsonl"
    processes = start(config, logs, output_dir=cut)
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 12:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)
    ip(f"-n {SECOND} link set wire down")

    # Both trainers end within the time-out of a minute. A torchrun without its rendezvous may wait on, so it is killed.
    end = time.monotonic() + 100
    while not all("Timed out waiting 60000ms" in (logs / node).read_text() for node in NODES):
        assert time.monotonic() < end, "a trainer still waits for the other"
        time.sleep(1)
    for process in processes:
        process.kill()
    ip(f"-n {SECOND} link set wire up")
    processes = start(config, tmp_path / "again", output_dir=cut, resume=True)
    assert [process.wait(300) for process in processes] == [0, 0]
    assert_same_weights(tmp_path / "whole", cut)


@pytest.mark.slow
@quiet
@pytest.mark.usefixtures("nodes")
def test_weights_that_stay_on_a_node_change_no_bit(files, tmp_path):
    """The command of docs/scaling.md for two machines, but for its server."""
    options = {"zero_stage": 3, "sequence_parallel": 2, "gradient_checkpointing": True, "steps": 3}
    within = tmp_path / "hpz.json"
    within.write_text('{"zero_optimization": {"zero_hpz_partition_size": 2}}')
    for name, more in (("over", {}), ("within", {"deepspeed": str(within)})):
        config = grpo_config(files, tmp_path / name, micro_batch_size=1, **options, **more)
        started = start(config, tmp_path / f"logs-{name}", processes=2)
        assert [process.wait(300) for process in started] == [0, 0]
    assert_same_weights(tmp_path / "over", tmp_path / "within")
