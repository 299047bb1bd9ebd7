"""Packaging.

`kernels/` and `trainers/` stand at the top level of the repository but are imported as `fused_rl.kernels` and
`fused_rl.trainers`: a top-level package `kernels` would shadow the Hugging Face package that transformers imports.
"""

from setuptools import setup

setup(
    packages=[
        "fused_rl",
        "fused_rl.cpu",
        "fused_rl.integrations",
        "fused_rl.kernels",
        "fused_rl.recipes",
        "fused_rl.trainers",
    ],
    package_dir={"fused_rl.kernels": "kernels", "fused_rl.recipes": "recipes", "fused_rl.trainers": "trainers"},
    package_data={
        "fused_rl": ["py.typed"],
        "fused_rl.cpu": ["*.c"],
        "fused_rl.recipes": ["*.yaml"],  # `fused-rl demo` finds them beside the trainers, here and installed
    },
)
