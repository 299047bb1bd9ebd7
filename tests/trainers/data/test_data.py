import json
import re

import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.commands.eval import EvalConfig
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.order import RowOrder
from fused_rl.trainers.data.reading import load_train_eval
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import DataConfig
from fused_rl.trainers.rollouts.roll_out import prompts_of
from tests.trainers import tiny


@pytest.mark.parametrize("chat", [True, False])
def test_an_empty_prompt_is_refused_and_an_empty_system_message_is_none(chat):
    encoder, user = Encoder(tiny.tokenizer(chat=chat)), {"role": "user", "content": "a"}
    said = [{"role": "assistant", "content": "b"}, {"role": "user", "content": ""}]
    for prompt in ("", [{"role": "system", "content": "s"}, *said[1:]], [user, *said])[
        : 3 if chat else 1
    ]:
        with pytest.raises(InputError, match="^the prompt is empty; fix or remove the row"):
            tiny.prompt(encoder, {"prompt": prompt}, "prompt")
    if chat:
        assert tiny.prompt(encoder, {"prompt": [{"role": "system", "content": ""}, user]}, "prompt")


def test_a_folder_of_several_configurations(tmp_path):
    """Configuration and split are honoured for both data sets, and a wrong one is a line."""
    folder = tmp_path / "many"
    for name in ("main", "b"):
        for split in ("train", "test"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            tiny.jsonl(folder / name / f"{split}.jsonl", [{"prompt": f"{name} {split}"}])
    cards = [
        f"- config_name: {name}\n  data_files:\n  - {{split: train, path: {name}/train.jsonl}}\n"
        f"  - {{split: test, path: {name}/test.jsonl}}\n"
        for name in ("main", "b")
    ]
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(cards) + "---\n")

    def read(**options):
        config = DataConfig(dataset=str(folder), eval_dataset=str(folder), **options)
        return [rows[0]["prompt"] for rows in load_train_eval(config)]

    assert read() == ["main train", "main test"]
    assert read(dataset_config="b") == ["b train", "b test"]
    for wrong in ({"dataset_config": "c"}, {"eval_split": "dev"}):
        with pytest.raises(InputError, match=f"{list(wrong.values())[0]}") as refused:
            read(**wrong)
        assert "\n" not in str(refused.value)


def test_a_split_that_a_file_does_not_have_is_refused_at_once():
    files = {"dataset": "d.jsonl", "eval_dataset": "e.csv.gz"}
    assert DataConfig(**files, dataset_split="train", eval_split="test").eval_split == "test"
    for split in ("train[:5%]", "test"):
        with pytest.raises(InputError, match=f"^dataset_split={re.escape(split)} has no meaning"):
            DataConfig(**files, dataset_split=split)
    for others in (files, {"dataset": "hub/name"}):
        with pytest.raises(InputError, match=r"^eval_split=dev has no meaning"):
            DataConfig(**others, eval_split="dev")
    with pytest.raises(InputError, match=r"^dataset_split=train has no meaning"):
        EvalConfig(model="m", dataset="d.jsonl", dataset_split="train")


def text_of(tokenizer, ids):
    return tokenizer.decode(ids)


def test_text_becomes_a_chat_with_each_special_token_once():
    # The template writes <bos> too: it must not appear twice.
    tokenizer = tiny.tokenizer(adds_bos=True)
    rows = Rows([{"prompt": "hi", "completion": "yo"}], "x")
    encoder = Encoder(tokenizer, system_prompt="S")
    ((prompt, completion),) = tiny.pairs(encoder, rows[0], None, "completion")
    assert text_of(tokenizer, prompt) == "<bos><system>S<end>\n<user>hi<end>\n<assistant>"
    # The template's newline after EOS is not to be learnt.
    assert text_of(tokenizer, completion) == "yo<end>"
    assert tiny.prompt(encoder, rows[0], "prompt") == prompt


def test_a_tokenizer_that_cuts_and_pads_for_others_does_not_do_so_to_rows():
    row = {"prompt": "hi", "completion": "yo"}
    tokenizer = tiny.tokenizer()
    expected = tiny.pairs(Encoder(tokenizer), row, None, "completion")
    for options in ({"truncation": True, "max_length": 1}, {"padding": "max_length"}):
        tokenizer("hello", **{"max_length": 99} | options)
        assert tiny.pairs(Encoder(tokenizer), row, None, "completion") == expected


@pytest.mark.parametrize("text", ["hi", "<bos>hi"])
def test_a_raw_prompt_has_one_bos(text):
    tokenizer = tiny.tokenizer(chat=False, adds_bos=True)
    rows = Rows([{"prompt": text, "completion": "yo"}], "x")
    ((prompt, completion),) = tiny.pairs(Encoder(tokenizer), rows[0], "prompt", "completion")
    assert (text_of(tokenizer, prompt), text_of(tokenizer, completion)) == ("<bos>hi", "yo<eos>")


