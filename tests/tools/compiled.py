"""`make test-compiled`: what compilers make of the kernels, tested where kernels, tools or compilers have changed.

tests/compiled.sha256 is the hash of these files when the tests last passed. Compiling every kernel for every device
takes minutes, and where nothing has changed it shows nothing new.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests/compiled.sha256"
TOOLS = ("codegen.py", "machine_code.py")


def sources(root: Path = ROOT) -> list[Path]:
    """Return the kernels, and what compiles and reads them."""
    tools = [root / "tests/tools" / name for name in TOOLS]
    return [*sorted((root / "kernels").rglob("*.py")), *tools, root / "tests/test_codegen.py"]


def current(root: Path = ROOT) -> str:
    """Return the hash of the sources and of the pinned compilers."""
    pins = re.findall(r"^(?:torch|triton)==.*$", (root / "constraints.txt").read_text(), re.M)
    hashed = hashlib.sha256("\n".join(pins).encode())
    for path in sources(root):
        hashed.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return hashed.hexdigest()


def changed() -> bool:
    return not STORED.exists() or STORED.read_text().strip() != current()


def main() -> int:
    if not changed():
        print(f"kernels/ is as it was when these tests passed; remove {STORED.name} to run them")
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-m", "compiled", "--durations=20"]
    status = subprocess.run([*command, *sys.argv[1:], "tests/test_codegen.py"], cwd=ROOT).returncode
    if status == 0:
        STORED.write_text(current() + "\n")
        print(f"wrote {STORED.relative_to(ROOT)}: commit it with your change")
    return status


if __name__ == "__main__":
    sys.exit(main())
