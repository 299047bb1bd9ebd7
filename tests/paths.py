"""Which paths a test runs on: the kernels, interpreted on the CPU or compiled on a GPU, and their twins on the CPU.

`make gpu` runs `ON_DEVICE` with `pytest --on-device`, which leaves out what runs on the CPU path.
"""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where tensors are that the kernels serve."""

# Every file with a test that runs kernels; the ops that much else rests on come first.
ON_DEVICE = [
    "tests/test_logprobs.py",
    "tests/test_logprobs_autograd.py",
    "tests/test_kernels.py",
    "tests/test_linear_autograd.py",
    "tests/test_head.py",
    "tests/test_kl.py",
    "tests/test_targets.py",
    "tests/test_support.py",
    "tests/test_support_linear.py",
    "tests/test_gae.py",
    "tests/test_sampling.py",
    "tests/test_outputs.py",
    "tests/test_extremes.py",
    "tests/test_hostile.py",
    "tests/test_graphs.py",
]
NOT_ON_DEVICE = {"tests/test_occupancy.py", "tests/test_compile.py"}  # the first launches nothing
