"""What is believed of a server: each of the ten checks sees what it is for, and says what to set."""

import math
from pathlib import Path

import pytest
import torch

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.digests import kept_though_changed, tensors_of
from fused_rl.trainers.servers.verify import Asked, Compared
from tests.marks import SLOW, first_fast, slow
from tests.trainers import fake_server, served, tiny

TRUNCATED = Sampling(0.9, 1, (), top_k=20, top_p=0.9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The server's weights at first, and the policy's."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny.model_folder(folder / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(params=["vllm", pytest.param("sglang", marks=SLOW)])
def fake(request, folders):
    with fake_server.serving(request.param, folders[0]) as made:
        yield made


@pytest.fixture
def policy(folders, monkeypatch):
    served.hurry(monkeypatch)
    return served.Policy(folders[1])


def published(fake, policy, folder, **other):
    """Three pushes of changed weights."""
    sampler = served.sampler_of([fake], policy, folder, **other)
    for step in range(3):
        policy.change(step)
        sampler.publish(step, policy.save)
    return sampler


@pytest.mark.parametrize("sampling", [TRUNCATED, *map(slow, (served.SAMPLING, Sampling(0.5, 1, ())))])
def test_a_server_that_is_right_passes(fake, policy, tmp_path, sampling, capsys):
    sampler = published(fake, policy, tmp_path / "run", sampling=sampling)
    assert fake.label == "2" and sampler.step == 2 and not fake.paused
    assert "digests" not in capsys.readouterr().out


WRONG_FROM_THE_START = {
    "raw": "not the trainer's .*not of what was drawn from; start it with .*(RETURN_ORIGINAL_L|processed_l)",
    "clones": "four seeds gave four times the same response, whose probability is .*: a group would be clones",
    "unseeded": r"one seed gave \[.*\] and then \[.*\]: a resumed run would not be the uninterrupted one; start it",
    "deaf": "does not have the weights that were pushed",
    "old version": "version 0 was pushed, but it says that its weights are of '1234'",
    "stale": "those to a new prompt are right, so what it keeps of prompts is of the weights before; start it with --",
    "no logprobs": "an unusable response: no log-probabilities; start it with",
}


@pytest.mark.parametrize("flaw", WRONG_FROM_THE_START)
def test_what_is_wrong_with_a_server_is_seen_before_the_first_step(fake, policy, tmp_path, flaw):
    fake.flaws = {flaw, "mute"}
    sampler = None
    with pytest.raises(InputError, match=WRONG_FROM_THE_START[flaw]) as refused:
        sampler = served.sampler_of([fake], policy, tmp_path / "run")
        sampler.publish(0, policy.save)
    line = str(refused.value)
    assert line.startswith(f"server {fake.url}") and "\n" not in line and (sampler is None or sampler.step in (None, 0))


GOES_WRONG = {
    "deaf": "did not read all weights of step 1: .* of its .* tensors .* are what they were before",
    "stale": "those to a new prompt are right",
    "raw": "not of what was drawn from",
}


@pytest.mark.parametrize("flaw", first_fast(GOES_WRONG))
def test_what_goes_wrong_later_is_seen_after_the_next_push(fake, policy, tmp_path, flaw):
    sampler = served.sampler_of([fake], policy, tmp_path / "run")
    sampler.publish(0, policy.save)
    fake.flaws = {flaw}
    policy.change(1)
    with pytest.raises(InputError, match=GOES_WRONG[flaw]):
        sampler.publish(1, policy.save)


QUERIES, NORM = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"


def test_weights_that_a_server_does_not_tell_of_show_in_log_probabilities(fake, policy, tmp_path, capsys):
    fake.flaws = {"mute"}
    sampler = served.sampler_of([fake], policy, tmp_path / "run")
    sampler.publish(0, policy.save)
    assert capsys.readouterr().out.count("tells no digests") == 1
    fake.flaws |= {"deaf"}
    policy.change(1)
    with pytest.raises(InputError, match="does not have the weights that were pushed, or computes in another dtype"):
        sampler.publish(1, policy.save)


@pytest.mark.parametrize("name", first_fast([QUERIES, NORM]))
def test_a_tensor_that_is_missing_from_a_folder_is_named(fake, policy, tmp_path, name):
    sampler = served.sampler_of([fake], policy, tmp_path / "run")
    sampler.publish(0, policy.save)
    policy.change(1)
    policy.left_out = (name,)
    with pytest.raises(InputError, match=f"lacks 1 tensors that were pushed before .{name}, ….*keeps its old ones"):
        sampler.publish(1, policy.save)


def test_a_tensor_that_was_missing_from_the_start_shows_in_log_probabilities(fake, policy, tmp_path):
    policy.left_out = (QUERIES,)
    sampler = served.sampler_of([fake], policy, tmp_path / "run")
    with pytest.raises(InputError, match="does not have the weights that were pushed"):
        sampler.publish(0, policy.save)


@pytest.mark.parametrize("name", [QUERIES, "model.embed_tokens.weight", NORM])
def test_a_tensor_that_a_server_does_not_read_keeps_its_digest(fake, policy, tmp_path, name, monkeypatch):
    sampler = served.sampler_of([fake], policy, tmp_path / "run")
    sampler.publish(0, policy.save)
    load = fake_server.load_file
    monkeypatch.setattr(fake_server, "load_file", lambda path: {k: v for k, v in load(path).items() if k != name})
    # Of joined tensors another part is new, so that the digest is too: log-probabilities tell.
    message = "does not have the weights" if name == QUERIES else f"did not read all weights of step 1: 1 of .*{name}"
    policy.change(1)
    with pytest.raises(InputError, match=message):
        sampler.publish(1, policy.save)


def test_the_digest_of_nothing_is_none(folder, policy, tmp_path):
    """Which vLLM on a CPU tells of matrices that it has packed; of the others a digest that stays is still seen."""
    with fake_server.serving("vllm", folder) as fake:
        fake.flaws = {"packed"}
        sampler = served.sampler_of([fake], policy, tmp_path / "run")
        for step in range(2):
            sampler.publish(step, policy.save)
            policy.change(step)
        fake.flaws |= {"deaf"}
        with pytest.raises(InputError, match="did not read all weights of step 2: 6 of its 6 tensors"):
            sampler.publish(2, policy.save)


def test_weights_that_did_not_change_keep_their_digests(fake, policy, tmp_path):
    sampler = served.sampler_of([fake], policy, tmp_path / "run")
    for step in range(3):  # as with a learning rate of 0, or with layers that are frozen
        sampler.publish(step, policy.save)
        with torch.no_grad():
            policy.module.base.lm_head.weight += 0.01
    assert fake.label == "2"


def test_another_tokenizer_is_refused(fake, policy, tmp_path):
    fake.tokenizer.add_tokens(["trips"])
    with pytest.raises(InputError, match="has another tokenizer: 'Round trips .*… is .* ids there, .* serve the mod"):
        served.sampler_of([fake], policy, tmp_path / "run")


def test_a_server_without_a_tokenizer_is_asked_in_ids_alone(fake, policy, tmp_path):
    fake.script = [("/tokenize", 404)] * 2
    served.sampler_of([fake], policy, tmp_path / "run").publish(0, policy.save)


@pytest.mark.parametrize("vocab", first_fast([259, 270]))
def test_another_vocabulary_is_refused(fake, policy, tmp_path, vocab):
    fake.lm.resize_token_embeddings(vocab, mean_resizing=False)
    with pytest.raises(InputError, match="has not the policy's 263 ids|takes id 26., but the policy has 263 ids"):
        served.sampler_of([fake], policy, tmp_path / "run")


def test_a_server_that_is_too_short_is_refused(fake, policy, tmp_path):
    with pytest.raises(InputError, match="takes 128 tokens, but max_prompt_length and max_new_tokens are 129 together"):
        served.sampler_of([fake], policy, tmp_path / "run", longest=129)


@pytest.mark.parametrize("flaw", first_fast(["no sets", "no masks"]))
def test_truncated_sampling_needs_a_server_that_tells_sets(fake, policy, tmp_path, flaw):
    fake.flaws = {flaw}
    with pytest.raises(InputError, match="not tell what tokens were drawn from, which top_p.*: .*start it with --"):
        served.sampler_of([fake], policy, tmp_path / "run", sampling=TRUNCATED)
    served.sampler_of([fake], policy, tmp_path / "run")  # which nobody asks of it where nothing is truncated


def test_sets_are_asked_for_as_the_run_draws(folders, policy, tmp_path):
    """vLLM tells none but under a top_k."""
    with fake_server.serving("vllm", folders[0]) as fake:
        with pytest.raises(InputError, match="not tell what tokens were drawn from.*this run with --top_k"):
            served.sampler_of([fake], policy, tmp_path / "run", sampling=Sampling(0.9, 1, (), top_p=0.9))
        served.sampler_of([fake], policy, tmp_path / "run", sampling=TRUNCATED)


def test_kept_sets_that_are_of_something_else_are_refused(fake, policy, tmp_path, monkeypatch):
    sampler = served.sampler_of([fake], policy, tmp_path / "run", sampling=TRUNCATED)
    draw = fake.draw

    def widened(*args, **options):
        found = draw(*args, **options)
        if found["sets"]:
            found["sets"] = [[*kept, next(i for i in range(263) if i not in kept)] for kept in found["sets"]]
        return found

    monkeypatch.setattr(fake, "draw", widened)
    with pytest.raises(InputError, match="not of the distribution over the kept sets; start it with"):
        sampler.publish(0, policy.save)

    def without(*args, **options):
        found = draw(*args, **options)
        if found["sets"]:
            found["sets"] = [[i for i in range(263) if i != token] for token in found["ids"]]
        return found

    monkeypatch.setattr(fake, "draw", without)
    with pytest.raises(InputError, match="token .* is not in the set that it was drawn from"):
        served.sampler_of([fake], policy, tmp_path / "run", sampling=TRUNCATED).publish(0, policy.save)


def test_a_stop_token_that_does_not_stop_is_refused(fake, policy, tmp_path, monkeypatch):
    draw = fake.draw
    monkeypatch.setattr(fake, "draw", lambda ids, chosen, *a, **o: draw(ids, chosen | {"stop_token_ids": []}, *a, **o))
    with pytest.raises(InputError, match="does not stop at a stop token"):
        served.sampler_of([fake], policy, tmp_path / "run").publish(0, policy.save)


def test_a_stop_token_of_the_run_may_come_before_the_one_that_is_asked_for(folders, policy, tmp_path):
    with fake_server.serving("sglang", folders[0]) as fake:
        sampler = served.sampler_of([fake], policy, tmp_path / "run")
        sampler.publish(0, policy.save)
        (verifier,) = sampler.verifiers
        free = verifier._ask(Asked("stop", verifier._short(0), verifier._plain(0.0), None)).response.ids
        assert free[0] != free[len(free) // 2]
        fake.tokenizer.eos_token = fake.tokenizer.convert_ids_to_tokens(free[0])
        verifier.expected = policy.expected(sampling=Sampling(0.9, 1, (free[0],)))
        verifier._check_stops()


def test_differences_are_told_with_their_sign(fake, policy, tmp_path, monkeypatch):
    draw = fake.draw

    def lower(*args, **options):
        found = draw(*args, **options)
        return found | {"logprobs": [value - 0.5 for value in found["logprobs"]]}

    monkeypatch.setattr(fake, "draw", lower)
    with pytest.raises(InputError, match=r"mean -0.5, mean of sizes 0.5, largest 0.5 nats; allowed are 0.001 at most"):
        served.sampler_of([fake], policy, tmp_path / "run").publish(0, policy.save)
    with pytest.raises(InputError, match="allowed are 0.05 on average"):
        served.sampler_of([fake], policy, tmp_path / "run", exact=False).publish(0, policy.save)


def test_rounding_of_the_head_is_told_as_that(fake, policy, tmp_path, monkeypatch, capsys):
    draw, size = fake.draw, [0.02]

    def rounded(*args, **options):
        found = draw(*args, **options)
        signs = [1 if i % 2 else -1 for i in range(len(found["logprobs"]))]
        told = [value + sign * size[0] for value, sign in zip(found["logprobs"], signs, strict=True)]
        return found | {"logprobs": told}

    monkeypatch.setattr(fake, "draw", rounded)
    sampler = served.sampler_of([fake], policy, tmp_path / "run", exact=False)
    for step in range(2):
        sampler.publish(step, policy.save)
    said = capsys.readouterr().out
    assert said.count("is of logits in 16 bits; start it with --") == 1 and "--head_dtype float32" in said
    size[0] = 0.004
    with pytest.raises(InputError, match="is of logits in 16 bits; start it with .*--head_dtype float32"):
        served.sampler_of([fake], policy, tmp_path / "run").publish(0, policy.save)


def test_two_lists_are_compared_by_mean_size_and_largest():
    compared = Compared.of([-1.0, -2.0, -3.0], [-1.5, -1.0, -3.0])
    assert compared == (pytest.approx(-1 / 6), 0.5, 1.0)
    for at in range(3):
        own = [-1.0, -2.0, -3.0]
        own[at] = math.nan
        compared = Compared.of([-1.0, -2.0, -3.0], own)
        assert compared.largest == math.inf and not compared.within(True) and not compared.within(False)


def test_a_folders_tensors_are_known_by_their_bytes(folders):
    first, second = (tensors_of(Path(folder)) for folder in folders)
    weights = tiny.weights(folders[0])
    assert first.keys() == second.keys() == weights.keys()
    same = {name for name in first if "norm" in name or name.endswith("bias")}  # ones and zeros, in both
    assert {name for name in first if first[name] == second[name]} == same


def test_names_of_servers_are_those_of_folders_in_parts():
    before = {"rank0/model.layers.0.self_attn.qkv_proj.weight": "a", "rank0/model.norm.weight": "b", "rope": "c"}
    after = before | {"rank0/model.norm.weight": "d"}
    changed = {"model.layers.0.self_attn.v_proj.weight", "model.norm.weight"}
    assert kept_though_changed(before, after, changed) == ["rank0/model.layers.0.self_attn.qkv_proj.weight"]
    assert kept_though_changed(before, after, {"model.norm.weight"}) == []
    assert kept_though_changed(before, before, {"other.name"}) == list(before)
    assert kept_though_changed(before, before, set()) == []
