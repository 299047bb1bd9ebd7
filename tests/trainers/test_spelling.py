"""What `--verifiers` may say, and that a dry run refuses everything else."""

import pytest

from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.options.config import InputError, parse
from fused_rl.trainers.scorers import math as verifiers
from fused_rl.trainers.scorers.load import load_scorers
from fused_rl.trainers.scorers.options import check_weights, read

FUNCTION = "tests.trainers.tiny:odd_characters"
TEN_CASES = [
    ("math", "math", "math", "", {}, None, None),
    (" 0.5 * math >= 1 ", "math", "math", "", {}, 0.5, 1.0),
    ("reasoning_gym:chain_sum", "reasoning_gym", "reasoning_gym:chain_sum", "chain_sum", {}, None, None),
    ("2*a.b:f>=-0.5", "function", "a.b:f", "a.b:f", {}, 2.0, -0.5),
    ("a.b.f", "function", "a.b.f", "a.b:f", {}, None, None),
    ("reward_model:runs/a(1)/it's", "reward_model", "reward_model:runs/a(1)/it's", "runs/a(1)/it's", {}, None, None),
    (r"regex('\d+, (\d)\b')", "regex", "regex", "", {"pattern": r"\d+, (\d)\b"}, None, None),
    ('3*regex("it\'s >= 2*(x)", name=last)>=0.5', "regex", "last", "", {"pattern": "it's >= 2*(x)"}, 3.0, 0.5),
    ("length( limit = 7 , name='too long')", "length", "too long", "", {"limit": 7}, None, None),
    ("exact_match(ignore_case=true)", "exact_match", "exact_match", "", {"ignore_case": True}, None, None),
]


@pytest.mark.parametrize("case", TEN_CASES, ids=[case[0] for case in TEN_CASES])
def test_a_scorer_is_read_as_it_is_spelled(case):
    text, kind, name, detail, arguments, weight, solved_at = case
    (one,) = read(text)
    assert (one.kind, one.name, one.detail, one.arguments) == (kind, name, detail, arguments)
    assert (one.weight, one.solved_at) == (weight, solved_at)


def test_a_reward_model_may_have_dots_in_its_name():
    for name in ("./rm", "../rm/model", "v1.0", "org/Qwen2.5-RM", "/a.b/c"):
        for spelled in (f"reward_model:{name}", f"0.5*reward_model:{name}>=1"):
            (one,) = read(spelled)
            assert (one.kind, one.detail, one.name) == ("reward_model", name, f"reward_model:{name}")
    for name in ("a.b:f", "a.b.f", "reward_model.a:f", "math.f"):
        assert read(name)[0].kind == "function"


def test_commas_separate_outside_of_parentheses_alone():
    several = ", ".join(case[0] for case in TEN_CASES[1:] if case[1] != "math")
    assert [one.text for one in read(several)] == [case[0].strip() for case in TEN_CASES[2:]]


def test_a_list_of_yaml_is_the_same_as_commas(tmp_path):
    (tmp_path / "c.yaml").write_text("verifiers:\n- math\n- 0.2*regex('\\d, \"(\\d)')\n")
    argv = ["--config", str(tmp_path / "c.yaml"), "--model=m", "--dataset=d", "--output_dir=o"]
    config = parse(grpo.GRPOConfig, argv, "fused-rl grpo")
    assert config.verifiers == "math, 0.2*regex('\\d, \"(\\d)')"
    assert [one.arguments for one in read(config.verifiers)] == [{}, {"pattern": '\\d, "(\\d)'}]


REFUSED = {
    "typo": "verifier 'typo': expected math, reasoning_gym, .* or module:function$",
    "mth": "did you mean 'math'",
    "exact_macth": "did you mean 'exact_match'",
    "maths:f": "'maths:f': ModuleNotFoundError: .*; did you mean 'math'",
    "no_such_module:f": "'no_such_module:f': ModuleNotFoundError",
    "no.such.module.f": "'no.such.module:f': ModuleNotFoundError",
    "reasoning_gym:chain_sums": "no dataset 'chain_sums'; did you mean 'chain_sum'",
    "regex('(a')": r"'regex': the pattern '\(a' does not compile: missing \)",
    "regex": "expected a pattern, as in regex",
    "regex('a": "its parentheses or quotes do not close",
    "regex(a b)": "cannot read 'a b'; text stands in quotes",
    "regex(7)": "pattern is 7; expected text in quotes",
    "regex('a', 'b')": "regex has two 'pattern'; its arguments are pattern, name",
    "regex('a'), regex('b')": "'regex' is named 2 times; regex.…, name=other",
    "format(tags='a')": "format takes no 'tags'; its arguments are pattern, name",
    "length": "expected length.target=N. or length.limit=N.",
    "length(target=3, limit=4)": "expected length.target=N. or length.limit=N.",
    "length(target=0)": "target is 0; expected a whole number above 0",
    "length(target=1.5)": "target is 1.5; expected a whole number above 0",
    "exact_match(ignore_case=1)": "ignore_case is 1; expected true or false",
    "math(1)": "math takes no arguments",
    "reward_model": "verifier 'reward_model': expected math",
    "2*math, 3*math": "'math' is named 2 times",
    "x*format": "'x' is not a number",
}


@pytest.mark.parametrize("spelled", REFUSED)
def test_a_dry_run_refuses_what_cannot_be_and_loads_no_model(spelled, capsys):
    command, name = ((grpo, "grpo"), (ppo, "ppo"))[len(spelled) % 2]
    with pytest.raises(SystemExit, match=rf"^fused-rl {name}: error: .*{REFUSED[spelled]}") as refusal:
        command.main(["--model=none", "--dataset=none", "--output_dir=none", "--dry_run", "--verifiers", spelled])
    assert "\n" not in refusal.value.code and not capsys.readouterr().out


def test_a_scorer_without_a_weight_among_weighted_ones_is_refused_before_the_run(capsys):
    argv = ["--model=none", "--dataset=none", "--output_dir=none", "--verifiers", f"math, 0.2*{FUNCTION}"]
    said = f"verifiers: 'math' has no weight, and '0.2[*]{FUNCTION}' has one; give each a weight: 1[*]math$"
    with pytest.raises(SystemExit, match=said):
        grpo.main([*argv, "--dry_run"])
    config = parse(grpo.GRPOConfig, argv, "fused-rl grpo")
    with pytest.raises(InputError, match=said):
        load_scorers(config, None, None)
    grpo.main([*argv[:-1], f"2*math, 0.2*{FUNCTION}", "--dry_run"])
    assert f"\n# reward: 2*math + 0.2*{FUNCTION}\n" in capsys.readouterr().out
    for fine in ("format", f"format, {FUNCTION}", f"format, 0*{FUNCTION}", f"0*format, 0.5*{FUNCTION}"):
        check_weights(read(fine))


def test_those_that_compare_with_the_answer_say_what_is_solved():
    def thresholds(spelled):
        return {scorer.name: scorer.solved_at for scorer in verifiers.load_scorers(spelled)}

    assert thresholds("exact_match, format") == {"exact_match": 1.0, "format": None}
    assert thresholds("regex('a(b)'), length(limit=4)") == {"regex": 1.0, "length": None}
    assert thresholds("format>=1, exact_match>=0") == {"format": 1.0, "exact_match": 0.0}
    assert thresholds("regex('ab'), length(limit=4)") == {"regex": 1.0, "length": None}  # nobody compares
    with pytest.raises(InputError, match="verifier 'nan[*]format': 'nan' is not a finite number"):
        thresholds("nan*format")
