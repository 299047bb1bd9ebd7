"""Whole runs of sft and grpo on models of a few thousand weights: split over ranks, saved, and seen."""

import pytest
import torch

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.reading import load_train_eval
from tests.distributed import run_distributed
from tests.trainers import tiny
from tests.trainers.runs import assert_same_weights, grpo_config, sft_config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model folder and a gsm8k-like file."""
    folder = tmp_path_factory.mktemp("files")
    return tiny.model_folder(folder / "model", pad_is_eos=True), tiny.jsonl(
        folder / "rows.jsonl", tiny.sums(20)
    )


# One result, however the batch is split.


def draws(rank, world):
    drawn = []
    for seed in (1, 1, 2):
        engine.setup(seed)
        drawn.append(torch.rand(3).tolist())
    return drawn


def test_every_rank_draws_its_own_responses_and_a_seed_draws_them_again():
    first, second = run_distributed(draws, 2)
    assert first[0] != second[0] and first[0] == first[1] != first[2] and second[0] == second[1]


# What a run leaves and shows.


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


def test_sft_learns_and_its_saved_model_has_the_loss_and_accuracy_of_their_definitions(
    files, tmp_path
):
    import transformers

    tied = tiny.model_folder(tmp_path / "tied", tie=True)
    folder = sft.train(sft_config((tied, files[1]), tmp_path / "run", steps=30, lr=1e-2))
    assert "lm_head.weight" not in tiny.weights(folder)  # tied weights once
    assert encode.load_tokenizer(folder).chat_template == tiny.CHAT_TEMPLATE
    generation = transformers.GenerationConfig.from_pretrained(folder)
    # The model's own defaults, not the rollout's.
    assert (generation.top_k, generation.eos_token_id) == (1, [3, 2])
    first, *_, last = tiny.read_metrics(tmp_path / "run")
    loss, accuracy = held_out_by_definition(sft_config((folder, files[1]), tmp_path / "x"))
    assert last["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert last["eval/token_accuracy"] == pytest.approx(accuracy) and accuracy > 0.5
    assert loss < 0.5 * first["eval/loss"]


@pytest.mark.slow
def test_a_reference_is_loaded_and_measured_where_it_is_asked_for_and_changes_nothing(
    files, tmp_path
):
    # Nor does the number of evaluations.
    for every, eval_every in ((0, 1), (2, 2)):
        options = {"kl_every": every, "eval_every": eval_every}
        grpo.train(grpo_config(files, tmp_path / str(every), **options))
    assert_same_weights(tmp_path / "0", tmp_path / "2")
    none, second = (tiny.read_metrics(tmp_path / name) for name in "02")
    keys = set().union(*none)
    assert not [key for key in keys if "kl" in key.replace("approxkl", "").replace("kl_coef", "")]
    assert ["objective/kl_exact" in metrics for metrics in second] == [False, False, True, False]
