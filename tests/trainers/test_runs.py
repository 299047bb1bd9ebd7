"""Whole runs of sft and grpo on models of a few thousand weights: split over ranks, saved, and seen."""

import itertools
import re

import pytest
import torch

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.reading import load_train_eval
from fused_rl.trainers.models import language_model
from fused_rl.trainers.policy import evaluate, setup
from fused_rl.trainers.scorers.load import load_scorers
from tests.distributed import run_distributed
from tests.trainers import figures, runs, tiny
from tests.trainers.runs import assert_same_metrics, assert_same_weights, grpo_config, sft_config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model folder and a gsm8k-like file."""
    folder = tmp_path_factory.mktemp("files")
    return tiny.model_folder(folder / "model", pad_is_eos=True), tiny.jsonl(
        folder / "rows.jsonl", tiny.sums(20)
    )


@pytest.fixture(scope="module")
def grpo_run(files, tmp_path_factory):
    """The folder of a run of grpo that is evaluated after every other step, with its figures."""
    folder = tmp_path_factory.mktemp("grpo") / "run"
    with figures.drawn(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        grpo.train(grpo_config(files, folder, eval_every=2))
    return folder


# One result, however the batch is split.


def train_splits(rank, world, files, folder, cases):
    for stage, micro in cases:
        options = {"zero_stage": stage} | runs.division(micro)
        sft.train(sft_config(files, f"{folder}/{world}-{stage}-{micro}", **options))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_micro_batches_and_zero_stages_change_nothing(files, tmp_path, world):
    # Every stage with two divisions, and every division with two stages.
    divisions = itertools.cycle((8, 4, "40 tokens", 1) if world == 1 else ("40 tokens", 1, 8, 4))
    cases = [(stage, next(divisions)) for stage in (0, 1, 2, 3, 1, 0, 3, 2)]
    sft.train(sft_config(files, tmp_path / "reference", micro_batch_size=8))
    runs.on_ranks(train_splits, world, files, str(tmp_path), cases)
    for stage, micro in cases:
        made = tmp_path / f"{world}-{stage}-{micro}"
        # The norm shows the gradient's scale, which Adam's step hides; then lr = 1e-3 four times.
        assert_same_metrics(tmp_path / "reference", made, rtol=2e-5)
        assert_same_weights(tmp_path / "reference", made, atol=2e-5)


def draws(rank, world):
    drawn = []
    for seed in (1, 1, 2):
        engine.setup(seed)
        drawn.append(torch.rand(3).tolist())
    return drawn


def test_every_rank_draws_its_own_responses_and_a_seed_draws_them_again():
    first, second = run_distributed(draws, 2)
    assert first[0] != second[0] and first[0] == first[1] != first[2] and second[0] == second[1]


@pytest.mark.slow
def test_training_does_not_depend_on_how_often_it_is_evaluated(files, grpo_run, tmp_path):
    grpo.train(grpo_config(files, tmp_path, eval_every=1))
    often, seldom = (tiny.untimed(tiny.read_metrics(folder)) for folder in (tmp_path, grpo_run))
    for a, b in zip(often, seldom, strict=True):
        assert {k: v for k, v in a.items() if k in b} == b
    assert often[1].keys() > seldom[1].keys()
    assert_same_weights(tmp_path, grpo_run)


def evaluate_share(rank, world, files, folder):
    """Held-out rows do not divide over the ranks."""
    grpo.train(grpo_config(files, f"{folder}/{world}", eval_size=3, steps=1))


@pytest.mark.slow
def test_no_held_out_row_is_dropped_to_make_the_ranks_even(files, tmp_path):
    evaluate_share(0, 1, files, str(tmp_path))
    runs.on_ranks(evaluate_share, 2, files, str(tmp_path))
    one, two = (tiny.read_metrics(tmp_path / name)[0] for name in ("1", "2"))
    # Greedy: the same answers to the same three.
    assert one["eval/accuracy_greedy"] == two["eval/accuracy_greedy"]
    config = grpo_config(files, "")
    scorers = load_scorers(config)
    prompts = setup.load_prompts(config, encode.load_tokenizer(files[0]), scorers)[1][:3]
    shares = [evaluate.share_of_rank(prompts)]
    assert (shares[0].prompts, shares[0].count) == (prompts, 3)


# What a run leaves and shows.


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_and_leaves_its_files(files, grpo_run, tmp_path, capsys):
    for name, options in {"again": {}, "other": {"seed": 2}}.items():
        grpo.train(grpo_config(files, tmp_path / name, eval_every=2, **options))
    a, b, c = (
        tiny.untimed(tiny.read_metrics(of))
        for of in (grpo_run, tmp_path / "again", tmp_path / "other")
    )
    assert a == b and a != c
    assert_same_weights(grpo_run, tmp_path / "again")
    evaluated = ["eval/accuracy_greedy" in m for m in tiny.read_metrics(grpo_run)]
    assert evaluated == [True, False, True, True]
    said = capsys.readouterr().out
    assert "first_ratio" not in said
    ending = r"did it learn\? \w+: held-out .* on 4 rows; .*KL .* response\n(?:finding.*\n)?model: .*\nnext: fused-rl"
    assert len(re.findall(ending, said)) == 2
    for name in (
        "curves.png",
        "samples.jsonl",
        "model/model.safetensors",
        "model/chat_template.jinja",
    ):
        assert (grpo_run / name).stat().st_size > 0
    assert list((grpo_run / "tensorboard").iterdir())


@pytest.mark.slow
def test_without_a_kl_no_reference_is_loaded_and_none_is_logged(files, tmp_path, monkeypatch):
    loaded, load_lm = [], language_model.load_lm
    monkeypatch.setattr(
        language_model, "load_lm", lambda *a, **k: loaded.append(k) or load_lm(*a, **k)
    )
    grpo.train(grpo_config(files, tmp_path / "none", kl_every=0))
    assert len(loaded) == 1
    grpo.train(grpo_config(files, tmp_path / "second", kl_every=2))
    none, second = (tiny.read_metrics(tmp_path / name) for name in ("none", "second"))
    keys = set().union(*none)
    assert not [key for key in keys if "kl" in key.replace("approxkl", "").replace("kl_coef", "")]
    assert ["objective/kl_exact" in metrics for metrics in second] == [False, False, True, False]
    # What is not measured changes nothing of what is trained.
    assert_same_weights(tmp_path / "none", tmp_path / "second")


@pytest.mark.slow
def test_sft_learns_and_its_metrics_have_exactly_these_names(files, tmp_path):
    sft.train(sft_config(files, tmp_path, steps=30, lr=1e-2, eval_every=15))
    metrics = tiny.read_metrics(tmp_path)
    evaluation = {"eval/loss", "eval/token_accuracy"}
    assert (
        set(metrics[0]) == {"step"} | evaluation
        and set(metrics[1]) == {"step", *tiny.usual("sft")} - evaluation
    )
    assert set(metrics[15]) == {"step", *tiny.usual("sft")}
    assert metrics[-1]["eval/loss"] < 0.5 * metrics[0]["eval/loss"] and metrics[-1]["lr"] < 1e-3
    # Loss and accuracy before and after, from the definition.
    for model, found in ((files[0], metrics[0]), (str(tmp_path / "model"), metrics[-1])):
        loss, accuracy = held_out_by_definition(sft_config((model, files[1]), tmp_path))
        assert found["eval/loss"] == pytest.approx(loss, rel=1e-5)
        assert found["eval/token_accuracy"] == pytest.approx(accuracy)
    assert accuracy > 0.5


def held_out_by_definition(config: sft.SFTConfig) -> tuple[float, float]:
    """Negative log-likelihood, and how often the likeliest token is the right one: means over completion tokens."""
    lm = tiny.load_lm(config, trainable=False)
    _, held_out = load_train_eval(config)
    encoder, losses, hits = encode.Encoder(encode.load_tokenizer(config.model)), [], []
    for i in range(len(held_out)):
        prompt, completion = tiny.pairs(encoder, held_out[i], None, "answer")[0]
        logprobs = (
            lm.base(input_ids=torch.tensor([prompt + completion]))
            .logits[0]
            .double()
            .log_softmax(-1)
        )
        for j, token in enumerate(completion, len(prompt) - 1):
            losses.append(-logprobs[j, token].item())
            hits.append(logprobs[j].argmax().item() == token)
    return sum(losses) / len(losses), sum(hits) / len(hits)


def test_held_out_rows_that_are_left_out_are_counted_once(files, tmp_path, capsys):
    held_out = tiny.jsonl(tmp_path / "held_out.jsonl", tiny.sums(4))
    sft.train(sft_config(files, tmp_path / "run", eval_dataset=held_out, eval_size=3, steps=1))
    output = capsys.readouterr().out
    assert output.count(f"{held_out}: evaluated on 3 of 4 held-out rows (--eval_size)\n") == 1


def test_a_saved_model_reloads_to_the_same_scores_with_all_its_files(files, tmp_path):
    import transformers

    tied = tiny.model_folder(tmp_path / "tied", tie=True)
    folder = sft.train(sft_config((tied, files[1]), tmp_path / "run"))
    saved = tiny.weights(folder)
    assert "lm_head.weight" not in saved  # tied weights once
    tokenizer, before = (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(tied),
    )
    assert (
        tokenizer.chat_template == before.chat_template
        and tokenizer.eos_token_id == before.eos_token_id
    )
    generation = transformers.GenerationConfig.from_pretrained(folder)
    # The model's own defaults, not the rollout's.
    assert (generation.top_k, generation.eos_token_id) == (
        1,
        [3, 2],
    )
    lm = tiny.load_lm(sft_config((folder, files[1]), tmp_path / "x"), trainable=False)
    held_out = load_train_eval(sft_config(files, tmp_path / "x"))[1]
    config = sft_config(files, "", micro_batch_size=8)
    pairs = sft.encoded(config, held_out, encode.Encoder(tokenizer))
    loss = sft.evaluate(lm, sft.micro_batches(pairs, config, 0, "cpu")).metrics["eval/loss"]
    assert tiny.read_metrics(tmp_path / "run")[-1]["eval/loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_lora_trains_adapters_and_measures_against_the_model_without_them(files, tmp_path):
    import peft
    import transformers

    grpo.train(grpo_config(files, tmp_path, lora_rank=2, lr=1e-2, gradient_checkpointing=True))
    metrics = tiny.read_metrics(tmp_path)
    assert (
        metrics[1]["objective/kl_exact"] == pytest.approx(0, abs=1e-6)
        and metrics[3]["objective/kl_exact"] > 1e-3
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(files[0])
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "model")
    changed = [n for n, p in adapted.named_parameters() if "lora_B" in n and p.abs().sum() > 0]
    assert changed and not (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_bfloat16_keeps_fp32_masters_and_starts_on_policy(files, tmp_path, capsys):
    grpo.train(
        grpo_config(files, tmp_path, dtype="bfloat16", zero_stage=1, lr=1e-6, steps=4, save_every=4)
    )
    metrics = tiny.read_metrics(tmp_path)
    assert (
        all(abs(m["val/ratio"] - 1) < 5e-2 for m in metrics[1:])
        and "warning" not in capsys.readouterr().out
    )
    assert {w.dtype for w in tiny.weights(tmp_path / "model").values()} == {torch.bfloat16}
    (state,) = (tmp_path / "checkpoints" / "step-4" / "policy").glob("*optim_states.pt")
    masters = torch.load(state, weights_only=False)["optimizer_state_dict"][
        "single_partition_of_fp32_groups"
    ][0]
    # Eight updates of 1e-6 are below the last bit of most bf16 weights, but not of their masters.
    moved = (masters != masters.bfloat16().float()).float().mean()
    # The rest are embeddings of bytes that never came.
    assert masters.dtype == torch.float32 and moved > 0.5
