"""The commands of docs/scaling.md run with their options, for tiny models, rows and lengths, on a CPU."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.trainers import fake_server
from tests.trainers.killed import ROOT
from tests.trainers.runs import VERIFIER

PAGE = (ROOT / "docs" / "scaling.md").read_text()
LINES = PAGE.replace("\\\n", " ").splitlines()
COMMANDS = [shlex.split(line[line.index("torchrun") :]) for line in LINES if "torchrun --n" in line]
SMALL = "--steps 1 --prompts_per_step 4 --group_size 2 --eval_size 0 --save_every 0 --max_prompt_length 64"


def tiny_words(words: list[str], files, folder, urls) -> list[str]:
    """Return the words after the module, with what is large, or is elsewhere, replaced by something small."""
    model, dataset = files
    (folder / "hpz.json").write_text(
        json.dumps({"zero_optimization": {"zero_hpz_partition_size": 2}})
    )
    given = words[words.index("-m") + 2 :]
    given = dict(zip(given[::2], given[1::2], strict=True))
    given |= dict(zip(SMALL.split()[::2], SMALL.split()[1::2], strict=True))
    given |= {"--model": model, "--dataset": dataset, "--max_new_tokens": "8"}
    given |= {"--output_dir": str(folder / "run"), "--verifiers": VERIFIER}
    given["--sequence_parallel"] = str(min(2, int(given.get("--sequence_parallel", 1))))
    given["--server"] = ",".join(urls[: given["--server"].count(",") + 1])
    for option, name in (("--deepspeed", "hpz.json"), ("--published_dir", "published")):
        given |= {option: str(folder / name)} if option in given else {}
    return [word for option in given.items() for word in option]


def test_each_example_is_read():
    assert len(COMMANDS) == 4 and sum("…" in words for words in COMMANDS) == 1
    (partition,) = re.findall(r"^{.*hpz.*}$", PAGE, re.MULTILINE)
    assert list(json.loads(partition)["zero_optimization"]) == ["zero_hpz_partition_size"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, id="two machines of two")])
@pytest.mark.parametrize("number", range(3))
def test_a_command_of_the_page_trains(number, world, files, tmp_path):
    words = [words for words in COMMANDS if "…" not in words][number]
    if (world == 4) != ("--nnodes" in words):
        pytest.skip("on four processes the example of two machines, on two the others")
    with fake_server.serving("vllm", files[0]) as one, fake_server.serving("vllm", files[0]) as two:
        given = tiny_words(words, files, tmp_path, [one.url, two.url])
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        done = subprocess.run(
            [sys.executable, *launch, "-m", "fused_rl.trainers.grpo", *given],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:3000]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 1
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
