"""How much code there is, and how dense it reads: `make size`, or `python -m tests.tools.size FOLDER…`.

The last column is the difference in tokens to main, or on main to the commit before; a clone without either has none.
Tokens say how much there is to understand, and lines only how it is laid out. The table informs a reviewer: nothing
fails on it. Comments, docstrings and layout are not counted as tokens; a line of code is one that has a token.
"""

import ast
import dataclasses
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("fused_rl", "trainers", "kernels", "recipes", "tests", "bench")
# Inside fused_rl/ these are links in a checkout, and folders in a source distribution.
LINKED = {"kernels", "trainers", "recipes"}
WITH_ROOMS = ("fused_rl", "trainers")  # folders whose subfolders have a row each
TOP_FLOOR = "(top floor)"
HEADINGS = (
    f"{'folder':15} {'files':>6} {'lines':>7} {'tokens':>8} {'per line':>10} {'p90':>5} "
    f"{'comments/100':>13} {'functions':>10} {'to main':>9}"
)
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclasses.dataclass
class Size:
    """What some files measure together."""

    files: int = 0
    lines: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    """One entry per line of code: how many tokens begin on it."""
    comments: int = 0
    functions: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(
            self.files + other.files,
            self.lines + other.lines,
            self.tokens + other.tokens,
            self.comments + other.comments,
            self.functions + other.functions,
        )

    def row(self, label: str, before: "Size | None") -> str:
        """Return the line of the table, under `HEADINGS`; `before` is the size in main, None if that is not known."""
        code_lines = max(len(self.tokens), 1)
        ascending = sorted(self.tokens) or [0]
        tokens = sum(self.tokens)
        p90 = ascending[int(0.9 * len(ascending))]
        density = f"{tokens / code_lines:10.1f} {p90:5d} {100 * self.comments / code_lines:13.1f}"
        amount = f"{self.files:6d} {self.lines:7d} {tokens:8d}"
        difference = "" if before is None else f" {tokens - sum(before.tokens):+9d}"
        return f"{label:15} {amount} {density} {self.functions:10d}{difference}"


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the lines of every string that stands as a statement, as those under fields of dataclasses do."""
    lines = set()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return lines


def measure(text: str) -> Size:
    """Return the size of one file's text."""
    tree = ast.parse(text)
    docstrings = docstring_lines(tree)
    per_line: dict[int, int] = {}
    commented = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            commented.add(line)
        elif token.type not in LAYOUT and line not in docstrings:
            per_line[line] = per_line.get(line, 0) + 1
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Size(1, text.count("\n"), list(per_line.values()), len(commented), len(functions))


def git(*words: str) -> bytes | None:
    """Return what a command of git prints; None where it fails, as without a history."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def main_before() -> bytes | None:
    """Return an archive of what this work began from: where it left main, or on main the commit before."""
    begun = [git("merge-base", "HEAD", name) for name in ("main", "origin/main")]
    # A pull request is checked out as one merge, whose first parent is main.
    commits = [*filter(None, begun), git("rev-parse", "--verify", "HEAD^")]
    for commit in filter(None, commits):
        if commit != git("rev-parse", "HEAD"):
            return git("archive", commit.decode().strip())
    return None


def rooms(folder: str, root: Path = ROOT) -> dict[str, Size]:
    """Return the size of each subfolder, and under TOP_FLOOR that of the files that stand beside them."""
    sizes: dict[str, Size] = {}
    for place, subfolders, files in os.walk(root / folder):  # which follows no links
        inside = Path(place).relative_to(root / folder)
        if folder == "fused_rl" and not inside.parts:
            subfolders[:] = set(subfolders) - LINKED
        room = inside.parts[0] if inside.parts else TOP_FLOOR
        for name in files:
            if name.endswith(".py"):
                size = measure(Path(place, name).read_text(encoding="utf-8"))
                sizes[room] = sizes.get(room, Size()) + size
    return dict(sorted(sizes.items()))


def main(folders: list[str]) -> None:
    print(HEADINGS)
    archive = main_before()
    with tempfile.TemporaryDirectory() as place:
        if archive is not None:
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(place, filter="data")
        for folder in folders:
            sizes = rooms(folder)
            in_main = {} if archive is None else rooms(folder, Path(place))
            before = None if archive is None else sum(in_main.values(), Size())
            print(sum(sizes.values(), Size()).row(folder, before))
            if folder in WITH_ROOMS:
                for room, size in sizes.items():
                    print(size.row(f"  {room}", before and in_main.get(room, Size())))


if __name__ == "__main__":
    main(sys.argv[1:] or list(FOLDERS))
