"""Tools and environments: ids, masks, results of every kind, failures, and programs that were written for TRL."""

import asyncio
import functools
import itertools
import json
import pickle
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from fused_rl import TokenSupport
from fused_rl.trainers.rollouts import tools as playing
from fused_rl.trainers.rollouts.roll_out import means_of, roll_out
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample, Sampler, support_of
from fused_rl.trainers.scorers.load import load_scorers
from tests.trainers import tiny
from tests.trainers.data.test_templates import encoder_of

GRPOTrainer = pytest.importorskip("trl").GRPOTrainer
from trl.chat_template_utils import get_training_chat_template, parse_response  # noqa: E402


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: One factor.
        b: The other.

    Returns:
        The product.
    """
    return a * b


async def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    await asyncio.sleep(0)
    return a + b


def answer(kind: str) -> object:
    """
    Answer in many ways.

    Args:
        kind: Which way.
    """
    if kind == "hangs":
        time.sleep(1000)
    if kind == "raises":
        raise KeyError(kind)
    return {
        "object": SimpleNamespace(a=1),
        "dict": {"a": [1, "two"]},
        "long": "word \u1234" * (1 << 20),
        "control": "a\x00\x1b[31m\ud800b\tc\n<|im_end|>",
        "empty": "",
        "none": None,
    }[kind]


def calling(name: str, family: str = "qwen3", **arguments) -> str:
    if family.startswith("llama"):
        return json.dumps({"name": name, "parameters": arguments})
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Scripted(Sampler):
    """Says to each prompt the turns of a script, cut to their limit, with records as a server has them."""

    reports_logprobs = records_support = True

    def __init__(self, encoder, *scripts):
        super().__init__()
        self.encoder, self.scripts, self.batches = encoder, [[*script] for script in scripts], []

    def sample(self, prompts, sampling):
        self.batches.append(prompts)
        eos, responses = self.encoder.tokenizer.eos_token_id, []
        # The prompts of a batch are those of the scripts that are not over, in order.
        speaking = [script for script in self.scripts if script][: len(prompts)]
        for script in speaking:
            ids = [*self.encoder.ids(script.pop(0)), eos][: sampling.max_new_tokens]
            finish = "stop" if ids[-1] == eos else "length"
            support = TokenSupport.from_lists([[token, 1] for token in ids])
            responses.append(Response(ids, finish, [-float(token) for token in ids], support))
        return responses


@pytest.fixture
def played(tmp_path):
    """A function of scripts, with the folder of a model that has no weights."""
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    return functools.partial(play, str(tmp_path))


def play(
    model, name, scripts, tools=(multiply, add, answer), environment=None, room=6000, row=None
):
    """Return the responses to scripts, what sampled them and its encoder."""
    encoder = encoder_of(name)
    config = tiny.config_of("grpo", model, max_prompt_length=6000, tool_timeout=0.5)
    made = playing.ToolSampler(config, tools, environment)
    built = Scripted(encoder, *scripts)
    sampler = made(built, encoder.tokenizer)
    tokenizer = encoder.tokenizer
    text = tokenizer.apply_chat_template(
        ASKED, tokenize=False, add_generation_prompt=True, **sampler.config.chat_template_kwargs
    )
    prompts = tuple(Prompt(encoder.ids(text), row or {}, "a row", ASKED) for _ in scripts)
    sampling = Sampling(1.0, room, (tokenizer.eos_token_id,), prompts=prompts)
    return sampler.sample([prompt.ids for prompt in prompts], sampling), sampler, encoder


ASKED = [{"role": "user", "content": "How much?"}]
THOUGHT = "<think>\nIt depends.\n</think>\n\n"


def two_calls(name):
    """The turns of a conversation with two calls after each other, and where templates allow it two at once."""
    thought = THOUGHT if name == "qwen3" else ""
    first = [calling("multiply", name, a=6, b=7)]
    first += [] if name.startswith("llama") else [calling("multiply", name, a=2, b=3)]
    second = calling("add", name, a=42, b=1)
    return [thought + "\n".join(first), thought + second, thought + "It is 43."]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "llama3_2"])
def test_a_conversation_has_the_ids_of_the_template_and_the_mask_of_trl(played, name):
    script = two_calls(name)
    (response,), sampler, encoder = played(name, [script])
    tokenizer, prompt_ids = encoder.tokenizer, response.extra["prompt_ids"]
    messages = response.extra["completions"]
    assert [message["role"] for message in messages].count("tool") == 3 - name.startswith("llama")
    schemas = sampler.config.chat_template_kwargs["tools"]
    whole = tokenizer.apply_chat_template([*ASKED, *messages], tools=schemas, tokenize=False)
    ids = encoder.ids(whole)
    both = prompt_ids + response.ids
    assert ids[: len(both)] == both and not tokenizer.decode(ids[len(both) :]).strip()

    # The loop of TRL itself, on the same turns.
    turns = [[*encoder.ids(text), tokenizer.eos_token_id] for text in script]
    functions = sampler.functions(object())
    asyncs = {"add": functions.pop("add")}
    later = iter(turns[1:])
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    trainer = SimpleNamespace(
        max_tool_calling_iterations=9,
        max_completion_length=6000,
        _sync_tool_dicts=[functions],
        _async_tool_dicts=[asyncs],
        async_loop=loop,
        _is_vlm=False,
        use_vllm=False,
        vllm_mode=None,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=9999)),
        environment_factories=None,
        tools=[multiply, add, answer],
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=get_training_chat_template(tokenizer) if name == "qwen3" else None,
        chat_template_kwargs={},
        _generate_single_turn=lambda *args, **options: ([next(later)], None),
    )
    trainer._get_tool_suffix_ids = functools.partial(GRPOTrainer._get_tool_suffix_ids, trainer)
    first = [[parse_response(tokenizer, turns[0], prefix=prompt_ids)]]
    mask, _, theirs, *_ = GRPOTrainer._tool_call_loop(
        trainer, [[*ASKED]], [prompt_ids], [turns[0]], first, None, None, {}
    )
    assert theirs == [response.ids] and [*map(bool, mask[0])] == response.trained
    # What the policy said has the records of its turns.
    said = sum(turns, [])
    assert response.sampled(response.ids) == said
    assert response.sampled(response.logprobs) == [-float(token) for token in said]
    kept = support_of([response])
    assert kept.ids.view(-1, 2)[:, 0].tolist() == said


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_what_a_tool_answers_is_text_and_what_it_cannot_do_is_said(played, name):
    kinds = ["hangs", "raises", "object", "dict", "long", "control", "empty", "none"]
    scripts = [[calling("answer", name, kind=kind), "Done."] for kind in kinds]
    broken = "<tool_call>\n{broken" if name == "qwen2_5" else '{"name": "x", "parameters": 1}'
    scripts += [[calling("nothing", name), "Done."], [calling("add", name, c=1), "Done."]]
    scripts += [[broken, "Done."], ["Done at once."]]
    responses, sampler, encoder = played(name, scripts)
    assert [len(batch) for batch in sampler.built.batches] == [12, 11]
    said = []
    for response in responses[:-1]:
        others = [not flag for flag in response.trained]
        said.append(encoder.tokenizer.decode([*itertools.compress(response.ids, others)]))
        assert len(response.ids) <= 6000 and response.finish == "stop"
        assert "Done." in encoder.tokenizer.decode(response.ids[-9:])
        assert len(response.logprobs) == len(response.trained) == len(response.ids)
    hangs, raises, a, b, long, control, _, none, unknown, wrong, unread = said
    assert (
        "CallTimeout: over 0.5 seconds" in hangs
        and "KeyError: 'raises'" in raises
        and "namespace(a=1)" in a
    )
    assert "'two'" in b and "None" in none and "KeyError: 'nothing'" in unknown
    assert "word" in long and playing.CUT in long and "TypeError" in wrong
    assert "x00" in control and "x1b[31m" in control and "ud800" in control
    assert "\x1b" not in control and "Error" in unread
    logged = [one for response in responses for one in response.extra["logged"]]
    means = means_of(logged, ())
    assert means["tools/call_frequency"] == 11 / 12
    assert means["tools/failure_frequency"] == 5 / 11


def test_turns_end_where_calls_are_not_answered_or_nothing_has_room(played):
    call = calling("multiply", a=6, b=7)
    (short, other), sampler, encoder = played("qwen2_5", [[call] * 9, ["word " * 99]], room=230)
    eos = encoder.tokenizer.eos_token_id
    assert short.trained.index(False) == len(encoder.ids(call)) + 1
    assert len(short.ids) <= 230 and short.finish == "length"
    assert len(other.ids) == 230 and other.finish == "length" and all(other.trained)
    assert len(short.ids) == len(short.trained) == len(short.logprobs) == len(short.support)
    # A turn that was sampled with the room of another response is cut.
    scripts = [[call, "word " * 99], ["word", ""]]
    (cut, _), *_ = played("qwen2_5", scripts, room=230)
    assert len(cut.ids) == 230 == len(cut.support) == len(cut.logprobs) and cut.finish == "length"

    sampler.config = sampler.config.replace(max_tool_calling_iterations=1)
    sampler.built.scripts = [[call, call]]
    how = Sampling(1.0, 999, (eos,), prompts=(Prompt(encoder.ids("x"), {}),))
    (once,) = sampler.sample([[1]], how)
    assert once.finish == "stop" and len([*itertools.groupby(once.trained)]) == 3


class Guess:
    """A number to be guessed; made and reset as TRL does it."""

    made = 0

    def __init__(self):
        Guess.made += 1
        self.secret = None

    def reset(self, secret=None, **kwargs) -> str | None:
        if secret == "broken":
            raise ConnectionError("no server")
        assert "environment" not in kwargs
        self.secret, self.won = secret, 0.0
        return f" It is below {secret + 3}." if kwargs.get("says") else None

    def get_reward(self) -> float:
        return self.won

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.
        """
        if self.won:
            raise ValueError("Game over.")
        self.won = float(number == self.secret)
        return "right" if self.won else "wrong"

    def _hidden(self):
        raise AssertionError


