"""The storeys of the project, over the syntax tree: who may import whom, no circle among files, no private name abroad.

A folder comes under a rule by standing in `FOLDERS` with the folders below it, and in the rule's parametrization.
`python -m tests.test_architecture | tred | dot -Tsvg -o docs/imports.svg` draws the imports between rooms (graphviz).
"""

import ast
import functools
import sys
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

# Folder -> the folders whose modules its files may import.
FOLDERS = {
    "kernels": {"kernels"},
    "fused_rl": {"kernels", "fused_rl"},
    "trainers": {"fused_rl", "trainers"},
    "recipes": {"fused_rl", "trainers", "recipes"},
    "bench": {"kernels", "fused_rl", "trainers", "recipes", "bench"},
}
# Room of trainers/ -> the rooms that its files may import; the algorithms on the top floor and commands/ import any.
GROUND = {"options"}
BASE = GROUND | {"base"}
DATA = BASE | {"data", "metrics"}
MIDDLE = DATA | {"models", "rollouts", "run"}
UPPER = MIDDLE | {"servers", "samplers"}
ROOMS = {
    "options": set(),
    "base": GROUND,
    "data": BASE,
    "metrics": BASE,
    "models": DATA,
    "rollouts": DATA,
    "run": DATA,
    "servers": DATA | {"rollouts"},
    "samplers": DATA | {"rollouts", "servers"},
    "policy": UPPER,
    "workers": set(),
    "scorers": UPPER | {"workers"},
    "commands": UPPER | {"policy", "scorers"},
}
# Every file of trainers/ that has a command of its own to train with.
ALGORITHMS = {path.stem for path in (ROOT / "trainers").glob("*.py") if "\ndef train(" in path.read_text()}
WHOLE = ("kernels", "fused_rl", "trainers", "recipes", "bench")  # folders without circles and private names of others
# Host packages belong to the trainers and to integrations, which import theirs lazily.
HOSTS = ("deepspeed", "transformers", "datasets")


class Import(NamedTuple):
    path: Path
    module: str
    """In full; a name of another package stays as it is written."""
    names: tuple[str, ...]
    """What is taken out of it; () for `import module`."""


def imports(path):
    """Every import of a file, at its top or inside a function; relative ones are refused."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, alias.name, ())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write fused_rl.… in full"
            yield Import(path, node.module, tuple(alias.name for alias in node.names))


def module_of(path, root=ROOT):
    """The name under which a file is imported."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    if parts[0] in ("kernels", "trainers", "recipes"):
        parts = ("fused_rl", *parts)
    return ".".join(parts)


def folder_of(module):
    """The folder that a module of ours stands in, or None."""
    top, _, rest = module.partition(".")
    second = rest.partition(".")[0]
    if top == "fused_rl":
        return second if second in ("kernels", "trainers", "recipes") else "fused_rl"
    return top if top in FOLDERS else None


def files(folder, root=ROOT):
    """Its modules; the links in fused_rl/, which are folders in a source distribution, are others' modules."""
    found = sorted((root / folder).rglob("*.py"))
    linked = ("kernels", "trainers", "recipes") if folder == "fused_rl" else ()
    return [path for path in found if path.relative_to(root / folder).parts[0] not in linked]


def modules(folders, root=ROOT):
    paths = chain.from_iterable(files(folder, root) for folder in folders)
    return {module_of(path, root): path for path in paths}


def targets(imported, known):
    """The modules of `known` that an import reaches: a submodule, else the module that a name is taken from."""
    for name in imported.names:
        if f"{imported.module}.{name}" in known:
            yield f"{imported.module}.{name}"
        elif imported.module in known:
            yield imported.module
    if not imported.names and imported.module in known:
        yield imported.module


def circle(folders, root=ROOT):
    """A list of modules each of which imports the next, the last one the first; [] where there is none."""
    known = modules(folders, root)
    edges = {}
    for module, path in known.items():
        found = chain.from_iterable(targets(imported, known) for imported in imports(path))
        edges[module] = sorted({*found} - {module})
    done = set()

    def walk(module, trail):
        if module in trail:
            return trail[trail.index(module) :]
        if module in done:
            return []
        for target in edges[module]:
            if found := walk(target, [*trail, module]):
                return found
        done.add(module)
        return []

    for module in edges:
        if found := walk(module, []):
            return found
    return []


