"""The declaration of options: files, the command line, Python, ranges, help, and what an option needs beside it."""

import inspect
import json
import re
from pathlib import Path

import pytest

import fused_rl
from fused_rl.integrations import openrlhf, primitives, transformers, trl, verl
from fused_rl.objectives.presets import resolve_options
from fused_rl.trainers import cli, grpo, ppo, sft
from fused_rl.trainers.base.options import in_words, kinds_of
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.commands.eval import EvalConfig
from fused_rl.trainers.data import preferences
from fused_rl.trainers.data.forms import PROMPT_COLUMNS
from fused_rl.trainers.options import to_yaml
from fused_rl.trainers.policy import options
from fused_rl.trainers.rollouts import types
from fused_rl.trainers.run.parse import parse
from tests.trainers.bad_inputs import CASES
from tests.trainers.runs import trainers
from tests.trainers.test_faults import GOOD

RECIPES = Path(__file__).parents[2] / "recipes"
COMMANDS = {name: listed.config_class() for name, listed in cli.COMMANDS.items() if listed.config}
NEEDED = ["--model", "m", "--dataset", "d.jsonl", "--output_dir", "o"]


DEFAULTS = Path(__file__).with_name("defaults.txt")


def defaults() -> str:
    """Return every default of an option, a public function and a type of rollouts, with who has it."""
    have: dict[str, list[str]] = {}
    for command, config in COMMANDS.items():
        for name, field in config.model_fields.items():
            value = field.get_default(call_default_factory=True)
            have.setdefault(f"--{name} {value!r}", []).append(command)
    public = {name: getattr(fused_rl, name) for name in fused_rl.__all__}
    called = {name: each for name, each in public.items() if inspect.isroutine(each)}
    called |= {
        name: kind
        for name, kind in vars(types).items()
        if inspect.isclass(kind) and kind.__module__ == types.__name__
    }
    for host in (openrlhf, primitives, transformers, trl, verl):
        for name, each in vars(host).items():
            if inspect.isroutine(each) and each.__module__ == host.__name__:
                called[f"{host.__name__.rpartition('.')[2]}.{name}"] = each
    for name, each in called.items():
        for given in inspect.signature(each).parameters.values():
            if given.default is not given.empty:
                have.setdefault(f"{given.name}={given.default!r}", []).append(name)
    for name in types.Sampler.__annotations__:  # of a sampler of a user's
        have.setdefault(f"{name}={getattr(types.Sampler, name)!r}", []).append("Sampler")
    return "".join(f"{default}: {' '.join(where)}\n" for default, where in sorted(have.items()))


def test_a_default_is_changed_on_purpose():
    """Then `python -m tests.trainers.test_options` writes the file again."""
    assert defaults() == DEFAULTS.read_text()


def made(*argv, config=grpo.GRPOConfig):
    return parse(config, [*NEEDED, *argv])


def test_the_command_line_wins_over_the_file_and_over_the_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 1e-3\ngroup_size: 16\nraw_prompt: true\n")
    config = made(
        "--config", str(tmp_path / "c.yaml"), "--lr", "2e-3", "--resume", "--local_rank=1"
    )
    assert (config.lr, config.group_size, config.raw_prompt, config.resume, config.minibatches) == (
        *(2e-3, 16, True, True),
        grpo.GRPOConfig.model_fields["minibatches"].default,
    )


def test_every_bad_option_that_needs_no_file_of_a_run_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = 0
    for case in CASES["options"]:
        if case.command not in COMMANDS:
            continue
        if case.spoil is not None:
            case.spoil(tmp_path)
        try:
            parse(COMMANDS[case.command], [*GOOD[case.command], *case.options])
        except InputError as error:
            assert re.search(case.message, f"error: {error}"), (case.title, str(error))
            assert "\n" not in str(error)
            refused += 1
    assert refused >= 50  # the others are refused by a run: tests/trainers/test_faults.py