class Late:
    """An environment whose reward is awaited, and whose tool hangs."""

    def reset(self, **row):
        return None

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5

    def think(self) -> str:
        """Think about it."""
        time.sleep(1000)


def test_environments_say_the_task_and_score_and_are_used_again(played):
    right, wrong = (calling("guess", number=number) for number in (3, 4))
    Guess.made = 0
    scripts = [[right, "Done."], [wrong, right, right, "Done."], ["Nothing."]]
    options = {"environment": Guess, "tools": [multiply], "row": {"secret": 3, "says": True}}
    responses, sampler, encoder = played("qwen3", scripts, **options)
    assert Guess.made == 3 and sampler.config.verifiers == [Guess]
    text = encoder.tokenizer.decode(responses[0].extra["prompt_ids"])
    assert "How much? It is below 6." in text and '"guess"' in text and '"multiply"' in text
    assert "get_reward" not in text and "_hidden" not in text
    assert "ValueError: Game over." in encoder.tokenizer.decode(responses[1].ids)
    rewards = [response.extra["Guess"] for response in responses]
    assert rewards == [1.0, 1.0, 0.0]

    # One that fails ends its own response, and another takes its place.
    rows = ({"secret": 3}, {"secret": "broken"}, {"secret": 5})
    prompts = tuple(Prompt(encoder.ids("x"), row, "a row", ASKED) for row in rows)
    sampler.built.scripts = [[right, "Done."], [right, "Done."]]
    how = Sampling(1.0, 999, (encoder.tokenizer.eos_token_id,), prompts=prompts)
    with pytest.warns(UserWarning, match="no server"):
        won, failed, lost = sampler.sample([[1]] * 3, how)
    assert Guess.made == 4 and failed.ids == [] and failed.extra["environments"].secret is None
    (scorer,) = load_scorers(sampler.config)
    samples = [Sample({}, [1], response, "") for response in (won, failed, lost)]
    assert scorer.name == "Guess" and scorer(samples) == [1.0, None, 0.0]
    assert ("environments/failure_frequency", 1.0) in failed.extra["logged"]


