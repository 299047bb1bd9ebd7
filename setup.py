"""Packaging.

`kernels/`, `trainers/` and `recipes/` stand at the top level of the repository but are imported as `fused_rl.kernels`,
…: a top-level package `kernels` would shadow the Hugging Face package that transformers imports. So `fused_rl/` holds
symbolic links to them, which Python, editors, type checkers and setuptools follow alike.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=find_namespace_packages(include=["fused_rl", "fused_rl.*"], exclude=["*.__pycache__"]),
    package_data={
        "fused_rl": ["py.typed"],
        "fused_rl.cpu": ["*.c"],
        # `fused-rl demo` finds them beside the trainers, here and installed.
        "fused_rl.recipes": ["*.yaml"],
    },
)
