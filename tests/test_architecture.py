"""The direction of imports, read from the syntax trees of the project's files."""

import ast
import functools
import graphlib
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
DATA = {"base", "data"}
MIDDLE = DATA | {"models", "rollouts", "run", "servers"}
ROOMS = {
    "base": set(),
    "data": {"base"},
    "models": DATA,
    "rollouts": DATA,
    "run": DATA,
    "servers": DATA | {"rollouts"},
    "policy": MIDDLE | {"scorers"},
    "scorers": MIDDLE,
    "commands": MIDDLE | {"policy", "scorers"},
}
# What stands above the rooms and all of them may import: it imports none of the algorithms.
OPEN = ("fused_rl.trainers.options", "fused_rl.trainers.cli")
# Room of fused_rl/ -> the rooms that its files may import. What stands on the top floor may import any of them, and of
# it a room imports the oracle alone; integrations import what a user does.
LIBRARY_ROOMS = {
    "base": {"cpu"},
    "cpu": set(),
    "objectives": {"base"},
    "ops": {"base", "cpu", "objectives"},
    "integrations": {"base", "cpu", "objectives", "ops"},
}
ABOVE = {"fused_rl.reference": set(LIBRARY_ROOMS), "fused_rl": {"integrations"}}
# Every file of trainers/ that has a command of its own to train with.
ALGORITHMS = {
    path.stem for path in (ROOT / "trainers").glob("*.py") if "\ndef train(" in path.read_text()
}
# Host packages belong to the trainers and to integrations, which import theirs lazily.
HOSTS = ("deepspeed", "transformers", "datasets")


# What a run needs only where an option or a command names it, by module or by room of trainers/. Imported inside of a
# function, it is nothing that a reader of an algorithm has to know.
SATELLITES = {
    "base.deepspeed_file": "--deepspeed",
    "trl_names": "an option that is unknown",
    "commands": "a command of its own",
    "servers": "--server",
    "policy.signal": "an evaluation before training",
    "rollouts.lag": "--lag",
    "rollouts.mismatch": "a sampler that reports log-probabilities",
    "rollouts.tools": "--tools and --environment",
    "models.adapters": "--lora_rank, or a model that was saved as adapters",
    "models.checkpointing": "--gradient_checkpointing",
    "models.compiled": "--torch_compile",
    "models.four_bit": "--load_in_4bit",
    "models.masked_rows": "rows under a mask: on a CPU, or with eager attention",
    "models.sequences": "--sequence_parallel",
    "run.dry_run": "--dry_run",
    "run.fitting": "a GPU, whose micro-batches are measured",
    "run.hub": "--push_to_hub",
    "run.rules": "the doctor, on rank 0",
    "scorers.functions": "--verifiers module:function",
    "scorers.math": "--verifiers math",
    "scorers.reward_model": "--verifiers reward_model:FOLDER",
}


# Programs that draw or follow imports do not follow the links in fused_rl/, so within these imports are relative.
RELATIVE = ("fused_rl.trainers.", "fused_rl.kernels.")


class Import(NamedTuple):
    """An import statement of one module."""

    path: Path
    line: int
    module: str
    names: tuple[str, ...]
    """The names that are taken out of it; () for `import module`."""


@functools.cache
def imports(path):
    """Return every import of a file, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [Import(path, node.lineno, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.append(Import(path, node.lineno, absolute(path, node), names))
        elif isinstance(node, ast.Call) and _is_import_module(node.func):
            (name, *_) = node.args
            if isinstance(name, ast.Constant):
                found.append(Import(path, node.lineno, name.value, ()))
    return found


def absolute(path, node):
    """Return the module of an import from, which is relative within trainers/ and within kernels/ and nowhere else."""
    name = module_of(path)
    folder = next((top for top in RELATIVE if name.startswith(top)), None)
    if node.level:
        assert folder, f"{path}: relative import; write fused_rl.… in full"
        return ".".join([*name.split(".")[: -node.level], *filter(None, [node.module])])
    assert not folder or not f"{node.module}.".startswith(folder), (
        f"{path}: write a relative import"
    )
    return node.module


def _is_import_module(function):
    """Return True for importlib.import_module and __import__, which an import may hide behind."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def module_of(path):
    """Return the name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    if parts[0] in ("kernels", "trainers", "recipes"):
        parts = ("fused_rl", *parts)
    return ".".join(parts)


def folder_of(module):
    """Return the folder that a module of ours stands in, or None."""
    top, _, rest = module.partition(".")
    second = rest.partition(".")[0]
    if top == "fused_rl":
        return second if second in ("kernels", "trainers", "recipes") else "fused_rl"
    return top if top in FOLDERS else None


def room_of(module):
    """Return the room of trainers/ that a module stands in; None for the top floor and everything else."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["fused_rl", "trainers"] and len(parts) > 3 else None


def library_room_of(module):
    """Return the room of fused_rl/ that a module stands in; None for its top floor."""
    second = module.split(".")[1:2]
    return second[0] if second and second[0] in LIBRARY_ROOMS else None


def files(folder):
    """Return the modules of a folder; the links in fused_rl/ lead to other folders' modules."""
    linked = ("kernels", "trainers", "recipes") if folder == "fused_rl" else ()
    found = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in found if path.relative_to(ROOT / folder).parts[0] not in linked]


