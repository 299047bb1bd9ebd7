"""Slips that are drawn: small changes of the code that leave it running, from a seed.

A room has as many of them as its share of the product's tokens; in a room a file is drawn by its tokens, then a kind,
then a place. Nobody chose the places, so the share that the tests see says what they see of the next slip.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.tools import size

ROOT = Path(__file__).resolve().parents[2]
HARMLESS = Path(__file__).with_name("harmless.txt")
ROWS_C = "fused_rl/cpu/rows.c"

# Folders that are judged together.
ROOMS = {
    "kernels": ("kernels",),
    "C": (ROWS_C,),
    "ops": ("fused_rl/ops", "fused_rl/base", "fused_rl/cpu"),
    "objectives": ("fused_rl/objectives",),
    "integrations": ("fused_rl/integrations",),
    "models": ("trainers/models",),
    "policy and rollouts": ("trainers/policy", "trainers/rollouts"),
    "data": ("trainers/data",),
    "run and base": ("trainers/run", "trainers/base", "trainers/commands"),
    "servers and scorers": ("trainers/servers", "trainers/scorers"),
    "trainers": ("trainers",),  # what stands on the top floor
}

MESSAGES = {"InputError", "ValueError", "RuntimeError", "print_rank0", "print", "warn", "field"}
# Methods that can be forgotten; most return their tensor in another dtype, place or shape.
FORGETTABLE = {
    "abs",
    "clamp",
    "clamp_min",
    "clamp_max",
    "clone",
    "detach",
    "double",
    "exp",
    "float",
}
FORGETTABLE |= {"flatten", "lower", "masked_fill", "strip", "square", "sqrt", "to", "unsqueeze"}
# They change no value; None is `**options`.
HARMLESS_KEYWORDS = {"desc", "frozen", "num_stages", "num_warps", "strict", "timeout", None}
MODULES = {"tl", "torch", "math"}
TYPED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "map", "filter"}
TYPED |= {"promote_types"}  # in any order
TWINS = {"min": "max", "sum": "mean", "any": "all", "minimum": "maximum", "amin": "amax"}
TWINS |= {"argmin": "argmax", "cumsum": "cumprod", "floor": "ceil", "zeros": "ones"}
TWINS |= {"startswith": "endswith", "zeros_like": "ones_like"}
TWINS |= {other: name for name, other in TWINS.items()}
EDGES = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
EDGES |= {ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
OTHER_SIGN = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/"}
# Texts, also in parts, and lists, which have no arithmetic.
NO_NUMBERS = ast.Constant | ast.JoinedStr | ast.Tuple | ast.List
HASHED = re.compile("digest|hash|key|state|fingerprint")


class Slip(NamedTuple):
    """One change: the bytes of a file from `begin` to `end` become `new`."""

    file: str
    begin: int
    end: int
    new: str
    kind: str
    function: str | None
    """The innermost function that it changes, None at the top of a module or outside of Python."""

    def applied(self) -> bytes:
        code = (ROOT / self.file).read_bytes()
        return code[: self.begin] + self.new.encode() + code[self.end :]

    def lines(self) -> tuple[str, str]:
        """Return the lines that it changes, before and after, each in one."""
        code = (ROOT / self.file).read_bytes()
        first = code.rfind(b"\n", 0, self.begin) + 1
        last = code.find(b"\n", self.end)
        changed = code[first : self.begin] + self.new.encode() + code[self.end : last]
        return tuple(" ".join(text.decode().split()) for text in (code[first:last], changed))

    @property
    def number(self) -> int:
        return (ROOT / self.file).read_bytes()[: self.begin].count(b"\n") + 1

    def __str__(self) -> str:
        before, after = self.lines()
        return f"{self.file}:{self.number} ({self.kind})\n    {before}\n    {after}"


class _Places(ast.NodeVisitor):
    """Collects the slips of a file of Python."""

    def __init__(self, file: str, optional: Callable[[str], bool]):
        self.file, self.optional = file, optional
        self.code = (ROOT / file).read_bytes()
        lengths = [len(line) for line in self.code.splitlines(keepends=True)]
        self.starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        self.functions: list[str] = []
        self.found: list[Slip] = []
        self.visit(ast.parse(self.code))

    def span(self, node) -> tuple[int, int]:
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node) -> str:
        begin, end = self.span(node)
        return self.code[begin:end].decode()

    def add(self, kind: str, node, new: str) -> None:
        self.between(kind, *self.span(node), new)

    def between(self, kind: str, begin: int, end: int, new: str) -> None:
        function = self.functions[-1] if self.functions else None
        if new.encode() != self.code[begin:end]:
            self.found.append(Slip(self.file, begin, end, new, kind, function))

    def swap(self, kind: str, first, second) -> None:
        begin, end = self.span(first)[0], self.span(second)[1]
        middle = self.code[self.span(first)[1] : self.span(second)[0]].decode()
        self.between(kind, begin, end, self.text(second) + middle + self.text(first))

    def without(self, kind: str, items: list, item) -> None:
        """One item of a list less, with its comma."""
        at = items.index(item)
        if at + 1 < len(items):
            self.between(kind, self.span(item)[0], self.span(items[at + 1])[0], "")
        elif at:
            self.between(kind, self.span(items[at - 1])[1], self.span(item)[1], "")

    # What is never changed: messages, types, documentation, and what only says that a caller is wrong.
    def visit_Raise(self, node):
        pass

    visit_Assert = visit_Import = visit_ImportFrom = visit_JoinedStr = visit_Raise

    def visit_AnnAssign(self, node):
        if isinstance(node.value, ast.Constant):
            self.default(node.value)
        elif node.value:
            self.visit(node.value)

    def visit_Assign(self, node):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        self.fields(names, node.value)
        if names != ["__all__"]:
            self.visit(node.value)

    def visit_FunctionDef(self, node):
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.default(default)
        self.functions.append(node.name)
        for part in node.body:
            self.visit(part)
        self.functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def default(self, node) -> None:
        value = getattr(node, "value", None)
        if isinstance(value, bool):
            self.add("default", node, str(not value))
        elif isinstance(value, int | float):
            self.add("default", node, repr(2 * value + 1))

    def fields(self, names: list[str], value) -> None:
        """A field less of what is compared, hashed or kept by its name."""
        of = [*names, *self.functions[-1:]]
        if not any(HASHED.search(name.lower()) for name in of):
            return
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) > 2:
            for item in value.elts:
                self.without("field", value.elts, item)
        if isinstance(value, ast.Dict) and len(value.keys) > 1 and None not in value.keys:
            for at, key in enumerate(value.keys):
                last = at + 1 == len(value.keys)
                begin = self.span(value.values[at - 1])[1] if last else self.span(key)[0]
                end = self.span(value.values[at])[1] if last else self.span(value.keys[at + 1])[0]
                self.between("field", begin, end, "")

    def visit_Return(self, node):
        if node.value:
            self.fields([], node.value)
            if isinstance(node.value, ast.Tuple):
                for first, second in zip(node.value.elts, node.value.elts[1:], strict=False):
                    self.swap("return", first, second)
            self.visit(node.value)

    def condition(self, test) -> None:
        self.add("condition", test, f"(not ({self.text(test)}))")

    def visit_If(self, node):
        if "TYPE_CHECKING" in self.text(node.test):
            return
        # A check that only raises would raise for everybody.
        if not all(isinstance(part, ast.Raise) for part in node.body):
            self.condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.condition(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp

    def visit_comprehension(self, node):
        for test in node.ifs:
            self.condition(test)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for first, second in zip(node.values, node.values[1:], strict=False):
            other = " or " if isinstance(node.op, ast.And) else " and "
            self.between("and, or", self.span(first)[1], self.span(second)[0], other)
            self.between("term", self.span(first)[1], self.span(second)[1], "")
        self.generic_visit(node)

    def visit_Compare(self, node):
        if len(node.ops) == 1 and type(node.ops[0]) in EDGES:
            left, right = self.span(node.left)[1], self.span(node.comparators[0])[0]
            middle = self.code[left:right].decode()
            if not set("()") & set(middle):
                self.between("edge", left, right, f" {EDGES[type(node.ops[0])]} ")
        self.generic_visit(node)

    def visit_BinOp(self, node):
        texts = [part for part in (node.left, node.right) if isinstance(part, NO_NUMBERS)]
        left, right = self.span(node.left)[1], self.span(node.right)[0]
        middle = self.code[left:right].decode()
        if not any(isinstance(getattr(part, "value", ""), str) for part in texts) and not set(
            "()#"
        ) & set(middle):
            if type(node.op) in OTHER_SIGN:
                self.between("sign", left, right, f" {OTHER_SIGN[type(node.op)]} ")
            self.between("term", left, self.span(node.right)[1], "")
            if isinstance(node.op, ast.Mult | ast.Add | ast.BitAnd | ast.BitOr):
                self.between("term", self.span(node.left)[0], right, "")
            if isinstance(node.op, ast.BitAnd | ast.BitOr):
                self.between("and, or", left, right, " | " if "&" in middle else " & ")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.USub | ast.Invert | ast.Not):
            kind = "sign" if isinstance(node.op, ast.USub) else "condition"
            self.add(kind, node, f"({self.text(node.operand)})")
        if not isinstance(node.operand, ast.Constant):
            self.visit(node.operand)

    def visit_Constant(self, node):
        if type(node.value) is int:
            self.add("constant", node, str(node.value + 1))
        elif type(node.value) is float:
            self.add("constant", node, repr(2 * node.value + 1))
        elif type(node.value) is bool:
            self.add("constant", node, str(not node.value))

    def visit_Subscript(self, node):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in inside:
            if isinstance(part, ast.Slice) and not part.step and (part.lower or part.upper):
                one = ast.unparse(part)
                other = {"1:": ":-1", ":-1": "1:"}.get(one, ":")
                self.add("slice", part, other)
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            self.add("key", node.slice, repr(node.slice.value + "_"))
        self.generic_visit(node)

    def visit_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in MESSAGES:
            return
        is_method = isinstance(node.func, ast.Attribute)
        if name in TWINS and (is_method or name != "sum"):  # Python has no mean
            begin = self.span(node.func)[1] - len(name.encode())
            self.between("twin", begin, self.span(node.func)[1], TWINS[name])
        of = is_method and self.text(node.func.value)
        if name in FORGETTABLE and of and of not in MODULES:
            self.add("forgotten", node, of)
        for first, second in zip(node.args, node.args[1:], strict=False):
            kinds = {type(first), type(second)}
            if kinds <= {ast.Name, ast.Attribute, ast.Subscript} and name not in TYPED:
                self.swap("swap", first, second)
        if name == "where" and len(node.args) == 3:
            self.swap("swap", *node.args[1:])
        if name == "range":
            self.add("edge", node.args[-1], f"({self.text(node.args[-1])}) - 1")
        arguments = [*node.args, *node.keywords]
        for keyword in node.keywords:
            if keyword.arg not in HARMLESS_KEYWORDS and self.optional(keyword.arg):
                self.without("keyword", arguments, keyword)
            if keyword.arg in ("dim", "axis") and self.text(keyword.value) in ("-1", "0", "1"):
                self.add("dim", keyword.value, "-1" if self.text(keyword.value) == "0" else "0")
        if name in ("get", "pop") and node.args:
            key = getattr(node.args[0], "value", None)
            if isinstance(key, str):
                self.add("key", node.args[0], repr(key + "_"))
        for part in [node.func, *node.args, *node.keywords]:
            if getattr(part, "arg", "") not in HARMLESS_KEYWORDS:
                self.visit(part)

    def visit_Dict(self, node):
        for key in node.keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self.add("key", key, repr(key.value + "_"))
        self.generic_visit(node)


def _of_c(file: str) -> Iterator[Slip]:
    """Return the slips of C, line by line: comments, declarations and the preprocessor's lines have none."""
    changes = [
        ("edge", r"(?<=[\w)\] ])(<|>)(?= )", lambda m: m[1] + "="),
        ("edge", r"<=|>=", lambda m: m[0][0]),
        ("edge", r"==|!=", lambda m: {"==": "!=", "!=": "=="}[m[0]]),
        ("sign", r" ([+-]) ", lambda m: f" {'-' if m[1] == '+' else '+'} "),
        ("sign", r"(?<=[=(,?:] )-(?=\w)|(?<=\()-(?=\w)", lambda m: ""),
        ("term", r" [*] [\w.]+(\[[^][]*\])?(?=[;, )])", lambda m: ""),
        ("term", r"(?<=[=(] )[\w.]+ [*+] (?=\w)", lambda m: ""),
        ("and, or", r"&&|[|][|]", lambda m: {"&&": "||", "||": "&&"}[m[0]]),
        ("twin", r"\bf?(min|max)", lambda m: m[0][:-3] + {"min": "max", "max": "min"}[m[1]]),
        ("constant", r"(?<![\w.])\d+(?![\w.])", lambda m: str(int(m[0]) + 1)),
        ("term", r"(?<=\w) [-+]= ", lambda m: " = "),
    ]
    place, is_comment = 0, False
    for line in (ROOT / file).read_text().splitlines(keepends=True):
        code = line.split("//")[0]
        is_comment = is_comment or code.lstrip().startswith("/*")
        if not is_comment and line.startswith(" "):
            for kind, pattern, change in changes:
                for m in re.finditer(pattern, code):
                    begin = place + len(code[: m.start()].encode())
                    yield Slip(file, begin, begin + len(m[0].encode()), change(m), kind, None)
        is_comment = is_comment and "*/" not in line
        place += len(line.encode())


