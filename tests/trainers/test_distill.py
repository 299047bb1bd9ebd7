"""Distillation: its loss and gradient in fp64, and runs that do not depend on how they were split or interrupted."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from fused_rl.recipes import demo
from fused_rl.trainers import distill
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.models import packing
from fused_rl.trainers.policy import teacher
from fused_rl.trainers.policy.policy import Policy
from fused_rl.trainers.run.parse import parse
from tests.marks import slow
from tests.trainers import fake_server, tiny
from tests.trainers.runs import assert_equal_runs, division, forget_after, on_ranks

PADDING = 5  # rows of the teacher's head beyond the student's
GIVEN = {"on_policy": 0.0, "completion_column": "answer"}
MIXED = GIVEN | {"on_policy": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A student, and a wider teacher whose head is padded."""
    import transformers

    folder = tmp_path_factory.mktemp("distill")
    tiny.model_folder(folder / "model")
    rows = [
        row | {"teacher": "other" if i % 3 else "itself"} for i, row in enumerate(tiny.sums(21))
    ]
    tiny.jsonl(folder / "rows.jsonl", rows)
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    config.update(
        {"hidden_size": 24, "vocab_size": config.vocab_size + PADDING, "initializer_range": 0.3}
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        lm = transformers.Qwen2ForCausalLM(config)
    lm.save_pretrained(folder / "teacher")
    tiny.tokenizer().save_pretrained(folder / "teacher")
    return folder


def distill_config(folder: Path, output: Path, **options) -> distill.DistillConfig:
    settings = {
        "teacher": str(folder / "teacher"),
        "eval_size": 5,
        "steps": 4,
        "prompts_per_step": 8,
        "lr": 1e-3,
        "max_new_tokens": 6,
        "eval_samples": 2,
        "micro_batch_size": 3,
        "dtype": "float32",
        "eval_every": 2,
        "save_every": 2,
    }
    files = (folder / "model", folder / "rows.jsonl", output)
    return tiny.config_of("distill", *files, **(settings | options))


def trained(folder: Path, output: Path, **options) -> list[dict]:
    distill.train(distill_config(folder, output, **options))
    return tiny.untimed(tiny.read_metrics(output))


def watched(monkeypatch) -> tuple[list, list]:
    """The samples that the loss is taken of, call by call, and the gradients of each update, from now on."""
    samples, gradients = [], []
    accumulate, optimizer_step = distill.accumulate, Policy.optimizer_step

    def step(policy, number):
        gradients.append(
            {name: p.grad.double() for name, p in policy.model.module.lm.named_parameters()}
        )
        return optimizer_step(policy, number)

    monkeypatch.setattr(
        distill, "accumulate", lambda *given: samples.append(given[2]) or accumulate(*given)
    )
    monkeypatch.setattr(Policy, "optimizer_step", step)
    return samples, gradients


def expected(folder: Path, samples, config) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """The mean divergence per token by plain softmax in fp64, the agreement of all tokens, and the gradient."""
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name).double()
        for name in ("model", "teacher")
    )
    tokens, agrees = [], []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response.ids])
        predicting = slice(len(sample.prompt_ids) - 1, -1)
        own, other = (
            lm(ids).logits[0, predicting, : student.config.vocab_size] for lm in (student, teacher)
        )
        p, q = (
            torch.softmax(logits / config.distill_temperature, -1)
            for logits in (own, other.detach())
        )
        beta = {"reverse": 0.0, "forward": 1.0, "jensen-shannon": config.jsd_beta}[config.direction]
        m = beta * q + (1 - beta) * p
        if config.direction == "jensen-shannon":
            tokens.append((beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1))
        else:
            tokens.append(
                (p * (p / q).log() if config.direction == "reverse" else q * (q / p).log()).sum(-1)
            )
        agrees.append(own.argmax(-1) == other.argmax(-1))
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
        {"direction": "jensen-shannon", "jsd_beta": 0.2, "distill_temperature": 0.7},
    ],
    ids=["reverse", "forward", "jensen-shannon", "jensen-shannon-0.2"],
)
def test_loss_and_gradient_are_those_of_plain_softmax_in_fp64(
    folder, tmp_path, monkeypatch, options
):
    samples, gradients = watched(monkeypatch)
    (metrics,) = trained(
        folder, tmp_path, steps=1, eval_size=0, max_grad_norm=0.0, **MIXED, **options
    )
    loss, _, gradient = expected(folder, samples[0], distill_config(folder, tmp_path, **options))
    assert loss > 0.01 and metrics["distill/kl"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["distill/num_tokens"] == sum(len(sample.response.ids) for sample in samples[0])
    for name, wanted in gradient.items():
        assert (gradients[0][name] - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_rows_are_sampled_by_the_share_and_the_others_keep_their_completion(
    folder, tmp_path, monkeypatch
):
    samples, _ = watched(monkeypatch)
    options = GIVEN | {"on_policy": 0.3, "group_size": 2, "steps": 5, "eval_size": 0}
    metrics = trained(folder, tmp_path, **options)
    # 2.4 rows of 8 are due in each step; every completion begins with "Add them" and is cut.
    encoded = [*tiny.tokenizer()("Add them", add_special_tokens=False).input_ids][:6]
    given = [sum(sample.response.ids == encoded for sample in of_step) for of_step in samples]
    assert given == [6, 5, 6, 5, 6]
    assert [len(of_step) for of_step in samples] == [10, 11, 10, 11, 10]
    # Of 21 rows the first two steps take 16, each once; a row that is sampled has two responses.
    first, second, *_ = [{sample.where for sample in of_step} for of_step in samples]
    assert len(first) == len(second) == 8 and not first & second
    assert [row["episode"] for row in metrics] == [4, 10, 14, 20, 24]
    none, *_ = trained(folder, tmp_path / "given", steps=1, eval_size=0, **GIVEN)
    assert len(samples[-1]) == 8 and "completions/mean_length" not in none


def test_the_logits_of_the_loss_have_the_dtype_of_the_head(folder, tmp_path):
    options = GIVEN | {"dtype": "bfloat16", "zero_stage": 2, "steps": 1, "eval_size": 0}
    exact, rounded = (
        trained(folder, tmp_path / dtype, head_dtype=dtype, **options)[0]["distill/kl"]
        for dtype in ("float32", "bfloat16")
    )
    assert 1e-6 < abs(exact / rounded - 1) < 0.05


def test_held_out_responses_are_compared_and_metrics_have_exactly_these_names(
    folder, tmp_path, monkeypatch, capsys
):
    samples, _ = watched(monkeypatch)
    scorers = {"verifiers": ["tests.trainers.tiny:first_is_odd"], "solved_at": [0.0]}
    metrics = trained(folder, tmp_path / "run", **scorers)
    assert "teach anything" not in capsys.readouterr().out  # which is about rewards
    # From a score of 0 on all are solved.
    names = {"step", *tiny.usual("distill")} - {"eval/mean_length_unsolved"}
    names = {name for name in names if not name.startswith(("time/", "perf/"))}
    scored = {
        f"rewards/tests.trainers.tiny:first_is_odd/{name}" for name in ("mean", "std", "none")
    }
    passes = {"eval/pass_at_1", "eval/pass_at_2"}
    evaluation = {name for name in names if name.startswith("eval/")} | passes
    assert set(metrics[0]) == {"step"} | evaluation
    assert (
        set(metrics[1]) == names - evaluation | scored
        and set(metrics[2]) == names | evaluation | scored
    )
    assert all(math.isfinite(value) for row in metrics for value in row.values())

    # Two responses to each of five prompts, before the first step; the student has learned at the end.
    first, last = metrics[0], metrics[-1]
    loss, agreement, _ = expected(folder, samples[0], distill_config(folder, tmp_path))
    assert len(samples[0]) == 10 and first["eval/distill/kl"] == pytest.approx(
        loss.item(), rel=1e-5
    )
    assert first["eval/distill/top1_agreement"] == pytest.approx(agreement)
    assert last["eval/distill/kl"] < first["eval/distill/kl"]


def test_without_scorers_an_evaluation_shows_the_divergence_alone(folder, tmp_path, capsys):
    metrics = trained(folder, tmp_path, steps=1)
    assert "eval/distill/kl" in metrics[-1] and not {"eval/score", "eval/accuracy_greedy"} & {
        *metrics[-1]
    }
    assert "no scorer" not in capsys.readouterr().out


def test_a_completion_without_an_embedding_is_refused_before_training(folder, tmp_path):
    """As a token is that was added to the tokenizer, and for which the embeddings were not resized."""
    import transformers

    for name in ("model", "teacher"):
        shutil.copytree(folder / name, tmp_path / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(tmp_path / name)
    rows = [{"question": f"{i}+1?", "answer": "2" if i < 6 else "<new> 2"} for i in range(8)]
    tiny.jsonl(tmp_path / "rows.jsonl", rows)
    config = distill_config(
        tmp_path, tmp_path / "run", teacher=str(tmp_path / "teacher"), **MIXED | {"eval_size": 0}
    )
    with pytest.raises(InputError, match="rows.jsonl, line 7: token '<new>' has id .* embeds ids"):
        distill.train(config)


def test_a_teacher_may_be_adapters(folder, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = peft.get_peft_model(
        lm, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapters")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(tmp_path / "adapters")
    options = GIVEN | {"steps": 1, "eval_size": 0}
    (same,) = trained(folder, tmp_path / "same", teacher=str(folder / "model"), **options)
    (other,) = trained(folder, tmp_path / "other", teacher=str(tmp_path / "adapters"), **options)
    assert abs(same["distill/kl"]) < 1e-9 and same["distill/top1_agreement"] == 1
    assert other["distill/kl"] > 1e-3


def test_a_column_of_the_rows_names_the_teacher(folder, tmp_path, monkeypatch):
    """The student as its own teacher adds no divergence, so the other one's rows give all of it."""
    teachers = {"itself": str(folder / "model"), "other": str(folder / "teacher")}
    options = {"steps": 1, "eval_size": 0, "max_grad_norm": 0.0}
    samples, gradients = watched(monkeypatch)
    (metrics,) = trained(folder, tmp_path / "run", teacher=teachers, **options)
    (of_step,) = samples
    corrected = [sample for sample in of_step if sample.row["teacher"] == "other"]
    assert 0 < len(corrected) < len(of_step)
    loss, _, gradient = expected(folder, corrected, distill_config(folder, tmp_path))
    share = sum(len(sample.response.ids) for sample in corrected) / metrics["distill/num_tokens"]
    assert metrics["distill/kl"] == pytest.approx(share * loss.item(), rel=1e-5)
    for name, wanted in gradient.items():
        assert (gradients[0][name] - share * wanted).norm() <= 1e-4 * wanted.norm(), name

    with pytest.raises(
        InputError, match=r"column 'name' is missing; the row has .*'teacher'.*--teacher_column"
    ):
        trained(folder, tmp_path / "no", teacher=teachers, teacher_column="name", **options)
    with pytest.raises(
        InputError, match=r"rows.jsonl, line \d+: column 'teacher' is 'other'; .*: itself, more"
    ):
        trained(
            folder,
            tmp_path / "no",
            teacher={"itself": teachers["itself"], "more": teachers["other"]},
            **options,
        )


def test_packed_sequences_are_the_same_training(folder, tmp_path, monkeypatch):
    options = {"micro_batch_size": 8, "eval_size": 0, "group_size": 2, "save_every": 0}
    rows = []
    monkeypatch.setattr(
        teacher, "arrange", lambda lengths, _: rows.append(packing.fill(lengths, 99)) or rows[-1]
    )
    # Where sequences are so short it saves little.
    monkeypatch.setattr(teacher, "price", lambda *given: 0)
    runs = [
        trained(folder, tmp_path / str(packs), packing=packs, **options) for packs in (False, True)
    ]
    for padded, packed in zip(*runs, strict=True):
        assert packed == pytest.approx(padded, rel=1e-4, abs=1e-6)
    assert len(rows) == 2 * 4 and all(len(of_part) < 8 for of_part in rows)

    # Of two teachers the second one cannot read packed rows, so nobody gets them.
    costs = iter([object(), None])
    monkeypatch.setattr(teacher, "packing_costs", lambda *_, **__: next(costs))
    teachers = {"itself": str(folder / "model"), "other": str(folder / "teacher")}
    trained(folder, tmp_path / "two", teacher=teachers, packing=True, **options | {"steps": 1})
    assert len(rows) == 2 * 4


@pytest.mark.parametrize("direction", ["reverse", slow("forward"), slow("jensen-shannon")])
def test_a_teacher_behind_a_server_corrects_its_likeliest_tokens(folder, tmp_path, direction):
    """With all tokens it is the model in the process; with three the divergence is smaller, and never negative."""
    options = {"direction": direction, "eval_size": 0, "steps": 2, "save_every": 0}
    trained(folder, tmp_path / "taught", lr=0.1, **options)
    taught = str(tmp_path / "taught" / "model")
    whole = trained(folder, tmp_path / "whole", teacher=taught, **options)
    with fake_server.serving("vllm", taught, max_model_len=512) as fake:
        vocab = fake.lm.config.vocab_size
        served = {"teacher": fake.url} | options
        every = trained(folder, tmp_path / "every", teacher_top_k=vocab, **served)
        three = trained(folder, tmp_path / "three", teacher_top_k=3, **served)
        with pytest.raises(
            InputError, match=r"start vLLM with --max-logprobs 5 or more, or lower --teacher_top_k"
        ):
            fake.script += [("/v1/completions", lambda answer: {"choices": [{}]})]
            trained(folder, tmp_path / "old", teacher_top_k=5, **served)
    assert every[1]["distill/kl"] > 1e-2
    for a, b, c in zip(whole, every, three, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
        assert c["distill/kl"] >= 0 and c["distill/topk_mass"] < 1
    assert three[1]["distill/kl"] < every[1]["distill/kl"]


def test_a_server_with_another_tokenizer_is_refused(folder, tmp_path):
    with fake_server.serving("vllm", str(folder / "model")) as fake:
        fake.script += [("/tokenize", lambda answer: answer | {"tokens": [1, 2]})]
        with pytest.raises(InputError, match="has other tokens than model="):
            trained(folder, tmp_path, teacher=fake.url)


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize"])
def test_a_teacher_that_is_no_vllm_is_refused(folder, tmp_path, path):
    with fake_server.serving("vllm", str(folder / "model")) as fake:
        fake.script += [(path, lambda answer: {"status": "fine"})]
        with pytest.raises(InputError, match=f"{path} answered {{'status'.*expected a vLLM server"):
            trained(folder, tmp_path, teacher=fake.url)


def test_another_vocabulary_is_refused_with_the_tokens_that_differ(folder, tmp_path):
    from transformers import AutoTokenizer

    teacher = Path(tiny.model_folder(tmp_path / "teacher"))
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    count = len(tokenizer)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(teacher)
    what = rf"has {count + 1} tokens and model=\S+ {count}, and 1 differ: '<think>'; choose a teacher with"
    with pytest.raises(InputError, match=what):
        distill.train(distill_config(folder, tmp_path / "run", teacher=str(teacher)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": {}}, "teacher={} names no teacher"),
        (
            {"teacher": "no/such/teacher"},
            "no/such/teacher does not exist; the current folder is",
        ),
        ({"jsd_beta": 0.3}, "jsd_beta=0.3 has no meaning without --direction jensen-shannon"),
        ({"jsd_beta": 1.0}, "jsd_beta=1.0 should be less than 1"),
        (
            {"completion_column": "answer"},
            "completion_column=answer has no meaning without --on_policy below 1",
        ),
        ({"lag": 1} | MIXED, "lag=1 samples all rows of a later step; drop it, or --on_policy"),
        (
            {"teacher_column": "from"},
            "teacher_column=from has no meaning without several teachers by name",
        ),
        ({"teacher_top_k": 5}, "teacher_top_k=5 has no meaning without a teacher behind a server"),
        (
            {"teacher": "http://x:1", "distill_temperature": 2.0},
            "distill_temperature=2.0 must be 1 with a teacher",
        ),
        ({"loss_from": "logits"}, "loss_from=logits has no meaning here: leave it out"),
        (
            {"on_policy": 0.5},
            r"rows.jsonl, line \d+: column 'completion' is missing; .*--completion_column",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(folder, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        distill.train(distill_config(folder, tmp_path, **options))


@pytest.mark.parametrize(
    "options", [MIXED, pytest.param({"lag": 1}, marks=pytest.mark.slow)], ids=["mixed", "lag"]
)
def test_a_stopped_run_goes_on_bit_for_bit(folder, tmp_path, options):
    trained(folder, tmp_path / "whole", **options)
    forget_after(tmp_path / "whole", tmp_path / "run", 2)
    trained(folder, tmp_path / "run", resume=True, **options)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


def test_the_recipe_takes_the_models_of_the_demo():
    config = parse(distill.DistillConfig, ["--config", str(demo.RECIPES / "demo_distill.yaml")])
    assert distill.arithmetic(config, 2)["rows per step"] == "128 = 2 processes x 64"
    assert (config.model, config.teacher) == ("runs/demo/sft/model", "runs/demo/grpo/model")
    assert demo.grpo_config(Path("runs/demo"), 1).output_dir == "runs/demo/grpo"


def train_splits(rank, world, folder, output, direction, splits):
    found = {}
    for zero_stage, micro_batch_size in splits:
        run = output / f"{world}-{zero_stage}-{micro_batch_size}"
        options = MIXED | {"zero_stage": zero_stage} | division(micro_batch_size) | direction
        # Close to greedy, so that the seeds of ranks decide nothing; 5 held-out prompts do not divide over 2 ranks.
        metrics = trained(folder, run, temperature=1e-4, adam_eps=1e-3, save_every=0, **options)
        weights = {name: weight.numpy() for name, weight in tiny.weights(run / "model").items()}
        found[zero_stage, micro_batch_size] = weights, metrics
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"direction": "jensen-shannon", "jsd_beta": 0.2},
        {"teacher": {"itself": "model", "other": "teacher"}},
    ],
    ids=["reverse", "jensen-shannon-0.2", "several"],
)
def test_processes_micro_batches_and_zero_stages_agree(folder, tmp_path, options):
    if "teacher" in options:
        options = {
            "teacher": {name: str(folder / model) for name, model in options["teacher"].items()}
        }
    one = on_ranks(train_splits, 1, folder, tmp_path, options, [(0, 8), (2, 1)])[0]
    two = on_ranks(train_splits, 2, folder, tmp_path, options, [(3, "30 tokens"), (2, 8)])[0]
    weights, metrics = one[0, 8]
    for split, (other_weights, other_metrics) in [*one.items(), *two.items()]:
        for key in weights:
            assert abs(weights[key] - other_weights[key]).max() < 1e-5, (split, key)
        for a, b in zip(metrics, other_metrics, strict=True):
            assert b == pytest.approx(a, rel=1e-4, abs=1e-5), split