MODULES = {module_of(path): path for path in chain.from_iterable(map(files, FOLDERS))}


def targets(imported):
    """Yield the modules of ours that an import reaches: a submodule, else the module that a name is taken from."""
    for name in imported.names:
        submodule = f"{imported.module}.{name}"
        if submodule in MODULES or imported.module in MODULES:
            yield submodule if submodule in MODULES else imported.module
    if not imported.names and imported.module in MODULES:
        yield imported.module


def violations(folder, imported):
    """Yield what is wrong with an import in a folder: an upward direction, or a package that does not belong."""
    reached = [f"{imported.module}.{name}" for name in imported.names] or [imported.module]
    top = imported.module.split(".")[0]
    where = f"{imported.path}:{imported.line}: {imported.module}"
    ours = {folder_of(module) for module in reached} - {None}
    if top in ("kernels", "trainers"):
        yield f"{where}: write fused_rl.{imported.module}"
    elif ours - FOLDERS[folder]:
        yield f"{where}: {folder} must not import {ours - FOLDERS[folder]}"
    elif (
        folder == "kernels"
        and not ours
        and top not in ("torch", "triton", *sys.stdlib_module_names)
    ):
        yield f"{where}: a kernel imports torch and triton alone"
    elif folder == "fused_rl" and top in HOSTS:
        yield f"{where}: the library must not import it"
    elif folder == "trainers" and top == "triton":
        yield f"{where}: if a trainer needs a kernel, an op is missing"
    for name in imported.names:
        if ours and name.startswith("_") and not name.startswith("__"):
            yield f"{where}: {name} is private to its module"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_downwards(folder):
    paths = [path for path in files(folder) if path.parent.name != "integrations"]
    found = chain.from_iterable(
        violations(folder, imported) for path in paths for imported in imports(path)
    )
    assert paths and list(found) == []


def test_no_file_imports_itself_by_way_of_others():
    edges = {}
    for module, path in MODULES.items():
        edges[module] = sorted(set(chain.from_iterable(map(targets, imports(path)))) - {module})
    graphlib.TopologicalSorter(edges).prepare()  # a CycleError names the circle


def test_rooms_import_those_below_and_trainers_no_trainer():
    wrong = []
    for path in files("trainers"):
        room, above = (
            room_of(module_of(path)),
            {f"fused_rl.trainers.{name}" for name in ALGORITHMS - {path.stem}},
        )
        for target in chain.from_iterable(map(targets, imports(path))):
            other = room_of(target)
            reaches_down = other == room or other in ROOMS.get(room, ())
            is_open = target in OPEN and room != "base"
            allowed = room is None or reaches_down or is_open
            if target in above or not (allowed or folder_of(target) != "trainers"):
                wrong.append(f"{path} imports {target}")
    assert wrong == [] and {"sft", "reward", "grpo", "ppo"} <= ALGORITHMS


def top_level(path):
    """Return the modules of ours that a file imports when it is imported itself: none of those inside of functions."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = absolute(path, node)
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names & MODULES.keys()


def test_an_algorithm_reaches_a_satellite_only_where_an_option_names_it():
    begins = tuple(f"fused_rl.trainers.{name}" for name in SATELLITES)
    assert all(any(module.startswith(each) for module in MODULES) for each in begins)
    wrong = []
    for algorithm in ALGORITHMS:
        waiting, seen = [f"fused_rl.trainers.{algorithm}"], set()
        while waiting:
            module = waiting.pop()
            seen.add(module)
            for target in top_level(MODULES[module]) - seen:
                if target.startswith(begins):
                    wrong.append(f"{algorithm}: {module} imports {target}")
                waiting.append(target)
    assert wrong == []


def test_options_import_nothing_of_a_run():
    names = top_level(MODULES["fused_rl.trainers.options"])
    assert {room_of(name) for name in names} <= {None, "base"}


def test_rooms_of_the_library_import_those_below():
    wrong = []
    for path in files("fused_rl"):
        room = library_room_of(module_of(path))
        for target in chain.from_iterable(map(targets, imports(path))):
            if room is None or folder_of(target) != "fused_rl" or room in ABOVE.get(target, ()):
                continue
            if library_room_of(target) not in LIBRARY_ROOMS[room] | {room}:
                wrong.append(f"{path} imports {target}")
    assert wrong == []


# What makes a tensor of the default dtype, or of that of what it is given; and what has a dtype, but no device.
OF_A_DTYPE = {
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
}
OF_A_DTYPE |= {"tensor", "zeros"}
OF_A_DEVICE = {"arange", "as_tensor", "randint", "randperm"}


@pytest.mark.parametrize("folder", ["kernels", "fused_rl"])
def test_every_allocation_names_its_dtype_and_device(folder):
    """A model's code may call torch.set_default_dtype and torch.set_default_device; Tensor.new_zeros has both."""
    wrong = []
    for path in files(folder):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "torch":
                continue
            needed = {"dtype", "device"} if node.attr in OF_A_DTYPE else {"device"}
            named = {keyword.arg for keyword in calls[node].keywords} if node in calls else set()
            if node.attr in OF_A_DTYPE | OF_A_DEVICE and not needed <= named:
                wrong.append(f"{path}:{node.lineno}: torch.{node.attr} without {needed - named}")
    assert wrong == []
