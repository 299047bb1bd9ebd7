"""Ten things that a server gets wrong without a word, each made on purpose, and each found by a check that names it."""

import dataclasses
from pathlib import Path

import pytest

from fused_rl.trainers import grpo
from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.digests import tensors_of
from fused_rl.trainers.servers.verify import Verifier
from tests.server import models
from tests.server.checks import expected_of, refused, verified
from tests.server.test_training import Recording, grpo_config
from tests.trainers import served, tiny

pytestmark = pytest.mark.server
LACKING = "model.layers.1.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"  # of a matrix that is multiplied with, vLLM tells no digest on a CPU
CACHED = "what it keeps of prompts is of the weights before.*--no-enable-prefix-caching"


@pytest.fixture(scope="module")
def expected(folders):
    """The policy of the first folder."""
    return expected_of(folders[0])


def altered(server, monkeypatch, **fields):
    """The server, which reads other fields than it was sent."""
    ask = server.connection.ask

    def told(path, body):
        return ask(path, body | {name: value for name, value in fields.items() if name in body})

    monkeypatch.setattr(server.connection, "ask", told)
    return server


def partial(folder: str, target: Path, lacking: str = LACKING) -> Path:
    """A copy that lacks one tensor."""
    policy = served.Policy(folder)
    policy.left_out = (lacking,)
    policy.save(target)
    return target


def test_a_server_that_is_right_passes_every_check(servers, folders, expected):
    server = servers.holding(folders[1])
    verified(server, expected, folders[0], folders[0])
    verified(server, dataclasses.replace(expected, sampling=Sampling(1.0, 8, (5,))), folders[0])


def test_a_prefix_cache_of_the_weights_before(servers, folders, expected, monkeypatch):
    server = servers.holding(folders[1])
    tell = server.connection.tell

    def forgetful(path, body=None):
        if path == "/reset_prefix_cache":
            return {"success": True}
        return tell(path.replace("mode=wait", "mode=wait&clear_cache=false"), body)

    monkeypatch.setattr(server.connection, "tell", forgetful)
    refused(CACHED, server, expected, folders[0])


def test_a_folder_that_lacks_a_tensor(servers, folders, expected, tmp_path):
    server = servers.holding(folders[1])
    lacking = partial(folders[0], tmp_path / "lacking")
    refused("it does not have the weights that were pushed", server, expected, lacking)
    refused(f"lacks 1 tensors.*{LACKING}", server, expected, folders[0], lacking)


def test_a_tensor_that_was_not_read(servers, folders, expected, tmp_path):
    """It is in the folder, and changed there; the server keeps the digest of its own."""
    server = servers.holding(folders[1])
    verifier = Verifier(server, expected)
    verifier.before_pushes()
    verifier.after_push(Path(folders[1]), 0, tensors_of(Path(folders[1])))
    server.push(partial(folders[0], tmp_path / "lacking", EMBEDDING), 1)
    with pytest.raises(InputError, match=f"did not read all weights of step 1: 1 of .*{EMBEDDING}"):
        verifier.after_push(Path(folders[0]), 1, tensors_of(Path(folders[0])))


def test_other_weights(servers, folders, expected):
    refused("it does not have the weights that were pushed", servers.holding(folders[0]), expected, folders[1])


def test_another_tokenizer(servers, folders, expected):
    other = dataclasses.replace(expected, tokenizer=tiny.tokenizer())
    refused("has another tokenizer.*--tokenizer", servers.holding(folders[0]), other)


def test_another_vocabulary(servers, folders, expected):
    server = servers.holding(folders[0])
    refused("has not the policy's", server, dataclasses.replace(expected, vocab=expected.vocab + 8))


def test_clones(servers, folders, expected, monkeypatch):
    server = altered(servers.holding(folders[0]), monkeypatch, seed=1)
    refused("four times the same response", server, expected, folders[0])


def test_seeds_that_are_not_read(servers, folders, expected, monkeypatch):
    server = altered(servers.holding(folders[0]), monkeypatch, seed=None)
    refused("one seed gave", server, expected, folders[0])


def test_another_temperature(servers, folders, expected, monkeypatch):
    server = altered(servers.holding(folders[0]), monkeypatch, temperature=0.9)
    refused("log-probabilities of a response after step 0 are not the trainer's", server, expected, folders[0])


def test_stop_tokens_that_are_not_read(servers, folders, expected, monkeypatch):
    server = altered(servers.holding(folders[0]), monkeypatch, stop_token_ids=[])
    refused("does not stop at a stop token", server, expected, folders[0])


def test_less_room_than_the_run_needs(servers, folders, expected):
    longer = dataclasses.replace(expected, longest=models.POSITIONS + 1)
    refused(f"takes {models.POSITIONS} tokens.*--max-model-len 513", servers.holding(folders[0]), longer)


def test_kept_sets_that_it_cannot_tell(servers, folders, expected):
    truncated = dataclasses.replace(expected, sampling=Sampling(1.0, 8, (), top_p=0.9))
    refused("does not tell what tokens were drawn from.*--return-sampling-mask", servers.holding(folders[0]), truncated)


def test_weights_of_a_version_that_was_not_pushed(servers, folders, rows, tmp_path):
    """Somebody else has pushed in mid-run: the run ends in a line that says both versions."""
    server = servers.holding(folders[0])

    class Disturbed(Recording):
        def sample(self, prompts, sampling):
            if len(self.drawn) == 1:
                server.push(Path(folders[1]), 99)
            return super().sample(prompts, sampling)

    config = grpo_config(folders[0], rows, tmp_path / "run", steps=3, server=[server.url])
    with pytest.raises(InputError, match="99") as error:
        grpo.train(config, sampler=lambda built, tokenizer: Disturbed(built))
    assert "\n" not in str(error.value) and "step 1" in str(error.value)
