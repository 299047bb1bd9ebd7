"""A run that ends at a held-out figure, and the sampled accuracy of SFT that it may be."""

import json

import pytest

from fused_rl.trainers import sft
from tests.trainers import killed, tiny
from tests.trainers.runs import (
    assert_same_weights,
    refused,
    run_config,
)

LONG = {"steps": 8, "eval_every": 2, "lr": 1e-2, "lr_schedule": "constant"}
SAMPLED = {"verifiers": "tests.trainers.tiny:odd_characters", "max_new_tokens": 6}
FILES = {"model": "m", "dataset": "d", "output_dir": "o"}


def at_steps(folder, key: str) -> dict[int, float]:
    return {line["step"]: line[key] for line in tiny.read_metrics(folder) if key in line}


def test_sampled_accuracy_of_sft_ends_a_warm_start_and_changes_no_bit_of_it(files, tmp_path):
    plain, sampled = tmp_path / "plain", tmp_path / "sampled"
    few = LONG | {"steps": 4}
    sft.train(run_config(files, plain, **few))
    sft.train(run_config(files, sampled, **few, **SAMPLED))
    assert_same_weights(plain, sampled)
    first, *_, last = tiny.read_metrics(sampled)
    for key in ("accuracy_greedy", "accuracy_sampled", "score", "token_accuracy", "loss"):
        assert f"eval/{key}" in first and f"eval/{key}" in last
    lines = map(json.loads, (sampled / "samples.jsonl").read_text().splitlines())
    assert {line["of"] for line in lines} == {"held-out, greedy"}


def test_responses_are_scored_by_the_held_out_rows_of_another_file(files, tmp_path, capsys):
    # The rows that are trained on have no answer and another form.
    demonstrations = [{"prompt": f"{i}?", "completion": "ab"} for i in range(16)]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab"}]
    problems = [{"messages": turns, "answer": "abc"[: i % 4]} for i in range(1, 4)]
    dataset = tiny.jsonl(tmp_path / "train.jsonl", demonstrations)
    held_out = tiny.jsonl(tmp_path / "held.jsonl", problems)
    options = {"eval_dataset": held_out, "eval_size": 3, "max_new_tokens": 6, "eval_samples": 2}
    options |= {"completion_column": "completion", "steps": 1, "verifiers": "exact_match"}

    config = run_config((files[0], dataset), tmp_path / "run", **options)
    sft.train(config)
    found = tiny.read_metrics(tmp_path / "run")[-1]
    assert {"eval/accuracy_greedy", "eval/accuracy_sampled", "eval/token_accuracy"} <= found.keys()
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    rows = {line["row"]: line["answer"] for line in lines}
    assert rows == {f"{held_out}, line {i}": "abc"[:i] for i in (1, 2, 3)}
    words = killed.words_of(config.replace(output_dir=str(tmp_path / "dry"), deepspeed=None))
    capsys.readouterr()
    sft.main([*words, "--dry_run"])
    printed = capsys.readouterr()
    assert "# scores, which are only shown: 1*exact_match" in printed.out
    assert f"{held_out}: messages\n" in printed.err and "unused" not in printed.err

    # An answer that is missing is missing there alone.
    tiny.jsonl(tmp_path / "held.jsonl", [*problems[:2], {"messages": turns}])
    missing = "held.jsonl, line 3: there is no answer"
    refused(config.replace(output_dir=str(tmp_path / "other")), missing)
    with pytest.raises(SystemExit, match=missing):
        sft.main([*words, "--dry_run"])
