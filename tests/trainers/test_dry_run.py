"""A dry run reads the rows as the run does: it refuses what the run refuses, and shows what the run trains."""

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest

from fused_rl.trainers import cli, grpo, ppo, sft
from fused_rl.trainers.rollouts.types import Sampler
from fused_rl.trainers.run import dry_run
from tests.trainers import tiny

SAID = {"role": "king", "content": "q"}
ROWS = {
    "demonstrations": {"prompt": "q", "completion": "a"},
    "pairs": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "marked": {"prompt": "q", "completion": "a", "label": True},
    "answers": {"prompt": "q", "completion": "a", "answer": "7"},
}
READS = {"sft": "demonstrations", "reward": "pairs", "dpo": "pairs", "kto": "marked"}
OPTIONS = {"grpo": ["--verifiers", "exact_match"], "ppo": ["--verifiers", "exact_match"]}


def said_twice(name, words) -> str:
    """What a run refuses, as it does and as its dry run does."""
    main = importlib.import_module(cli.TRAINERS[name].module).main
    said = []
    for action in ([], ["--dry_run"]):
        with pytest.raises(SystemExit) as refused:
            main([*words, *action])
        said.append(str(refused.value))
    assert said[0] == said[1]
    return said[0]


def words_of(name, folder, rows, tmp_path) -> list[str]:
    dataset = tiny.jsonl(tmp_path / "rows.jsonl", rows)
    words = ["--model", folder, "--dataset", dataset, "--output_dir", str(tmp_path / "run")]
    if name == "distill":
        words += ["--teacher", folder, "--on_policy", "0.5"]
    if name in ("distill", "ppo", "grpo"):
        words += ["--max_new_tokens", "8"]
    return [*words, "--eval_size", "4", *OPTIONS.get(name, [])]


@pytest.mark.parametrize("name", cli.TRAINERS)
def test_a_dry_run_says_what_the_run_would_say(name, folder, tmp_path, capsys):
    row = ROWS[READS.get(name, "answers")]
    # KTO needs several prompts. One of those that cannot be used is held out, and one is no row.
    rows = [row | {"prompt": f"q{i % 2}"} for i in range(40)]
    rows[11], rows[38], rows[20] = row | {"prompt": ""}, row | {"prompt": [SAID]}, [row]
    words = words_of(name, folder, rows, tmp_path)
    said = said_twice(name, words)
    assert "3 of 40 rows cannot be used" in said and not (tmp_path / "run").exists()
    reasons = {12: "the prompt is empty", 39: "an unknown role or none", 21: "got list"}
    for number, reason in reasons.items():
        assert f"rows.jsonl, line {number}: " in said and reason in said

    capsys.readouterr()
    main = importlib.import_module(cli.TRAINERS[name].module).main
    main([*words, "--bad_rows", "1", "--dry_run"])
    printed = capsys.readouterr()
    assert "left out 3 of 40 rows" in printed.err and "one example: " in printed.out


