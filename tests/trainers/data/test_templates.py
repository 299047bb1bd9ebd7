"""The chat templates that TRL ships, through every form of rows: equal ids, generation's prompts, and nothing lost."""

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers

from fused_rl.trainers.data import encode
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.forms import RowReader
from fused_rl.trainers.data.preferences import pair_sides
from fused_rl.trainers.data.rows import BadRow
from fused_rl.trainers.data.templates import spellings
from tests.lazy import transformers
from tests.trainers import tiny

trl = pytest.importorskip("trl", reason="TRL needs Python 3.11")
FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
# EOS, BOS, and what else the generation configs of these models name as ends of a response.
FAMILIES = {
    "cohere": ("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    "deepseek": ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    "diffusion_gemma": ("<eos>", "<bos>", "<turn|>", "<|tool_response>"),
    "gemma4": ("<eos>", "<bos>", "<turn|>", "<|tool_response>"),
    "gemma": ("<eos>", "<bos>", "<end_of_turn>"),
    "glm4moe": ("<|endoftext|>", None, "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|startoftext|>", "<|endoftext|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>", "<|begin_of_text|>"),
    "lfm2": ("<|im_end|>", "<|startoftext|>"),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>", "<|eom_id|>", "<|end_of_text|>"),
    "llava_next": ("</s>", "<s>"),
    "muse_glimmer": ("<|eot|>", "<|begin_of_text|>"),
    "nemotron": ("<|im_end|>", None),
    "phi3": ("<|endoftext|>", "<s>", "<|end|>", "<|assistant|>"),
    "qwen": ("<|im_end|>", None, "<|endoftext|>"),
    "smolvlm": ("<end_of_utterance>", "<|im_start|>"),
}
SPECIAL = re.compile(r"<[|｜][^<>{}'\" ]*[|｜]>|<(?:start_of_turn|turn\||\|turn)>")
# cl100k's: white space before a word is one token with it, and white space behind it another.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.cache
def byte_level() -> str:
    """Return a tokenizer of bytes and of what often stands together, as the text that describes it."""
    made = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    whole_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, whole_bytes])
    made.decoder = decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["\n\n think \n\n  answer \n assistant"] * 5, learner)
    return made.to_str()


@functools.cache
def encoder_of(name: str, **template_kwargs) -> Encoder:
    eos, bos, *stops = next(FAMILIES[family] for family in FAMILIES if name.startswith(family))
    template = (FOLDER / f"{name}.jinja").read_text()
    special = {*SPECIAL.findall(template), *stops, eos, *filter(None, [bos])}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(byte_level()),
        pad_token="<pad>",
        eos_token=eos,
        bos_token=bos,
        additional_special_tokens=sorted(special),
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    stop_ids = tokenizer.convert_tokens_to_ids(stops)
    return Encoder(tokenizer, stop_ids=stop_ids, chat_template_kwargs=template_kwargs)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str | None, **others) -> dict:
    return {"role": "assistant", "content": content, **others}


def encoded(encoder: Encoder, row: dict, turns: str = "last") -> list:
    return tiny.pairs(encoder, row, None, "completion", turns)


def sides(encoder: Encoder, row: dict) -> list:
    columns = {"chosen_column": "chosen", "rejected_column": "rejected"}
    return pair_sides(encoder, RowReader(row), None, columns)


# The same in every form.


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_says_the_same_has_the_same_ids(name):
    encoder = encoder_of(name)
    prompt, good, bad = [user("Where?")], "At home.", "At work."
    chosen, rejected = (prompt + [assistant(text)] for text in (good, bad))
    same = encoded(encoder, {"prompt": "Where?", "completion": good})
    eos = encoder.tokenizer.eos_token
    turns = [{"from": "human", "value": "Where?"}, {"from": "model", "value": good}]
    for row in (
        {"prompt": "Where?", "completion": good + eos},
        {"prompt": "Where?", "completion": f"{good}{eos}\n"},
        {"prompt": prompt, "completion": [assistant(good)]},
        {"messages": chosen},
        {"conversations": turns},
        {"instruction": "Where?", "output": good},
    ):
        assert encoded(encoder, row) == same, row

    both = same + encoded(encoder, {"prompt": "Where?", "completion": bad})
    for row in (
        {"prompt": "Where?", "chosen": good, "rejected": bad + eos},
        {"prompt": prompt, "chosen": [assistant(good)], "rejected": [assistant(bad)]},
        {"prompt": "Where?", "chosen": good, "rejected": [assistant(bad)]},
        {"chosen": chosen, "rejected": rejected},
    ):
        assert sides(encoder, row) == both, row


