"""DPO and KTO: their losses in fp64, TRL's updates, and what they do before the first step."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import dpo, kto
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.encode import Encoder, load_tokenizer
from fused_rl.trainers.data.marked import marked_rows
from fused_rl.trainers.data.micro_batches import Padding
from fused_rl.trainers.data.preferences import Pair
from fused_rl.trainers.data.rows import Rows
from tests.trainers import tiny
from tests.trainers.reward_runs import make_model, write_marked, write_pairs
from tests.trainers.steps import Plain, assert_gradients_close

TRAINERS = {"dpo": dpo, "kto": kto}
OPTIONS = {
    "dpo": {"label_smoothing": 0.05, "nll_coef": 0.1},
    "kto": {"desirable_weight": 1.25, "undesirable_weight": 0.75},
}
RUN = {"eval_size": 5, "steps": 2, "batch_size": 8, "save_every": 0, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    make_model(folder / "model")
    write_pairs(folder / "dpo.jsonl")
    write_marked(folder / "kto.jsonl")
    return folder


def config_of(trainer: str, folder: Path, output_dir="run", **options):
    files = {"dataset": folder / f"{trainer}.jsonl", "output_dir": output_dir}
    return tiny.config_of(trainer, folder / "model", **(files | RUN | OPTIONS[trainer] | options))


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_before_training_all_scores_are_equal_and_the_accuracy_is_a_half(
    trainer, warmup, folder, tmp_path, monkeypatch
):
    # A reference that has read the training rows in other micro-batches, as rounding would have it.
    name, position = {"dpo": ("pair_metrics", 1), "kto": ("update", 2)}[trainer]
    score = getattr(TRAINERS[trainer], name)

    def score_beside_rounding(*arguments, **named):
        arguments = list(arguments)
        is_training = named.get("backward", arguments[-1] == "train/dpo/")
        if is_training and arguments[position] is not None:
            arguments[position] = arguments[position] + 1e-6
        return score(*arguments, **named)

    monkeypatch.setattr(TRAINERS[trainer], name, score_beside_rounding)
    options = {"eval_size": 11, "micro_batch_size": 3, "steps": 1 + warmup}
    options["warmup_steps"] = warmup
    TRAINERS[trainer].train(config_of(trainer, folder, tmp_path, **options))
    first, *_ = (tmp_path / "held_out.jsonl").read_text().splitlines()
    assert json.loads(first)[f"eval/{trainer}/accuracy"] == [[0.5] * 11]
    # Scores of the first step are 0, too, and with a warm-up those of the second.
    for step in tiny.read_metrics(tmp_path)[-1 - warmup :]:
        found = step.items()
        scores = {name: value for name, value in found if re.search("train/.*_rewards?$", name)}
        assert len(scores) >= 2 and set(scores.values()) == {0}
        assert step[f"train/{trainer}/accuracy"] == 0.5


# The loss of a pair from log pi and log pi_ref (2,), numbers of predicted tokens (2,) and the pair's margin; beta 0.5.
softplus, relu = torch.nn.functional.softplus, torch.relu
PAPERS = {
    "sigmoid": lambda lp, ref, n, margin: softplus(margin - 0.5 * lead(lp - ref)),
    "hinge": lambda lp, ref, n, margin: relu(1 + margin - 0.5 * lead(lp - ref)),
    "ipo": lambda lp, ref, n, margin: (lead((lp - ref) / n) - margin - 1 / (2 * 0.5)) ** 2,
    "simpo": lambda lp, ref, n, margin: softplus(margin - 0.5 * lead(lp / n)),
    "orpo": lambda lp, ref, n, margin: 0.5 * softplus(margin - lead(torch.logit((lp / n).exp()))),
    "apo-zero": lambda lp, ref, n, margin: 1 - lead(torch.sigmoid(0.5 * (lp - ref))),
}


def lead(scores):
    return scores[0] - scores[1]


def exact_model(config):
    """The model in fp64, without our code in its forward pass."""
    return tiny.load_lm(config, trainable=False).base.double().requires_grad_(True)


def of_response(exact, prompt, response):
    """(log pi of a response, its predicted tokens): nothing predicts the first one without a prompt."""
    ids, begin = torch.tensor(prompt + response), max(1, len(prompt))
    logp = exact(input_ids=ids[None]).logits[0, begin - 1 : -1].log_softmax(-1)
    return logp.gather(1, ids[begin:, None]).sum(), len(ids) - begin


@pytest.mark.parametrize("loss_type", PAPERS)
def test_a_loss_is_its_papers_however_the_pairs_are_split(loss_type, folder, monkeypatch):
    """Value and gradient in fp64, over micro-batches and ranks."""
    least = 0.0 if loss_type == "apo-zero" else 0.25
    options = {"loss_type": loss_type, "beta": 0.5, "label_smoothing": 0.0, "margin": least}
    config = config_of("dpo", folder, nll_coef=0.3, **options)
    made = torch.Generator().manual_seed(0)
    pairs = []
    for i in range(6):
        sizes = 3 * (i > 0), 2 + i, 9 - i
        ids = [torch.randint(3, 40, (n,), generator=made).tolist() for n in sizes]
        pairs.append(Pair((ids[0], ids[1]), (ids[0], ids[2]), 0.5 * (i % 3), f"line {i}"))
    reference = -40 + 4 * torch.randn(6, 2, generator=made)

    exact = exact_model(config)
    losses, nll, count = [], 0.0, 0
    for pair, ref in zip(pairs, reference.double(), strict=True):
        scores, lengths = zip(
            of_response(exact, *pair.chosen), of_response(exact, *pair.rejected), strict=True
        )
        terms = torch.stack(scores), ref, torch.tensor(lengths), least + pair.margin
        losses.append(PAPERS[loss_type](*terms))
        nll, count = nll - scores[0], count + lengths[0]
    loss = torch.stack(losses).mean() + 0.3 * nll / count
    loss.backward()

    monkeypatch.setattr(ranks, "global_sum", lambda values: values.double())
    for world, micro_batch_size, tokens in ((1, 4, 60), (2, 1, None), (3, 4, None)):
        config.micro_batch_size, config.micro_batch_tokens = micro_batch_size, tokens
        lm, logprobs = tiny.load_lm(config), 0.0
        monkeypatch.setattr(ranks, "world_size", lambda world=world: world)
        monkeypatch.setattr(ranks, "processes", lambda world=world: world)
        for rank in range(world):  # one after the other: its gradients add up, as do its scores
            monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
            logprobs = logprobs + dpo.measure(Plain(lm), pairs, config, reference, Padding())
        found = dpo.pair_metrics(logprobs, reference, pairs, config, "")
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert found["nll"] == pytest.approx((nll / count).item(), rel=1e-5)
        for parameter in lm.parameters():
            parameter.grad /= world  # as the engine averages
        assert_gradients_close(lm, exact, "lm.")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_log_probability_that_is_not_finite_names_its_row(trainer, folder, tmp_path):
    from transformers import AutoModelForCausalLM

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    lm = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        lm.get_output_embeddings().weight[3] = math.nan
    lm.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=rf"rows .*{trainer}.jsonl, line \d+: \[nan"):
        TRAINERS[trainer].train(config_of(trainer, tmp_path, tmp_path / "run"))


# KTO's metrics and rows.


def test_scores_of_a_kind_are_a_mean_of_its_responses():
    sums = {"desirable": 0.25, "desirable_rewards": 1.0, "undesirable_rewards": 3.0}
    means = {"desirable": 0.25, "desirable_rewards": 4.0, "undesirable_rewards": 4.0}
    assert kto.mean_scores({name: torch.tensor(value) for name, value in sums.items()}) == means


def read(folder, rows, **options):
    encoder = Encoder(load_tokenizer(str(folder / "model")))
    return marked_rows(config_of("kto", folder, **options), Rows(rows, "rows.jsonl"), encoder)


def test_a_pair_is_two_rows_and_mismatched_responses_answer_another_prompt(folder):
    pairs = [{"prompt": f"{a}:", "chosen": a * 3, "rejected": a} for a in "abc"]
    marked = [{"prompt": "d:", "completion": "d", "label": label} for label in (1, 0, True)]
    rows = read(folder, pairs + marked)
    assert [row.desirable for row in rows] == [True, False] * 3 + [True, False, True]
    assert [row.where for row in rows[:3]] == [f"rows.jsonl, line {i}" for i in (1, 1, 2)]
    # Each row's is that of the last row before it with another prompt; before the first row comes the last one.
    others = [rows[i].matched[1] for i in (8, 8, 1, 1, 3, 3, 5, 5, 5)]
    assert [row.mismatched for row in rows] == [
        (row.matched[0], other) for row, other in zip(rows, others, strict=True)
    ]


def said(*pairs):
    return [{"prompt": p, "completion": r, "label": True} for p, r in pairs]


def test_the_first_and_the_last_row_may_have_one_prompt_but_not_all(folder):
    rows = read(folder, said("pA", "qB", "rC", "pD"))
    others = [rows[i].matched[1] for i in (2, 0, 1, 2)]
    assert [row.mismatched[1] for row in rows] == others
    with pytest.raises(InputError, match="rows have the prompt of rows.jsonl, line 1; .*several"):
        read(folder, said("pA", "pD")).check_prompts()
    # A response to a shorter prompt is cut where the row would be too long.
    first, second = read(folder, said(("aaaaaa", "b"), ("a", "bbbbbb")), max_length=8)
    assert sum(map(len, first.mismatched)) == 8 and len(second.mismatched[1]) == 2


def test_a_label_is_true_or_false(folder):
    with pytest.raises(InputError, match="line 1: column 'label' must be true or false, got 'yes'"):
        read(folder, [{"prompt": "a", "completion": "b", "label": "yes"}])


def test_a_step_of_kto_is_its_papers(folder):
    """arXiv:2402.01306, section 4.2, value and gradient in fp64; the KL to compare with is of mismatched responses."""
    config = config_of("kto", folder, beta=0.5, micro_batch_size=2)
    pairs = [{"prompt": f"{a}:", "chosen": a * 3, "rejected": a} for a in "abc"]
    rows = read(folder, pairs)
    reference = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)) - 15
    exact = exact_model(config)
    own, other = (
        torch.stack([of_response(exact, *getattr(row, kind))[0] for row in rows])
        for kind in ("matched", "mismatched")
    )
    moved, kl = own - reference[:, 0], (other - reference[:, 1]).mean().detach().clamp(min=0)
    lead = torch.tensor([1.0, -1] * 3) * 0.5 * (moved - kl)
    loss = (torch.tensor([1.25, 0.75] * 3) * (1 - lead.sigmoid())).mean()
    loss.backward()
    lm = tiny.load_lm(config)
    found = kto.update(Plain(lm), rows, reference, config, backward=True)
    assert (found["loss"], found["kl"]) == pytest.approx((loss.item(), kl.item()), rel=1e-5)
    nll = -own[::2].sum().item() / sum(len(row.matched[1]) for row in rows[::2])
    assert found["nll"] == pytest.approx(nll, rel=1e-5)
    assert kl > 0.1
    assert_gradients_close(lm, exact, "lm.")
