"""Every way of installing and importing the package works."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PARTS = ("kernels", "fused_rl", "trainers")


def run_python(code, *, cwd, python=sys.executable, **env):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_import_with_torch_alone(tmp_path):
    """`import fused_rl`, the reference and the CPU path work where triton, deepspeed and transformers do not exist."""
    code = """
        import importlib.abc, sys

        absent = "triton deepspeed transformers datasets peft accelerate trl".split()

        class Absent(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in absent:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())
        import torch, fused_rl
        import fused_rl.integrations.trl  # which imports its host when it patches it
        from fused_rl import reference
        logits = torch.randn(4, 50, requires_grad=True)
        targets = torch.tensor([1, 2, 3, 4])
        out = fused_rl.token_logprobs(logits, targets)
        out.logprobs.sum().backward()
        torch.testing.assert_close(out.entropy, reference.token_logprobs(logits, targets).entropy)
        print(sorted(m for m in sys.modules if m.split(".")[0] in ("triton", "deepspeed", "transformers")))
    """
    assert run_python(code, cwd=tmp_path, PYTHONPATH=str(ROOT), TRITON_INTERPRET="0") == "[]"


USE = """
    import importlib.util
    others = [importlib.util.find_spec(name) for name in ("kernels", "trainers", "recipes", "tests")]
    assert [spec for spec in others if spec and not spec.origin] == [], "folders of ours are packages"
    import fused_rl, torch
    from fused_rl.kernels import logprob
    import fused_rl.trainers.cli as cli
    fused_rl.token_logprobs(torch.zeros(1, 3), torch.tensor([0]))
    from fused_rl.recipes.demo import RECIPES
    assert (RECIPES / "demo_grpo.yaml").is_file(), RECIPES
    from pathlib import Path
    assert (Path(fused_rl.__file__).parent / "cpu" / "rows.c").is_file()
    print(fused_rl.__file__, logprob.__file__, cli.__file__, sep="\\n")
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the checkout, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("sources")
    for name in (*PARTS, "recipes", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture
def environment(tmp_path):
    """An empty virtual environment that sees this one's packages, but not its fused_rl."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(
        run_python(
            "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path, python=python
        )
    )
    packages = site / "packages"
    packages.mkdir()
    for entry in Path(pytest.__file__).parent.parent.iterdir():
        if "fused_rl" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    (site / "packages.pth").write_text(f"{packages}\n")
    return python


def sdist(sources, folder):
    """The source distribution of a checkout: the links are folders in it."""
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    return folder / run_python(code, cwd=sources).splitlines()[-1]


def pip_install(python, *arguments):
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
    ]
    done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
# The last two are editable modes.
@pytest.mark.parametrize("way", ["wheel", "sdist", "lenient", "strict"])
def test_installed_package_works_from_another_folder(way, sources, environment, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if way == "wheel":
        pip_install(environment, sources)
    elif way == "sdist":
        pip_install(environment, sdist(sources, tmp_path))
    else:
        pip_install(environment, "-e", sources, "--config-settings", f"editable_mode={way}")
    files = run_python(USE, cwd=elsewhere, python=environment, TRITON_INTERPRET="1").splitlines()
    home = sources if way in ("lenient", "strict") else environment.parent.parent
    assert all(Path(f).is_relative_to(home) for f in files), files
    help_text = run_python(
        "from fused_rl.trainers.cli import main; import sys; sys.argv = ['fused-rl', '--help']\n"
        "try: main()\nexcept SystemExit: pass",
        cwd=elsewhere,
        python=environment,
    )
    assert "grpo" in help_text


@pytest.mark.slow
def test_type_checkers_see_an_editable_installation(sources, environment, tmp_path):
    """From another folder, trainers included: in strict mode nothing is unknown, and every mistake is found."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    pyright = shutil.which("pyright", path=places)
    if pyright is None:
        pytest.skip("pyright is not installed; the extra `dev` has it")
    pip_install(environment, "-e", sources)
    (tmp_path / "typed.py").write_text((ROOT / "tests" / "typed.py").read_text())
    command = [pyright, "--pythonpath", environment, "typed.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_checkout_beside_the_hugging_face_package_kernels(tmp_path):
    """Even from the checkout's root, `import kernels` finds the other package and ours stays reachable."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("owner = 'somebody else'")
    code = "import kernels; from fused_rl.kernels import logprob; print(kernels.owner, logprob.__name__)"
    out = run_python(
        code, cwd=ROOT, PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]), TRITON_INTERPRET="1"
    )
    assert out == "somebody else fused_rl.kernels.logprob"


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory):
    """What `pip install .` leaves: the package, torch and what it needs, none of the extras."""
    places = tmp_path_factory.mktemp("installed")
    installed = Path(torch.__file__).parent.parent
    others = {"deepspeed", "transformers", "datasets", "pydantic", "yaml", "rich", "fused_rl"}
    for path in installed.iterdir():
        if path.name.split(".")[0].split("-")[0] not in others:
            (places / path.name).symlink_to(path)
    (places / "fused_rl").symlink_to(ROOT / "fused_rl")
    return places


COMMAND = "import sys; sys.argv[1:] = {}; from fused_rl.trainers.cli import main; main()"


def command(places, *words):
    """(exit status, stdout, stderr) of `fused-rl` there, without what else this Python has installed."""
    environment = {"PYTHONPATH": str(places), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    code = [sys.executable, "-S", "-c", COMMAND.format(list(words))]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, cwd=places)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_without_extras_help_is_help_and_a_command_says_what_to_install(without_extras):
    status, out, _ = command(without_extras, "--help")
    assert status == 0 and out.startswith("usage: fused-rl COMMAND")
    status, out, err = command(without_extras, "grpo", "--model", "x")
    assert (status, out) == (1, "") and err.count("\n") == 1, err
    assert err.startswith("fused-rl grpo: error: ")
    assert err.endswith(" is not installed: pip install 'fused-rl[train]'\n")