def product() -> dict[str, str]:
    """Return the room of each file of the product."""
    files = {}
    for room, places in ROOMS.items():
        for place in places:
            path = ROOT / place
            found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            for file in found:
                files.setdefault(str(file.relative_to(ROOT)), room)
    return files


def _is_optional(files: list[str]) -> Callable[[str], bool]:
    """Return who says if a keyword may be left out: no function of the product needs an argument of that name."""
    needed = set()
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_bytes())):
            if isinstance(node, ast.FunctionDef):
                given = node.args.args + node.args.posonlyargs
                has_default = node.args.defaults
                needed |= {one.arg for one in given[: len(given) - len(has_default)]}
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                needed |= {one.arg for one, default in pairs if default is None}
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.AnnAssign) and part.value is None:
                        needed.add(getattr(part.target, "id", ""))
    return lambda name: name not in needed


def places(is_executed: Callable[[str, str | None], bool]) -> dict[str, dict[str, list[Slip]]]:
    """Return the slips of each file by kind, in functions that tests execute, without those known to be harmless."""
    harmless = {tuple(line.split(" => ")[:2]) for line in HARMLESS.read_text().splitlines()}
    files = product()
    optional = _is_optional([file for file in files if file.endswith(".py")])
    found: dict[str, dict[str, list[Slip]]] = {}
    for file in files:
        is_python = file.endswith(".py")
        slips = _Places(file, optional).found if is_python else list(_of_c(file))
        kinds: dict[str, list[Slip]] = {}
        for slip in slips:
            if is_executed(file, slip.function) and slip.lines() not in harmless:
                kinds.setdefault(slip.kind, []).append(slip)
        found[file] = kinds
    return found


def draw(seed: int, count: int, room: str, is_executed) -> list[tuple[str, Slip]]:
    """Return `count` slips with their rooms, which is the given one if any."""
    rooms, found = product(), places(is_executed)
    tokens = {}
    for file in found:
        text = (ROOT / file).read_text()
        amount = sum(size.measure(text).tokens) if file.endswith(".py") else len(text) // 4
        tokens[file] = amount if found[file] and room in ("", rooms[file]) else 0
    drawn: dict[tuple, tuple[str, Slip]] = {}
    random = Random(seed)
    while len(drawn) < count:
        file = random.choices([*tokens], [*tokens.values()])[0]
        slip = random.choice(found[file][random.choice(sorted(found[file]))])
        if file.endswith(".py"):
            try:
                compile(slip.applied(), file, "exec")
            except SyntaxError:
                continue
        drawn.setdefault(slip[:4], (rooms[file], slip))
    return [*drawn.values()]
