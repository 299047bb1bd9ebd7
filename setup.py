"""Packaging.

`kernels/`, `trainers/` and `recipes/` stand at the top level of the repository but are imported as `fused_rl.kernels`,
…: a top-level package `kernels` would shadow the Hugging Face package that transformers imports. So `fused_rl/` holds
symbolic links to them, which Python, editors, type checkers and setuptools follow alike.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.editable_wheel import editable_wheel


class Editable(editable_wheel):
    """`pip install -e`, which puts on the path a folder that holds a link to fused_rl and nothing else.

    setuptools would install an import hook, which type checkers and editors do not read. Its mode without a hook puts
    the whole repository on the path, where `import kernels` would find our folder of that name.
    """

    def finalize_options(self):
        links = Path(".editable")
        links.mkdir(exist_ok=True)
        link = links / "fused_rl"
        if not link.is_symlink():
            link.symlink_to(Path("..", "fused_rl"))
        self.distribution.package_dir = {"": str(links)}
        super().finalize_options()


setup(
    packages=find_namespace_packages(include=["fused_rl", "fused_rl.*"], exclude=["*.__pycache__"]),
    package_data={
        "fused_rl": ["py.typed"],
        "fused_rl.cpu": ["*.c"],
        "fused_rl.recipes": [
            "*.yaml"
        ],  # `fused-rl demo` finds them beside the trainers, here and installed
    },
    cmdclass={"editable_wheel": Editable},
)