def test_a_mapping_is_read_from_a_file_and_as_text_and_printed_as_it_was(tmp_path):
    for text in ('{"enable_thinking": false}', "{enable_thinking: false}"):
        config = made(
            "--chat_template_kwargs", text, "--system_prompt", "a: b", "--clip_high", "inf"
        )
        assert config.chat_template_kwargs == {"enable_thinking": False}
        (tmp_path / "again.yaml").write_text(to_yaml(config))
        assert parse(grpo.GRPOConfig, ["--config", str(tmp_path / "again.yaml")]) == config


def test_every_option_of_the_policy_loss_is_an_option_of_the_run():
    given = {"loss_agg": "seq-mean-token-sum", "kl_coef": 0.1, "kl_estimator": "k3"}
    given |= {"surrogate": "sapo", "entropy_coef": 0.01, "top_entropy": 0.5}
    further = {"sapo_temperature_pos": 1.5}
    flags = [f"--{name}={value}" for name, value in given.items()]
    chosen = options.loss_options(made(*flags, f"--surrogate_options={json.dumps(further)}"))
    assert chosen == resolve_options("grpo", given | further)


def test_a_range_is_said_in_words():
    for command, name, said in (
        ("grpo", "steps", "int > 0"),
        ("grpo", "zero_stage", "0 or 1 or 2 or 3"),
        ("grpo", "verifier_weights", "list of float"),
        # Those of the library.
        ("grpo", "delta", "float > 0"),
        ("grpo", "top_entropy", "float > 0 <= 1"),
        ("dpo", "label_smoothing", "float >= 0 < 0.5"),
    ):
        assert in_words(kinds_of(COMMANDS[command])[name]) == said


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_the_options_that_matter_and_all_of_them_in_words(command, capsys):
    config_class, printed = COMMANDS[command], []
    for words in (["--help"], ["--help", "all"]):
        with pytest.raises(SystemExit) as stopped:
            parse(config_class, words)
        printed.append(capsys.readouterr().out)
        assert stopped.value.code == 0
    short, whole = printed
    assert len(short.splitlines()) <= 45 and all(
        f"\n  --{name} " in short for name in config_class.main
    )
    flat = " ".join(whole.split())
    for name, field in config_class.model_fields.items():
        _, _, after = flat.partition(f" --{name} ")
        assert " ".join(field.description.split()) in after, name
        assert f"({in_words(kinds_of(config_class)[name])}; " in after, name
    assert len({*re.findall(r"^  --(\w+) ", whole, re.M)}) == len(config_class.model_fields)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_prompt_column_names_every_column_of_prompts(command):
    description = COMMANDS[command].model_fields["prompt_column"].description
    assert {*PROMPT_COLUMNS} <= {*re.findall(r"\w+", description)}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_is_that_of_the_nearest_class(command):
    """As of a method; of an option that several bases declare, pydantic takes the first base's, however far it is."""
    config_class = COMMANDS[command]
    for name, field in config_class.model_fields.items():
        groups = [
            each for each in config_class.__mro__ if name in vars(each).get("__annotations__", {})
        ]
        assert groups[0].model_fields[name].default == field.default, name


def test_batch_arithmetic():
    sizes = ["--prompts_per_step=6", "--group_size=4", "--epochs=3", "--steps=5"]
    config = made("--verifiers", "math", *sizes)
    config.resolve()
    found = grpo.batch_plan(config, 2)
    assert found["responses per process and step"] == 12
    assert found["responses per process and minibatch"] == 6
    assert found["optimizer updates in the run"] == 5 * 2 * 3
    found = sft.batch_plan(
        made("--batch_size", "24", "--micro_batch_size", "5", config=sft.SFTConfig), 2
    )
    assert found["micro-batches per process and step"] == "3 of at most 5"
    # A pair is two sequences, and goes through the model as a whole.
    pairs = {
        1: "4 of 1 pairs = 2",
        3: "4 of 1 pairs = 2",
        4: "2 of 2 pairs = 4",
        6: "2 of 3 pairs = 6",
    }
    for most, expected in pairs.items():
        words = ["--batch_size", "8", "--micro_batch_size", str(most)]
        found = preferences.batch_plan(made(*words, config=COMMANDS["reward"]), 2)
        assert found["micro-batches per process and step"] == f"{expected} sequences"


