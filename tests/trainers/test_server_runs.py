"""Whole runs whose responses servers sample: through fakes of both kinds."""

import functools
import re
import shutil
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.policy import policy
from fused_rl.trainers.rollouts.mismatch import check_bound
from fused_rl.trainers.run import store
from fused_rl.trainers.servers.inference import Http
from tests.marks import SLOW
from tests.trainers import fake_server, runs, tiny

TRAINERS = {"grpo": (grpo.train, runs.grpo_config), "ppo": (ppo.train, runs.ppo_config)}
SMALL = {"save_every": 1, "max_prompt_length": 64}


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_run_learns_from_what_its_server_sampled(files, tmp_path, monkeypatch, lora_rank):
    monkeypatch.setenv("SERVER_KEY", "sk-secret")
    with fake_server.serving("vllm", files[0], key="sk-secret") as fake:
        options = {"steps": 2, "lora_rank": lora_rank, "server_api_key_env": "SERVER_KEY"}
        grpo.train(runs.grpo_config(files, tmp_path / "run", server=[fake.url], **SMALL, **options))
    store.unlock()
    steps = [
        row for row in tiny.read_metrics(tmp_path / "run") if "rollout/logprob_diff_max" in row
    ]
    assert [row["rollout/weight_version"] for row in steps] == [0, 1]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in steps)
    folder, published = fake.loaded[-1]
    assert folder.name == "step-2"
    if lora_rank:  # merged into what is published
        assert published.keys() == tiny.weights(Path(files[0])).keys()
    else:  # what was published last is the trained model
        model = tiny.weights(tmp_path / "run/model")
        assert model.keys() == published.keys() and all(
            torch.equal(model[name], published[name]) for name in model
        )
    assert not any(b"sk-secret" in content for content in runs.contents(tmp_path / "run").values())


@pytest.mark.slow
def test_servers_that_sleep_while_the_policy_is_trained_change_no_result(files, tmp_path):
    """And nothing is left where weights are published, whether the run ends or fails."""
    memory = tmp_path / "memory"
    asleep_in_training = []
    take_step = policy.Policy.optimizer_step

    def stepped(self, step):
        asleep_in_training.append(bool(fake.asleep))
        return take_step(self, step)

    for sleeps in (False, True):
        options = {"server_sleeps": sleeps, "published_dir": str(memory), "eval_size": 2}
        with fake_server.serving("vllm", files[0]) as fake, pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy.Policy, "optimizer_step", stepped)
            grpo.train(
                runs.grpo_config(
                    files, tmp_path / str(sleeps), server=[fake.url], steps=2, **SMALL, **options
                )
            )
            assert {folder.parent.parent for folder, _ in fake.loaded} == {memory}
            assert list(memory.iterdir()) == []
    assert asleep_in_training == [False] * 4 + [True] * 4  # two minibatches in each step
    one, other = (tiny.read_metrics(tmp_path / str(sleeps)) for sleeps in (False, True))
    assert tiny.untimed(one) == tiny.untimed(other) and "time/publish" in one[-1]
    runs.assert_same_weights(tmp_path / "False", tmp_path / "True", atol=0)

    # A run that fails, with its servers asleep: the next one wakes them.
    with fake_server.serving("vllm", files[0]) as fake:
        fake.script = [("/wake_up?tags=kv_cache", 500)]
        config = runs.grpo_config(
            files, tmp_path / "failed", server=[fake.url], steps=1, **SMALL, **options
        )
        with pytest.raises(InputError, match="HTTP 500.*did not wake"):
            grpo.train(config)
        assert fake.paused and len(list(memory.iterdir())) == 1
        store.unlock()  # as the command does when it ends
        assert list(memory.iterdir()) == []
        grpo.train(config.replace(overwrite=True))
        store.unlock()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_sleeps": True}, "server_sleeps=True means nothing without --server"),
        ({"published_dir": "/tmp"}, "published_dir=/tmp means nothing without --server"),
        ({"published_dir": "", "server": "http://127.0.0.1:1"}, "published_dir='' is empty"),
        (
            {"server_sleeps": True, "server": "http://127.0.0.1:1", "lag": 1},
            "server_sleeps=True has no meaning with lag",
        ),
    ],
)
def test_options_of_servers_need_one(options, message):
    with pytest.raises(InputError, match=message):
        grpo.GRPOConfig(model="m", dataset="d", output_dir="o", verifiers="math", **options)


RESUMED = [pytest.param(*case, marks=SLOW) for case in (("grpo", "sglang"), ("ppo", "vllm"))]


@pytest.mark.parametrize(("trainer", "kind"), RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(files, tmp_path, trainer, kind):
    train, config_of = TRAINERS[trainer]
    config_of = functools.partial(config_of, files, eval_size=0, **SMALL)
    with fake_server.serving(kind, files[0]) as fake:
        train(config_of(tmp_path / "whole", server=[fake.url]))
        store.unlock()
        shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
        for name in ("model", "critic"):
            shutil.rmtree(tmp_path / "stopped" / name, ignore_errors=True)
    torch.manual_seed(77)
    with fake_server.serving(
        kind, files[0]
    ) as fresh:  # on another port, with the weights that it began with
        train(config_of(tmp_path / "stopped", server=[fresh.url], resume_from="step-2"))
    store.unlock()
    runs.assert_equal_runs(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_responses_that_a_step_measures_otherwise_end_the_run(files, tmp_path):
    """The probe of a server passes, and then it samples otherwise."""
    with fake_server.serving("vllm", files[0]) as fake:
        draw = fake.draw

        def later(ids, chosen, most):
            # A rollout's responses; the probe's are longer.
            fake.flaws = {"warm"} if most == 6 else set()
            return draw(ids, chosen, most)

        fake.draw = later
        with pytest.raises(
            InputError,
            match="log-probabilities of this step's responses are .* nats off the policy's",
        ):
            grpo.train(
                runs.grpo_config(files, tmp_path / "run", server=[fake.url], eval_size=0, **SMALL)
            )
    store.unlock()
    for value, exact in ((9e-4, True), (0.04, False)):
        check_bound({"rollout/logprob_diff_abs": value}, exact)
    for value, exact in ((2e-3, True), (0.06, False), (float("nan"), False)):
        with pytest.raises(InputError, match="nats off"):
            check_bound({"rollout/logprob_diff_abs": value}, exact)


def trained_on_rank(rank, world, files, folder, url):
    """Return what a rank is told when the run ends with an error."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Http, "__init__", functools.partialmethod(quick, Http.__init__))
            grpo.train(
                runs.grpo_config(
                    files, folder, server=[url], eval_size=0, zero_stage=2, max_prompt_length=64
                )
            )
    except InputError as error:
        return str(error)
    finally:
        store.unlock()
    return None


def quick(self, init, *args, **options):
    init(self, *args, **options)
    self.pause = 0.0


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, "/collective_rpc", "/v1/completions"])
def test_ranks_fail_together_or_not_at_all(files, tmp_path, wrong):
    with fake_server.serving("vllm", files[0]) as fake:
        reset, resets = fake.reset, []

        def later():
            reset()
            resets.append(1)
            if wrong is not None and len(resets) == 2:  # in the second update
                fake.script = [(wrong, 500)] * 50

        fake.reset = later
        if wrong == "/collective_rpc":
            fake.script = [(wrong, 500)]
        found = runs.on_ranks(trained_on_rank, 2, files, tmp_path / "run", fake.url)
    if wrong is None:
        assert found == [None, None]
    else:
        assert all(re.search(f"POST {fake.url}{wrong}: HTTP 500", str(said)) for said in found), (
            found
        )
