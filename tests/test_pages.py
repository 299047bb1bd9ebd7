"""The pages of docs/: links lead somewhere, names exist, and the tutorial runs."""

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_rl
from fused_rl.trainers import cli
from fused_rl.trainers.run.parse import parse
from tests.marks import slow
from tests.trainers import tiny

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
README = ROOT / "README.md"
TUTORIAL = (DOCS / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(bash|python|text)\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=[page.stem for page in PAGES])
def test_a_link_to_a_file_leads_to_one(path):
    """On a Git host; `make docs` looks for anchors too."""
    links = re.findall(
        r"\]\(([^)#\s]+)",
        re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE),
    )
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []
    outside = [link for link in local if DOCS not in (path.parent / link).resolve().parents]
    assert path.name == "README.md" or outside == [], "a site of docs/ alone does not have it"


def test_the_site_has_every_page_and_the_api_every_public_name():
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages == listed
    named = set(
        re.findall(
            r"^::: fused_rl\.(\w+)$", (DOCS / "api" / "library.md").read_text(), re.MULTILINE
        )
    )
    assert named == set(fused_rl.__all__)


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page):
    """The complete command lines in a page's blocks of bash."""
    sources = "".join(re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)).replace(
        "\\\n", " "
    )
    lines = [
        shlex.split(line, comments=True)
        for line in sources.splitlines()
        if line.startswith("fused-rl")
    ]
    return [words for words in lines if "…" not in words]


COMMANDS = [words for path in PAGES for words in commands(path.read_text())]
CONFIGS = {name: listed.config_class() for name, listed in cli.COMMANDS.items() if listed.config}


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(words[1:4:2]))
def test_a_page_names_commands_and_options_that_exist(words):
    assert words[1] in cli.COMMANDS
    assert words[1] not in CONFIGS or parse(CONFIGS[words[1]], words[2:])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_page_of_a_command_names_its_options(name):
    """In the text, and in the first column of its tables of options."""
    file, _, section = cli.COMMANDS[name].page.partition("#")
    page = (DOCS / file).read_text()
    if section:
        page = page.split(f"## {section.capitalize()}\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`--(\w+)(?!-)\b", page))
    for table in re.findall(r"^\| option \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE):
        cells = [line.split("|")[1] for line in table.splitlines()]
        named |= set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert named and named - CONFIGS[name].model_fields.keys() == set()


def test_the_list_of_trainers_has_every_file_that_trains_and_their_pages():
    files = (ROOT / "trainers").glob("*.py")
    assert {*cli.TRAINERS} == {path.stem for path in files if "\ndef train(" in path.read_text()}
    assert [CONFIGS[name].command for name in CONFIGS] == [*CONFIGS]
    pages = {listed.page for listed in cli.TRAINERS.values()}
    assert pages == {f"trainers/{path.name}" for path in (DOCS / "trainers").iterdir()}


@pytest.mark.usefixtures("cpu")
def test_the_run_of_the_readme_trains(tmp_path):
    """On a tiny model, for a step."""
    example = next(block for block in python_blocks(README) if "train(" in block)
    model = tiny.model_folder(tmp_path / "model")
    folder = f"{tmp_path}/run"
    source = example.replace("Qwen/Qwen2.5-0.5B-Instruct", model)
    small = f'steps=1, prompts_per_step=2, max_new_tokens=4, eval_size=2, output_dir="{folder}"'
    exec(source.replace('output_dir="runs/squares"', small), {})
    assert Path(folder, "model", "config.json").exists()


OWN = (DOCS / "own_trainer.md").read_text()


def test_the_stable_names_have_the_arguments_that_the_page_says():
    table = OWN[OWN.index("| module | names |") :]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:] if line]
    assert len(rows) > 15
    for modules, names in rows:
        for module in re.findall(r"`([\w.]+)`", modules):
            for name, given in re.findall(r"`([\w.]+)(?:\(([\w, ]*)\))?`", names):
                found = importlib.import_module(f"fused_rl.trainers.{module}")
                for part in name.split("."):
                    found = getattr(found, part)
                if f"`{name}`" in names:  # a class whose constructor is not promised
                    continue
                parameters = dict(inspect.signature(found).parameters)
                parameters.pop("self", None)
                promised = [word for word in given.split(", ") if word]
                assert [*parameters][: len(promised)] == promised, f"{module}.{name}"


