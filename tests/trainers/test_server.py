"""A sampler behind servers: whose turn it is, folders that are whole or not there, and whole runs through fakes."""

import errno
import functools
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.run import store
from fused_rl.trainers.servers import inference
from fused_rl.trainers.servers import sampler as server
from fused_rl.trainers.servers.sampler import ServerSampler
from tests.marks import SLOW
from tests.trainers import fake_server, killed, runs, served, tiny

KINDS = [pytest.param("vllm"), pytest.param("sglang", marks=SLOW)]
SAMPLE = {"vllm": "/v1/completions", "sglang": "/generate"}
SAMPLING = Sampling(0.9, 5, (3,), seeds=tuple(range(100, 108)))
PROMPTS = [[1, 70, 71]] * 2 + [[1, 80]] * 2 + [[1, 90, 91]] * 2 + [[1, 60]] * 2


@pytest.fixture
def policy(folder, monkeypatch):
    served.hurry(monkeypatch)
    return served.Policy(folder)


@pytest.fixture
def pair(folder):
    """Two servers, one of each kind."""
    with fake_server.serving("vllm", folder) as one, fake_server.serving("sglang", folder) as other:
        yield [one, other]


def prompts_asked(fake) -> list[list[int]]:
    """Of responses of as many tokens as `SAMPLING` draws, sorted."""
    found = []
    for body in fake.bodies(SAMPLE[fake.kind]):
        most = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        if most == SAMPLING.max_new_tokens:
            found.append(body.get("prompt") or body["input_ids"])
    return sorted(found)


def test_prompts_go_to_the_servers_in_turn_and_a_rollout_repeats(pair, policy, tmp_path):
    sampler = served.sampler_of(pair, policy, tmp_path / "run")
    sampler.publish(4, policy.save)
    first = sampler.sample(PROMPTS, SAMPLING)
    assert [response.weight_version for response in first] == [4] * 8
    assert prompts_asked(pair[0]) == sorted(PROMPTS[:2] + PROMPTS[4:6])
    assert prompts_asked(pair[1]) == sorted(PROMPTS[2:4] + PROMPTS[6:])
    assert sampler.sample(PROMPTS, SAMPLING) == first

    # What each draws is what it draws alone with that seed, and what another server would.
    alone = served.sampler_of(pair[:1], policy, tmp_path / "other")
    alone.publish(4, policy.save)
    for one, other in zip(alone.sample(PROMPTS, SAMPLING), first, strict=True):
        assert one.ids == other.ids and one.finish == other.finish
    assert len({tuple(response.ids) for response in first}) > 4


def test_versions_come_from_the_server_where_its_responses_have_none(folder, policy, tmp_path):
    with fake_server.serving("vllm", folder, tells_versions=False) as fake:
        sampler = served.sampler_of([fake], policy, tmp_path / "run")
        sampler.publish(4, policy.save)
        assert {response.weight_version for response in sampler.sample(PROMPTS, SAMPLING)} == {4}
        fake.label = "5"  # somebody else's push
        assert {response.weight_version for response in sampler.sample(PROMPTS, SAMPLING)} == {5}
        fake.label = "default"
        with pytest.raises(InputError, match="no longer has the weights of step 4, but .* restarted; .*--resume"):
            sampler.sample(PROMPTS, SAMPLING)


def test_the_first_failure_ends_a_rollout(pair, policy, tmp_path):
    sampler = served.sampler_of(pair, policy, tmp_path / "run")
    sampler.publish(0, policy.save)
    pair[1].script = [("/generate", 400)]
    with pytest.raises(InputError, match=f"server {pair[1].url}, POST /generate: HTTP 400"):
        sampler.sample(PROMPTS, SAMPLING)
    pair[0].lm.resize_token_embeddings(600, mean_resizing=False)
    pair[0].lm.lm_head.weight.data[300:] = 50 * pair[0].lm.lm_head.weight.data[:263].mean(0)
    with pytest.raises(InputError, match="drew id .*, but the policy has 263 ids|finite"):
        sampler.sample(PROMPTS * 4, Sampling(2.0, 5, (3,)))


