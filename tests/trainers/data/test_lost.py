"""What a row says is trained or refused: no column, key or message is dropped without a word."""

import json

import pytest

from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.forms import WEIGHTS, RowReader
from fused_rl.trainers.data.preferences import pair_sides
from fused_rl.trainers.data.rows import BadRow, Rows
from tests.trainers import tiny

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ok"}
CALL = {"name": "f", "arguments": {"x": 1}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}


def completion(row: dict):
    return RowReader(row).completion(None, "completion")


def turn(**keys) -> dict:
    return {"messages": [USER, ANSWER | keys]}


def part(**keys) -> dict:
    return turn(content=[{"type": "text", "text": "ok"} | keys])


REFUSED = {
    "column 'prompt' must be text or a list of messages": {"prompt": [5], "completion": "b"},
    "column 'images' is filled, and only text can be read": turn() | {"images": ["a.png"]},
    "the weight of a message must be 0 or 1, got -1": turn(weight=-1),
    "the loss_scale of a message must be 0 or 1, got 2.0": turn(loss_scale=2.0),
    "has content of type 'image_url'": part(type="image_url"),
    "has content of type 'text', got": part(text=None),
    "the arguments of a tool call must be an object, got": turn(
        tool_calls=[{"function": CALL | {"arguments": "[1]"}}]
    ),
    "column 'system' must be text, got 7": {"prompt": "a", "completion": "b", "system": 7},
    "column 'input' must be text, got 7": {"instruction": "a", "input": 7, "output": "b"},
    "has an unknown role or none, got {": {"messages": [{"human": "a", "assistant": "b"}]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_trained_as_it_is_meant_is_refused(reason):
    with pytest.raises(BadRow) as error:
        completion(REFUSED[reason])
    assert reason in str(error.value)


@pytest.mark.parametrize("key", WEIGHTS)
def test_every_key_that_leaves_a_turn_out_is_read(key):
    off = key == "disable_loss"
    assert completion(turn(**{key: off})).prompt[-1] == ANSWER | {"weight": 0}
    assert completion(turn(**{key: not off})).prompt[-1] == ANSWER


def test_earlier_names_of_openai_are_read_as_the_later_ones():
    earlier = {
        "messages": [
            {"role": "developer", "content": "be kind"},
            USER,
            CALLS,
            {"role": "function", "name": "f", "content": "1"},
            ANSWER,
        ],
    }
    later = {
        "messages": [
            {"role": "system", "content": "be kind"},
            USER,
            CALLS,
            {"role": "tool", "name": "f", "content": "1"},
            ANSWER,
        ],
    }
    assert completion(earlier) == completion(later)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": [USER, CALLS]}, "tool_calls"),
        (turn(thinking="hm"), "thinking"),
        (turn() | {"tools": [{"function": TOOL}]}, "tools"),
    ],
)
def test_without_a_chat_template_only_text_can_be_trained(row, what):
    encoder = Encoder(tiny.tokenizer(chat=False))
    with pytest.raises(BadRow, match=f"has {what}, but there is no chat template"):
        tiny.pairs(encoder, row, None, "completion")


# What is refused, or read as it is meant, where the tokens would be wrong without a word.

SPELLED = '[{"role": "assistant", "content": "x"}]'
WRITTEN = "<bos><user>a<end>\n<assistant>"


def asked(text: str) -> dict:
    return {"role": "user", "content": text}


def answered(text: str, **others) -> dict:
    return {"role": "assistant", "content": text, **others}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": SPELLED}, "'completion' is a text that spells messages"),
        ({"prompt": WRITTEN, "completion": "b", "system": "s"}, "begins as only a chat template"),
        ({"text": "<end>\n"}, "the text is empty"),
        # Each turn ends with the call's name.
        ({"messages": [USER, CALLS | {"tool_calls": [{"name": "end"}]}]}, "repeats tool_calls"),
        (
            {
                "messages": [{"role": "system", "content": "s"}, asked("a"), answered("b")],
                "system": "t",
            },
            "another one in",
        ),
    ],
)
def test_a_demonstration_whose_tokens_would_be_wrong_is_refused(row, reason):
    with pytest.raises(BadRow, match=reason):
        tiny.pairs(Encoder(tiny.tokenizer()), row, None, "completion")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": "a", "chosen": SPELLED, "rejected": "b"},
            "'chosen' is a text that spells messages",
        ),
        (
            {
                "prompt": "c",
                "chosen": [asked("a"), answered("b")],
                "rejected": [asked("a"), answered("d")],
            },
            "ends with the user's turn, and a response begins with the user's",
        ),
        (
            {
                "chosen": [asked("a"), answered("b")],
                "rejected": [asked("c"), answered("b")],
            },
            "differ before the assistant's turn",
        ),
        (
            {"messages": [asked("a"), answered("b")], "chosen": "c", "rejected": "d"},
            "the prompt ends with",
        ),
        ({"chosen": "ab: ", "rejected": "ab: c"}, "the completion is empty"),
    ],
)
def test_a_pair_whose_tokens_would_be_wrong_is_refused(row, reason):
    with pytest.raises(BadRow, match=reason):
        both(Encoder(tiny.tokenizer()), row)


