import json

import pytest

from fused_rl.recipes import demo
from fused_rl.recipes.gym import score
from fused_rl.trainers.data import encode


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / "data" / name).read_text().splitlines()]


@pytest.mark.release
def test_the_demos_problems_teacher_and_tokenizer(tmp_path, capsys):
    demo.prepare(tmp_path, seed=3)
    train, held_out = rows_of(tmp_path, "train.jsonl"), rows_of(tmp_path, "eval.jsonl")
    questions = {row["question"] for row in train + held_out}
    # Nothing held out is seen.
    assert len(questions) == len(train) + len(held_out) == demo.NUM_TRAIN + demo.NUM_EVAL
    assert all(score(row["answer"], row) == 1.0 for row in held_out)

    demonstrations = rows_of(tmp_path, "demonstrations.jsonl")
    right = [score(row["demonstration"], row) == 1.0 for row in demonstrations]
    # Of problems with 0, 1, 2 subtractions (1/4, 1/2, 1/4) 1, 0.4, 0.16 are right: 0.49; standard error 0.009.
    assert sum(right) / len(right) == pytest.approx(0.49, abs=0.045)
    assert all(
        ok
        for ok, row in zip(right, demonstrations, strict=True)
        if "-" not in row["metadata"]["expression"]
    )
    assert "3000 problems, 256 held out" in capsys.readouterr().out

    tokenizer = encode.load_tokenizer(str(tmp_path / "init"))
    for row in train[:50]:
        ids = (
            tokenizer(row["question"]).input_ids
            + tokenizer(row["answer"], add_special_tokens=False).input_ids
        )
        assert tokenizer.decode(ids) == row["question"] + row["answer"] and len(ids) <= 12
    longest = max(
        len(tokenizer(row["answer"], add_special_tokens=False).input_ids)
        for row in train + held_out
    )
    assert longest + 1 <= 5  # recipes/demo_grpo.yaml: max_new_tokens, the EOS included
