"""What others say, by the chat templates of real models: the ids that the whole conversation has there."""

import pytest

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.rows import BadRow
from fused_rl.trainers.rollouts.turns import Conversation
from fused_rl.trainers.rollouts.types import Response, after_turn
from tests.trainers import tiny
from tests.trainers.data.test_templates import TEMPLATES, assistant, encoder_of, user

ASKED, SAID, LAST = user("How many?"), "I count 17 + 4.", "It is 21."
TINY = "the tiny model"
# Their templates leave earlier turns as they are.
EXACT = [TINY, "gemma", "gemma3", "llama3", "llama3_1", "llama3_2", "phi3", "qwen2_5"]
WITH_TOOLS = ["llama3_1", "llama3_2", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_nothink"]


def encoder_named(name: str, **template_kwargs) -> Encoder:
    return Encoder(tiny.tokenizer()) if name == TINY else encoder_of(name, **template_kwargs)


def joined(encoder: Encoder, said: str, content: str, role: str, finish="stop"):
    """Return the ids of a prompt, of the policy's turn, and of what another says to it."""
    prompt, turn = encoder.pair([ASKED, assistant(said)], None)
    turn = Response(turn if finish == "stop" else turn[:-1], finish)
    reply = Conversation(encoder.tokenizer).reply(turn, content, role)
    both = after_turn(None, turn, reply)
    assert both.trained == [True] * len(turn.ids) + [False] * len(reply)
    return prompt + both.ids, reply


@pytest.mark.parametrize("name", [TINY, *TEMPLATES])
def test_a_turn_of_the_user_has_the_ids_of_the_whole_conversation(name):
    encoder = encoder_named(name)
    whole, _ = encoder.pair([ASKED, assistant(SAID), user("21\n"), assistant(LAST)], None)
    for finish in ("stop", "length"):
        ids, reply = joined(encoder, SAID, "21\n", "user", finish)
        # Templates of reasoning write an earlier turn otherwise than generation has begun it.
        assert ids == whole or name not in EXACT
        assert reply == whole[-len(reply) :] and 0 < len(reply) < len(whole)
    assert Conversation(encoder.tokenizer).text(Response(encoder.ids(SAID), "stop")) == SAID


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_turn_of_a_tool_is_what_the_template_writes_after_a_call(name):
    encoder = encoder_named(name)
    call = {"type": "function", "function": {"name": "tool", "arguments": {}}}
    calls = assistant("", tool_calls=[call])
    answer = {"role": "tool", "name": "tool", "content": "21"}
    whole, _ = encoder.pair([ASKED, calls, answer, assistant(LAST)], None)
    prompt, turn = encoder.pair([ASKED, calls], None)
    reply = Conversation(encoder.tokenizer).reply(Response(turn, "stop"), "21", "tool")
    assert reply == whole[-len(reply) :]
    if name in EXACT:
        assert prompt + turn + reply == whole


def test_what_a_template_does_not_write_is_refused():
    with pytest.raises(InputError, match="a message of role tool"):
        Conversation(encoder_of("gemma").tokenizer).reply(Response([1], "length"), "21", "tool")
    with pytest.raises(InputError, match="no chat template"):
        Conversation(tiny.tokenizer(chat=False))
    with pytest.raises(BadRow):
        encoder_of("gemma").pair([ASKED, user("twice"), assistant(LAST)], None)
