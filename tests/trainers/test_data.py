import pytest

from fused_rl.trainers import grpo, ppo, reward, sft
from fused_rl.trainers.data import encode, preferences
from fused_rl.trainers.data.encode import Encoder, load_tokenizer
from fused_rl.trainers.data.order import RowOrder
from fused_rl.trainers.data.rows import Rows, load_rows, load_train_eval
from fused_rl.trainers.options.config import DataConfig, InputError
from fused_rl.trainers.policy import prepare
from tests.trainers import tiny


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = tiny.sums(3)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert load_rows(str(tmp_path / "d.parquet")).rows == rows
    read = load_rows(tiny.jsonl(tmp_path / "d.jsonl", rows)).rows
    assert read == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"prompt": "a"}\n\n{"promt": "b"}\n',
            r"line 3: column 'prompt' is missing.*\['promt'\].*--prompt_column",
        ),
        (
            '{"prompt": "a"}\n{"prompt": 5}\n',
            r"line 2: column 'prompt' must be text or a list of messages.*'5",
        ),
        ('{"prompt": [{"content": "x"}]}\n', r"d\.jsonl, line 1: column 'prompt' must be .* messages"),
        ('{"prompt": "a"}\n{"prompt": "b"\n', r"d\.jsonl, line 2, character \d+: not JSON"),
        ('["a"]\n', r"d\.jsonl, line 1: expected a JSON object, got list"),
        ('{"prompt": "a", "prompt": "b"}\n', r"line 1: key 'prompt' stands 2 times in one object"),
        ('{"prompt": "a\\ud800"}\n', r"line 1: '.ud800' is half a surrogate pair"),
        ("[" * 100_000, r"line 1: JSON nested too deeply"),
        (
            '{"prompt": [{"role": "user", "content": null}]}',
            r"line 1: column 'prompt' must be text or a list of messages",
        ),
        ('{"prompt": [{"role": "user", "content": ["a"]}]}', r"column 'prompt' must be text or a list of messages"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', r"line 1: .* the assistant's messages alone"),
        ('{"prompt": ' + "9" * 5000 + "}", r"line 1: not JSON that can be read: ValueError: .*5000 digits"),
        ("\n\n", r"d\.jsonl has no rows"),
    ],
)
def test_a_bad_row_names_file_line_and_column(text, message, tmp_path):
    (tmp_path / "d.jsonl").write_text(text)
    encoder = Encoder(tiny.tokenizer())
    with pytest.raises(InputError, match=message):
        rows = load_rows(str(tmp_path / "d.jsonl"))
        for i in range(len(rows)):
            encoder.prompt(rows, i, "prompt")


def test_bytes_that_are_no_utf_8_name_file_and_line(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match=r"d\.jsonl, line 2, byte 13: not UTF-8"):
        load_rows(str(tmp_path / "d.jsonl"))


@pytest.mark.parametrize("chat", [True, False])
def test_an_empty_prompt_is_refused_and_an_empty_system_message_is_none(chat):
    encoder, user = Encoder(tiny.tokenizer(chat=chat)), {"role": "user", "content": "a"}
    said = [{"role": "assistant", "content": "b"}, {"role": "user", "content": ""}]
    for prompt in ("", [{"role": "system", "content": "s"}, *said[1:]], [user, *said])[: 3 if chat else 1]:
        with pytest.raises(InputError, match="x.parquet, row 1: the prompt is empty; mend or remove the row"):
            encoder.prompt(Rows([{"prompt": prompt}], "x.parquet"), 0, "prompt")
    if chat:
        assert encoder.prompt(Rows([{"prompt": [{"role": "system", "content": ""}, user]}], "x"), 0, "prompt")