def test_messages_and_system_prompts_need_a_template():
    tokenizer = tiny.tokenizer(chat=False)
    with pytest.raises(InputError, match="no chat template"):
        tiny.prompt(
            Encoder(tokenizer), {"prompt": [{"role": "user", "content": "x"}] * 2}, "prompt"
        )
    with pytest.raises(InputError, match="need a tokenizer with a chat template"):
        Encoder(tokenizer, system_prompt="S")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\\nalternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "endfor"),
    ],
)
def test_a_chat_template_that_raises_is_a_line_with_the_row(template, reason):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    rows = Rows([{"prompt": "hi", "completion": "yo"}], "x.parquet")
    with pytest.raises(
        InputError,
        match=rf"^the chat template does not accept .*[(]user[)].*{reason}",
    ) as error:
        tiny.pairs(Encoder(tokenizer), rows[0], None, "completion")
    assert "\n" not in str(error.value)


def test_the_order_visits_every_row_once_per_epoch_and_continues_anywhere():
    order = RowOrder(10, 4, seed=3)
    batches = [next(order) for _ in range(5)]
    flat = sum(batches, [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)) and flat[:10] != flat[10:]
    for done in range(5):  # 2 is in the middle of the batch that spans two epochs
        other = RowOrder(10, 4, seed=3)
        other.position = 4 * done
        assert [next(other) for _ in range(5 - done)] == batches[done:]
    assert next(RowOrder(10, 10, seed=4)) != next(RowOrder(10, 10, seed=3))


def test_what_is_as_long_as_its_limit_is_kept_and_one_token_more_is_dropped():
    config = tiny.config_of("sft", max_length=9)
    rows = []
    for prompt, completion in ((4, 4), (5, 3), (4, 5), (3, 5), (5, 4)):  # EOS not counted
        rows.append({"prompt": "a" * prompt, "completion": "b" * completion})
    rows, encoder = Rows(rows, "x"), Encoder(tiny.tokenizer(chat=False))
    assert [example.where for example in sft.encoded(config, rows, encoder)] == [
        rows.where(i) for i in (0, 1, 3)
    ]
    prompts = prompts_of(rows, encoder, [], column="prompt", max_length=4)
    assert [prompt.where for prompt in prompts] == [rows.where(i) for i in (0, 2, 3)]


def test_every_stop_token_of_the_model_counts():
    import transformers

    tokenizer = tiny.tokenizer()
    for eos, expected in ((None, [3]), (2, [2, 3]), ([2, 5], [2, 3, 5])):
        assert (
            encode.stop_ids(tokenizer, transformers.GenerationConfig(eos_token_id=eos)) == expected
        )


THINKING = tiny.CHAT_TEMPLATE.replace(
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% if enable_thinking is false %}{{ '!' }}{% endif %}{% endif %}",
).replace(
    "'>' + m['content']",
    "'>' + ('!' if enable_thinking is false and m['role'] == 'assistant' else '') + m['content']",
)


def test_the_chat_template_gets_the_arguments_of_the_run(folder):
    tokenizer = with_template(THINKING)
    for given, expected in ((None, "<assistant>"), ({"enable_thinking": False}, "<assistant>!")):
        config = tiny.config_of("sft", model=folder, chat_template_kwargs=given)
        prompt = tiny.prompt(Encoder.of(config, tokenizer), {"prompt": "q"}, None)
        assert tokenizer.decode(prompt) == f"<bos><user>q<end>\n{expected}"


TOOL_TEMPLATE = (
    "{{ '<bos>' }}{% if tools %}{{ tools[0]['name'] }}{% endif %}{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{{ m['content'] or '' }}{% for c in m.tool_calls or [] %}{{ c['name'] }}!{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ASKED = {"role": "user", "content": "a"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}


def with_template(template):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_completion_is_the_turn_with_its_tool_calls_and_the_prompt_has_the_tools():
    tokenizer = with_template(TOOL_TEMPLATE)
    nothing_but_calls = CALL | {"content": None}
    in_parquet = [ASKED | {"tool_calls": None, "name": None}, nothing_but_calls | {"name": None}]
    tools = [{"name": "g"}]
    for messages, cell, written in [
        ([ASKED, CALL], tools, "g"),
        ([ASKED, nothing_but_calls], json.dumps(tools), "g"),
        (in_parquet, "", ""),  # a table of text has it where a row has no tools
    ]:
        rows = Rows([{"messages": messages, "tools": cell}], "d.jsonl")
        ((prompt, completion),) = tiny.pairs(Encoder(tokenizer), rows[0], None, "completion")
        assert tokenizer.decode(prompt) == f"<bos>{written}<user>a<end>\n<assistant>"
        assert tokenizer.decode(completion) == "f!<end>"
        assert tiny.prompt(Encoder(tokenizer), rows[0], None) == prompt


def test_a_word_that_the_template_does_not_read_is_refused():
    tokenizer = with_template("{% if x is not defined %}{% set x = 1 %}{% endif %}" + TOOL_TEMPLATE)
    Encoder(tokenizer, chat_template_kwargs={"x": 2})
    for word in ("enable_thinking", "messages"):
        with pytest.raises(InputError, match=f"chat_template_kwargs: .*{word}"):
            Encoder(tokenizer, chat_template_kwargs={word: 1})