def of_other_tokens(model: str, to: Path) -> str:
    """Return a copy of a model whose tokenizer has one more word."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["zebra"])
    shutil.copytree(model, to)
    tokenizer.save_pretrained(to)
    return str(to)


SERVED = "--server http://127.0.0.1:9"
# Of what a run refuses beside its rows, before it loads a model or while it does: the command, the options, the line.
REFUSED = [
    ("grpo", "--verifiers null", "verifiers is missing"),
    ("grpo", "--wandb_project p", "wandb_project needs wandb, which is not installed"),
    ("sft", "", "fused-rl sft needs peft, which is not installed: pip install 'fused-rl"),
    ("grpo", f"{SERVED} --top_p 0.9", "top_p=0.9 with servers needs --top_k"),
    ("grpo", f"{SERVED} --server_api_key_env hf_a_key", "^(?!.*hf_a_key).*no .* variable"),
    ("grpo", "--server 127.0.0.1:9", "server=.*expected a URL"),
    ("ppo", "--sampler json:no_such", "sampler 'json:no_such': .* has no function"),
    ("grpo", "--rollout_correction token-truncate", "corrects for a sampler that differs"),
    ("ppo", "--critic OTHER", "critic '.*' has another tokenizer than the policy"),
    ("ppo", "--critic ./no-such-critic", "no-such-critic"),
    ("grpo", "--max_new_tokens 9999", "up to 9999 more, but the model has .* positions"),
    ("ppo", "--verifiers reward_model:OTHER", "reward model '.*' has another tokenizer"),
    ("distill", "--teacher OTHER", "teacher .* has another tokenizer"),
    ("distill", "--teacher http://", "teacher='http://': expected a URL"),
    # Of the models, which a dry run reads without their weights.
    ("sft", "--dtype bfloat16 --zero_stage 0", "dtype=bfloat16 needs fp32 master weights"),
    ("dpo", "--save_merged", "save_merged=True says how adapters are made"),
    ("ppo", "--lora_rank 2 --lora_targets q_prj", "no linear layer 'q_prj'"),
    ("reward", "--attn_implementation fast", "attn_implementation=fast cannot be used"),
    ("sft", "--model REWARD", "it is a reward model: a causal LM is needed"),
    ("distill", "--teacher REWARD", "it is a reward model: a causal LM is needed"),
    ("sft", "--output_dir rows.jsonl/run", "could not be written to .*: Not a directory"),
    # Of functions of the user's.
    ("sft", f"--lr_schedule {__name__}:of_one", "lr_schedule at update 0 of 100: TypeError"),
    ("ppo", f"--lr_schedule {__name__}:falls", "lr_schedule at update 3 of .* 0 or more, got -1"),
    ("dpo", f"--on_step {__name__}:falls", r"on_step 'falls': expected a function of \(step\)"),
    ("grpo", f"--sampler {__name__}:of_one", r"expected a function of \(built, tokenizer\)"),
    ("ppo", f"--sampler {__name__}:Forgets", "Forgets takes no new weights: call super"),
    ("grpo", f"--surrogate {__name__}:of_one", "surrogate 'of_one': expected a function of"),
]


def of_one(value):
    return value


def falls(update, total):
    return 1.0 if update < 3 else -1.0


class Forgets(Sampler):
    def __init__(self, built, tokenizer):
        """It calls no `super().__init__`."""


@pytest.mark.parametrize(("name", "options", "line"), REFUSED)
def test_a_dry_run_refuses_the_options_that_the_run_refuses(
    name, options, line, folder, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    if not options:
        monkeypatch.setitem(sys.modules, "peft", None)
    if "OTHER" in options:
        options = options.replace("OTHER", of_other_tokens(folder, tmp_path / "other"))
    if "REWARD" in options:
        reward = tiny.reward_folder(tmp_path / "reward", folder)
        options = options.replace("REWARD", reward)
    monkeypatch.chdir(tmp_path)
    words = words_of(name, folder, [ROWS[READS.get(name, "answers")]] * 40, tmp_path)
    said = said_twice(name, [*words, *options.split()])
    assert re.search(line, said, re.DOTALL) and not (tmp_path / "run").exists()


def test_the_example_has_every_token_and_says_which_are_trained(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(dry_run, "MOST_TOKENS", 40)
    rows = [{"prompt": "a b", "completion": f"c\n{'d' * 100}"}] * 10
    words = words_of("sft", folder, rows, tmp_path)
    sft.main([*words, "--batch_size", "2", "--dry_run"])
    example = capsys.readouterr().out.split("# one example: ")[1].splitlines()
    assert example[0].startswith(f"{tmp_path}/rows.jsonl, line 1")
    assert example[1:] == [
        "# prompt (8 tokens): <bos>|<user>|a| |b|<end>|\\n|<assistant>",
        f"# trained (103 tokens): c|\\n|{'d|' * 18}… 63 more …|{'d|' * 19}<end>",
    ]
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]
    words = words_of("sft", folder, [{"messages": turns}] * 10, tmp_path)
    sft.main([*words, "--assistant_turns", "all", "--batch_size", "2", "--dry_run"])
    between = "(\\n)|(<user>)|(u)|(<end>)|(\\n)|(<assistant>)"
    assert f"# trained (4 of 10 tokens): a|<end>|{between}|a|<end>" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scorer", "column", "read"),
    [
        ("math", "answer", ["answer, which scorers read: 7"]),
        (f"{__name__}:of_a_column", "kind", ["kind, which scorers read: so\\n#### 7"]),
        ("length:4", "kind", []),
    ],
)
def test_the_example_has_what_its_scorers_read(scorer, column, read, folder, tmp_path, capsys):
    row = {"prompt": "3+4?", column: "so\n#### 7", "note": "x"}
    words = words_of("grpo", folder, [row] * 20, tmp_path)
    grpo.main([*words[:-1], scorer, "--prompts_per_step", "4", "--dry_run"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if ", which scorers read: " in line] == [f"# {x}" for x in read]


def of_a_column(completions, kind):
    return [1.0] * len(completions)


@pytest.mark.parametrize("scorer", [r"regex:(\d+)", f"{__name__}:of_digits"])
def test_the_rows_own_answers_are_measured_and_scored(scorer, folder, tmp_path, capsys):
    rows = [{"prompt": "3+4?", "answer": "7"} for _ in range(20)]
    rows[2]["answer"], rows[4]["answer"] = "seven or so", ["seven or more", "7"]
    words = words_of("ppo", folder, rows, tmp_path)
    ppo.main([*words[:-1], scorer, "--eval_size", "0", "--prompts_per_step", "4", "--dry_run"])
    said = capsys.readouterr().err
    too_small = "max_new_tokens=8 is too small for the answer 'seven or so' of 11 tokens: "
    assert (too_small in said) == scorer.startswith("regex")
    worst = "0.9 on average, and at least 0 ("
    assert f" gives the rows' own answers {worst}{tmp_path}/rows.jsonl, line 3)" in said


def of_digits(response, row):
    return float(response.isdigit())
