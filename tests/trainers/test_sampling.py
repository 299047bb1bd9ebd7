"""Responses drawn with a past that is written in place, and looks at what has ended that are several tokens apart."""

import gc
import weakref
from importlib.metadata import version

import pytest
import torch
import transformers

from bench.trainers import decode_passes
from fused_rl.trainers.rollouts import generate, past
from fused_rl.trainers.rollouts.sampling import NoDistribution, Sampling
from tests import graphs
from tests.marks import diagonal
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


def sampler_of(lm, *, every=None, captures=False, **options):
    sampler = generate.TransformersSampler(lm, pad_id=0, batch_size=8, poll_every=every, **options)
    sampler.graphs.is_on = captures
    return sampler


def drawn(lm, prompts, sampling, *, seed=0, **options):
    """The responses, from a seed."""
    torch.manual_seed(seed)
    return sampler_of(lm, **options).sample([list(prompt) for prompt in prompts], sampling)


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
        if rows.past.width > 12 + 5:
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


# Steps that are captured.


@pytest.fixture
def captured(monkeypatch, poisoned):
    """The graphs that stand for CUDA's, in a list that fills; memory that nobody has written holds NaN."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graphs.Graph)
    monkeypatch.setattr(torch.cuda, "graph", graphs.capture)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(graphs.Graph, "captured", [])
    monkeypatch.setattr(generate.TransformersSampler, "reports_logprobs", True)
    return graphs.Graph.captured


SAMPLINGS = {
    "greedy": Sampling(0.0, 24, STOPS),
    "sampled": Sampling(0.7, 24, STOPS),
    "kept sets": Sampling(1.3, 24, STOPS, min_p=0.05),
}


@pytest.mark.parametrize(
    ("kind", "sampling", "prompts"),
    diagonal(KINDS, SAMPLINGS, {"padded": PADDED, "even": EVEN}),
)
def test_captured_steps_draw_what_others_do(kind, sampling, prompts, monkeypatch, captured, capsys):
    # There is room for few tokens, and rows end, so that several graphs are captured and the window moves.
    monkeypatch.setattr(past, "BLOCK", 5)
    name, options = kind
    lm = model(name, **options).eval()
    plain = drawn(lm, prompts, sampling, every=4)
    state = torch.get_rng_state()
    assert not captured
    scores = watch_scores(monkeypatch)
    found = drawn(lm, prompts, sampling, every=4, captures=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert token_ids(found) == token_ids(plain)
    for response, other in zip(found, plain, strict=True):
        assert response.logprobs == pytest.approx(other.logprobs, abs=2e-4)
        if sampling.truncates:
            assert torch.equal(response.support.ids, other.support.ids)
    # Every draw but the first is from the logits of a replay.
    assert sum(graph.replays for graph in captured) == len(scores) - 1
    assert len(captured) >= (len(scores) - 1) / 5
    assert capsys.readouterr().out == ""


def test_the_first_steps_are_compared_and_none_of_it_reaches_the_responses(captured, monkeypatch):
    lm, sampling = model("Llama").eval(), Sampling(1.0, 12, ())
    sampler, eager = sampler_of(lm, captures=True), []
    lm.register_forward_hook(lambda *_: eager.append(1))
    found = []
    for passes in (1 + 4 + 2, 1 + 2):
        # The prompts, the compared steps, and the first step of the shapes, which is computed and captured.
        eager.clear()
        torch.manual_seed(0)
        found.append(sampler.sample([list(prompt) for prompt in PADDED], sampling))
        assert len(eager) == passes
    assert found[0] == found[1]


def test_what_is_sampled_leaves_no_memory_to_the_garbage_collector(captured, monkeypatch):
    layers, init = [], past._Layer.__init__

    def noted(layer, *inputs):
        layers.append(weakref.ref(layer))
        init(layer, *inputs)

    monkeypatch.setattr(past._Layer, "__init__", noted)
    lm = model("Llama").eval()
    gc.collect()
    gc.disable()
    try:
        for captures in (False, True):
            drawn(lm, PADDED, Sampling(1.0, 12, STOPS), every=4, captures=captures)
        assert len(layers) > 4 and not any(layer() for layer in layers)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "problem"), [("Llama", None), ("Qwen3", None), ("Qwen2", "does not compile")]
)
def test_captured_steps_run_compiled_layers_that_share_graphs(kind, problem, captured, capsys):
    config, compiled, passes = model(kind).config, [], []
    sizes = config.to_dict() | {"num_hidden_layers": 6, "layer_types": None, "head_dim": 8}
    torch.manual_seed(1)
    lm = transformers.AutoModelForCausalLM.from_config(type(config)(**sizes)).eval()

    def backend(graph, inputs):
        compiled.append(graph)
        if problem:
            raise ValueError(problem)
        return lambda *inputs: passes.append(1) or graph(*inputs)

    torch._dynamo.reset()
    for layer in lm.model.layers:
        layer.compile(dynamic=True, backend=backend)
    sampling = Sampling(0.0, 24, ())
    with torch.compiler.set_stance("force_eager"):
        plain = drawn(lm, PADDED, sampling, captures=True)
        captured.clear()
        sampler = sampler_of(lm, captures=True)
        assert not compiled
        sampler.graphs.is_compiled = True
        found = sampler.sample([list(prompt) for prompt in PADDED], sampling)
    torch._dynamo.reset()
    assert token_ids(found) == token_ids(plain)
    for response, other in zip(found, plain, strict=True):
        assert response.logprobs == pytest.approx(other.logprobs, abs=1e-5 if problem else 1e-6)
    assert sampler.graphs.is_on and sampler.graphs.is_compiled == (problem is None)
    # A step that failed has no graph. The last layer, which no other follows, is compiled by itself.
    (graph,) = captured
    assert graph.replays == (22 if problem else 23)
    assert (len(compiled), len(passes)) == ((1, 0) if problem else (2, 6))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (problem is not None)
    for line in lines:
        assert "sampled without compiled layers" in line and problem in line


def stale(graph):
    """What a graph would do of which some number was the host's."""


def refused(*_):
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("name", "replacement", "reason"),
    [("replay", stale, "other logits"), ("__init__", refused, "when stream is capturing")],
)
def test_a_graph_that_fails_is_a_line_and_what_is_drawn_is_what_others_draw(
    name, replacement, reason, captured, monkeypatch, capsys
):
    lm, sampling = model("Llama").eval(), Sampling(1.0, 12, STOPS)
    plain = drawn(lm, PADDED, sampling, every=8)
    monkeypatch.setattr(graphs.Graph, name, replacement)
    sampler = sampler_of(lm, every=8, captures=True)
    for _ in range(2):
        torch.manual_seed(0)
        found = sampler.sample([list(prompt) for prompt in PADDED], sampling)
        assert token_ids(found) == token_ids(plain)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("LlamaForCausalLM is sampled without CUDA graphs") and reason in line


def test_a_step_on_an_accelerator_takes_an_offset_of_its_own():
    sampling = Sampling(temperature=1.0, max_new_tokens=1, stop_ids=())
    scores = torch.zeros(64, 97)
    scores[3, 5] = torch.nan
    state = torch.tensor([7, 0])
    draws = [generate._draw(scores, sampling, None, state) for _ in range(2)]
    assert state.tolist() == [7, 2] and not torch.equal(draws[0][0], draws[1][0])
    assert all(bad.nonzero().tolist() == [[3]] for _, bad in draws)
