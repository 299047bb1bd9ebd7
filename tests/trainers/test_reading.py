"""Which revision and which attention: in every place where a model or tokenizer is read. The Hub is a folder here."""

from pathlib import Path

import pytest
import torch

from fused_rl.trainers import ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.scorers import load
from tests.trainers import tiny

CPU = torch.device("cpu")
NAME = "someone/model"


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A cache of the Hub with one model in two revisions, of other weights and other chat templates."""
    cache = tmp_path_factory.mktemp("hub")
    there = cache / "models--someone--model"
    (there / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate({"main": "a" * 40, "v2": "b" * 40}.items()):
        folder = there / "snapshots" / commit
        tiny.model_folder(folder, seed=seed)
        (folder / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE + f"{{# {revision} #}}")
        (there / "refs" / revision).write_text(commit)
    return cache


@pytest.fixture(autouse=True)
def offline(hub, monkeypatch):
    engine.setup(1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def snapshot(hub: Path, revision: str) -> Path:
    there = hub / "models--someone--model"
    return there / "snapshots" / (there / "refs" / revision).read_text()


def embeddings(folder: Path) -> torch.Tensor:
    return tiny.weights(folder)["model.embed_tokens.weight"]


def readers(**options):
    """Every model that a run reads of `model`: the policy, its reference, a reward model's start, PPO's critic."""
    sft_config, tokenizer = (
        tiny.config_of("sft", NAME, **options),
        encode.load_tokenizer(NAME, options.get("revision")),
    )
    yield tiny.load_lm(sft_config).base
    yield tiny.load_lm(sft_config, trainable=False).base
    yield tiny.load_reward_model(tiny.config_of("reward", NAME, **options)).classifier
    yield ppo.load_critic(
        tiny.config_of("ppo", NAME, **options), tokenizer, CPU, 1
    ).module.classifier


@pytest.mark.parametrize("revision", ["main", "v2"])
def test_all_that_is_read_of_a_model_is_of_its_revision(revision, hub):
    expected = embeddings(snapshot(hub, revision))
    assert not torch.equal(
        expected, embeddings(snapshot(hub, "v2" if revision == "main" else "main"))
    )
    given = {} if revision == "main" else {"revision": revision}
    for model in readers(**given):
        assert torch.equal(model.get_input_embeddings().weight, expected)
    # A critic of its own is no revision of the policy, though it may have the same name.
    apart = tiny.config_of("ppo", NAME, critic=NAME, **given)
    critic = ppo.load_critic(apart, encode.load_tokenizer(NAME), CPU, 1).module.classifier
    assert torch.equal(critic.get_input_embeddings().weight, embeddings(snapshot(hub, "main")))
    assert f"{{# {revision} #}}" in encode.load_tokenizer(NAME, given.get("revision")).chat_template


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_is_that_of_every_model_that_is_read(attention, hub, tmp_path):
    for model in readers(attn_implementation=attention):
        assert model.config._attn_implementation == attention
    folder = tiny.reward_folder(tmp_path / "reward", str(snapshot(hub, "main")))
    config = tiny.config_of(
        "ppo", NAME, verifiers=f"reward_model:{folder}", attn_implementation=attention
    )
    reading = {"tokenizer": encode.load_tokenizer(NAME), "device": CPU, "batch_size": 4}
    (scorer,) = load.load_scorers(config, policy=config, held=config, **reading)
    assert scorer.scorer.model.classifier.config._attn_implementation == attention