# What each turn must be.

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is outside.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def calls(arguments, count: int = 1) -> list[dict]:
    function = {"name": "weather", "arguments": arguments}
    return [{"id": f"call-{i:04}", "type": "function", "function": function} for i in range(count)]


CITY = {"city": "Paris", "days": [1, "two"], "more": {"a": {"b": "it's"}}}
CALL = assistant(None, tool_calls=calls(CITY))
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call-0000", "content": '{"rain": 1}'}
THOUGHT = "<think>\nIt depends.\n</think>\n\nAt home."
KINDS = {
    "plain": [{"messages": [user("Where?"), assistant("At home.")]}],
    "turns": [{"messages": [user("a"), assistant("First."), user("b"), assistant("Second.")]}],
    "white space": [
        {"prompt": "Where?", "completion": text}
        for text in (" At home.", "  At home.", "\n\nAt home.", "\tAt home.", "At home. \n\n")
    ],
    "system": [
        {"messages": [{"role": "system", "content": "Be brief."}, user("a"), assistant("First.")]}
    ],
    "tools": [{"tools": TOOLS, "messages": [user("Where?"), assistant("At home.")]}],
    "calls": [
        {"tools": TOOLS, "messages": [user("a"), CALL, RESULT, assistant("Wet."), *more]}
        for more in ([], [user("b"), assistant("Second.")])
    ],
    "words beside a call": [{"tools": TOOLS, "messages": [user("a"), CALL | {"content": "Hm."}]}],
    "two calls": [
        {"tools": TOOLS, "messages": [user("a"), assistant("", tool_calls=calls(CITY, 2))]}
    ],
    "reasoning": [
        {"messages": [user("Where?"), assistant("At home.", reasoning_content="It depends.")]},
        {"messages": [user("Where?"), assistant("At home.", thinking="It depends.")]},
    ],
    "reasoning in the content": [
        {"messages": [user("Where?"), assistant(THOUGHT), user("b"), assistant(THOUGHT)]}
    ],
}
# What a template cannot write, by how its name begins: the longest beginning counts.
NO_CALLS = {"calls", "words beside a call", "two calls"}
NO_TOOLS = {"tools", *NO_CALLS}
REFUSED = {
    "": set(),
    **dict.fromkeys(("cohere", "gemma3", "idefics3", "llama3"), {"reasoning", *NO_TOOLS}),
    **dict.fromkeys(("llava_next", "phi3", "qwen2_5_vl", "smolvlm"), {"reasoning", *NO_TOOLS}),
    "deepseek": NO_TOOLS,
    "gemma": {"system", "reasoning", *NO_TOOLS},
    "gemma4": {"reasoning"},
    "gemma4_v5": set(),
    "gptoss": {"two calls"},
    "lfm2": {"reasoning", *NO_CALLS},
    "lfm2_2_5": set(),
    "lfm2_v2": {"reasoning"},
    **dict.fromkeys(("llama3_1", "llama3_2"), {"reasoning", "words beside a call", "two calls"}),
    "muse_glimmer": {"words beside a call"},
    **dict.fromkeys(("qwen2_5", "qwen3_instruct", "qwen3_vl"), {"reasoning"}),
    "qwen3_5_nothink": {"reasoning", "reasoning in the content"},
}
BECAUSE = {
    "system": "System role not supported",
    "tools": "repeats tools",
    "calls": "repeats tool|does not accept",
    "words beside a call": "repeats (tool|what the assistant says)",
    "two calls": "repeats tool|several tool_calls|single tool-calls",
    "reasoning": "repeats reasoning|enable_thinking: true",
    "reasoning in the content": "enable_thinking: true",
}