def run_own_trainer(folder, *words, file="weighted.py", processes=1, fails=False):
    """Run a trainer of the page as it is written, in a folder outside of the repository; return what it prints."""
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*launch, file, "--model", "model", "--dataset", "rows.jsonl", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def own_trainer(tmp_path):
    """A folder with the page's trainers, a model, and rows whose odd ones count."""
    for source in python_blocks(DOCS / "own_trainer.md"):
        (tmp_path / source.split()[1]).write_text(source)
    tiny.model_folder(tmp_path / "model")
    rows = [
        {"prompt": f"{i}?", "completion": str(i), "weight": i % 2, "note": "unread"}
        for i in range(40)
    ]
    tiny.jsonl(tmp_path / "rows.jsonl", rows)
    return tmp_path


def test_an_own_trainer_has_a_dry_run_that_knows_its_column(own_trainer):
    printed = run_own_trainer(own_trainer, "--output_dir", "run", "--eval_size", "8", "--dry_run")
    assert "unused columns: note" in printed and "# one example: rows.jsonl, line 1" in printed
    assert "# beside its tokens: 0.0" in printed and "0|<end>" in printed
    words = ("--output_dir", "run", "--eval_size", "8", "--weight_column", "note")
    printed = run_own_trainer(own_trainer, *words, fails=True)
    assert "weighted.py: error: 40 of 40 rows cannot be used" in printed
    assert "rows.jsonl, line 1: could not convert string to float: 'unread'" in printed


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_an_own_trainer_with_rollouts_trains_in_70_lines(processes, own_trainer):
    assert len((own_trainer / "bestofn.py").read_text().splitlines()) <= 70
    words = "--verifiers tests.trainers.tiny:odd_characters --eval_size 8 --steps 4 --lr 1e-2 "
    words += "--prompts_per_step 8 --max_new_tokens 6 --save_every 0 --output_dir run"
    run_own_trainer(own_trainer, *words.split(), file="bestofn.py", processes=processes)
    losses = [entry["train/loss"] for entry in tiny.read_metrics(own_trainer / "run")[1:]]
    assert 0 < losses[-1] < losses[0]


@pytest.mark.slow
def test_an_own_trainer_resumes_on_two_ranks_bit_for_bit(own_trainer):
    words = "--eval_size 8 --batch_size 8 --lr 1e-3 --steps 4 --eval_every 2 --output_dir"
    words = words.split()
    printed = run_own_trainer(own_trainer, *words, "whole", processes=2)
    assert (
        "did it learn? yes, and still improving (--resume --steps 8 goes on): held-out" in printed
    )
    (own_trainer / "half.py").write_text("def stop(step):\n    step.number == 2 and step.stop()\n")
    run_own_trainer(own_trainer, *words, "parts", "--on_step", "half:stop", processes=2)
    run_own_trainer(own_trainer, *words, "parts", "--resume", processes=2)
    run_own_trainer(own_trainer, *words, "one")
    whole, parts, one = (
        tiny.weights(own_trainer / name / "model") for name in ("whole", "parts", "one")
    )
    assert all(whole[name].equal(parts[name]) for name in whole)
    assert all(torch.allclose(whole[name], one[name], atol=1e-5) for name in whole)


def prints(output, line):
    """True if the output has the line, with numbers that are at most 0.1 from the line's; … stands for anything."""
    words, numbers = re.split(r"[\d.]+", line), re.findall(r"[\d.]+", line)
    pattern = r"([\d.]+)".join(map(re.escape, words)).replace("…", ".*")
    found = re.search(pattern, output)
    pairs = zip(numbers, found.groups() if found else (), strict=found is not None)
    return found is not None and all(abs(float(a) - float(b)) <= 0.1 for a, b in pairs)


@pytest.mark.release
def test_the_tutorial_prints_what_it_says(tmp_path):
    """Every block, in order, in an empty folder: bash as it stands, Python as a file, whose first line may name it."""
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    alone = {"PATH": paths, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    alone |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    output = ""
    for kind, source in BLOCKS:
        if kind == "text":
            assert [line for line in source.splitlines() if not prints(output, line)] == [], output
            continue
        name = re.match(r"# (\w+\.py)\n", source)
        path = tmp_path / (name[1] if name else f"block.{kind}")
        path.write_text(source)
        command = [sys.executable] if kind == "python" else ["bash", "-eu"]
        command += [path.name]
        ran = subprocess.run(
            command, cwd=tmp_path, env=os.environ | alone, capture_output=True, text=True
        )
        output = ran.stdout
        assert ran.returncode == 0, source + output + ran.stderr