def test_a_failure_is_heard_while_an_earlier_request_is_silent():
    answered, begun = threading.Event(), []

    def work(number):
        begun.append(threading.current_thread())
        if number == 0:
            answered.wait(30)
        if number == 1:
            raise InputError("refused")
        return number

    started = time.monotonic()
    with pytest.raises(InputError, match="refused"):
        server._at_once(work, [(0,), (1,)])
    assert time.monotonic() - started < 20
    assert all(thread.daemon for thread in begun)  # the end of the process waits for no other threads
    answered.set()


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_what_is_asked_at_once_comes_back_in_order(monkeypatch, at_once):
    monkeypatch.setattr(server, "AT_ONCE", at_once)
    assert server._at_once(lambda a, b: (a, b), [(i, -i) for i in range(20)]) == [(i, -i) for i in range(20)]
    assert server._at_once(None, []) == []


def test_a_server_given_twice_is_refused(pair, policy, tmp_path):
    with pytest.raises(InputError, match="names http.* twice; give each once"):
        served.sampler_of([pair[0], pair[0]], policy, tmp_path / "run")


# The folder.


def test_the_last_folder_stays_until_all_servers_have_the_next(pair, policy, tmp_path):
    sampler = served.sampler_of(pair, policy, tmp_path / "run")
    published = tmp_path / "run" / "published"
    sampler.publish(0, policy.save)
    pair[1].script = [("/update_weights_from_disk", 500)]
    with pytest.raises(InputError, match="HTTP 500"):
        sampler.publish(1, policy.save)
    assert sorted(path.name for path in published.iterdir()) == ["step-0", "step-1"]
    sampler.publish(2, policy.save)
    assert [path.name for path in published.iterdir()] == ["step-2"]
    weights = tiny.weights(published / "step-2")
    assert torch.equal(weights["model.norm.weight"], policy.module.base.model.norm.weight)


def test_no_room_for_the_folder_is_a_line_and_costs_nothing(pair, policy, tmp_path):
    sampler = served.sampler_of(pair, policy, tmp_path / "run")
    sampler.publish(0, policy.save)
    before, asked = runs.contents(tmp_path / "run"), [len(fake.asked) for fake in pair]

    def full(folder):
        folder.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        InputError, match="the weights for the servers could not be written to .*published: No space .*M"
    ):
        sampler.publish(1, full)
    assert [len(fake.asked) for fake in pair] == asked
    assert runs.contents(tmp_path / "run") == before
    sampler.publish(1, policy.save)


# Whole runs.


def grpo_config(files, output_dir, fakes, **options):
    """GRPO of three steps with dropout off and saves, by servers."""
    options = {"save_every": 1, "server": [fake.url for fake in fakes], "max_prompt_length": 64} | options
    return runs.grpo_config(files, output_dir, **options)


def ppo_config(files, output_dir, fakes, **options):
    """PPO likewise, with a critic of its own."""
    model, dataset = files
    defaults = {"verifiers": runs.VERIFIER, "eval_size": 4, "steps": 3, "prompts_per_step": 8, "max_new_tokens": 6}
    defaults |= {"save_every": 1, "zero_stage": 0, "eval_samples": 2, "micro_batch_size": 4, "lr": 1e-3}
    defaults |= {"max_prompt_length": 64}
    given = {"model": model, "dataset": dataset, "output_dir": str(output_dir), "server": [f.url for f in fakes]}
    return ppo.PPOConfig(**given, **tiny.settled(defaults | options))


TRAINERS = {"grpo": (grpo.train, grpo_config), "ppo": (ppo.train, ppo_config)}


@pytest.fixture
def hurried(monkeypatch):
    served.hurry(monkeypatch)