def test_an_empty_completion_is_refused_whatever_the_template_makes_of_it():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "' ' + message['content']")
    rows = Rows([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}], "x.parquet")
    config = sft.SFTConfig(model="m", dataset="d", output_dir="o")
    with pytest.raises(InputError, match="x.parquet, row 2: a completion is empty"):
        sft.encoded(config, rows, Encoder(tokenizer))


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
        return [rows.rows[0]["prompt"] for rows in load_train_eval(config)]

    assert read() == ["main train", "main test"]
    assert read(dataset_config="b") == ["b train", "b test"]
    assert read(dataset_config="b", eval_dataset_config="main") == ["b train", "main test"]
    for wrong in ({"dataset_config": "c"}, {"eval_split": "dev"}):
        with pytest.raises(InputError, match=f"{list(wrong.values())[0]}") as refused:
            read(**wrong)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nothing"])
def test_a_parquet_file_that_is_not_whole_is_refused(content, tmp_path):
    (tmp_path / "d.parquet").write_bytes(content)
    with pytest.raises(InputError, match="d.parquet cannot be read as Parquet"):
        load_rows(str(tmp_path / "d.parquet"))


def test_a_parquet_file_whose_text_is_no_utf_8_names_the_column(tmp_path):
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.array([b"a", b"\xff"]).cast(pyarrow.binary()).view(pyarrow.utf8())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": text}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match="d.parquet, column 'answer': not UTF-8; write the text as UTF-8"):
        load_rows(str(tmp_path / "d.parquet"))


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_a_file_that_may_not_be_read_is_one_line(name, tmp_path, monkeypatch):
    (tmp_path / name).write_text("{}")

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("io.open", refuse)  # the user of the tests may be root
    with pytest.raises(InputError, match=f"dataset file {tmp_path / name} cannot be read: Permission denied"):
        load_rows(str(tmp_path / name))


def test_missing_files_and_other_formats_are_refused(tmp_path):
    (tmp_path / "d.txt").write_text("a\n")
    with pytest.raises(InputError, match="does not exist"):
        load_rows(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="only .jsonl, .json, .csv, .parquet files are read"):
        load_rows(str(tmp_path / "d.txt"))


def test_line_numbers_survive_the_split_and_an_empty_training_set_is_refused():
    rows = Rows([{"a": i} for i in range(5)], "x.parquet")
    train, held_out = rows.split(2)
    assert len(train) == 3 and held_out.where(0) == "x.parquet, row 4"
    with pytest.raises(InputError, match="eval_size=5 leaves nothing"):
        rows.split(5)


def text_of(tokenizer, ids):
    return tokenizer.decode(ids)


def test_text_becomes_a_chat_with_each_special_token_once():
    tokenizer = tiny.tokenizer(adds_bos=True)  # the template writes <bos> too: it must not appear twice
    rows = Rows([{"prompt": "hi", "completion": "yo"}], "x")
    encoder = Encoder(tokenizer, system_prompt="S")
    prompt, completion = encoder.pair(rows, 0, None, "completion")
    assert text_of(tokenizer, prompt) == "<bos><system>S<end>\n<user>hi<end>\n<assistant>"
    assert text_of(tokenizer, completion) == "yo<end>"  # the template's newline after EOS is not to be learnt
    assert encoder.prompt(rows, 0, "prompt") == prompt


def test_messages_end_where_the_assistant_begins():
    tokenizer = tiny.tokenizer()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = Rows([{"messages": messages}], "x")
    prompt, completion = Encoder(tokenizer).pair(rows, 0, None, "completion")
    assert text_of(tokenizer, prompt + completion) == "<bos><user>hi<end>\n<assistant>yo<end>"
    assert Encoder(tokenizer).prompt(rows, 0, None) == prompt


@pytest.mark.parametrize("text", ["hi", "<bos>hi"])
def test_a_raw_prompt_has_one_bos(text):
    tokenizer = tiny.tokenizer(chat=False, adds_bos=True)
    rows = Rows([{"prompt": text, "completion": "yo"}], "x")
    prompt, completion = Encoder(tokenizer).pair(rows, 0, "prompt", "completion")
    assert (text_of(tokenizer, prompt), text_of(tokenizer, completion)) == ("<bos>hi", "yo<eos>")