def written(encoder: Encoder, messages: list[dict], tools, **options) -> Iterator[str]:
    """Yield the text that transformers makes of messages, in each way to spell these."""
    options |= encoder.template_kwargs | {"tools": tools, "tokenize": False}
    for spelled in spellings(messages, in_parts=encoder._wants_parts):
        with contextlib.suppress(Exception):
            yield encoder.tokenizer.apply_chat_template(spelled, **options)


def check_turn(encoder: Encoder, messages: list[dict], tools, pair) -> None:
    prompt, completion = pair
    tokenizer, decode = encoder.tokenizer, encoder.tokenizer.decode
    # The prompt is what generation sees.
    seen = written(encoder, messages[:-1], tools, add_generation_prompt=True)
    before = next(text for text in seen if encoder.ids(text) == prompt)

    # Both together are what the template, and so TRL, writes, up to the token that ends the turn.
    spoken, end = decode(prompt + completion[:-1]), decode(completion[-1:])
    wholes = written(encoder, messages, tools, add_generation_prompt=False)
    whole = next((text for text in wholes if text.startswith(spoken)), None)
    if whole is None:
        assert before.rstrip().endswith("<think>")
        assert decode(completion).count("</think>") == 1 and "<think>" not in decode(completion)
    else:
        rest = whole.removeprefix(spoken)
        assert rest.startswith(end) or not rest.strip()
        ids, both = encoder.ids(whole), prompt + completion[:-1]
        assert ids[: len(prompt)] != prompt or ids[: len(both)] == both

    # One token ends it, and one begins it.
    assert [token in encoder.stop_ids for token in completion] == [False] * (
        len(completion) - 1
    ) + [True]
    if tokenizer.bos_token and tokenizer.bos_token not in ("<|im_start|>",):
        assert (prompt + completion)[1:].count(tokenizer.bos_token_id) == 0

    # Nothing is lost, and nothing is written as Python does.
    turn, said = messages[-1], decode(completion)
    words = re.sub("</?think>", "", turn["content"] or "").split()
    words += [
        name
        for name in ("It", "depends.")
        for key in turn
        if key in ("reasoning_content", "thinking")
    ]
    words += ["weather", "Paris", "it's"] * bool(turn.get("tool_calls"))
    assert [word for word in words if word not in said] == []
    assert "None" not in said and "{'" not in said


def check(encoder: Encoder, row: dict) -> None:
    pairs = encoded(encoder, row, turns="all")
    messages = row.get("messages") or [user(row["prompt"]), assistant(row["completion"])]
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(pairs) == len(ends)
    for end, pair in zip(ends, pairs, strict=True):
        check_turn(encoder, messages[: end + 1], row.get("tools"), pair)
    assert encoded(encoder, row) == pairs[-1:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_continues_what_generation_sees_or_is_refused_with_its_reason(name):
    encoder = encoder_of(name)
    refused = REFUSED[max((other for other in REFUSED if name.startswith(other)), key=len)]
    for kind, rows in KINDS.items():
        for row in rows:
            if kind not in refused:
                check(encoder, row)
                continue
            with pytest.raises(BadRow, match=BECAUSE[kind]):
                encoded(encoder, row)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "nothink" in name])
def test_the_option_that_an_error_names_helps(name):
    encoder = encoder_of(name, enable_thinking=True)
    for kind in ("plain", "reasoning", "reasoning in the content"):
        for row in KINDS[kind]:
            check(encoder, row)


