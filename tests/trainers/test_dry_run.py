"""A dry run reads the rows as the run does: it refuses what the run refuses, and shows what the run trains."""

import importlib

import pytest

from fused_rl.trainers import cli, distill, sft
from fused_rl.trainers.run import command
from tests.trainers import tiny

SAID = {"role": "user", "content": "q"}
ROWS = {
    "demonstrations": {"prompt": "q", "completion": "a"},
    "pairs": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "marked": {"prompt": "q", "completion": "a", "label": True},
    "answers": {"prompt": "q", "completion": "a", "answer": "7"},
}
READS = {"sft": "demonstrations", "reward": "pairs", "dpo": "pairs", "kto": "marked"}
OPTIONS = {"grpo": ["--verifiers", "exact_match"], "ppo": ["--verifiers", "exact_match"]}


def words_of(name, folder, dataset, tmp_path) -> list[str]:
    words = ["--model", folder, "--dataset", dataset, "--output_dir", str(tmp_path / "run")]
    if name == "distill":
        words += ["--teacher", folder, "--on_policy", "0.5"]
    return [*words, "--eval_size", "4", *OPTIONS.get(name, [])]


@pytest.mark.parametrize("name", cli.TRAINERS)
def test_a_dry_run_says_what_the_run_would_say(name, folder, tmp_path, capsys):
    row = ROWS[READS.get(name, "answers")]
    rows = [row] * 40
    # One in the middle, one among the held-out rows, and one that is no row.
    faults = {11: row | {"prompt": ""}, 38: row | {"prompt": [SAID | {"role": "bot"}]}, 20: [row]}
    rows = [faults.get(i, row) for i in range(40)]
    words = words_of(name, folder, tiny.jsonl(tmp_path / "rows.jsonl", rows), tmp_path)
    main = importlib.import_module(cli.TRAINERS[name].module).main
    said = []
    for action in ([], ["--dry_run"]):
        with pytest.raises(SystemExit) as refused:
            main([*words, *action])
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "3 of 40 rows cannot be used" in said[0]
    for number, reason in (
        (12, "the prompt is empty"),
        (39, "an unknown role, got 'bot'"),
        (21, "got list"),
    ):
        assert f"rows.jsonl, line {number}: " in said[0] and reason in said[0]
    assert not (tmp_path / "run").exists()

    capsys.readouterr()
    main([*words, "--bad_rows", "skip", "--dry_run"])
    printed = capsys.readouterr()
    assert "left out 3 of 40 rows" in printed.err and "one example: " in printed.out


def test_the_example_has_every_token_and_says_which_are_trained(folder, tmp_path, capsys):
    rows = [{"prompt": "a b", "completion": f"c\n{'d' * 300}"}] * 10
    words = words_of("sft", folder, tiny.jsonl(tmp_path / "rows.jsonl", rows), tmp_path)
    sft.main([*words, "--batch_size", "2", "--dry_run"])
    example = capsys.readouterr().out.split("# one example: ")[1].splitlines()
    assert example[0].startswith(f"{tmp_path}/rows.jsonl, line 1")
    assert example[1:] == [
        "# demonstration, prompt (8 tokens): <bos>|<user>|a| |b|<end>|\\n|<assistant>",
        f"# demonstration, trained (303 tokens): c|\\n|{'d|' * 98}… 103 more …|{'d|' * 99}<end>",
    ]


def test_of_many_rows_a_sample_is_checked(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "MOST_ROWS", 6)
    rows = [{"prompt": f"{i}", "completion": "c"} for i in range(30)]
    words = words_of("sft", folder, tiny.jsonl(tmp_path / "rows.jsonl", rows), tmp_path)
    sft.main([*words, "--batch_size", "8", "--dry_run"])
    assert "checked 6 of 26 rows of " in capsys.readouterr().err


def test_a_run_says_which_form_it_read_and_which_columns_it_did_not(folder, tmp_path, capsys):
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows = [{"id": i, "source": "x", "conversations": turns} for i in range(12)]
    words = words_of("sft", folder, tiny.jsonl(tmp_path / "rows.jsonl", rows), tmp_path)
    sft.main([*words, "--batch_size", "8", "--dry_run"])
    assert "rows: ShareGPT conversations; unused columns: id, source\n" in capsys.readouterr().err


def test_no_row_that_can_be_used_is_an_error_with_skip_too(folder, tmp_path):
    rows = [{"prompt": "", "completion": "a"}] * 9
    words = words_of("sft", folder, tiny.jsonl(tmp_path / "rows.jsonl", rows), tmp_path)
    with pytest.raises(SystemExit, match="no row can be used; .*line 1: the prompt is empty"):
        sft.main([*words, "--bad_rows", "skip"])


def test_held_out_rows_of_distillation_need_no_completion(folder, tmp_path, capsys):
    row = ROWS["answers"]
    rows = [row] * 36 + [{"prompt": "q"}] * 4
    words = words_of("distill", folder, tiny.jsonl(tmp_path / "rows.jsonl", rows), tmp_path)
    distill.main([*words, "--prompts_per_step", "4", "--dry_run"])
    assert "# prompt (" in capsys.readouterr().out
