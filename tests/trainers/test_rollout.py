from types import SimpleNamespace

import pytest
import torch

from fused_rl import TokenSupport
from fused_rl.trainers import grpo
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.rollouts import generate
from fused_rl.trainers.rollouts.returned import check_responses
from fused_rl.trainers.rollouts.roll_out import (
    Sampling,
    right_answer,
    roll_out,
)
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.lazy import transformers
from tests.trainers import tiny


def load(folder, **options):
    options = {"model": folder, "dataset": "", "output_dir": "", "zero_stage": 0, **options}
    return tiny.load_lm(grpo.GRPOConfig(**options), trainable=False)


def test_the_end_of_sequence_counts_even_where_it_is_the_pad_token():
    eos = pad = 3
    batch = make_batch([[5, eos, 6], [5]], [[7, eos], [eos]], pad, "cpu", width=7)
    assert batch.input_ids.tolist() == [[5, 3, 6, 7, 3, 3, 3], [5, 3, 3, 3, 3, 3, 3]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]]


def sample(lm, prompts, *, batch_size=64, **options):
    sampling = Sampling(**({"temperature": 1.0, "max_new_tokens": 6, "stop_ids": (3,)} | options))
    return tiny.generate(lm.lm, prompts, sampling, batch_size=batch_size)


def test_responses_to_one_prompt_are_those_of_the_prompt_alone(folder):
    # Neighbours that are equal are computed once; rows that have ended leave the batch while others go on.
    lm, prompts = load(folder), [[1, 70, 71]] * 2 + [[1, 80], [1, 70, 71]] + [[1, 80, 81, 82]] * 2
    free = sample(lm, prompts, temperature=0.0, batch_size=1, stop_ids=(259,))
    stops = (free[0][1], free[2][3], 259)
    together, alone = (
        sample(lm, prompts, temperature=0.0, batch_size=size, stop_ids=stops) for size in (6, 1)
    )
    assert together == alone and len({len(response) for response in alone}) > 1
    # A stop token ends a response in its last place as in any other.
    for most in range(1, 5):
        sampling = Sampling(0.0, most, stops)
        for response in tiny.respond(lm.lm, prompts, sampling, batch_size=6):
            assert (response.finish == "stop") == (response.ids[-1] in stops)
    torch.manual_seed(0)
    first, second = sample(lm, prompts[:2], batch_size=2)
    assert first != second  # the copies are drawn each for itself


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2}


def test_no_architecture_keeps_its_dropout(tmp_path):
    options = {"dropout": 0.5, "attention_dropout": 0.5, "word_embed_proj_dim": 16}
    config = transformers.OPTConfig(**SIZES, **options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lm = load(str(tmp_path)).train()
    ids, mask = torch.arange(8)[None], torch.ones(1, 7, dtype=torch.bool)
    assert torch.equal(lm(ids, mask).logprobs, lm(ids, mask).logprobs)


def test_a_drawn_token_is_that_at_a_quantile_and_never_an_impossible_one():
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, 6)
    largest = 1 - 2**-53  # of torch.rand in fp64
    quantiles = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, largest], dtype=torch.float64)
    assert generate.token_at(probabilities, quantiles).tolist() == [1, 1, 3, 3, 4, 4]
    # Of sums that rounding makes a little more or less than 1, over a vocabulary of a large model.
    torch.manual_seed(0)
    scores = torch.randn(64, 150_000) * 4
    scores[:, -1000:] = -torch.inf
    rows = torch.softmax(scores, -1)
    last = generate.token_at(rows, torch.full((64,), largest, dtype=torch.float64))
    assert (rows.gather(1, last[:, None]) > 0).all()


# What a sampler may report.

KEPT = [[5, 90], [3, 7, 8]]


# A response of a sampler that reports log-probabilities where the response has some -> the line.
BROKEN = [
    (Response([5, 6, 7], "length"), "expected at most 2 ids from 0 to below 264, got 3: .5, 6, 7."),
    (Response([5], "stop"), r"finish='stop' and stop tokens at \[\] of 1; expected stop with"),
    (Response([3, 3], "stop"), r"finish='stop' and stop tokens at \[0, 1\] of 2"),
    (Response([5], "abort"), "finish='abort' .* expected stop with"),
    (Response([-1], "length"), "expected at most 2 ids from 0 to below 264, got 1: .-1"),
    (Response([5, 264], "length"), "expected at most 2 ids .* got 2: .5, 264"),
    (Response([5], "length", [float("nan")]), "a logprob is nan; it must be above -9999, and at"),
    # vLLM's minus infinity, and no numbers.
    (Response([5], "length", [-9999.0]), "a logprob is -9999.0; it must be above -9999"),
    (Response([5, 6], "length", [-0.1, None], trained=[False, True]), "a logprob is None"),
    (Response([5], "length", -1.0), "expected a Response .*'float' object is not iterable"),
    (Response([5.0], "length"), "expected a Response of whole ids .*'float' object"),
    (
        Response([5], "length", trained=["True"]),
        r"trained=\[nan\]; expected True or False for each",
    ),
    (Response([5], "length", trained=[0.5]), r"trained=\[0.5\]; expected True or False"),
    (None, "expected a Response .* got None"),
    (Response([5], "length", logprobs=[-0.1, -0.2]), "2 logprobs for 1 ids"),
    (Response([5, 6], "length", support=[[5]]), "1 support for 2 ids"),
    (Response([5], "length", support=[[5, 264]]), "id 264 in a kept set; expected ids below 264"),
    (Response([5], "length", support=torch.tensor([5])), "expected a Response of whole ids"),
]