@pytest.mark.parametrize("name", TEMPLATES)
def test_responses_of_several_turns_follow_their_prompt_or_are_refused(name):
    encoder = encoder_of(name)
    turns = [assistant("First."), user("b"), assistant("Second.")]
    others = [assistant("Other."), user("b"), assistant("Second.")]
    row = {"prompt": [user("a")], "chosen": turns, "rejected": others}
    prompt = tiny.prompt(encoder, {"prompt": "a"}, None)
    opens = encoder.tokenizer.decode(prompt).rstrip().endswith("<think>")
    try:
        pairs = sides(encoder, row)
    except BadRow as error:
        # Where generation begins with reasoning, earlier turns are written without it.
        assert opens or "</think>" in encoder.tokenizer.decode(prompt)
        assert "the chat template rewrites earlier turns" in str(error)
        return
    whole = encoded(encoder, {"messages": [user("a"), *turns]})[0]
    assert [ids for ids, _ in pairs] == [prompt, prompt]
    assert sum(pairs[0], []) == sum(whole, []) and pairs[0][1] != pairs[1][1]

    # Reasoning that an earlier turn loses would be a response that nobody gave.
    row["chosen"] = [assistant(THOUGHT), *turns[1:]]
    try:
        ((_, chosen), _) = sides(encoder, row)
    except BadRow as error:
        assert "the chat template rewrites earlier turns" in str(error)
    else:
        assert "depends" in encoder.tokenizer.decode(chosen)


# Tokenizers that begin a text with a space of their own, as Llama 2's and Mistral's.

INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
LINES = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def spaced(template: str, scheme: str):
    """Return a tokenizer of single characters with Metaspace, of two spaces, and of a colon with a letter behind it."""
    letters = [chr(i) for i in range(33, 127)]
    vocabulary = ["<s>", "</s>", "▁", "▁▁", ":y", "\n", *letters]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=[("▁", "▁"), (":", "y")]
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.mark.parametrize("scheme", ["always", "first"])
@pytest.mark.parametrize("template", [INST, LINES])
@pytest.mark.parametrize("text", ["yes", " yes", "  yes", "\n\nyes", "\t yes"])
def test_no_space_is_invented_between_prompt_and_completion(template, scheme, text):
    tokenizer = spaced(template, scheme)
    tokenizer.add_tokens(["\t"])
    ((prompt, completion),) = encoded(Encoder(tokenizer), {"prompt": "q", "completion": text})
    generated = tokenizer.apply_chat_template(
        [user("q")], add_generation_prompt=True, return_dict=False
    )
    assert prompt == generated and completion[-1] == tokenizer.eos_token_id
    pieces = tokenizer.convert_ids_to_tokens(completion[:-1])
    assert "".join(pieces).replace("▁", " ") == " " * (template == INST) + text


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "nemotron" in name])
def test_reasoning_that_only_the_content_closes_is_trained_once(name):
    encoder = encoder_of(name)
    for text in ("two\n</think>\n\nfour", "the tag </think> ends it"):
        ((_, completion),) = encoded(encoder, {"prompt": "q", "completion": text})
        assert encoder.tokenizer.decode(completion) == f"{text}<|im_end|>"


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.startswith("deepseek")])
def test_white_space_of_an_answer_stays_behind_reasoning_that_is_closed(name):
    encoder = encoder_of(name)
    ((_, completion),) = encoded(encoder, {"prompt": "q", "completion": "    return 1"})
    assert encoder.tokenizer.decode(completion[:-1]) == "\n</think>\n\n    return 1"


# What ends a response.


def test_a_model_without_a_generation_config_ends_where_its_rollouts_do(tmp_path):
    folder = tiny.model_folder(tmp_path / "model")
    config = tiny.config_of("sft", model=folder)
    tokenizer = encode.load_tokenizer(folder)
    expected = [[tokenizer.eos_token_id, 2], [tokenizer.eos_token_id]]
    for ends in map(sorted, expected):
        lm = tiny.load_lm(config)
        assert encode.stop_ids(tokenizer, lm.base.saved_generation_config) == ends
        assert encode.saved_stop_ids(folder, None, tokenizer) == ends

        # Adapters end a response as the model below them, which may stand beside them.
        adapters = tmp_path / "adapters"
        adapters.mkdir(exist_ok=True)
        saved = {"base_model_name_or_path": "../model"}
        (adapters / "adapter_config.json").write_text(json.dumps(saved))
        assert encode.saved_stop_ids(str(adapters), None, tokenizer) == ends
        (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
