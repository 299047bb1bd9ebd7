"""How much code there is, and how dense it reads: `make size`, or `python -m tests.tools.size FOLDER…`.

Tokens say how much there is to understand, and lines only how it is laid out. The table informs a reviewer: nothing
fails on it. Comments, docstrings and layout are not counted as tokens; a line of code is one that has a token.
"""

import ast
import dataclasses
import io
import os
import sys
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
    f"{'comments/100':>13} {'functions':>10}"
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

    def row(self, label: str) -> str:
        """Return the line of the table, under `HEADINGS`."""
        code_lines = max(len(self.tokens), 1)
        ascending = sorted(self.tokens) or [0]
        tokens = sum(self.tokens)
        p90 = ascending[int(0.9 * len(ascending))]
        density = f"{tokens / code_lines:10.1f} {p90:5d} {100 * self.comments / code_lines:13.1f}"
        amount = f"{self.files:6d} {self.lines:7d} {tokens:8d}"
        return f"{label:15} {amount} {density} {self.functions:10d}"


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


def rooms(folder: str) -> dict[str, Size]:
    """Return the size of each subfolder, and under TOP_FLOOR that of the files that stand beside them."""
    sizes: dict[str, Size] = {}
    for place, subfolders, files in os.walk(ROOT / folder):  # which follows no links
        inside = Path(place).relative_to(ROOT / folder)
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
    for folder in folders:
        sizes = rooms(folder)
        print(sum(sizes.values(), Size()).row(folder))
        if folder in WITH_ROOMS:
            for room, size in sizes.items():
                print(size.row(f"  {room}"))


if __name__ == "__main__":
    main(sys.argv[1:] or list(FOLDERS))
