"""`make types`: pyright on the product, and in strict mode on tests/typed.py and the Python of the pages."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("README.md", "docs/tutorial.md", "docs/hooks.md")


def write_blocks() -> None:
    """Write each block of Python of the pages as a file under build/typed, with the first lines of tests/typed.py."""
    folder = ROOT / "build" / "typed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    head, _, _ = (ROOT / "tests" / "typed.py").read_text().partition('"""')
    for page in PAGES:
        text = (ROOT / page).read_text()
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.M)
        ):
            # A block whose first line names a file is imported by others under that name.
            named = re.match(r"# (\w+)\.py\n", block)
            name = named[1] if named else f"{Path(page).stem.lower()}{number}"
            (folder / f"{name}.py").write_text(head + block)


def errors() -> list[str]:
    """Return a line for each error, the configuration being that of pyproject.toml."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        sys.exit(done.stdout + done.stderr)
    lines = []
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        if found["severity"] == "error":
            path = Path(found["file"]).relative_to(ROOT).as_posix()
            line = found["range"]["start"]["line"] + 1
            lines.append(f"{path}:{line}: {found['message']} ({found.get('rule')})")
    return lines


def main() -> None:
    write_blocks()
    lines = errors()
    print(*lines, f"{len(lines)} errors", sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