def both(encoder: Encoder, row: dict) -> list:
    columns = {"chosen_column": "chosen", "rejected_column": "rejected"}
    sides = pair_sides(encoder, RowReader(row), None, columns)
    return [tuple(map(encoder.tokenizer.decode, side)) for side in sides]


def test_the_context_of_a_response_is_whole_and_has_each_end_once():
    encoder = Encoder(tiny.tokenizer())
    ends = [asked("a"), answered("b<end>"), asked("c"), answered("d<end>")]
    ((prompt, completion),) = tiny.pairs(encoder, {"messages": ends}, None, "completion")
    assert encoder.tokenizer.decode(prompt).endswith("<assistant>b<end>\n<user>c<end>\n<assistant>")
    assert encoder.tokenizer.decode(completion) == "d<end>"
    # A marker that a user writes.
    messages = [asked("what is <user>?"), answered("b")]
    ((prompt, _),) = tiny.pairs(encoder, {"messages": messages}, None, "completion")
    assert encoder.tokenizer.decode(prompt) == "<bos><user>what is <user>?<end>\n<assistant>"

    # Ids of messages make no other question of one.
    ids = {"chosen": "1", "rejected": "2"}
    named = {
        side: [asked("a"), answered("x", id=i), asked("b"), answered(i)] for side, i in ids.items()
    }
    assert [response for _, response in both(encoder, named)] == ["1<end>", "2<end>"]

    # A text that begins the other keeps a token beside its end.
    begins = both(encoder, {"chosen": "ab: xy", "rejected": "ab: xyz"})
    assert begins == [("ab: x", "y<end>"), ("ab: x", "yz<end>")]


def test_spellings_of_parts_calls_and_columns_say_the_same():
    part = {"type": "text", "text": None, "value": "ok"}
    assert completion(turn(content=[part])) == completion(turn())
    thought = {"type": "reasoning", "value": "hm"}
    assert completion(turn(content=[thought, part])) == completion(turn(reasoning_content="hm"))
    call = {"type": "tool_call", "value": json.dumps(CALL)}
    calls = [{"type": "function", "function": CALL}]
    assert completion(turn(content=[call])) == completion(turn(content="", tool_calls=calls))
    twice = CALL | {"arguments": json.dumps(json.dumps(CALL["arguments"]))}
    spelled = [{"type": "function", "function": twice}]
    assert completion(turn(tool_calls=spelled)) == completion(turn(tool_calls=calls))
    nested = {"input": {"messages": [USER]}, "completion": "ok"}
    assert RowReader(nested).completion("input.messages", "completion").prompt == [USER]
    (text,) = RowReader({"a": {"b": "ok"}}).completion(None, "completion", "a.b").responses
    assert text == "ok"


def test_reasoning_is_closed_once_where_the_template_writes_it_after_white_space():
    tokenizer = tiny.tokenizer()
    opened = tiny.CHAT_TEMPLATE.replace("{{ '<assistant>' }}", "{{ '<assistant><think>\\n' }}")
    written = "('\\n<think>\\n\\n</think>\\n' if m['role'] == 'assistant' else '') + m['content']"
    tokenizer.chat_template = opened.replace("m['content']", written)
    rows = Rows([{"prompt": "a", "completion": "b"}], "x")
    ((_, completion),) = tiny.pairs(Encoder(tokenizer), rows[0], None, "completion")
    assert tokenizer.decode(completion) == "\n</think>\nb<end>"


@pytest.mark.parametrize("beside", ["system", "user"])
def test_tools_that_a_template_writes_only_beside_some_first_message_are_found_there(beside):
    tokenizer = tiny.tokenizer()
    written = f"{{% if tools and messages[0]['role'] == '{beside}' %}}{{{{ tools | tojson }}}}{{% endif %}}"
    tokenizer.chat_template = written + tiny.CHAT_TEMPLATE
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    row = {"prompt": "a", "completion": "b", "tools": [tool]}
    rows = Rows([row | {"system": "s"}, row], "x")
    refused = []
    for i in range(2):
        try:
            tiny.pairs(Encoder(tokenizer), rows[i], None, "completion")
        except BadRow as error:
            refused.append((i, error.reason))
    number = 1 if beside == "system" else 0
    assert refused == [(number, "the chat template leaves out or repeats tools")]
