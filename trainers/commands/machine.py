"""`fused-rl doctor` without a run: versions, device, compiler, and a kernel against its definition."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil

import torch

import fused_rl
from fused_rl import reference

# Those on which most depends; `pip install 'fused-rl[train]'` brings all that training needs.
PACKAGES = ("torch", "triton", "deepspeed", "transformers", "datasets", "peft", "trl", "vllm")


def errors(device: str) -> tuple[float, float]:
    """Return the largest errors against fp64, of `token_logprobs` on a device and of PyTorch in fp32.

    They are of log-probabilities and entropies, in nats, and of the gradient of their sum.
    """
    # The vocabulary has several blocks and a tail. The generator is separate, so that the global one stays as it is.
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(64, 5003, generator=generator)
    targets = torch.arange(64)

    def of(op, dtype: torch.dtype, place: str) -> torch.Tensor:
        """Return the values and the gradient of an op in one fp64 vector."""
        x = logits.to(place, dtype, copy=True).requires_grad_()
        rows = op(x, targets.to(place))
        (gradient,) = torch.autograd.grad(rows.logprobs.sum() + rows.entropy.sum(), x)
        values = torch.cat([rows.logprobs, rows.entropy, gradient.flatten()])
        return values.detach().double().cpu()

    # Values and gradient of the kernel, and of plain PyTorch in fp32, are each compared with fp64 on the CPU.
    exact = of(reference.token_logprobs, torch.float64, "cpu")
    results = (
        of(fused_rl.token_logprobs, torch.float32, device),
        of(reference.token_logprobs, torch.float32, "cpu"),
    )
    ours, plain = ((values - exact).abs().max().item() for values in results)
    return ours, plain


def version_of(package: str) -> str:
    """Return the version that is installed."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # such as Triton's builds for ROCm
        return "without a version"


def report() -> int:
    """Print the report about this machine, and return 1 if the kernel is wrong and 0 otherwise."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"fused_rl {fused_rl.__version__}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version_of(name)}" for name in PACKAGES))
    print(
        f"device: {torch.cuda.get_device_name() if device == 'cuda' else f'{os.cpu_count()} CPU cores, no GPU'}"
    )
    compiler = next(
        filter(shutil.which, ("g++", "cc", "clang")), "none; on Debian and Ubuntu: apt install g++"
    )
    print(f"compiler: {compiler}")

    # The kernel's error may be twice that of plain PyTorch in the same dtype.
    error, allowed = errors(device)
    right = error <= 2 * allowed
    print(
        f"token_logprobs on {device}: {'right' if right else 'WRONG, please report it'}: within {error:.1e} of fp64"
    )
    return int(not right)