def checked(*responses, reports_logprobs=False, **options):
    prompts = [Prompt([7], {}, "d.jsonl, line 4")] * 2
    sampling = Sampling(1.0, 2, (3,), **options)
    check_responses(
        list(responses), prompts[: len(responses)], sampling, 264, reports_logprobs=reports_logprobs
    )


@pytest.mark.parametrize(("response", "message"), BROKEN)
def test_a_response_that_breaks_its_promises_names_the_row(response, message):
    with pytest.raises(InputError, match=f"^the sampler's response to d.jsonl, line 4: {message}"):
        checked(response, reports_logprobs=getattr(response, "logprobs", None) is not None)


@pytest.mark.parametrize("kind", [torch.tensor, iter])
def test_a_response_may_have_any_kind_of_list(kind):
    response = Response(kind([5, 6]), "length", kind([-0.5, -1.0]), trained=kind([True, True]))
    checked(response, reports_logprobs=True)
    assert response == Response([5, 6], "length", [-0.5, -1.0], trained=[True, True])
    assert [type(token) for token in response.ids] == [int, int]


def test_responses_are_one_for_each_prompt_with_what_the_sampler_declares():
    checked(Response([5, 3], "stop"), Response([], "length"))
    # What another says may hold stop tokens, and nothing of it is checked.
    spoken = Response([3, 5], "length", [float("nan"), -0.1], trained=[False, True])
    checked(spoken, reports_logprobs=True)
    for kept in (KEPT, TokenSupport.from_lists(KEPT), [[], [3]]):
        checked(Response([90, 3], "stop", support=kept), Response([], "length"), top_p=0.9)
    with pytest.raises(InputError, match="no kept sets, though the sampling truncates"):
        checked(Response([5], "length"), top_k=2)
    with pytest.raises(InputError, match="logprobs=None of a sampler with reports_logprobs = True"):
        checked(Response([5], "length"), reports_logprobs=True)


def test_a_sample_shows_the_answer_or_what_scorers_may_read():
    row = {"prompt": "1+1?", "note": "easy", "answer": "so #### 2", "empty": None}
    judge = SimpleNamespace(columns=("answer",), answer=lambda row: row["answer"][-1])
    of_note, of_all = SimpleNamespace(columns=("note",)), SimpleNamespace(columns=None)
    everything = {"columns": {"note": "easy", "answer": "so #### 2"}}
    assert right_answer(row, "1+1?", [of_note, judge]) == {"answer": "2"}
    assert right_answer(row, "1+1?", [of_note]) == {"columns": {"note": "easy"}}
    assert right_answer(row, "1+1?", [of_all]) == everything
    assert right_answer(row, "1+1?", []) == {}


@pytest.mark.parametrize("by_transformers", [False, True])
def test_logits_that_are_not_finite_are_one_line_with_step_and_rows(
    folder, by_transformers, monkeypatch
):
    lm, calls = load(folder).base, []
    monkeypatch.setattr(generate, "keeps_keys_and_values", lambda lm: not by_transformers)

    def spoil(head, inputs, logits):
        calls.append(len(logits))
        if len(calls) == 3:
            logits[1] = torch.nan
        return logits

    lm.get_output_embeddings().register_forward_hook(spoil)
    sampler = generate.TransformersSampler(lm, pad_id=0, batch_size=4)
    sampler.publish(6, save=None)
    prompts = [Prompt([1, 70 + i], {}, f"d.jsonl, line {i}") for i in range(3)]
    sampling = Sampling(1.0, 5, ())
    with pytest.raises(
        InputError, match="step 6: .* NaN or infinite; their rows: d.jsonl, line 1$"
    ):
        roll_out(sampler, [], prompts, sampling, tiny.tokenizer(), torch.device("cpu"))
    assert len(calls) == 5  # to the end of the batch: other ranks may wait for this one
