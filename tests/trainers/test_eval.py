"""`fused-rl eval`: its figures by hand, its files, what it takes from a run, and what it refuses."""

import json
import re
import shutil

import pytest

from fused_rl.trainers.commands import eval as command
from fused_rl.trainers.data import encode
from fused_rl.trainers.rollouts.types import Response
from fused_rl.trainers.run.parse import parse
from tests.distributed import run_distributed
from tests.trainers import tiny

EOS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and five rows."""
    folder = tmp_path_factory.mktemp("eval")
    tiny.model_folder(folder / "model")
    rows = [{"question": "a" * i, "answer": str(i)} for i in (5, 1, 4, 2, 3)]
    tiny.jsonl(folder / "rows.jsonl", rows)
    return folder


def options(folder, **more):
    given = {"model": folder / "model", "dataset": folder / "rows.jsonl"}
    given |= {"verifiers": "exact_match"} | more
    return [f"--{name}={value}" for name, value in given.items()]


def read(folder):
    rows = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    return rows, json.loads((folder / "summary.json").read_text())


class Scripted(tiny.Sampler):
    """Greedy: right for prompts of 3 or more; sampled: the first j of n right for a prompt of j; 1 of 4 is cut."""

    def __init__(self, lm, *, pad_id, batch_size):
        self.encode = tiny.tokenizer()

    def sample(self, prompts, sampling):
        turn, drawn = {}, []
        for prompt in prompts:
            size = len(self.encode.decode(prompt).split("<user>")[1].split("<end>")[0])
            j = turn[size] = turn.get(size, 0) + 1
            right = size >= 3 if not sampling.temperature else j <= size
            text = str(size) if right else "wrong"
            ids = self.encode(text, add_special_tokens=False).input_ids
            stops = j != 4
            drawn.append(Response([*ids, EOS] if stops else ids, "stop" if stops else "length"))
        return drawn


def test_the_figures_are_those_by_hand(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "TransformersSampler", Scripted)
    out = tmp_path / "new" / "out"
    command.main(options(folder, samples=4, max_new_tokens=9, batch_size=6, output_dir=out))
    rows, summary = read(out)

    # Of 4 samples the problems 1 … 5 have 1, 2, 3, 4 and 4 right; right ones have a digit and, but for the fourth ones,
    # an end; wrong ones 5 letters and the same.
    error = (0.425 / 4 / 5) ** 0.5
    expected = {"problems": 5, "accuracy_greedy": 3 / 5, "accuracy_greedy_error": (0.3 / 5) ** 0.5}
    expected |= {"pass_at_1": 14 / 20, "pass_at_2": (0.5 + 5 / 6 + 3) / 5}
    expected |= {
        "pass_at_4": 1.0,
        "pass_at_k": 1.0,
        "pass_at_k_error": 0,
        "frac_reward_zero_std": 2 / 5,
    }
    expected |= {"accuracy_sampled": 14 / 20, "accuracy_sampled_error": error}
    expected |= {"score": 14 / 20, "score_error": error, "score_std": (0.7 * 0.3) ** 0.5}
    expected |= {"commonest_ratio": 3 / 20, "clipped_ratio": 5 / 20, "mean_length": (26 + 33) / 20}
    expected |= {"mean_length_solved": 26 / 14, "mean_length_unsolved": 33 / 6}
    written = summary.pop("options")
    assert summary.pop("bad_rows") == []
    assert summary == pytest.approx(expected)
    assert written["verifiers"] == ["exact_match"] and written["max_new_tokens"] == 9
    assert re.search(r"\naccuracy_greedy +0.6\n", capsys.readouterr().out)

    # Every response, problems in the order of the rows.
    kinds = [(i, kind) for i in range(5) for kind in ("greedy", *["sampled"] * 4)]
    assert [(row["problem"], row["decoding"]) for row in rows] == kinds
    second = rows[5:10]
    assert [row["response"] for row in second] == ["wrong", "1", "wrong", "wrong", "wrong"]
    assert [row["finish"] for row in second] == ["stop"] * 4 + ["length"]
    assert second[1]["row"].endswith("rows.jsonl, line 2") and "<user>a<end>" in second[1]["prompt"]
    assert second[1]["scores"] == {"exact_match": 1.0} and second[1]["tokens"] == 2


def test_responses_are_those_of_the_model_and_equal_seeds_are_equal(folder, tmp_path):
    found = []
    for more in ({}, {}, {"seed": 2}, {"top_k": 1}):
        out = tmp_path / str(len(found))
        command.main(options(folder, samples=2, max_new_tokens=4, output_dir=out, **more))
        found.append([row["response"] for row in read(out)[0]])
    a, b, c, one = found
    assert a == b != c
    # From the most likely token alone all are greedy.
    assert a[::3] == c[::3] == one[::3] == one[1::3]


def test_the_options_of_the_run_are_those_of_its_model(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "model", run / "model")
    (run / "config.yaml").write_text(
        "max_new_tokens: 3\nraw_prompt: true\nlr: 1.0\nverifiers: ['regex:(a)', 'regex:b, c']\n"
        "verifier_weights: [1.0, 0.5]\nsolved_at: null\n"
    )
    config = command.EvalConfig(model=str(run / "model"), dataset=str(folder / "rows.jsonl"))
    found = command.with_run_options(config)
    assert (found.max_new_tokens, found.raw_prompt) == (3, True)
    assert (found.verifiers, found.verifier_weights) == (["regex:(a)", "regex:b, c"], [1.0, 0.5])
    given = {"max_new_tokens": 5, "raw_prompt": False, "verifiers": "format"}
    assert command.with_run_options(config.replace(**given)) == config.replace(**given)


def test_a_response_may_be_as_long_as_the_model_has_positions(folder, tmp_path, capsys):
    row = {"question": "1 + 1 = ?", "answer": "2"}
    command.main(options(folder, dataset=tiny.jsonl(tmp_path / "one.jsonl", [row]), samples=1))
    prompt = tiny.prompt(encode.Encoder(tiny.tokenizer()), row, None)
    # The model has 128 positions.
    assert f"max_new_tokens: {128 - len(prompt)}\n" in capsys.readouterr().out


def evaluate_on(rank, world, argv):
    return command.evaluate(parse(command.EvalConfig, argv))["accuracy_greedy"]


@pytest.mark.slow
def test_several_processes_draw_the_same_greedy_responses_in_the_same_order(folder, tmp_path):
    found = []
    for world in (1, 3):  # 5 problems: two of three shares are filled up
        out = tmp_path / str(world)
        argv = options(folder, samples=2, max_new_tokens=4, batch_size=2, output_dir=out)
        returned = run_distributed(evaluate_on, world, argv, timeout=200)
        assert returned == returned[:1] * world
        rows, summary = read(out)
        greedy = [row for row in rows if row["decoding"] == "greedy"]
        order = [(row["decoding"], row["row"]) for row in rows]
        found.append((greedy, order, summary["accuracy_greedy"]))
    assert found[0] == found[1]
