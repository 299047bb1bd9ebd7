"""Record which functions of the product each test executes, and the CPU seconds that it takes.

`pytest -p tests.tools.executed` appends one JSON line per test to the file that FUSED_RL_EXECUTED names: the test's
name, its outcome, its seconds with those of its processes, and its functions by file. `tests.tools.slips` reads them,
and has a file with the names of the tests that it wants, FUSED_RL_ONLY.
Processes that a test starts are seen as well, because `tests/tools/child` stands first on their path.
"""

import ast
import builtins
import hashlib
import json
import marshal
import os
import resource
import sys
import tempfile
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(tempfile.gettempdir()) / f"fused-rl-executed-{os.getuid()}"  # compiled modules
NOTES = (
    "FUSED_RL_EXECUTED_NOTES"  # the file to which processes of the current test add their functions
)


class Loader(SourceFileLoader):
    """Loads a module whose functions say first that they are called.

    Kernels do not: Triton reads their text. A trace function would need no loader, and make Python twice as slow.
    """

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        stamp = hashlib.sha256(self.get_data(path) + path.encode()).hexdigest()
        compiled = CACHE / f"{stamp}-{sys.version_info.minor}"
        if compiled.exists():
            return marshal.loads(compiled.read_bytes())
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                at = 1 if ast.get_docstring(node, clean=False) is not None else 0
                name = f"{os.path.relpath(os.path.realpath(path), ROOT)}:{node.name}"
                call = ast.parse(f"__called__({name!r})").body[0]
                for part in ast.walk(call):
                    if hasattr(part, "lineno"):
                        part.lineno = part.end_lineno = node.body[0].lineno
                node.body.insert(at, call)
        code = compile(tree, path, "exec", dont_inherit=True)
        CACHE.mkdir(exist_ok=True)
        written = tempfile.NamedTemporaryFile(dir=CACHE, delete=False)  # noqa: SIM115
        written.write(marshal.dumps(code))
        written.close()
        os.replace(written.name, compiled)
        return code


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] != "fused_rl":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def install(called) -> None:
    """Call `called` with "file:function" at each call of a function of the product."""
    builtins.__called__ = called
    sys.meta_path.insert(0, Finder)


def cpu_seconds() -> float:
    """User and system seconds of this process and of those of its children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


class Recorder:
    """The plugin: one line per test."""

    def __init__(self, file: str):
        self.file = file
        self.called: set[str] = set()
        install(lambda name: self.called.add(name))
        self.of_fixture: dict[int, set[str]] = {}  # what fixtures that live longer have called
        self.outcome = "passed"
        self.notes = tempfile.NamedTemporaryFile("w+", suffix=".executed")  # noqa: SIM115
        os.environ[NOTES] = self.notes.name
        child = str(ROOT / "tests/tools/child")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [child, *filter(None, [os.environ.get("PYTHONPATH")])]
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        before, self.called = self.called, set()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.of_fixture[id(fixturedef)] = self.called
            self.called = before | self.called

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.called, self.outcome = set(), "passed"
        if "torch._dynamo.config" in sys.modules:  # a graph would break at every call that is noted
            sys.modules["torch._dynamo.config"].ignore_logging_functions.add(builtins.__called__)
        self.notes.seek(0)
        self.notes.truncate()
        begin = cpu_seconds()
        try:
            return (yield)
        finally:
            seconds = cpu_seconds() - begin
            called = self.called | set(Path(self.notes.name).read_text().split())
            for definitions in item._fixtureinfo.name2fixturedefs.values():
                for definition in definitions:
                    called |= self.of_fixture.get(id(definition), set())
            line = {
                "test": item.nodeid,
                "outcome": self.outcome,
                "seconds": round(seconds, 3),
                "called": by_file(called),
            }
            with open(self.file, "a") as file:
                file.write(json.dumps(line) + "\n")

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed":
            self.outcome = report.outcome


def by_file(called: set[str]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for name in sorted(called):
        file, _, function = name.rpartition(":")
        files.setdefault(file, []).append(function)
    return files


def pytest_collection_modifyitems(config, items):
    if os.environ.get("FUSED_RL_ONLY"):
        wanted = set(Path(os.environ["FUSED_RL_ONLY"]).read_text().splitlines())
        # A slip may give a case another name.
        renamed = {name.split("[")[0] for name in wanted - {item.nodeid for item in items}}
        items[:] = [
            item for item in items if item.nodeid in wanted or item.nodeid.split("[")[0] in renamed
        ]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before the first conftest, as what these import would stay without its calls."""
    if os.environ.get("FUSED_RL_EXECUTED"):
        early_config.pluginmanager.register(Recorder(os.environ["FUSED_RL_EXECUTED"]))


def record_child() -> None:
    """In a process that a test has started: append what is called to the test's notes, once."""
    notes = open(os.environ[NOTES], "a", buffering=1)  # noqa: SIM115 — as long as the process
    seen = set()

    def called(name):
        if name not in seen:
            seen.add(name)
            notes.write(name + "\n")

    install(called)
