"""`fused-rl doctor` alone: versions, device, compiler, a kernel against its definition, and what is missing."""

import importlib.metadata
import os
import platform
import shutil

import torch

import fused_rl
from fused_rl import reference

EXTRAS = {
    "train": (
        "triton",
        "deepspeed",
        "transformers",
        "datasets",
        "peft",
        "pydantic",
        "tensorboard",
        "math-verify",
    ),
    "demo": ("reasoning-gym",),
}


def errors(device: str) -> tuple[float, float]:
    """Return the largest errors against fp64, in nats: of `token_logprobs` on a device, and of PyTorch in fp32."""
    # A vocabulary of several blocks and a tail, by a generator of its own.
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(64, 5003, generator=generator)
    targets = torch.arange(64)

    def of(op, dtype: torch.dtype, place: str) -> torch.Tensor:
        x = logits.to(place, dtype, copy=True).requires_grad_()
        rows = op(x, targets.to(place))
        (rows.logprobs.sum() + rows.entropy.sum()).backward()
        found = torch.cat([rows.logprobs, rows.entropy, x.grad.flatten()])
        return found.detach().double().cpu()

    # The kernel's values and gradient, and those of plain fp32, each against fp64 on the CPU.
    exact = of(reference.token_logprobs, torch.float64, "cpu")
    found = (
        of(fused_rl.token_logprobs, torch.float32, device),
        of(reference.token_logprobs, torch.float32, "cpu"),
    )
    return tuple((values - exact).abs().max().item() for values in found)


def look() -> int:
    """Print the report; return 1 if the kernel is wrong, else 0."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"fused_rl {fused_rl.__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(
        f"device: {torch.cuda.get_device_name() if device == 'cuda' else f'{os.cpu_count()} CPU cores, no GPU'}"
    )
    compiler = next(
        filter(shutil.which, ("g++", "cc", "clang")), "none; on Debian and Ubuntu: apt install g++"
    )
    print(f"compiler: {compiler}")

    # What each extra brings, by the names of distributions, of which a name may be spelled with - or _.
    distributions = list(importlib.metadata.distributions())
    installed = {found.name.lower().replace("_", "-"): found.version for found in distributions}
    for extra, packages in EXTRAS.items():
        missing = [name for name in packages if name not in installed]
        print(
            f"[{extra}]: {', '.join(f'{name} {installed[name]}' for name in packages if name in installed)}"
        )
        if missing:
            print(f"  missing: {', '.join(missing)}; pip install 'fused-rl[{extra}]'")

    # The kernel may err twice as much as plain PyTorch in the same dtype.
    error, allowed = errors(device)
    right = error <= 2 * allowed
    print(
        f"token_logprobs on {device}: {'right' if right else 'WRONG, please report it'}: within {error:.1e} of fp64"
    )
    return int(not right)