def room_of(module):
    """The room of trainers/ that a module stands in; None for those of the top floor and everything else."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["fused_rl", "trainers"] and len(parts) > 3 else None


def place_of(module):
    """Where a module stands, for the drawing: a room of trainers/, the trainers on its top floor, or a folder."""
    room = room_of(module)
    if room is not None:
        return f"trainers/{room}"
    parts = module.split(".")
    return (
        f"fused_rl/{parts[1]}"
        if parts[0] == "fused_rl" and parts[1:2] in (["cpu"], ["integrations"])
        else folder_of(module)
    )


def drawing(folders, root=ROOT):
    """The imports between rooms as a graph for graphviz, arrows to what is imported."""
    known = modules(folders, root)
    places, arrows = {}, set()
    for module, path in known.items():
        names = places.setdefault(place_of(module), [])
        names += [path.stem] if path.stem != "__init__" else []
        for imported in imports(path):
            arrows |= {(place_of(module), place_of(target)) for target in targets(imported, known)}
    lines = ["digraph imports {", "rankdir=TB; node [shape=box, fontsize=11]; edge [arrowsize=0.5, color=grey40];"]
    for place, names in places.items():
        rows = [", ".join(names[i : i + 6]) for i in range(0, len(names), 6)]
        label = "\\n".join([place, *rows])
        lines.append(f'"{place}" [label="{label}"];')
    lines += [f'"{place}" -> "{other}";' for place, other in sorted(arrows) if place != other]
    return "\n".join([*lines, "}"])


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_names(path, root=ROOT):
    """Names with a leading underscore that a file takes from another module of ours, imported or by attribute."""
    known = modules(FOLDERS, root)
    bound = {}  # a name of this file -> the module of ours that it stands for
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and folder_of(node.module or ""):
            for alias in node.names:
                if is_private(alias.name):
                    yield f"{path}:{node.lineno}: from {node.module} import {alias.name}"
                if f"{node.module}.{alias.name}" in known:
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known:
                    bound[alias.asname or alias.name] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in bound:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def violations(folder, path):
    """Imports against the direction kernels <- fused_rl <- trainers <- recipes, and packages that do not belong."""
    for imported in imports(path):
        reached = [f"{imported.module}.{name}" for name in imported.names] or [imported.module]
        top = imported.module.split(".")[0]
        if top in ("kernels", "trainers"):
            yield f"{path}: import {imported.module}: write fused_rl.{imported.module}"
            continue
        ours = {folder_of(module) for module in reached} - {None}
        for other in sorted(ours - FOLDERS[folder]):
            yield f"{path}: {folder} imports {imported.module}, of {other}"
        if folder == "kernels" and not ours and top not in ("torch", "triton", *sys.stdlib_module_names):
            yield f"{path}: a kernel imports {imported.module}"
        if folder == "fused_rl" and top in HOSTS:
            yield f"{path}: the library imports {imported.module}"
        if folder == "trainers" and top == "triton":
            yield f"{path}: a trainer imports triton: if it needs a kernel, an op is missing"


def rising_arrows(path, root=ROOT):
    """Imports of a room's file from a room, or a file of the top floor, that is not below it."""
    room = room_of(module_of(path, root))
    known = modules(["trainers"], root)
    for imported in imports(path):
        for target in targets(imported, known):
            if room_of(target) != room and room_of(target) not in ROOMS[room]:
                yield f"{path}: {room} imports {target}"


def found_in(paths, rule):
    """What a rule finds in all of the files."""
    return list(chain.from_iterable(map(rule, paths)))


def algorithm_imports(path):
    """Of the other trainers' algorithms: what two share has a room below."""
    if path.stem not in ALGORITHMS:
        return
    others = {f"fused_rl.trainers.{name}" for name in ALGORITHMS if name != path.stem}
    for imported in imports(path):
        for target in targets(imported, others):
            yield f"{path}: {target}"


