"""Text of a model or a dataset cannot steer the terminal; files of metrics are strict JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.base import screen
from fused_rl.trainers.base.files import as_json
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.run.command import around
from fused_rl.trainers.run.logger import Logger

HOSTILE = "\x1b[2J\x1b]52;c;aGk=\x07 \r\x9b1m \u202eabc\u2066 \x00\x08"


def test_control_characters_are_shown(capsys, tmp_path):
    screen.print_line(HOSTILE, "a\tb", "é ± 漢 🙂\u00a0")
    shown = capsys.readouterr().out
    assert shown == (
        "\\x1b[2J\\x1b]52;c;aGk=\\x07 \\r\\x9b1m \\u202eabc\\u2066 \\x00\\x08\na\\tb\né ± 漢 🙂\u00a0\n"
    )
    with pytest.raises(SystemExit) as stopped, around("fused-rl sft"):
        raise InputError(f"a row says {HOSTILE}\nand more")
    assert "\\x1b[2J" in stopped.value.code and not {"\n", "\x1b"} & {*stopped.value.code}
    config = sft.SFTConfig(model="m", dataset="d", output_dir=str(tmp_path))
    logger = Logger(config, 0)
    logger.samples(1, [{"prompt": HOSTILE, "response": f"two\nlines {HOSTILE}"}])
    logger.samples(
        2, [{"reward": 0.8999999761581421, "scores": {"f": 1 / 3}, "row": "in no table"}]
    )
    logger.samples(3, [{"prompt": "как?", "columns": {"answer": "так", "kind": "слово"}}])
    logger.close()
    out = capsys.readouterr().out
    assert " 0.9 " in out and "in no table" not in out
    kept = (tmp_path / "samples.jsonl").read_text()
    assert '"reward": 0.9, "scores": {"f": 0.333333}, "row": "in no table"}' in kept
    # Columns of the row are shown, and what is no control character stands as it reads.
    assert out.index("prompt") < out.index("answer") and "так" in out and "слово" in out
    assert "columns" not in out
    assert '"как?", "columns": {"answer": "так", "kind": "слово"}' in kept
    assert (
        json.loads(kept.splitlines()[0])["prompt"] == HOSTILE
        and kept.replace("\n", "").isprintable()
    )
    assert "\\x1b[2J" in out and not set(HOSTILE) - set("[2J]5;caGk= 1mb") & set(out)


def test_what_a_run_wrote_after_its_checkpoint_is_cut(tmp_path):
    files = [tmp_path / f"{name}.jsonl" for name in ("metrics", "samples", "held_out")]
    for file in files:
        file.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    Logger(sft.SFTConfig(model="m", dataset="d", output_dir=str(tmp_path)), 2).close()
    for file in files:
        assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_json_is_strict():
    text = as_json(
        {
            "a": float("nan"),
            "b": [float("-inf"), 1.5, (float("inf"),)],
            "c": {"d": None},
            "e": Path("x"),
            "f": "\ud800",
        }
    )
    assert text.encode()
    expected = {"a": None, "b": [None, 1.5, [None]], "c": {"d": None}, "e": "x", "f": "\ud800"}
    assert json.loads(text, parse_constant=pytest.fail) == expected


@pytest.mark.parametrize(("name", "word"), [("eval", "--help"), ("doctor", ".")])
def test_a_reader_that_ends_early_such_as_head_is_no_traceback(name, word, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.yaml").write_text("# fused-rl sft\n{}")
    command = [sys.executable, "-m", f"fused_rl.trainers.commands.{name}", word]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    run = subprocess.Popen(command, env=buffered, cwd=tmp_path, **pipes)
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait() == 141
