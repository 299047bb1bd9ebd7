"""The library as a repository of Hugging Face's `kernels`, which loads it without an installation.

    python -m tests.tools.hub_build build/hub

    from kernels import get_local_kernel
    fused_rl = get_local_kernel(Path("build/hub"))

It holds the ops, the losses and `layers.py`, once for each backend. Such a kernel may not import itself by name, and
its operators must not meet those of another version: imports become relative, and operators get a prefix of their own,
which follows from the sources. An installed fused_rl in the same process keeps its own.
"""

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

import fused_rl

BACKENDS = ("cpu", "cuda", "rocm")
# Folder -> the way up to the package.
FOLDERS = {"": ".", "base": "..", "objectives": "..", "ops": "..", "cpu": "..", "kernels": ".."}


def sources() -> dict[Path, str]:
    """Return the text of every file of the repository, by its path in it, with relative imports."""
    found = {}
    for folder, up in FOLDERS.items():
        for path in sorted((Path(fused_rl.__file__).parent / folder).iterdir()):
            # The C source is among them, because it is compiled on the machine that uses it.
            if path.suffix in (".py", ".c", ".typed"):
                text = path.read_text()
                text = re.sub(r"^(\s*)from fused_rl\.", rf"\1from {up}", text, flags=re.M)
                found[Path(folder) / path.name] = re.sub(
                    r"^(\s*)from fused_rl ", rf"\1from {up} ", text, flags=re.M
                )
    # `kernelize` finds layers as an attribute of the package.
    found[Path("__init__.py")] += "\nfrom . import layers  # noqa: E402\n"
    return found


def build(folder: Path) -> str:
    """Write the repository into `folder`, in place of one that is there; return the prefix of its operators."""
    texts = sources()
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:12]
    prefix = f"_fused_rl_{digest}"
    # A file of an earlier build that has no source any more would stay in the repository.
    shutil.rmtree(folder, ignore_errors=True)
    for backend in BACKENDS:
        place = folder / f"torch-{backend}"
        for name, text in texts.items():
            # An operator is named where it is registered and where it is called.
            text = text.replace('"fused_rl::', f'"{prefix}::').replace(
                "ops.fused_rl.", f"ops.{prefix}."
            )
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        described = {
            "id": f"{prefix}_{backend}",
            "name": "fused-rl",
            "version": 1,
            "license": "apache-2.0",
        }
        described |= {"python-depends": [], "kernel-depends": [], "backend": {"type": backend}}
        (place / "metadata.json").write_text(json.dumps(described))
    return prefix


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="is replaced")
    print(build(parser.parse_args().folder))
