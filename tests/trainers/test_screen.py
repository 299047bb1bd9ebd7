"""Text of a model or a dataset cannot steer the terminal; files of metrics are strict JSON."""

import json
from pathlib import Path

import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.base import screen
from fused_rl.trainers.base.files import as_json
from fused_rl.trainers.commands import eval as evaluation
from fused_rl.trainers.options import InputError
from fused_rl.trainers.run.command import around
from fused_rl.trainers.run.curves import draw_curves
from fused_rl.trainers.run.logger import Logger
from tests.trainers import figures, tiny

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model folder and a gsm8k-like file."""
    folder = tmp_path_factory.mktemp("files")
    return tiny.model_folder(folder / "model"), tiny.jsonl(folder / "rows.jsonl", tiny.sums(12))


def argv(files, folder: Path, *more: str) -> list[str]:
    model, dataset = files
    options = {"model": model, "dataset": dataset, "output_dir": folder, "completion_column": "answer", "eval_size": 2}
    options |= {"steps": 2, "batch_size": 4, "zero_stage": 0, "save_every": 1}
    return [*(f"--{name}={value}" for name, value in options.items()), *more]


@pytest.mark.slow
def test_a_second_run_in_a_process_is_a_run(files, tmp_path, capsys):
    """After a command, after one that was refused, and after a run without a command."""
    sft.main(argv(files, tmp_path / "a"))
    with pytest.raises(SystemExit, match="none.jsonl does not exist"):
        sft.main(argv((files[0], "none.jsonl"), tmp_path / "b"))
    sft.main(argv(files, tmp_path / "b", "--zero_stage=2"))
    options = dict(word.removeprefix("--").split("=", 1) for word in argv(files, tmp_path / "c"))
    sft.train(sft.SFTConfig(**{name: int(value) if value.isdigit() else value for name, value in options.items()}))
    words = ["--model", files[0], "--dataset", files[1], "--verifiers=math", "--samples=0", "--max_new_tokens=2"]
    evaluation.main([*words, "--max_rows=2"])
    sft.main(argv(files, tmp_path / "d"))
    a, c, d = (tiny.untimed(tiny.read_metrics(tmp_path / name)) for name in "acd")
    assert a == c == d
    assert "solved" in capsys.readouterr().out


HOSTILE = "\x1b[2J\x1b]52;c;aGk=\x07 \r\x9b1m \u202eabc\u2066 \x00\x08"


def test_control_characters_are_shown(capsys, files, tmp_path):
    screen.tell(HOSTILE, "a\tb", "é ± 漢 🙂\u00a0")
    shown = capsys.readouterr().out
    assert shown == ("\\x1b[2J\\x1b]52;c;aGk=\\x07 \\r\\x9b1m \\u202eabc\\u2066 \\x00\\x08\na\\tb\né ± 漢 🙂\u00a0\n")
    with pytest.raises(SystemExit) as stopped, around("fused-rl sft"):
        raise InputError(f"a row says {HOSTILE}\nand more")
    assert "\\x1b[2J" in stopped.value.code and "\n" not in stopped.value.code and "\x1b" not in stopped.value.code
    config = sft.SFTConfig(model="m", dataset="d", output_dir=str(tmp_path))
    logger = Logger(config, 0)
    logger.samples(1, [{"prompt": HOSTILE, "response": f"two\nlines {HOSTILE}"}])
    logger.samples(2, [{"reward": 0.8999999761581421}])
    logger.close()
    out = capsys.readouterr().out
    assert " 0.9 " in out  # short on the screen, exact in the file
    assert "0.8999999761581421" in (tmp_path / "samples.jsonl").read_text()
    assert "\\x1b[2J" in out and not set(HOSTILE) - set("[2J]5;caGk= 1mb") & set(out)


def test_json_is_strict():
    told = as_json({"a": float("nan"), "b": [float("-inf"), 1.5, (float("inf"),)], "c": {"d": None}, "e": Path("x")})
    assert json.loads(told, parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5, [None]],
        "c": {"d": None},
        "e": "x",
    }


def test_a_metric_that_is_no_number_is_null_and_is_not_drawn(tmp_path):
    config = sft.SFTConfig(model="m", dataset="d", output_dir=str(tmp_path))
    logger = Logger(config, 0)
    logger.log(1, {"train/loss": float("nan"), "lr": 1.0})
    logger.log(2, {"train/loss": 2.0, "lr": float("inf")})
    logger.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert found == [{"step": 1, "train/loss": None, "lr": 1.0}, {"step": 2, "train/loss": 2.0, "lr": None}]
    with figures.drawn():
        draw_curves(found, tmp_path / "curves.png")
    again = Logger(config, 2)  # a resumed run reads them
    again.close()
