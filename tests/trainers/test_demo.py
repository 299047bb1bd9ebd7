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
    assert "3000 problems, 256 held out" in capsys.readouterr().out
    train, held_out = rows_of(tmp_path, "train.jsonl"), rows_of(tmp_path, "eval.jsonl")
    # Nothing held out is seen.
    questions = {row["question"] for row in train + held_out}
    assert len(questions) == len(train) + len(held_out) == demo.NUM_TRAIN + demo.NUM_EVAL
    assert all(score(row["answer"], row) == 1.0 for row in held_out)

    demonstrations = rows_of(tmp_path, "demonstrations.jsonl")
    wrong = [row for row in demonstrations if score(row["demonstration"], row) < 1]
    # Of problems with 0, 1, 2 subtractions (1/4, 1/2, 1/4) 1, 0.4, 0.16 are right: 0.49; standard error 0.009.
    assert len(wrong) / len(demonstrations) == pytest.approx(0.51, abs=0.045)
    assert all("-" in row["metadata"]["expression"] for row in wrong)

    tokenizer, longest = encode.load_tokenizer(str(tmp_path / "init")), 0
    for row in train + held_out:
        answer = tokenizer(row["answer"], add_special_tokens=False).input_ids
        ids = tokenizer(row["question"]).input_ids + answer
        assert tokenizer.decode(ids) == row["question"] + row["answer"] and len(ids) <= 12
        longest = max(longest, len(answer))
    assert longest + 1 <= 5  # recipes/demo_grpo.yaml: max_new_tokens, the EOS included
