"""Distillation: its loss and gradient in fp64, its teachers, which rows are sampled."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fused_rl.trainers import distill
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.models.language_model import LanguageModel
from fused_rl.trainers.policy.policy import Policy
from fused_rl.trainers.policy.teacher import ServedTeacher, Teacher, load_teachers
from tests.lazy import transformers
from tests.marks import slow
from tests.trainers import fake_server, tiny

PADDING = 5  # rows of the teacher's head beyond the student's
GIVEN = {"on_policy": 0.0, "completion_column": "answer"}
MIXED = GIVEN | {"on_policy": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A student, and a wider teacher whose head is padded."""
    folder = tmp_path_factory.mktemp("distill")
    tiny.model_folder(folder / "model")
    rows = tiny.sums(21)
    for i, row in enumerate(rows):
        row["teacher"] = "other" if i % 3 else "itself"
    tiny.jsonl(folder / "rows.jsonl", rows)
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    wider = {"hidden_size": 24, "vocab_size": config.vocab_size + PADDING, "initializer_range": 0.3}
    config.update(wider)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        lm = transformers.Qwen2ForCausalLM(config)
    lm.save_pretrained(folder / "teacher")
    tiny.tokenizer().save_pretrained(folder / "teacher")
    return folder


def distill_config(folder: Path, output: Path, **options) -> distill.DistillConfig:
    given = {"teacher": str(folder / "teacher"), "eval_size": 0, "steps": 1, "save_every": 0}
    given |= {"prompts_per_step": 8, "max_new_tokens": 6, "eval_samples": 2, "max_grad_norm": 0.0}
    given |= {"lr": 1e-3, "micro_batch_size": 3, "dtype": "float32"}
    files = (options.pop("model", folder / "model"), folder / "rows.jsonl", output)
    return tiny.config_of("distill", *files, **(given | options))


def trained(folder: Path, output: Path, **options) -> list[dict]:
    distill.train(distill_config(folder, output, **options))
    return tiny.untimed(tiny.read_metrics(output))


def watched(monkeypatch) -> tuple[list, list]:
    """The samples that the loss is taken of, call by call, and the gradients of each update, from now on."""
    samples, gradients = [], []
    accumulate, optimizer_step = distill.accumulate, Policy.optimizer_step

    def noted(*given):
        samples.append(given[2])
        return accumulate(*given)

    def step(policy, number):
        weights = policy.model.module.lm.named_parameters()
        gradients.append({name: p.grad.double() for name, p in weights})
        return optimizer_step(policy, number)

    monkeypatch.setattr(distill, "accumulate", noted)
    monkeypatch.setattr(Policy, "optimizer_step", step)
    return samples, gradients


