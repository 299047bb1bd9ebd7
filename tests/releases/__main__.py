"""Every release of a host that an integration knows, each in a process of its own: `make test-releases [ONLY=trl-1.7]`.

A release is installed into a folder, before the packages of a common environment, with what it pins below that one.
What each prints is a row of table.md beside this file, which this command writes. The difference is the largest one of
losses and gradients, relative where a value is above 1; the seconds include imports. Two functions of verl and one of
TRL 1.15 are not compared without a GPU or flash-attn, which the host's own functions need.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).parent / "table.md"
HEADER = "| release | self-tests | steps | largest difference | seconds |\n|---|---|---|---|---|\n"
SECONDS = 300  # of one release, its installation aside
# TRL's clients of vLLM import it.
REQUESTS = ("requests", "urllib3", "charset_normalizer", "certifi")
HUB_1 = ("huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9", "certifi")


class Release(NamedTuple):
    """The newest release of a minor version, or another that differs from it."""

    host: str
    version: str
    pins: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.host}-{self.version}"


TRL = "1.0.0 1.1.0 1.2.0 1.3.0 1.4.0 1.5.1 1.6.0 1.7.1 1.8.0 1.9.2 1.10.0 1.11.0 1.12.0 1.13.0 1.14.2 1.15.0 1.16.0"
RELEASES = (
    *(Release("trl", version, REQUESTS) for version in TRL.split()),
    *(Release("verl", version) for version in ("0.7.1", "0.8.0", "0.9.1")),
    *(Release("openrlhf", version) for version in ("0.10.4", "0.11.0", "0.11.2")),
    *(
        Release("transformers", version, (*HUB_1, "tokenizers==0.22.2"))
        for version in ("5.12.1", "5.13.1", "5.14.1", "5.15.1")
    ),
    *(Release("transformers", version, HUB_1) for version in ("5.16.1", "5.17.0")),
    *(
        Release("transformers", version)
        for version in ("5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0", "5.24.0")
    ),
    Release("kernels", "0.17.2"),
    Release("liger-kernel", "0.8.5"),
)
# The hosts whose environment is not the tests' own.
ENVIRONMENTS = ("verl", "openrlhf", "kernels")


def python_of(release: Release) -> Path:
    """Return the interpreter of the common environment that has everything but the release."""
    suffix = f"-{release.host}" if release.host in ENVIRONMENTS else ""
    return Path(os.environ.get("VENV", ".venv") + suffix).absolute() / "bin" / "python"


def install(release: Release) -> Path:
    """Return the folder of a release, made where it is not there."""
    folder = ROOT / ".venv-releases" / str(release)
    if not (folder / "installed").exists():
        pip = [python_of(release), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        packages = (f"{release.host}=={release.version}", *release.pins)
        target = ["--no-deps", "--upgrade", "--target", folder]
        subprocess.run([*pip, *target, *packages], check=True)
        (folder / "installed").touch()
    return folder


def run(release: Release) -> dict:
    """Return what the steps of a release print, or why they print nothing."""
    started = time.monotonic()
    try:
        folder = install(release)
        started = time.monotonic()
        host = "tests.integrations.trl_step" if release.host == "trl" else "tests.releases.steps"
        command = [python_of(release), "-m", host, release.host]
        settings = {
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TRITON_INTERPRET": "0",
        }
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=SECONDS
        )  # fmt: skip
        (folder / "log").write_text(done.stdout + done.stderr)
        last = done.stdout.rstrip().rpartition("\n")[2]
        result = json.loads(last) if last.startswith("{") else {"error": _last_line(done.stderr)}
    except (subprocess.SubprocessError, OSError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    return {"ok": False, "seconds": round(time.monotonic() - started)} | result


def _last_line(text):
    return text.rstrip().rpartition("\n")[2] or "no output"


def failures(result: dict) -> list[str]:
    """Return what failed and why, a line each."""
    tests = result.get("self_test", {}).items()
    steps = result.get("steps", {}).items()
    return [
        *([result["error"]] if "error" in result else []),
        *(f"{name} is left to the host: {why}" for name, why in tests if name in result["left"]),
        *(f"{name}: {why}" for name, why in tests if "failed" in why or "ours raises" in why),
        *(f"{name}: {step['error']}" for name, step in steps if "error" in step),
        *(f"{name} differs: {step['difference']}" for name, step in steps if step.get("difference", 0) > 1e-5),
    ]  # fmt: skip


def _label(release):
    return f"{release.host} {release.version}"


def row(release: Release, result: dict) -> str:
    """Return the release's row of the table."""
    label = _label(release)
    if not result["ok"]:
        return f"| {label} | failed: {'; '.join(failures(result))[:200].replace('|', ',')} | | | {result['seconds']} |"
    tests = [value for value in result["self_test"].values() if value]
    passed = f"{tests.count('passed')} of {len(tests)}" if tests else ""
    differences = [step["difference"] for step in result["steps"].values()]
    steps = ", ".join(result["steps"])
    return f"| {label} | {passed} | {steps} | {max(differences):.0e} | {result['seconds']} |"


def rows() -> dict[str, str]:
    """Return the rows of the table by release, as "host version"."""
    lines = TABLE.read_text().removeprefix(HEADER).splitlines()
    return {line.split("|")[1].strip(): line for line in lines}


def write(new: dict[str, str]) -> None:
    """Put rows into the table, in place of those of the same releases; one of a release that is not tested goes."""
    found = rows() | new
    labels = map(_label, RELEASES)
    TABLE.write_text(HEADER + "".join(f"{found[label]}\n" for label in labels if label in found))


def main(only: list[str]) -> int:
    """Run the releases that `only` names, as in trl, trl-1.7 or trl-1.7.1, or all; return the exit status."""
    chosen = [
        release
        for release in RELEASES
        if not only or any(re.match(rf"{re.escape(name)}(?![^.-])", str(release)) for name in only)
    ]
    if not chosen:
        print(f"no release {' '.join(only)}; there are {', '.join(map(str, RELEASES))}")
        return 2
    failed = 0
    for release in chosen:
        result = run(release)
        failed += not result["ok"]
        verdict = "agrees" if result["ok"] else "FAILED: " + "; ".join(failures(result))
        print(f"{release!s:20} {result['seconds']:4} s  {verdict}", flush=True)
        write({_label(release): row(release, result)})
    print(f"{len(chosen) - failed} releases agree, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
