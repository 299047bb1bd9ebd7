"""What the tests of every host share: logits of hard cases, fp64 truths, and a host's attributes before and after."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fused_rl import reference

ROOT = Path(__file__).parent.parent.parent
HARD_CASES = ("plain", "peaked", "offset 100", "-inf columns")
# what a bound on an error may be missed by: the rounding of a result of magnitude 1
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}


def hard_logits(
    case: str, dtype: torch.dtype, rows: int = 24, vocab: int = 500
) -> tuple[Tensor, Tensor]:
    """Logits (rows, vocab) and labels (rows,), none of them at a banned column."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(rows, vocab, generator=generator) * 2
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    if case == "peaked":  # entropies from 1e-3 down to 1e-8
        logits[:, 3] = torch.linspace(22, 34, rows)
        labels[::2] = 3
    if case == "offset 100":
        logits += 100
    if case == "-inf columns":
        logits[:, ::2] = -torch.inf
        labels = labels // 2 * 2 + 1
    return logits.to(dtype), labels


def value_and_gradient(
    function: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """function(x), and its gradient for an upstream gradient, by default a random one."""
    leaf = x.clone().requires_grad_()
    value = function(leaf * 1)  # no leaf: some functions modify it in place
    if upstream is None:
        upstream = torch.randn(
            value.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
    value.backward(upstream.to(value.dtype))
    return value.detach(), leaf.grad


def both(integration, call: Callable[[], object]) -> tuple:
    """call() unpatched and patched."""
    theirs = call()
    with integration.patch():
        return theirs, call()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, check_dtype=False)


def error(actual: Tensor, truth: Tensor) -> float:
    """Largest deviation from the fp64 truth; infinite where it is NaN."""
    off = (actual.double() - truth).abs()
    off = torch.where(actual.double() == truth, 0, off)  # equal infinities
    return off.nan_to_num(torch.inf).max().item()


def truth(what: str, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`what` ("logprobs" or "entropy") of the logits as they are rounded, in fp64, and its gradient."""
    return value_and_gradient(
        lambda x: getattr(reference.token_logprobs(x, labels), what), logits.double()
    )


def assert_no_worse(ours: tuple, theirs: tuple, true: tuple, dtype: torch.dtype) -> None:
    """Value and gradient each as close to the truth as the host's, or closer."""
    for mine, other, exact in zip(ours, theirs, true, strict=True):
        floor = (
            ROUNDING[dtype if mine is ours[1] else torch.float32]
            * exact.abs().clamp(1).max().item()
        )
        assert error(mine, exact) <= max(error(other, exact), floor)


def check_ignored_labels(logprobs: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A label of -100 has a log-probability of 0 and no gradient."""
    logits, labels = hard_logits("plain", torch.float32)
    labels[::3] = -100
    value, gradient = value_and_gradient(lambda x: logprobs(x, labels), logits)
    assert (value[::3] == 0).all() and (value[1::3] < 0).all()
    assert (gradient[::3] == 0).all()


def attributes(host: str) -> dict[str, dict[str, object]]:
    """Every attribute of every module of the host that is imported now."""
    modules = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == host and module
    }
    return {name: dict(vars(module)) for name, module in modules.items()}


def changed(before: dict, after: dict) -> list[str]:
    """Names of attributes that are not the same object any more; modules imported in between do not count."""
    found = []
    for module, values in before.items():
        found += [
            f"{module}.{name}"
            for name, value in values.items()
            if after[module].get(name) is not value
        ]
    return found


def documented_example(section: str) -> str:
    """The python block of a section of docs/integrations.md."""
    text = (ROOT / "docs" / "integrations.md").read_text()
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    (block,) = re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
    return block


def run_fresh(source: str, folder: Path) -> str:
    """The output of a program in a process and a folder of its own, offline, with the stubs that this process has."""
    program = folder / "program.py"
    program.write_text(source)
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry.endswith("stubs"))])
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": path,
    }
    done = subprocess.run(
        [sys.executable, program],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