def expected(folder: Path, samples, config) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """The mean divergence per token by plain softmax in fp64, the agreement of all tokens, and the gradient."""
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name).double()
        for name in ("model", "teacher")
    )
    beta = {"reverse": 0.0, "forward": 1.0, "jensen-shannon": config.jsd_beta}[config.direction]
    tokens, agrees = [], []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response.ids])
        at = slice(len(sample.prompt_ids) - 1, -1)
        own, other = (
            lm(ids).logits[0, at, : student.config.vocab_size] for lm in (student, teacher)
        )
        agrees.append(own.argmax(-1) == other.argmax(-1))
        p = torch.softmax(own / config.distill_temperature, -1)
        q = torch.softmax(other.detach() / config.distill_temperature, -1)
        m = {0.0: q, 1.0: p}.get(beta, beta * q + (1 - beta) * p)
        share = {0.0: 1.0, 1.0: 0.0}.get(beta, 1 - beta)
        tokens.append((share * p * (p / m).log() + (1 - share) * q * (q / m).log()).sum(-1))
    loss = torch.cat(tokens).mean()
    loss.backward()
    agreement = torch.cat(agrees).double().mean().item()
    return loss.detach(), agreement, {name: p.grad for name, p in student.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"direction": "forward", "distill_temperature": 0.7},
        {"direction": "jensen-shannon", "distill_temperature": 2.0},
        {"direction": "jensen-shannon", "jsd_beta": 0.2},
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_plain_softmax_in_fp64(
    folder, tmp_path, monkeypatch, options
):
    samples, gradients = watched(monkeypatch)
    (metrics,) = trained(folder, tmp_path, **MIXED, **options)
    loss, _, gradient = expected(folder, samples[0], distill_config(folder, tmp_path, **options))
    assert loss > 0.01 and metrics["distill/kl"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["distill/num_tokens"] == sum(len(sample.response.ids) for sample in samples[0])
    for name, wanted in gradient.items():
        assert (gradients[0][name] - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_rows_are_sampled_by_the_share_and_the_others_keep_their_completion(
    folder, tmp_path, monkeypatch
):
    samples, _ = watched(monkeypatch)
    metrics = trained(folder, tmp_path, **GIVEN | {"on_policy": 0.3, "group_size": 2, "steps": 5})
    # 2.4 rows of 8 are due in each step; every completion begins with "Add them" and is cut.
    encoded = [*tiny.tokenizer()("Add them", add_special_tokens=False).input_ids][:6]
    given = [sum(sample.response.ids == encoded for sample in of_step) for of_step in samples]
    assert given == [6, 5, 6, 5, 6]
    assert [len(of_step) for of_step in samples] == [10, 11, 10, 11, 10]
    # Of 21 rows the first two steps take 16, each once; a row that is sampled has two responses.
    first, second, *_ = [{sample.where for sample in of_step} for of_step in samples]
    assert len(first) == len(second) == 8 and not first & second
    assert [row["episode"] for row in metrics] == [4, 10, 14, 20, 24]
    (none,) = trained(folder, tmp_path / "given", **GIVEN)
    assert len(samples[-1]) == 8 and "completions/mean_length" not in none


def test_held_out_responses_are_compared(folder, tmp_path, monkeypatch):
    """Two to each of five prompts, before the first step; without a scorer the divergence is all that is shown."""
    samples, _ = watched(monkeypatch)
    first, last = trained(folder, tmp_path, eval_size=5)
    assert not {"eval/score", "eval/accuracy_greedy"} & {*last}
    loss, agreement, _ = expected(folder, samples[0], distill_config(folder, tmp_path))
    assert len(samples[0]) == 10
    assert first["eval/distill/kl"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["eval/distill/top1_agreement"] == pytest.approx(agreement)
    assert last["eval/distill/kl"] < first["eval/distill/kl"]


@pytest.mark.parametrize("beyond", [0, 3])
def test_heads_with_biases_and_of_other_sizes_are_compared(folder, tmp_path, beyond):
    torch.manual_seed(0)
    student, teacher = torch.nn.Linear(4, 9 + beyond), torch.nn.Linear(6, 9)
    hidden, states = torch.randn(5, 4), torch.randn(5, 6)
    config = distill_config(folder, tmp_path, distill_temperature=0.7)
    lm = SimpleNamespace(head=student, softcap=None, head_dtype=None, head_temperature=1.5)
    lm.head_options = functools.partial(LanguageModel.head_options, lm)
    head = teacher.weight.detach(), teacher.bias.detach()
    found = Teacher(None, head, True).compare(config, lm, hidden, torch.arange(5), states)
    own, other = student(hidden)[:, :9], teacher(states)
    p, q = (torch.softmax(x.double() / 0.7 / 1.5, -1) for x in (own, other))
    torch.testing.assert_close(found.kl.double(), (p * (p / q).log()).sum(-1))
    assert found.agrees.sum() == (own.argmax(-1) == other.argmax(-1)).sum()


def test_a_teacher_may_scale_its_logits_by_another_number(folder, tmp_path):
    """Granite's sizes do; what distill cannot compare is refused: a cap, or more than a product."""
    tokenizer = tiny.tokenizer()
    sizes = {"vocab_size": len(tokenizer), "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}

    def model(kind, **options):
        config = getattr(transformers, f"{kind}Config")(**sizes, **options, pad_token_id=0)
        name = str(tmp_path / kind)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(name)
        tokenizer.save_pretrained(name)
        return name

    lm = transformers.AutoModelForCausalLM.from_pretrained(model("Granite", logits_scaling=3.0))
    student = LanguageModel(lm, "linear")
    policy = SimpleNamespace(
        device=lm.device, tokenizer=tokenizer, model=SimpleNamespace(module=student), costs=None
    )
    for kind, options, problem in (
        ("Granite", {"logits_scaling": 12.0}, None),
        ("Gemma2", {"final_logit_softcapping": 5.0, "head_dim": 8}, "caps its logits at 5.0"),
        (
            "ModernBertDecoder",
            {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1},
            "has more",
        ),
    ):
        name = model(kind, **options)
        config = policy.config = distill_config(folder, tmp_path, teacher=name).replace(model=name)
        if problem is not None:
            with pytest.raises(InputError, match=problem):
                load_teachers(config, policy)
            continue
        teacher = load_teachers(config, policy)[""]
        states, ids = torch.randn(3, 16), torch.arange(3)
        kl = teacher.compare(config, student, states, ids, states).kl
        p = (lm.lm_head(states).double() / 3).softmax(-1)
        q = (teacher.model.head(states).double() / 12).softmax(-1)
        torch.testing.assert_close(kl.double(), (p * (p / q).log()).sum(-1), atol=1e-6, rtol=1e-4)


def test_rows_that_the_student_alone_has_are_neither_sampled_nor_compared(folder, tmp_path):
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    lm.resize_token_embeddings(lm.config.vocab_size + PADDING, mean_resizing=False)
    with torch.no_grad():
        lm.get_output_embeddings().weight[-PADDING:] = 20 * torch.eye(
            PADDING, lm.config.hidden_size
        )
    lm.save_pretrained(tmp_path / "padded")
    tiny.tokenizer().save_pretrained(tmp_path / "padded")
    options = {"eval_size": 5, "teacher": tiny.model_folder(tmp_path / "teacher", seed=1)}
    alone, padded = (
        trained(folder, tmp_path / "runs" / model.name, model=model, **options)
        for model in (folder / "model", tmp_path / "padded")
    )
    for key in ("distill/kl", "optim/grad_norm", "eval/distill/kl"):
        assert padded[-1][key] == pytest.approx(alone[-1][key], rel=1e-5)


def test_a_servers_likeliest_tokens_come_first_without_the_one_that_stands_there():
    told = {"7": (30, -9.0), "6": (2, -2.0), "5": (1, -1.0)}, {"9": (2, -3.0), "8": (1, -0.5)}
    reported = [
        {token: {"rank": rank, "logprob": logprob} for token, (rank, logprob) in of_token.items()}
        for of_token in told
    ]
    http = SimpleNamespace(
        run=list, call=lambda *_: {"choices": [{"prompt_logprobs": [None, None, *reported]}]}
    )
    batch = make_batch([[1, 2]], [[7, 8]], 0, "cpu")
    ids, logprobs = ServedTeacher(http, "", "", 2).read({}, batch)
    assert ids.tolist() == [[5, 6], [8, 9]] and logprobs.tolist() == [[-1.0, -2.0], [-0.5, -3.0]]


def test_a_column_of_the_rows_names_the_teacher(folder, tmp_path, monkeypatch):
    """The student as its own teacher adds no divergence, so the other one's rows give all of it."""
    teachers = {"itself": str(folder / "model"), "other": str(folder / "teacher")}
    samples, gradients = watched(monkeypatch)
    (metrics,) = trained(folder, tmp_path / "run", teacher=teachers)
    corrected = [sample for sample in samples[0] if sample.row["teacher"] == "other"]
    assert 0 < len(corrected) < len(samples[0])
    loss, _, gradient = expected(folder, corrected, distill_config(folder, tmp_path))
    share = sum(len(sample.response.ids) for sample in corrected) / metrics["distill/num_tokens"]
    assert metrics["distill/kl"] == pytest.approx(share * loss.item(), rel=1e-5)
    for name, wanted in gradient.items():
        assert (gradients[0][name] - share * wanted).norm() <= 1e-4 * wanted.norm(), name

    more = {"itself": teachers["itself"], "more": teachers["other"]}
    with pytest.raises(InputError, match=r"line \d+: column 'teacher' is 'other'; .*itself, more"):
        trained(folder, tmp_path / "no", teacher=more)


@pytest.mark.parametrize("direction", ["reverse", slow("forward"), slow("jensen-shannon")])
def test_a_teacher_behind_a_server_corrects_its_likeliest_tokens(folder, tmp_path, direction):
    """With all tokens it is the model in the process; with three the divergence is smaller, and never negative."""
    options = {"direction": direction, "steps": 2}
    trained(folder, tmp_path / "taught", lr=0.1, **options)
    taught = str(tmp_path / "taught" / "model")
    whole = trained(folder, tmp_path / "whole", teacher=taught, **options)
    with fake_server.serving("vllm", taught, max_model_len=512) as fake:
        served = {"teacher": fake.url, "teacher_top_k": fake.lm.config.vocab_size} | options
        every = trained(folder, tmp_path / "every", **served)
        three = trained(folder, tmp_path / "three", **served | {"teacher_top_k": 3})
    assert 1e-2 < every[1]["distill/kl"] > three[1]["distill/kl"]
    for a, b, c in zip(whole, every, three, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
        assert c["distill/kl"] >= 0 and c["distill/topk_mass"] < 1


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1/models", {"status": "fine"}, "answered {'status'.*expected a vLLM server"),
        ("/tokenize", {"tokens": [1, 2]}, "has other tokens than model="),
    ],
)
def test_a_server_that_cannot_teach_is_refused_in_a_line(folder, tmp_path, path, answer, message):
    with fake_server.serving("vllm", str(folder / "model"), max_model_len=512) as fake:
        fake.script += [(path, lambda right: answer)]
        with pytest.raises(InputError, match=message):
            trained(folder, tmp_path, teacher=fake.url, teacher_top_k=5)
