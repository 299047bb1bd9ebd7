"""Responses drawn with a past that is written in place, and looks at what has ended that are several tokens apart."""

from importlib.metadata import version

import pytest
import torch

from bench.trainers import decode_passes
from fused_rl.trainers.rollouts import generate, past
from fused_rl.trainers.rollouts.sampling import NoDistribution, Sampling
from tests.trainers.test_packing import model

# The shortest first.
PADDED = (
    [5, 6, 7],
    [5, 6, 7],
    [9, 10, 11, 12, 13, 14],
    [9, 10, 11, 12, 13, 14],
    [8] * 12,
)
EVEN = ([5, 6, 7], [5, 6, 7], [8, 9, 10], [8, 9, 11], [8, 9, 11])
STOPS = (3, 4, 20, 40, 60, 80)
WINDOW = {"sliding_window": 8, "head_dim": 8}
KINDS = {
    "all of the past": ("Llama", {}),
    "eager": ("Qwen2", {"attn_implementation": "eager"}),
    "a window": ("Mistral", WINDOW),
    "a window in some layers": (
        "Gemma3Text",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def drawn(lm, prompts, sampling, *, every=None, seed=0, **options):
    """The responses, from a seed."""
    torch.manual_seed(seed)
    sampler = generate.TransformersSampler(lm, pad_id=0, batch_size=8, poll_every=every, **options)
    return sampler.sample([list(prompt) for prompt in prompts], sampling)


def token_ids(responses) -> list[list[int]]:
    return [response.ids for response in responses]


def watch_scores(monkeypatch) -> list[torch.Tensor]:
    """What tokens are drawn from, (b, V) for each step, in a list that fills."""
    seen, draw = [], generate._draw

    def watched(scores, *others):
        seen.append(scores.clone())
        return draw(scores, *others)

    monkeypatch.setattr(generate, "_draw", watched)
    return seen


@pytest.mark.parametrize("prompts", [PADDED, EVEN], ids=["padded", "even"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_the_bits_of_those_of_a_past_that_is_copied(kind, prompts, monkeypatch):
    # The room is full several times, and with it the window moves.
    monkeypatch.setattr(past, "BLOCK", 4)
    name, options = KINDS[kind]
    lm = model(name, **options).eval()
    seen = watch_scores(monkeypatch)
    responses = token_ids(drawn(lm, prompts, Sampling(1.0, 24, STOPS)))
    copied = []
    decode_passes(lm, list(prompts), responses, 0, check=lambda logits, *_: copied.append(logits))
    assert len(seen) == len(copied) == max(map(len, responses)) > 12
    for in_place, plain in zip(seen, copied, strict=True):
        assert torch.equal(in_place, plain)


def test_tokens_after_a_stop_are_not_recorded_however_rare_the_looks():
    # One id is kept of each row, so that the draws are the same for every interval.
    lm, stops = model("Llama").eval(), (26, 48)
    without = token_ids(drawn(lm, PADDED, Sampling(1.0, 24, (), top_k=1)))
    wanted = generate.until_stop(torch.tensor(without), stops)
    assert len({*map(len, wanted)}) > 2
    for every in (1, 8, 16, 100):
        found = drawn(lm, PADDED, Sampling(1.0, 24, stops, top_k=1), every=every)
        assert token_ids(found) == wanted
        for response in found:
            assert response.support.ids.tolist() == response.ids
            assert response.support.offsets.tolist() == [*range(len(response.ids) + 1)]


def test_logits_that_are_nan_after_the_end_of_a_response_are_no_error(monkeypatch):
    lm = model("Llama").eval()
    without = token_ids(drawn(lm, PADDED, Sampling(0.0, 12, ())))
    stops, feed = (without[4][3],), generate._Rows.feed
    wanted = token_ids(drawn(lm, PADDED, Sampling(0.0, 12, stops)))
    assert len(wanted[4]) <= 4 and max(map(len, wanted)) == 12

    def spoilt(rows, token):
        feed(rows, token)
        if rows.width > 12 + 5:
            rows.logits[rows.responses.index(4)] = torch.nan

    monkeypatch.setattr(generate._Rows, "feed", spoilt)
    assert token_ids(drawn(lm, PADDED, Sampling(0.0, 12, stops), every=16)) == wanted
    with pytest.raises(NoDistribution) as error:
        drawn(lm, PADDED, Sampling(0.0, 12, ()), every=16)
    assert error.value.responses == [4]


@pytest.mark.parametrize("problem", ["raises", "differs"])
def test_a_release_with_another_cache_samples_by_generate_and_says_so(problem, monkeypatch, capsys):
    lm, sampling = model("Llama").eval(), Sampling(0.0, 6, (3,))
    wanted = token_ids(drawn(lm, PADDED, sampling))
    assert capsys.readouterr().out == ""

    def other_cache(rows, token):
        if problem == "raises":
            raise AttributeError("'Layer' object has no attribute 'keys'")
        rows.logits = rows.logits.flip(0)

    monkeypatch.setattr(generate._Rows, "feed", other_cache)
    assert token_ids(drawn(lm, PADDED, sampling)) == wanted
    reason = {"raises": "no attribute 'keys'", "differs": "other logits token by token"}[problem]
    (line,) = capsys.readouterr().out.splitlines()
    assert reason in line and f"transformers {version('transformers')}" in line


def test_a_rank_that_has_ended_keeps_step_with_those_that_go_on(monkeypatch):
    lm, passes = model("Llama").eval(), []
    monkeypatch.setattr(generate, "keeps_keys_and_values", lambda lm: True)  # without its passes
    # Another rank goes on.
    monkeypatch.setattr(generate.dist, "all_reduce", lambda over, op: over.zero_())
    lm.register_forward_hook(lambda *_: passes.append(1))
    stops = tuple(range(97))
    for every in (1, 8):
        passes.clear()
        alone = drawn(lm, PADDED, Sampling(1.0, 20, stops), every=every)
        assert len(passes) == every
        passes.clear()
        together = drawn(lm, PADDED, Sampling(1.0, 20, stops), every=every, synced_gpus=True)
        assert len(passes) == 20
        assert token_ids(together) == token_ids(alone)
