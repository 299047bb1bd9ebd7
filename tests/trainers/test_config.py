import itertools
import sys
import typing
from pathlib import Path

import docstring_parser
import pytest

import fused_rl
from fused_rl.trainers import cli, grpo, ppo, sft
from fused_rl.trainers.commands import eval
from fused_rl.trainers.options import help
from fused_rl.trainers.options.config import InputError, in_words, names_of, to_yaml
from fused_rl.trainers.options.parse import parse
from fused_rl.trainers.policy import options
from fused_rl.trainers.scorers.options import read
from tests.marks import slow
from tests.trainers.runs import trainers

RECIPES = Path(__file__).parents[2] / "recipes"
NEEDED = ["--model", "m", "--dataset", "d.jsonl", "--output_dir", "o"]


def made(*argv, config=grpo.GRPOConfig):
    return parse(config, [*NEEDED, *argv], "fused-rl grpo")


def test_the_command_line_wins_over_the_file_and_over_the_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 1.0e-3\ngroup_size: 16\n")
    config = made("--config", str(tmp_path / "c.yaml"), "--lr", "2e-3")
    assert (config.lr, config.group_size, config.minibatches) == (2e-3, 16, grpo.GRPOConfig.minibatches)


def test_a_flag_needs_no_value_and_a_launchers_rank_is_not_a_key():
    config = made("--resume", "--local_rank=1", "--raw_prompt", "false")
    assert config.resume is True and config.raw_prompt is False


@pytest.mark.parametrize(
    ("text", "argv", "named"),
    [
        ("group_sizee: 4\n", [], "group_sizee"),
        ("", ["--group_sizee", "4"], "group_sizee"),
        ("group_size: many\n", [], "group_size"),
        ("", ["--group_size", "many"], "group_size"),
        ("", ["--zero_stage", "4"], "zero_stage"),
        ("", ["--dtype", "float8"], "dtype"),
        ("lr: [1]\n", [], "lr"),
    ],
)
def test_an_unknown_key_or_a_bad_value_is_named(text, argv, named, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(text or "lr: 1.0\n")
    with pytest.raises(SystemExit) as stopped:
        made("--config", str(tmp_path / "c.yaml"), *argv)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line.split("error:")[1]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", "0", "a whole number above 0"),
        slow("steps", "1.5", "a whole number above 0"),
        ("lr", "nan", "a finite number, 0 or more"),
        slow("lr", "inf", "a finite number, 0 or more"),
        slow("max_grad_norm", "-1", "a finite number, 0 or more"),
        ("adam_beta2", "1.5", "a number from 0 to below 1"),
        slow("temperature", "1e7", "a number from 1e-06 to 1e+06"),
        slow("clip_low", "-0.1", "a finite number, 0 or more"),
        slow("top_entropy", "0", "a number above 0, at most 1"),
        ("seed", str(2**40), "a whole number from 0 to 2^31 - 1"),
        ("zero_stage", "4", "one of 0, 1, 2, 3"),
        slow("eval_size", "-5", "a whole number, 0 or more"),
    ],
)
def test_a_value_out_of_its_range_is_one_line_that_names_option_value_and_range(name, value, expected, capsys):
    with pytest.raises(SystemExit):
        made(f"--{name}", value)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"fused-rl grpo: error: {name}: expected {expected}, got {value}"
    number = int(value) if value.lstrip("-").isdigit() else float(value)
    with pytest.raises(InputError, match=f"{name}={number!r}: expected".replace("+", "[+]")):
        grpo.GRPOConfig(model="m", dataset="d", output_dir="o", **{name: number})


def test_a_mapping_is_read_from_a_file_and_as_text_and_printed_as_it_was(tmp_path):
    (tmp_path / "c.yaml").write_text("chat_template_kwargs: {enable_thinking: true, style: short}\n")
    config = made("--config", str(tmp_path / "c.yaml"))
    assert config.chat_template_kwargs == {"enable_thinking": True, "style": "short"}
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert parse(grpo.GRPOConfig, ["--config", str(tmp_path / "again.yaml")], "fused-rl grpo") == config
    for text in ('{"enable_thinking": false}', "{enable_thinking: false}"):
        assert made("--chat_template_kwargs", text).chat_template_kwargs == {"enable_thinking": False}