def test_dry_run_prints_the_resolved_config(files, tmp_path, capsys):
    argv = ["--config", str(RECIPES / "demo_grpo.yaml"), "--lr", "0.25", "--model", files[0]]
    argv += ["--dataset", files[1], "--eval_size", "4", "--prompts_per_step", "4"]
    argv += ["--output_dir", str(tmp_path / "run"), "--verifiers", "math"]
    argv += ["--eval_dataset", files[1]]
    config = parse(grpo.GRPOConfig, argv)
    config.resolve()
    printed = []
    for words in (["--dry_run"], ["--dry_run", "all"]):
        grpo.main([*argv, *words])
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[-1])
        again = parse(grpo.GRPOConfig, ["--config", str(tmp_path / "printed.yaml"), "--overwrite"])
        assert again == config
    # What follows from other options is in the short form, and what has its default is not.
    short, whole = printed
    assert "\nmicro_batch_size: " in short and "\nkl_every: " not in short
    assert "\nkl_every: " in whole and "# responses per step: 32 = 4 prompts x 8" in whole


def test_every_recipe_parses():
    recipes = [
        path
        for path in RECIPES.glob("*.yaml")
        if re.search("sft|grpo|gsm8k|ppo|reward|distill", path.name)
    ]
    for recipe in recipes:
        name = next((name for name in cli.TRAINERS if name in recipe.name), "grpo")
        config = parse(COMMANDS[name], ["--config", str(recipe)])
        assert name != "ppo" or ppo.batch_plan(config, 2)
    assert len(recipes) > 4


def test_a_path_is_text_and_one_from_home_that_of_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = grpo.GRPOConfig(model=Path("m"), dataset="d.jsonl", output_dir=Path("~/o"))
    assert (config.model, config.output_dir) == ("m", str(tmp_path / "o"))


def test_what_is_set_later_is_checked_as_what_is_given(tmp_path):
    config = grpo.GRPOConfig(model="m", dataset="d.jsonl", output_dir=str(tmp_path / "o"))
    with pytest.raises(InputError, match="unknown option --stpes; did you mean --steps"):
        config.stpes = 3
    with pytest.raises(InputError, match="group_size=.8. should be a valid integer"):
        config.group_size = "8"
    with pytest.raises(InputError, match="lr='fast' should be a valid number"):
        config.lr = "fast"
    config.steps, config.num_train_epochs = 3, 2
    with pytest.raises(InputError, match="num_train_epochs=2.0 and steps=3 are both given"):
        grpo.train(config)


SECRETS = [
    "http://user:hunter2@host:8000",
    "https://host/v1?key=hunter2",
    "reward_model:https://hunter2@host/rm",
]


@pytest.mark.parametrize("url", SECRETS)
@pytest.mark.parametrize("config_class", [*trainers(), EvalConfig])
def test_no_option_takes_a_url_with_a_secret_and_no_error_repeats_it(config_class, url):
    for name in config_class.model_fields:
        for value in (url, [url], {"math": url}):
            with pytest.raises(InputError) as refused:
                config_class(**{"model": "model", "output_dir": "run"} | {name: value})
            assert "hunter2" not in str(refused.value), name
    for words in (
        [url],
        ["--lr", url],
        [f"--{url}"],
        ["--config", url],
        ["--verifiers", f"[{url}"],
    ):
        with pytest.raises(InputError) as refused:
            parse(config_class, words)
        assert "hunter2" not in str(refused.value), words


if __name__ == "__main__":
    DEFAULTS.write_text(defaults())
