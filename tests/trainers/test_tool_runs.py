"""Runs of programs that were written for TRL, with a model that was warm-started to call; ranks, a lag, and kills."""

import importlib
import inspect
import json
import random
import re
import shlex
import shutil
import signal
import threading
from pathlib import Path

import pytest

from fused_rl.recipes import tool
from fused_rl.recipes.tiny_model import learn_tokenizer, save_llama, texts_of
from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.commands.eval import EvalConfig, evaluate
from fused_rl.trainers.rollouts.types import Sampler
from fused_rl.trainers.run import store
from fused_rl.trainers.servers.sampler import ServerSampler
from tests.trainers import fake_server, killed, runs, tiny
from tests.trainers.test_tools import add, multiply


class Increment:
    """In the form of TRL's documentation of environments that make their own tasks."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 3)
        return f"Count to {self.target}"

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Count on.

        Args:
            step: By how much.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter


class EchoClient:
    """In the place of OpenEnv's client of its echo environment."""

    def step(self, action: dict) -> dict:
        return {"reward": len(action["message"]) / 10, "echoed": action["message"]}


class EchoToolEnv:
    """In the form of OpenEnv's example."""

    def __init__(self):
        self.env = EchoClient()
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo a message.

        Args:
            message: The message.

        Returns:
            The echoed message.
        """
        observation = self.env.step({"message": message})
        self.reward = observation["reward"]
        return observation["echoed"]


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


def accuracy(completions, answer, **kwargs) -> list[float]:
    return [
        float(completion[-1]["content"] == right)
        for completion, right in zip(completions, answer, strict=True)
    ]


def asked(question: str, name: str, arguments: dict, result: object) -> dict:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [{"role": "user", "content": question}]
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    messages.append({"role": "tool", "name": name, "content": str(result)})
    messages.append({"role": "assistant", "content": str(result)})
    functions = {"multiply": [multiply, add], "add": [multiply, add], "echo": [EchoToolEnv.echo]}
    offered = functions.get(name, [Increment.increment])
    return {"messages": messages, "tools": [*map(tool.get_json_schema, offered)]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The folder of a model that calls the functions of this file."""
    folder = tmp_path_factory.mktemp("calls")
    rows = [asked(f"{a} times {a}", "multiply", {"a": a, "b": a}, a * a) for a in (2, 3)]
    rows += [asked(f"{a} and {a}", "add", {"a": a, "b": a}, a + a) for a in (2, 3)]
    rows += [asked(f"Count to {n}", "increment", {"step": n}, n) for n in (1, 2, 3)]
    rows += [asked("Echo hello", "echo", {"message": "hello"}, "hello")]
    tokenizer = learn_tokenizer(texts_of(rows * 2), 400, chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "<call>"]})
    tokenizer.chat_template, tokenizer.response_template = tool.TEMPLATE, tool.RESPONSE
    save_llama(folder / "init", tokenizer, 1, layers=2, hidden_size=64, positions=256)
    options = {"steps": 60, "batch_size": 16, "lr": 5e-3, "eval_size": 0, "save_every": 0}
    config = tiny.config_of("sft", str(folder / "init"), None, str(folder / "sft"), **options)
    config = config.replace(assistant_turns="all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")  # as conftest.py does for a test
        return sft.train(config, dataset=rows * 4)


def options_of(model, folder, **options):
    usual = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "eval_size": 2, "save_every": 0}
    usual |= {"max_new_tokens": 48, "eval_samples": 2, "micro_batch_size": 8, "overwrite": True}
    return tiny.config_of("grpo", model, None, str(folder), **(usual | options))