def test_messages_and_system_prompts_need_a_template():
    tokenizer = tiny.tokenizer(chat=False)
    with pytest.raises(InputError, match="no chat template"):
        Encoder(tokenizer).prompt(Rows([{"prompt": [{"role": "user", "content": "x"}]}], "x"), 0, "prompt")
    with pytest.raises(InputError, match="system_prompt needs"):
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
        InputError, match=rf"x.parquet, row 1: the chat template does not take .*[(]user[)].*{reason}"
    ) as error:
        Encoder(tokenizer).pair(rows, 0, None, "completion")
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


def test_every_stop_token_of_the_model_counts():
    import transformers

    tokenizer = tiny.tokenizer()
    for eos, expected in ((None, [3]), (2, [2, 3]), ([2, 5], [2, 3, 5])):
        assert encode.stop_ids(tokenizer, transformers.GenerationConfig(eos_token_id=eos)) == expected


THINKING = tiny.CHAT_TEMPLATE.replace(
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% if enable_thinking is false %}{{ '!' }}{% endif %}{% endif %}",
).replace(
    "'>' + m['content']",
    "'>' + ('!' if enable_thinking is false and m['role'] == 'assistant' else '') + m['content']",
)


@pytest.fixture
def thinking(tmp_path):
    """A model folder whose chat template marks the assistant's turn where it is told not to think, and its rows."""
    folder = tiny.model_folder(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(THINKING)
    rows = [{"prompt": f"q{i}", "completion": "y", "chosen": "y", "rejected": "n"} for i in range(4)]
    return folder, tiny.jsonl(tmp_path / "rows.jsonl", rows)


def encoded_by_every_trainer(folder, rows, **options):
    """The prompt of the first row, as sft, reward and the policy trainers read it."""
    tokenizer = load_tokenizer(folder)
    options = {"model": folder, "dataset": rows, "output_dir": "o", "eval_size": 1} | options
    config = sft.SFTConfig(**options)
    yield sft.encoded(config, load_rows(rows), Encoder.of(config, tokenizer))[0].prompt
    pairs = preferences.PairEncoder(reward.RewardConfig(**options), tokenizer).pairs(load_rows(rows))
    yield pairs[0].chosen[0]
    yield pairs[0].rejected[0]
    for config_class in (grpo.GRPOConfig, ppo.PPOConfig):
        yield prepare.load_prompts(config_class(**options), tokenizer, [])[0][0].ids


def test_the_chat_template_is_told_in_every_trainer_what_the_run_tells_it(thinking):
    tokenizer = load_tokenizer(thinking[0])
    for told, expected in ((None, "<assistant>"), ({"enable_thinking": False}, "<assistant>!")):
        found = list(encoded_by_every_trainer(*thinking, chat_template_kwargs=told))
        texts = [tokenizer.decode(prompt) for prompt in found]
        assert texts == [f"<bos><user>q0<end>\n{expected}"] * 5


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"enable_thinkin": False}, "template does not read 'enable_thinkin'; did you mean enable_thinking[?]"),
        ({"quux": 1}, "template does not read 'quux'$"),
        ({"tokenize": False}, "tokenize is set by the trainer"),
        ({"add_generation_prompt": True}, "add_generation_prompt is set by the trainer"),
    ],
)
def test_what_the_chat_template_would_ignore_is_refused(told, message, thinking):
    with pytest.raises(InputError, match=f"chat_template_kwargs: .*{message}"):
        Encoder(load_tokenizer(thinking[0]), chat_template_kwargs=told)