def test_rows_choose_an_environment_and_see_its_tools_alone(played):
    several = {"a": Guess, "b": Late}
    options = {"environment": several, "tools": ()}
    (response,), sampler, encoder = played("qwen3", [["Hm."]], row={"environment": "b"}, **options)
    text = encoder.tokenizer.decode(response.extra["prompt_ids"])
    assert '"think"' in text and '"guess"' not in text
    guess, late = load_scorers(sampler.config)
    sample = Sample({}, [1], response, "")
    assert late([sample]) == [0.5] and guess([sample]) == [None]
    with pytest.warns(UserWarning, match="CallTimeout"):
        (hung,), *_ = played("qwen3", [[calling("think")]], row={"environment": "b"}, **options)
    assert all(hung.trained) and late([Sample({}, [1], hung, "")]) == [None]


def test_an_environment_is_read_by_scorers_and_does_not_travel(played):
    """Samples are sent to other ranks, and an environment may hold what cannot be sent."""

    class Locked(Guess):
        def __init__(self):
            self.lock = threading.Lock()

    def has_lock(environments, **kwargs):
        return [float(environment.lock.locked()) for environment in environments]

    options = {"environment": Locked, "row": {"secret": 3}}
    _, sampler, encoder = played("qwen3", [["Hm."]], **options)
    sampler.built.scripts = [["Hm."]]
    scorers = load_scorers(sampler.config.replace(verifiers=[has_lock]))
    prompts = [Prompt(encoder.ids("x"), {"secret": 3}, "a row", ASKED)]
    how = Sampling(1.0, 99, (encoder.tokenizer.eos_token_id,))
    rolled = roll_out(sampler, scorers, prompts, how, encoder.tokenizer, torch.device("cpu"))
    assert rolled.rewards.tolist() == [0.0]
    assert pickle.loads(pickle.dumps(rolled.samples))[0].prompt_ids == rolled.samples[0].prompt_ids