QUESTIONS = [{"prompt": "2 times 2", "answer": "4"}, {"prompt": "3 and 3", "answer": "6"}] * 2
PROGRAMS = {
    "tools": {"tools": [multiply, add], "dataset": QUESTIONS, "scorers": [accuracy]},
    "environments": {"environment_factory": Increment},
    "openenv": {
        "environment_factory": EchoToolEnv,
        "dataset": [{"prompt": [{"role": "user", "content": "Echo hello"}]}] * 6,
        "scorers": [reward_func],
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_trl_run_as_they_are(name, model, tmp_path):
    random.seed(1)
    grpo.train(options_of(model, tmp_path, lag=int(name == "environments")), **PROGRAMS[name])
    first, *_, last = tiny.read_metrics(tmp_path)
    assert first["eval/tools/call_frequency"] > 0.5 and last["tools/call_frequency"] > 0.5
    assert first["eval/accuracy_greedy"] + first["eval/score"] > 0
    assert last["tools/failure_frequency"] < 1
    shown = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert any("<call>" in row["response"] and "<tool>" in row["response"] for row in shown)


def test_a_dry_run_shows_the_tools_and_calls_none(model, tmp_path):
    def trap(a: int) -> int:
        """
        Nobody calls it.

        Args:
            a: A number.
        """
        raise AssertionError

    config = options_of(model, tmp_path, dry_run=True)
    with pytest.raises(grpo.command.DryRun) as shown:
        grpo.train(config, tools=[trap], dataset=QUESTIONS, scorers=[accuracy])
    assert (
        "trap:Nobodycallsit." in re.sub("[ |]", "", str(shown.value))
        and not (tmp_path / "model").exists()
    )

    config = options_of(tiny.model_folder(tmp_path / "none"), tmp_path / "o", dry_run=True)
    with pytest.raises(InputError, match="chat template does not read 'tools'"):
        grpo.train(config, tools=[trap], dataset=QUESTIONS, scorers=[accuracy])


def test_a_tokenizer_that_reads_no_calls_is_refused(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["response_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = options_of(str(folder), tmp_path / "o")
    with pytest.raises(InputError, match="reads no calls"):
        grpo.train(config, tools=[multiply], dataset=QUESTIONS, scorers=[accuracy])
    with pytest.raises(InputError, match="sampler and tools"):
        grpo.train(config, tools=[multiply], sampler=Sampler)
    with pytest.raises(InputError, match="zero_stage=3"):
        grpo.train(config.replace(zero_stage=3), tools=[multiply])


@pytest.mark.parametrize("lag", [0, 1])
def test_each_turn_of_all_responses_is_one_batch_of_a_server(lag, model, tmp_path, monkeypatch):
    batches, sample = [], ServerSampler.sample

    def noted(self, prompts, sampling):
        batches.append({prompt.count(result) for prompt in prompts})
        return sample(self, prompts, sampling)

    monkeypatch.setattr(ServerSampler, "sample", noted)
    with fake_server.serving("vllm", model) as fake:
        result = fake.tokenizer.convert_tokens_to_ids("<tool>")
        config = options_of(model, tmp_path, server=[fake.url], lag=lag, lr=1e-9, eval_size=0)
        config = config.replace(max_tool_calling_iterations=1, max_prompt_length=64)
        grpo.train(config, tools=[multiply, add], dataset=QUESTIONS, scorers=[accuracy])
    assert batches == [{0}, {1}] * 2
    steps = [row for row in tiny.read_metrics(tmp_path) if "rollout/weight_version" in row]
    assert [row["rollout/weight_version"] for row in steps] == [0, 1 - lag]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in steps)


@pytest.mark.parametrize("split", ["dataset", "eval_dataset"])
def test_a_row_that_names_no_environment_is_refused_at_the_start(split, model, tmp_path):
    row, factories = {"prompt": "Count", "environment": "a"}, {"a": Increment, "b": Increment}
    rows = {"dataset": [row], "eval_dataset": [row], split: [row | {"environment": ["a"]}]}
    with pytest.raises(InputError, match=r"row 1.*'environment' is .* one of \['a', 'b'\]"):
        grpo.train(options_of(model, tmp_path), environment_factory=factories, **rows)


def test_an_evaluation_calls_the_tools_of_the_models_run(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "config.yaml").write_text(f"environment: {EchoToolEnv.__module__}:EchoToolEnv")
    config = EvalConfig(model=str(tmp_path / "model"), dataset="", samples=1, max_new_tokens=48)
    figures = evaluate(config, dataset=PROGRAMS["openenv"]["dataset"], scorers=[reward_func])
    assert figures["score"] > 0.1, "no message was echoed"


# With a model of the policy's own kind as the critic or the teacher.
OTHERS = {
    "ppo": lambda model: {"minibatches": 1},
    "distill": lambda model: {"teacher": model},
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", OTHERS)
def test_other_trainers_call_tools(trainer, model, tmp_path):
    options = OTHERS[trainer](model) | {"steps": 1, "prompts_per_step": 2, "eval_size": 2}
    options |= {"max_new_tokens": 48, "micro_batch_size": 2}
    config = tiny.config_of(trainer, model, None, str(tmp_path), **options)
    train = importlib.import_module(f"fused_rl.trainers.{trainer}").train
    train(config, tools=[multiply, add], dataset=QUESTIONS, scorers=[accuracy])
    *_, last = tiny.read_metrics(tmp_path)
    assert last["tools/call_frequency"] > 0


class Locked(Increment):
    """Cannot be sent to another rank."""

    def __init__(self):
        self.lock = threading.Lock()


def _on_ranks(rank, world, model, folder):
    config = options_of(model, folder, prompts_per_step=4)
    grpo.train(config, tools=[multiply, add], environment_factory=Locked)


@pytest.mark.slow
def test_two_ranks_call_tools_of_an_environment_that_cannot_be_sent(model, tmp_path):
    runs.on_ranks(_on_ranks, 2, model, tmp_path)
    *_, last = tiny.read_metrics(tmp_path)
    assert last["tools/call_frequency"] > 0 and last["episode"] == 32


KILLED = shlex.split(
    "--dataset rows.jsonl --tools calls:multiply,calls:add --verifiers calls:accuracy --eval_size 2 --steps 3 "
    "--prompts_per_step 2 --group_size 4 --max_new_tokens 48 --zero_stage 0 --save_every 1 --keep_checkpoints 9"
)


@pytest.fixture(scope="module")
def start(model, tmp_path_factory):
    """`start()` is a folder to run in, and the command line."""

    def make() -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp("killed")
        tiny.jsonl(folder / "rows.jsonl", QUESTIONS * 2)
        sources = map(inspect.getsource, (multiply, add, accuracy))
        (folder / "calls.py").write_text("\n".join(["import asyncio", *sources]))
        return folder, ["--model", model, "--output_dir", "run", *KILLED]

    return make


@pytest.fixture(scope="module")
def whole(start) -> Path:
    folder, words = start()
    assert killed.run("grpo", words, folder) == [0], (folder / "log").read_text()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("at", ["step-1", "step-2", "step-3", "model"])
def test_a_killed_run_with_a_tool_goes_on_bit_for_bit(at, start, whole):
    folder, words = start()
    statuses = killed.run("grpo", words, folder, killed.Moment(1, f"unfinished-{at}"))
    assert statuses == [-signal.SIGKILL], (folder / "log").read_text()
    is_begun = store.steps_in(folder / "run" / "checkpoints")
    how = ["--resume"] if is_begun else ["--overwrite"]
    assert killed.run("grpo", [*words, *how], folder) == [0], (folder / "log").read_text()
    assert is_begun or at == "step-1"
    runs.assert_equal_runs(whole, folder / "run")