def test_a_template_can_be_told_nothing_where_it_is_not_used(thinking):
    for tokenizer, raw in ((load_tokenizer(thinking[0]), True), (tiny.tokenizer(chat=False), False)):
        with pytest.raises(InputError, match="chat_template_kwargs needs a tokenizer with a chat template"):
            Encoder(tokenizer, raw_prompt=raw, chat_template_kwargs={"enable_thinking": False})


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
    for messages in ([ASKED, CALL], [ASKED, nothing_but_calls], in_parquet):
        rows = Rows([{"messages": messages, "tools": [{"name": "g"}]}], "d.jsonl")
        prompt, completion = Encoder(tokenizer).pair(rows, 0, None, "completion")
        assert tokenizer.decode(prompt) == "<bos>g<user>a<end>\n<assistant>"
        assert tokenizer.decode(completion) == "f!<end>"
        assert Encoder(tokenizer).prompt(rows, 0, None) == prompt


REFUSED_TURNS = {
    "d.jsonl, line 1: the assistant's turn has tool_calls, but the chat template leaves it out": [ASKED, CALL],
    "the assistant's turn has reasoning_content, but": [ASKED, {**CALL, "tool_calls": None, "reasoning_content": "r"}],
    "the completion spells '<end>', the token that ends": [ASKED, {"role": "assistant", "content": "b<end>c"}],
    "must be text or a list of messages": [ASKED, {"role": "assistant", "content": None}],
}


@pytest.mark.parametrize("message", REFUSED_TURNS)
def test_a_turn_that_would_not_be_trained_on_whole_is_refused(message):
    with pytest.raises(InputError, match=message):
        Encoder(tiny.tokenizer()).pair(Rows([{"messages": REFUSED_TURNS[message]}], "d.jsonl"), 0, None, "completion")


@pytest.mark.parametrize(("chat", "spelled"), [(True, "<end>"), (False, "<eos>")])
def test_a_completion_that_spells_the_end_of_a_response_is_refused(chat, spelled):
    rows = Rows([{"prompt": "a", "completion": f"b{spelled}c"}], "d.jsonl")
    with pytest.raises(InputError, match=f"d.jsonl, line 1: the completion spells '{spelled}'"):
        Encoder(tiny.tokenizer(chat=chat)).pair(rows, 0, None, "completion")


def test_tools_that_reach_no_model_are_refused():
    rows = [{"prompt": "a", "tools": tools} for tools in ([{"name": "g"}], "[]", ["g"])]
    for row, message in zip(rows, ("template does not read them", "must be a list", "must be a list"), strict=True):
        with pytest.raises(InputError, match=f"d.jsonl, line 1: .*{message}"):
            Encoder(tiny.tokenizer()).prompt(Rows([row], "d.jsonl"), 0, None)
    told = Encoder(with_template(TOOL_TEMPLATE), chat_template_kwargs={"tools": [{"name": "h"}]})
    with pytest.raises(InputError, match="the row has tools, and chat_template_kwargs has others"):
        told.prompt(Rows(rows[:1], "d.jsonl"), 0, None)


def test_a_word_of_the_template_that_it_does_not_read_is_refused():
    template = "{% generation %}{% endgeneration %}{% if x is not defined %}{% set x = 1 %}{% endif %}{# hint #}"
    tokenizer = with_template(template + TOOL_TEMPLATE)
    Encoder(tokenizer, chat_template_kwargs={"x": 2})
    for word in ("hint", "role", "m", "messages", "if"):
        with pytest.raises(InputError, match=f"chat_template_kwargs: .*{word}"):
            Encoder(tokenizer, chat_template_kwargs={word: 1})


def test_a_column_of_nulls_is_not_called_missing():
    for column in ("prompt", "messages", "question"):
        with pytest.raises(InputError, match=f"d.jsonl, line 1: column '{column}' is null"):
            Encoder(tiny.tokenizer()).prompt(Rows([{column: None}], "d.jsonl"), 0, None)
    with pytest.raises(InputError, match="column 'prompt' is missing"):
        Encoder(tiny.tokenizer()).prompt(Rows([{"q": "a"}], "d.jsonl"), 0, None)