def test_a_mapping_that_is_none_is_refused(capsys):
    for value in ("3", "[1]", "text", "{1: 2}"):
        with pytest.raises(SystemExit):
            made("--chat_template_kwargs", value)
        (line,) = capsys.readouterr().err.splitlines()
        assert "chat_template_kwargs" in line and "a mapping from names to values" in line


def test_a_key_that_is_spelled_otherwise_is_suggested(capsys):
    with pytest.raises(SystemExit):
        made("--kl-coef", "0.1")
    assert "unknown option --kl-coef; did you mean --kl_coef?" in capsys.readouterr().err


def test_a_key_that_stands_twice_is_refused(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("lr: 1.0\nsteps: 3\nlr: 2.0\n")
    with pytest.raises(SystemExit):
        made("--config", str(tmp_path / "c.yaml"))
    assert "c.yaml, line 3: key 'lr' stands on line 1 too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- lr\n", "expected lines of `option: value`"),
        ("lr\n", "expected lines of `option: value`"),
        ("? [lr]\n: 2\n", "line 1: expected the name of an option before the colon"),
    ],
)
def test_a_file_of_anything_but_options_is_named(text, expected, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(SystemExit):
        made("--config", str(tmp_path / "c.yaml"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "c.yaml" in line and expected in line


def test_every_option_of_the_policy_loss_is_an_option_of_the_run():
    from fused_rl.presets import PolicyLossOptions
    from fused_rl.surrogates import READS

    changed = {
        "ratio_level": "sequence",
        "surrogate": None,  # each, below
        "loss_agg": "seq-mean-token-sum",
        "clip_low": 0.1,
        "clip_high": 0.9,
        "delta": 3.0,
        "sapo_temperature_pos": 2.0,
        "sapo_temperature_neg": 3.0,
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 1.5,
        "vespo_k_neg": 2.5,
        "vespo_lambda_neg": 3.5,
        "kl_coef": 0.1,
        "kl_estimator": "k3",
        "entropy_coef": 0.01,
        "rollout_correction": "sequence-mask",
        "rollout_low": 0.5,
        "rollout_high": 3.0,
        "off_policy_threshold": 0.2,
        "top_entropy": 0.5,
        "entropy_threshold": None,  # not beside top_entropy
        "skip_impossible": True,
    }
    assert changed.keys() == PolicyLossOptions.__dataclass_fields__.keys()
    of_surrogates = {*itertools.chain(*READS.values())}
    for surrogate in READS:
        unread = of_surrogates - {*READS[surrogate]}
        given = {name: value for name, value in changed.items() if value is not None and name not in unread}
        given["surrogate"] = surrogate
        argv = [f"--{name}={value}" for name, value in given.items()]
        assert options.loss_options(made(*argv)) == {"preset": "grpo", **given}
    other = options.loss_options(made("--entropy_threshold", "0.5", "--preset", "dapo"))
    assert other == {
        "preset": "dapo",
        "entropy_threshold": 0.5,
        "kl_coef": 0.0,
        "kl_estimator": "rk3",
        "entropy_coef": 0.0,
    }


@pytest.mark.parametrize(("command", "config"), [("grpo", grpo.GRPOConfig), ("ppo", ppo.PPOConfig)])
def test_the_options_of_the_loss_are_the_librarys_with_their_words_and_ranges(command, config, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parse(config, ["--help"], f"fused-rl {command}")
    told = " ".join(capsys.readouterr().out.split())
    kinds = typing.get_type_hints(config)
    for param in docstring_parser.parse_from_object(fused_rl.PolicyLossOptions).params:
        _, _, after = told.partition(f" --{param.arg_name} ")
        assert " ".join(param.description.split()) in after[:500] or param.arg_name in vars(config), param.arg_name
        assert f"({in_words(kinds[param.arg_name])}; default " in after[:700], param.arg_name


OF_SECTIONS = {
    "model": "model load_in_4bit",
    "data": "dataset chat_template_kwargs prompt_column",
    "rollout": "temperature server group_size max_new_tokens stop_token",
    "scorers": "verifiers answer_column",
    "loss": "clip_low kl_coef advantage gae_lambda target_kl",
    "critic": "critic critic_lr value_clip",
    "optimizer": "lr zero_stage dtype",
    "run": "output_dir steps seed eval_samples",
}


def test_help_is_in_sections_and_tells_types_in_words(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as stopped:
        parse(ppo.PPOConfig, ["--help"], "fused-rl ppo")
    out, places = capsys.readouterr().out, []
    for section, options_of in OF_SECTIONS.items():
        places.append(out.index(f"\n{section}:\n"))
        after = out[places[-1] :].partition("\n\n")[2].partition("\n\n")[0]  # behind what the section is
        assert all(f"\n  --{name} " in f"\n{after}" for name in options_of.split()), section
    assert stopped.value.code == 0 and places == sorted(places)
    assert out.count("(type: ") == 0 and "(a finite number, 0 or more; default 1e-06)" in out
    assert "(text; required)" in out and "(true or false; default false)" in out and "default null)" in out


def test_every_option_of_every_command_stands_in_one_section():
    configs = [eval.EvalConfig, *trainers()]
    for config_class in configs:
        found = help.sections(config_class)
        assert sorted(sum(found.values(), [])) == sorted(names_of(config_class))
        owners = [group for group in config_class.__mro__ if "sections" in vars(group)]
        for group in owners:  # a slip of the pen there would move an option in silence
            assert set(group.sections.values()) <= help.SECTIONS.keys()
            named = set(" ".join(group.sections).split()) - {"*"}
            assert named <= set(names_of(group)), group


def test_the_help_of_the_program_says_what_each_command_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fused-rl", "--help"])
    cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert cli.TOLD.keys() == cli.COMMANDS.keys()
    for name, told in cli.TOLD.items():
        assert f"  {name:<12} {told}" in lines and len(told) <= 60


def test_what_draws_no_gradient_takes_no_option_of_a_loss(capsys):
    for name in names_of(options.LossConfig):
        with pytest.raises(SystemExit):
            parse(eval.EvalConfig, ["--model", "m", "--dataset", "d.jsonl", f"--{name}", "1"], "fused-rl eval")
        assert f"unknown option --{name}" in capsys.readouterr().err


def test_a_preset_brings_its_advantage_and_an_option_overrides_it():
    assert grpo.advantage_of(made("--preset", "rloo")) == "leave-one-out"
    assert grpo.advantage_of(made("--preset", "reinforce++")) == "batch-std"
    assert grpo.advantage_of(made("--preset", "dr_grpo")) == "group-mean"
    assert grpo.advantage_of(made("--preset", "rloo", "--advantage", "group-std")) == "group-std"
    assert grpo.advantage_of(made("--preset", "ppo", "--advantage", "group-std")) == "group-std"


@pytest.mark.parametrize(
    ("argv", "world", "message"),
    [
        (["--prompts_per_step", "3"], 2, "prompts_per_step=3 does not divide over 2 processes"),
        (["--minibatches", "3"], 1, "minibatches=3 does not divide the 256 responses"),
        (["--group_size", "1"], 1, "at least 2"),
        (["--preset", "grpoo"], 1, "grpoo.*grpo"),
        (["--preset", "ppo"], 1, "preset=ppo takes its advantages from gae, which needs a critic"),
        (["--delta", "1.1"], 1, "delta must lie above 1 \\+ clip_high"),
        (["--surrogate", "clap"], 1, "surrogate must be one of clip"),
    ],
)
def test_arithmetic_that_does_not_work_out_is_refused(argv, world, message):
    with pytest.raises(InputError, match=message):
        grpo.arithmetic(made(*argv), world)


def test_batch_arithmetic():
    found = grpo.arithmetic(made("--prompts_per_step", "6", "--group_size", "4", "--epochs", "3", "--steps", "5"), 2)
    assert found["responses per process and step"] == 12
    assert found["responses per process and minibatch"] == 6
    assert found["optimizer updates in the run"] == 5 * 2 * 3
    found = sft.arithmetic(made("--batch_size", "24", "--micro_batch_size", "5", config=sft.SFTConfig), 2)
    assert found["micro-batches per process and step"] == "3 of at most 5"


def dry_run(argv, capsys) -> str:
    """What is printed where the rows are not there, which is told at the end."""
    with pytest.raises(SystemExit, match="error: dataset file .*none.jsonl does not exist"):
        grpo.main([*argv, "--dataset", "none.jsonl", "--dry_run"])
    return capsys.readouterr().out


def test_dry_run_prints_the_resolved_config_though_files_are_not_there(files, capsys):
    printed = dry_run(["--config", str(RECIPES / "demo_grpo.yaml"), "--lr", "0.25", "--model", files[0]], capsys)
    assert "lr: 0.25" in printed and "verifiers:\n- reasoning_gym\n" in printed
    assert "# responses per step: 256 = 32 prompts x 8" in printed


def test_what_dry_run_prints_is_the_same_config_when_it_is_read_back(files, tmp_path, capsys):
    argv = ["--config", str(RECIPES / "demo_grpo.yaml"), "--system_prompt", "a: b", "--clip_high", "inf"]
    argv += ["--model", files[0], "--dataset", "none.jsonl"]
    (tmp_path / "printed.yaml").write_text(dry_run(argv, capsys))
    again = parse(grpo.GRPOConfig, ["--config", str(tmp_path / "printed.yaml"), "--overwrite"], "fused-rl grpo")
    assert again == parse(grpo.GRPOConfig, argv, "fused-rl grpo")


def test_every_recipe_of_sft_and_grpo_parses():
    for recipe in [*RECIPES.glob("*sft*.yaml"), *RECIPES.glob("*grpo*.yaml"), *RECIPES.glob("gsm8k*.yaml")]:
        trainer, config = (sft, sft.SFTConfig) if "sft" in recipe.name else (grpo, grpo.GRPOConfig)
        trainer.arithmetic(parse(config, ["--config", str(recipe)], "fused-rl"), 1)


def test_the_version_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fused-rl", "--version"])
    cli.main()
    assert capsys.readouterr().out == f"fused-rl {fused_rl.__version__}\n"


def test_an_unknown_command_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fused-rl", "grop"])
    with pytest.raises(SystemExit, match="grop"):
        cli.main()


@pytest.mark.parametrize(
    ("name", "value"), [("clip_high", "1e39"), ("entropy_coef", "-1e39"), ("top_k", "1" + "0" * 19)]
)
def test_a_number_that_no_tensor_holds_is_refused(name, value, capsys):
    with pytest.raises(SystemExit):
        made(f"--{name}={value}")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fused-rl grpo: error: {name}=") and "the largest number that can be computed with" in line
    assert made("--clip_high", "inf").clip_high == float("inf")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"verifiers": 5}, r"verifiers=5: expected text, or a list of texts"),
        ({"verifiers": ["math", 5]}, r"verifiers=\['math', 5\]: expected text, or a list"),
        ({"model": object}, "model=<class 'object'>: expected text"),
        ({"overwrite": "false"}, "overwrite='false': expected true or false"),
        ({"resume": 1}, "resume=1: expected true or false"),
    ],
)
def test_python_gives_options_of_the_types_that_the_command_gives(options, expected):
    with pytest.raises(InputError, match=expected):
        grpo.GRPOConfig(**{"model": "m", "dataset": "d.jsonl", "output_dir": "o"} | options)


def test_a_path_is_text():
    config = grpo.GRPOConfig(model=Path("m"), dataset=Path("d.jsonl"), output_dir=Path("~/o"))
    assert (config.model, config.dataset, config.output_dir) == ("m", "d.jsonl", str(Path.home() / "o"))
    to_yaml(config)


def test_a_path_from_home_is_that_of_a_shell_and_an_empty_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("model: ~/m\noutput_dir: ~/o\n")
    config = made("--config", str(tmp_path / "c.yaml"), "--verifiers", "reward_model:~/rm")
    assert (config.model, config.output_dir) == (str(tmp_path / "m"), str(tmp_path / "o"))
    assert read(config)[0].detail == str(tmp_path / "rm")
    for name in ("output_dir", "model", "prompt_column", "eval_dataset"):
        with pytest.raises(InputError, match=f"{name}='' is empty; give it a value, or leave it out"):
            grpo.arithmetic(made(f"--{name}="), 1)


def test_what_is_set_later_is_checked_as_what_is_given(tmp_path):
    config = grpo.GRPOConfig(model="m", dataset="d.jsonl", output_dir=str(tmp_path / "o"))
    with pytest.raises(AttributeError, match="GRPOConfig: unknown option --stpes; did you mean --steps"):
        config.stpes = 3
    with pytest.raises(InputError, match="lr='fast': expected a finite number"):
        config.lr = "fast"
    config.steps, config.num_train_epochs = 3, 2
    with pytest.raises(InputError, match="num_train_epochs=2.0 and steps=3 are both given"):
        grpo.train(config)