def test_a_run_through_a_server_learns_from_what_the_server_drew(files, tmp_path, hurried):
    with fake_server.serving("vllm", files[0]) as fake:
        config = grpo_config(files, tmp_path / "run", [fake], steps=2, save_every=0)
        grpo.train(config)
        assert fake.label == "2"
    metrics = tiny.read_metrics(tmp_path / "run")
    steps = [row for row in metrics if "rollout/logprob_diff_max" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["rollout/logprob_diff_max"] < 1e-4
    assert [row["rollout/weight_version"] for row in steps] == [0, 1]

    # What was published last is the trained model.
    model, published = tiny.weights(tmp_path / "run/model"), tiny.weights(tmp_path / "run/published/step-2")
    assert model.keys() == published.keys() and all(torch.equal(model[name], published[name]) for name in model)
    store.release()


@pytest.mark.slow
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_whole_runs(files, tmp_path, hurried, trainer, kind, truncated):
    train, config_of = TRAINERS[trainer]
    options = {"top_p": 0.9, "top_k": 30} if truncated else {}
    with fake_server.serving(kind, files[0]) as fake, fake_server.serving(kind, files[0]) as other:
        train(config_of(files, tmp_path / "run", [fake, other], **options))
        assert fake.label == other.label == "3"
    for row in tiny.read_metrics(tmp_path / "run"):
        assert row.get("rollout/logprob_diff_max", 0) < 1e-4
    store.release()
    with fake_server.serving(kind, files[0]) as fake:
        train(config_of(files, tmp_path / "run", [fake], overwrite=True, **options))
    store.release()


@pytest.mark.parametrize(
    ("trainer", "kind"),
    [("grpo", "vllm"), pytest.param("grpo", "sglang", marks=SLOW), pytest.param("ppo", "vllm", marks=SLOW)],
)
def test_a_resumed_run_is_the_uninterrupted_one(files, tmp_path, hurried, trainer, kind):
    train, config_of = TRAINERS[trainer]
    config_of = functools.partial(config_of, files, eval_size=0)
    with fake_server.serving(kind, files[0]) as fake:
        train(config_of(tmp_path / "whole", [fake]))
        store.release()
        shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
        for name in ("model", "critic"):
            shutil.rmtree(tmp_path / "stopped" / name, ignore_errors=True)
    torch.manual_seed(77)
    with fake_server.serving(kind, files[0]) as fresh:  # on another port, with the weights that it began with
        train(config_of(tmp_path / "stopped", [fresh], resume_from="step-2"))
        assert fresh.label == "3"
    store.release()
    runs.assert_equal_runs(tmp_path / "whole", tmp_path / "stopped")


MOMENTS = {"first push": (1, "published"), "in a folder": (60, "published"), "in a checkpoint": (9, "step-2")}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(files, tmp_path, moment):
    def words(fake, folder, **other):
        config = runs.grpo_config(files, folder, eval_size=0, save_every=1, keep_checkpoints=9, max_prompt_length=64)
        return killed.words_of(config, server=fake.url, **other)

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole, cut = tmp_path / "whole/run", tmp_path / "cut/run"
    with fake_server.serving("vllm", files[0]) as fake:
        assert killed.run("grpo", words(fake, whole), tmp_path / "whole") == [0]
        assert killed.run("grpo", words(fake, cut), tmp_path / "cut", killed.Moment(*MOMENTS[moment])) == [-9]
        resumable = (cut / "checkpoints/latest").exists()
        again = {"resume": True} if resumable else {"overwrite": True}
        assert killed.run("grpo", words(fake, cut, **again), tmp_path / "cut") == [0]
    assert resumable == (moment != "first push")
    runs.assert_equal_runs(whole, cut)
    assert [path.name for path in (cut / "published").iterdir()] == ["step-3"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_server_that_dies_in_mid_run_is_a_line_and_the_run_goes_on_with_another(files, tmp_path, hurried, trainer):
    train, config_of = TRAINERS[trainer]
    config_of = functools.partial(config_of, files, tmp_path / "run", eval_size=0, steps=2)
    with fake_server.serving("vllm", files[0]) as fake:
        draw = fake.draw

        def dies(ids, chosen, most, **options):
            if fake.label == "1" and most == 6:  # in a rollout: what is only compared is longer
                raise ConnectionResetError
            return draw(ids, chosen, most, **options)

        fake.draw = dies
        with pytest.raises(InputError, match=f"server {fake.url}, .*: no answer: .*is the server up"):
            train(config_of([fake]))
    store.release()
    with fake_server.serving("vllm", files[0]) as fresh:
        train(config_of([fresh], resume=True))
        assert fresh.label == "2"
    store.release()


def test_a_server_of_another_model_is_refused_and_nothing_is_lost(files, tmp_path, hurried):
    other = tiny.model_folder(tmp_path / "other", chat=False, seed=3)
    with fake_server.serving("vllm", other) as fake:
        fake.lm.resize_token_embeddings(300, mean_resizing=False)
        with pytest.raises(InputError, match=f"server {fake.url} .*takes id 26., but the policy has 263 ids"):
            grpo.train(grpo_config(files, tmp_path / "run", [fake]))
    store.release()
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_url_that_is_no_server_is_refused(files, tmp_path, hurried):
    config = runs.grpo_config(files, tmp_path / "run", server=["http://127.0.0.1:9"])
    with pytest.raises(InputError, match="server http://127.0.0.1:9, GET /health: no answer"):
        grpo.train(config)
    store.release()


def test_kept_sets_that_a_server_cannot_tell_are_refused(files, tmp_path, hurried):
    with fake_server.serving("vllm", files[0]) as fake:
        fake.flaws = {"no sets"}
        with pytest.raises(InputError, match="start it with --enable-scale-out --return-sampling-mask"):
            grpo.train(grpo_config(files, tmp_path / "run", [fake], top_p=0.9))
    store.release()


def test_a_dry_run_asks_no_server(files, tmp_path, capsys):
    model, dataset = files
    words = ["--model", model, "--dataset", dataset, "--verifiers", runs.VERIFIER, "--dry_run"]
    grpo.main([*words, "--output_dir", str(tmp_path / "run"), "--server", "http://127.0.0.1:9", "http://127.0.0.1:10"])
    said = capsys.readouterr().out
    assert "# servers, not asked yet: http://127.0.0.1:9 http://127.0.0.1:10" in said


def trained_on_rank(rank, world, files, folder, url, wrong):
    """What a rank hears where a server goes wrong, or the disk of the first one; None where nothing does."""
    inference.STARTS_WITHIN = 0.0
    config = runs.grpo_config(files, folder, server=[url], eval_size=0, zero_stage=2, max_prompt_length=64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and wrong == "full disk":
                patch.setattr(ServerSampler, "_name", no_room)
            grpo.train(config)
    except InputError as error:
        return str(error)
    finally:
        store.release()
    return None


def no_room(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, "/collective_rpc", "/v1/completions", "full disk"])
def test_ranks_fail_together_or_not_at_all(files, tmp_path, wrong):
    with fake_server.serving("vllm", files[0]) as fake:

        def later(right):
            fake.script = [(wrong, 500)] * 50
            return right

        if wrong is not None:
            fake.script = [("/weight_checker", later)]  # when the first weights have been pushed
        found = runs.on_ranks(trained_on_rank, 2, files, tmp_path / "run", fake.url, wrong)
        asked = len(fake.bodies("/v1/completions"))
    if wrong is None:
        assert found == [None, None] and asked > 3 * 16
        return
    expected = f"server {fake.url}, POST {wrong}: HTTP 500|could not be written to .*: No space left"
    assert all(re.search(expected, str(said)) for said in found), found


@pytest.mark.slow
def test_adapters_are_merged_into_what_is_published(files, tmp_path, hurried):
    with fake_server.serving("vllm", files[0]) as fake:
        grpo.train(grpo_config(files, tmp_path / "run", [fake], lora_rank=4, eval_size=0))
    store.release()
    assert tiny.weights(tmp_path / "run/published/step-3").keys() == tiny.weights(Path(files[0])).keys()
