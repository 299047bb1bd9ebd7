"""The examples of docs/integrations.md, each run as written, in a process and an empty folder of its own."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import slow
from tests.trainers import tiny

ROOT = Path(__file__).parent.parent.parent
# Section -> the package that its examples import; None where they need none. An absent host's examples are skipped:
# they run in the environment that has it.
HOSTS = {
    "TRL": "trl",
    "transformers": "transformers",
    "verl": "verl",
    "OpenRLHF": "openrlhf",
    "open-instruct": None,
}


def examples(text: str) -> list[tuple[str, str]]:
    """(section, source) of each Python block."""
    found = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0].strip()
        found += [(title, block) for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]
    return found


def run_example(source: str, folder: Path, before: str = "") -> str:
    """What a block prints, run without network; `before` is source that an environment needs first, such as a stub."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": ""}
    # not the interpreter of the tests: a reader has none
    environment = {
        **os.environ,
        **offline,
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
    }
    (folder / "example.py").write_text(before + source)
    ran = subprocess.run(
        [sys.executable, "example.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


WRITTEN = examples((ROOT / "docs" / "integrations.md").read_text())


# an example imports torch in a process of its own; TRL's also runs within tests/test_integrations_trl_patch.py
EXAMPLES = [slow(*block) for block in WRITTEN]


@pytest.mark.parametrize(("section", "source"), EXAMPLES, ids=[section for section, _ in WRITTEN])
def test_an_example_runs_as_written(section, source, tmp_path):
    host = HOSTS[section]
    if host is not None and importlib.util.find_spec(host) is None:
        pytest.skip(f"{host} is not installed here")
    tiny.model_folder(tmp_path / "model", chat=False)  # stands for the reader's own
    run_example(source, tmp_path)