@pytest.mark.parametrize("folder", ["kernels", "fused_rl", "trainers", "recipes"])
def test_import_direction(folder):
    paths = [path for path in files(folder) if path.parent.name != "integrations"]
    assert paths
    assert found_in(paths, functools.partial(violations, folder)) == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("kernels", "from fused_rl import losses"),
        ("kernels", "import transformers"),
        ("fused_rl", "def f():\n    import deepspeed"),
        ("fused_rl", "from fused_rl.trainers import engine"),
        ("fused_rl", "from fused_rl import trainers"),
        ("trainers", "import triton.language as tl"),
        ("trainers", "from fused_rl.kernels import logprob"),
        ("trainers", "from fused_rl import recipes"),
        ("trainers", "import kernels.logprob"),
        ("recipes", "import bench.measure"),
    ],
)
def test_import_direction_is_enforced(folder, source, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(violations(folder, path))


def test_no_file_imports_itself_by_way_of_others():
    """Inside a function too: an import that hides there from a circle is one."""
    assert circle(WHOLE) == []


@pytest.mark.parametrize("late", ["from fused_rl.kernels import a", "def f():\n    import fused_rl.kernels.a"])
def test_circles_are_found(late, tmp_path):
    (tmp_path / "kernels").mkdir()
    sources = {"a": "from fused_rl.kernels.b import x", "b": "import fused_rl.kernels.c", "c": late, "d": "import os"}
    for name, source in sources.items():
        (tmp_path / "kernels" / f"{name}.py").write_text(source)
    found = circle(["kernels"], tmp_path)
    assert sorted(found) == ["fused_rl.kernels.a", "fused_rl.kernels.b", "fused_rl.kernels.c"]
    (tmp_path / "kernels" / "c.py").write_text("from fused_rl.kernels.d import y")
    assert circle(["kernels"], tmp_path) == []


def test_every_file_of_the_trainers_stands_in_a_room_that_the_table_names():
    rooms = {path.parent.name for path in files("trainers")} - {"trainers"}
    assert rooms == set(ROOMS)
    top = {path.stem for path in (ROOT / "trainers").glob("*.py")}
    assert top == ALGORITHMS | {"cli"} and len(top) <= 6


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_one_above_or_beside_it(room):
    assert found_in(files(f"trainers/{room}"), rising_arrows) == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_small(room):
    assert sum(len(path.read_text().splitlines()) for path in files(f"trainers/{room}")) <= 1400


def test_rising_arrows_are_found(tmp_path):
    for name in ("run/loop.py", "models/lora.py", "data/rows.py", "grpo.py"):
        (tmp_path / "trainers" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "trainers" / name).write_text("")
    sources = ["from fused_rl.trainers.models import lora", "from fused_rl.trainers.models.lora import x"]
    for source in [
        *sources,
        "from fused_rl.trainers import grpo",
        "def f():\n    import fused_rl.trainers.models.lora",
    ]:
        (tmp_path / "trainers" / "run" / "loop.py").write_text(source)
        assert list(rising_arrows(tmp_path / "trainers" / "run" / "loop.py", tmp_path)), source
    (tmp_path / "trainers" / "run" / "loop.py").write_text("from fused_rl.trainers.data import rows")
    assert not list(rising_arrows(tmp_path / "trainers" / "run" / "loop.py", tmp_path))


@pytest.mark.parametrize("folder", WHOLE)
def test_no_private_name_of_another_module(folder):
    assert found_in(files(folder), private_names) == []


@pytest.mark.parametrize(
    "source",
    [
        "from fused_rl.kl import _token_kl",
        "from fused_rl import kl\nkl._token_kl",
        "import fused_rl.kl\nfused_rl.kl._token_kl(1)",
        "def f():\n    from fused_rl.kernels import logprob as module\n    return module._temperature",
    ],
)
def test_private_names_are_found(source, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert len(list(private_names(path))) == 1
    path.write_text("from fused_rl import kl\nkl.__name__, kl.token_kl, self._mine, torch._dynamo")
    assert list(private_names(path)) == []


def whole_configs(paths):
    """(file, function) of every parameter that is the whole config of a run, and not the group of options it reads."""
    trees = {path: ast.parse(path.read_text()) for path in paths}
    nodes = chain.from_iterable(map(ast.walk, trees.values()))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    whole = {"RunConfig"}
    for _ in classes:  # as deep as inheritance can be
        whole |= {node.name for node in classes if whole & {ast.unparse(base) for base in node.bases}}
    for path, tree in trees.items():
        made = [node for node in tree.body if isinstance(node, ast.Assign)]
        bounds = tuple(f"bound={name})" for name in whole)
        variables = {ast.unparse(node.targets[0]) for node in made if ast.unparse(node.value).endswith(bounds)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                for argument in arguments:
                    if argument.annotation is not None and ast.unparse(argument.annotation) in whole | variables:
                        yield path, node.name


def test_few_functions_take_the_whole_config_of_a_run():
    """The algorithms and run/ do; a room takes the group of options that it reads."""
    assert len(list(whole_configs(files("trainers")))) <= 25


def test_whole_configs_are_found(tmp_path):
    path = tmp_path / "rooms.py"
    path.write_text(
        "class A(RunConfig): ...\nclass B(Group, A): ...\nC = TypeVar('C', bound=B)\nD = TypeVar('D', bound=Group)\n"
        "def f(config: B, *, other: A): ...\ndef g(config: C) -> C: ...\ndef h(config: D, group: Group): ...\n"
    )
    assert [name for _, name in whole_configs([path])] == ["f", "f", "g"]


def test_no_trainer_imports_a_trainer():
    paths = [path for path in files("trainers") if path.stem in ALGORITHMS]
    assert {"sft", "reward", "grpo", "ppo"} <= ALGORITHMS
    assert found_in(paths, algorithm_imports) == []


@pytest.mark.parametrize(
    "source",
    [
        "from fused_rl.trainers import grpo",
        "def f():\n    import fused_rl.trainers.sft",
        "from fused_rl.trainers.sft import train",
    ],
)
def test_trainers_of_trainers_are_found(source, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(source)
    assert list(algorithm_imports(path))


def test_no_package_named_kernels_or_trainers():
    for part in ("kernels", "trainers"):
        assert not (ROOT / part / "__init__.py").exists(), f"{part}/__init__.py would shadow another package"


if __name__ == "__main__":
    print(drawing(["recipes", "trainers", "fused_rl", "kernels"]))
