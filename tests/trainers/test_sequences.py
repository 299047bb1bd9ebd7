"""Sequences of which each process holds a part are scored, and trained on, as whole ones in one process."""

import pytest
import torch

from fused_rl import TokenSupport
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.models import packing, sequences
from fused_rl.trainers.models.language_model import LanguageModel
from fused_rl.trainers.models.reward_model import Critic, RewardModel
from fused_rl.trainers.rollouts import roll_out
from fused_rl.trainers.rollouts.types import Response, Sample
from fused_rl.trainers.scorers.functions import FunctionScorer
from tests.distributed import run_distributed
from tests.lazy import transformers
from tests.trainers import divided, fake_server, tiny
from tests.trainers.runs import assert_same_metrics, on_ranks


def grads(module) -> list[torch.Tensor]:
    found = []
    for weight in module.parameters():
        if weight.grad is not None:
            found.append(weight.grad.clone())
            weight.grad = None
    return found


def in_both_forms(module, score) -> list[float]:
    """The largest differences of `score(module)` and of its gradients from whole sequences to parts."""
    results = []
    for of_sequences in (None, module.sequence_parts):
        module.sequence_parts, before = of_sequences, module.sequence_parts
        values = score(module)
        generator = torch.Generator().manual_seed(1)
        loss = sum((v * torch.randn(v.shape, generator=generator)).sum() for v in values)
        loss.backward()
        gradients = grads(module)
        if of_sequences is not None:
            # Each process has the gradient of its own part.
            for gradient in gradients:
                torch.distributed.all_reduce(gradient)
        results.append([*(v.detach() for v in values), *gradients])
        module.sequence_parts = before if of_sequences is None else of_sequences
    worst = []
    for whole, parts in zip(*results, strict=True):
        worst.append(((whole - parts).abs().max() / whole.abs().max()).item())
    return worst


def token_loss(logprobs, entropy):
    return logprobs.exp()


def scored_in_parts(rank, world, folder) -> list[float]:
    """Differences of a language model's scores, a reward model's and a critic's, and of their gradients."""
    engine.setup(1, sequence_parallel=world)
    reading = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, **reading)
    # 11 tokens, which the processes do not divide; the last rows' tokens are all in the first part.
    ids = torch.randint(8, 200, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[1, 4:], mask[2, 2:] = False, False
    # Kept sets of the token itself and others; an empty one is the whole vocabulary.
    kept = [[int(token), 3, 4, 5] for token in ids[:, 1:][mask]]
    kept[2] = []
    support = TokenSupport.from_lists(kept)
    worst = []
    for loss_from in ("linear", "logits"):
        model = LanguageModel(lm, loss_from, sequence_parts=sequences.SequenceParts(lm, 16))
        worst += in_both_forms(model, lambda m: m(ids, mask, 0.7)[:2])
        worst += in_both_forms(model, lambda m: m(ids, mask, support=support)[:2])
        worst += in_both_forms(model, lambda m: [m(ids, mask, token_loss=token_loss).loss])
    attended = torch.nn.functional.pad(mask, (1, 0), value=True)
    for kind, inputs in ((RewardModel, (ids, attended)), (Critic, (ids, mask))):
        model = kind.from_pretrained(folder, **reading)
        torch.nn.init.normal_(model.classifier.score.weight)
        torch.distributed.broadcast(model.classifier.score.weight.data, 0)
        model.sequence_parts = sequences.SequenceParts(model.classifier, 16)
        worst += in_both_forms(model, lambda m, inputs=inputs: [m(*inputs)])
    return worst


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_are_scored_as_whole_sequences(world, tmp_path):
    # Of 4 processes two have the same head of keys, of 2 processes those of one head have both.
    folder = tiny.model_folder(tmp_path, heads=4, key_heads=world // 2)
    for worst in run_distributed(scored_in_parts, world, folder):
        assert max(worst) < 2e-5, worst


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "initializer_range": 0.2,
}
# Ropes that turn otherwise in sequences of more than 13 tokens.
LENGTH = 13
LONGER = {"max_position_embeddings": LENGTH, "head_dim": 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
NESTED = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"}}
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
ORIGINAL = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
# Models and options that the parts would be wrong for, and what each is told.
REFUSED = [
    ("Qwen2Config", {"attn_implementation": "eager"}, "eager needs a mask of all pairs"),
    ("Qwen2Config", {"num_attention_heads": 1, "num_key_value_heads": 1}, "head count 1"),
    ("MistralConfig", {"sliding_window": 8}, "sliding_window=8 is shorter"),
    ("LlamaConfig", LONGER | {"rope_parameters": DYNAMIC}, "rope_type=dynamic depends"),
    ("Gemma3TextConfig", LONGER | {"rope_parameters": NESTED}, "rope_type=dynamic depends"),
    ("Phi3Config", {"rope_parameters": LONGROPE} | ORIGINAL, "rope_type=longrope depends"),
    ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "tokens meet outside of attention"),
]


def what_is_refused(rank, world) -> list[str]:
    engine.setup(1, sequence_parallel=world)
    messages = []
    for config_class, options, _ in REFUSED:
        options = SMALL | options
        attention = options.pop("attn_implementation", "sdpa")
        config = getattr(transformers, config_class)(**options)
        try:
            lm = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=attention
            )
            sequences.SequenceParts(lm, 16)
            messages.append("nothing")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    # Rows that hold several sequences, which sdpa would not keep apart in parts.
    lm = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SMALL))
    options = {"option": "packing", "otherwise": "demonstrations are padded"}
    assert packing.packing_costs(lm, 16, None, **options) is None
    try:
        packing.packing_costs(lm, 16, True, **options)
    except InputError as error:
        messages.append(str(error))
    # A model that keeps options to itself, in place of what transformers passes on.
    forward = lm.base_model.forward
    lm.base_model.forward = lambda sequence_parts=None, **options: forward(**options)
    try:
        sequences.SequenceParts(lm, 16)
    except InputError as error:
        messages.append(str(error))
    return messages


def test_what_parts_would_be_wrong_for_is_refused():
    for found in run_distributed(what_is_refused, 2):
        *messages, of_packing, of_options = found
        for message, (_, _, expected) in zip(messages, REFUSED, strict=True):
            assert message.startswith("InputError: sequence_parallel=2: "), (message, expected)
            assert expected in message
        assert of_packing.startswith("packing: sequence_parallel divides rows of one sequence")
        assert "does not pass on to its attention" in of_options


# Models that know positions up to the longest sequence, which two parts pad by one token.
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": LENGTH, "vocab_size": 64}
NO_BIAS = {"enable_bias": False}  # the gradient of a bias of keys is rounding alone
AT_THE_END = [
    ("LlamaConfig", SMALL | LONGER | {"rope_parameters": DYNAMIC}),
    ("GPT2Config", GPT2),
    (
        "OPTConfig",
        SMALL
        | LONGER
        | {"num_key_value_heads": 4, "ffn_dim": 32, "word_embed_proj_dim": 32}
        | NO_BIAS,
    ),
]


def scored_at_the_end(rank, world) -> dict[str, float]:
    """Differences of models' scores of sequences that are as long as they may be, and of a reward model's."""
    engine.setup(1, sequence_parallel=world)
    ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, LENGTH - 1, dtype=torch.bool)
    worst = {}
    for config_class, options in AT_THE_END:
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**options)
        lm = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model = LanguageModel(
            lm.eval(), "linear", sequence_parts=sequences.SequenceParts(lm, LENGTH)
        )
        worst[config_class] = max(in_both_forms(model, lambda m: m(ids, mask)[:2]))
    return worst


def test_positions_end_with_the_longest_sequence():
    for worst in run_distributed(scored_at_the_end, 2):
        assert max(worst.values()) < 2e-5, worst


def of_many(completions, log_extra):
    """Columns of a wrong length, where the text asks for them."""
    log_extra("column", [1] * (len(completions) - completions.count("short")))
    return "12" if completions[0] == "text" else [float(len(text)) for text in completions]


def what_scorers_return(rank, world) -> list:
    engine.setup(1, sequence_parallel=world)
    scorer = FunctionScorer("my:f", of_many)
    found = []
    for texts in (["a", "bcd"], ["text", "b"], ["short", "b"]):
        samples = [Sample({}, [], Response([5], "stop"), text, "a row", "q") for text in texts]
        try:
            found.append(roll_out._scores_by(scorer, samples).tolist())
        except InputError as error:
            found.append(str(error))
    return found


def test_what_a_scorer_returns_is_that_of_each_part():
    first, second = run_distributed(what_scorers_return, 2)
    assert first == second
    scores, of_text, of_columns = first
    assert scores == [1.0, 3.0]
    assert "returned 0 scores ('12')" in of_text
    assert "gave 1 values for 2 responses" in of_columns


def test_processes_that_it_does_not_divide_and_a_teacher_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: False)
    assert ranks.planned_ranks(2) == 3
    with pytest.raises(InputError, match="sequence_parallel=4 does not divide the 6 processes"):
        ranks.planned_ranks(4)
    with pytest.raises(InputError, match="sequence_parallel=2 divides sequences that a teacher"):
        tiny.config_of("distill", teacher="m", sequence_parallel=2)


@pytest.mark.slow
def test_a_server_samples_each_response_once_for_a_group(tmp_path):
    files = divided.make_files(tmp_path)
    # Weights that differ by rounding may sample another token, so they stay as they are.
    options = {"sampler": None, "lag": 1, "temperature": 0.9, "max_prompt_length": 64, "lr": 0.0}
    for processes in (1, 2):
        with fake_server.serving("vllm", files["model"]) as fake:
            given = options | {"server": [fake.url], "sequence_parallel": processes}
            run = (str(tmp_path / str(processes)), "grpo", given)
            on_ranks(divided.train_all, processes, files, [run])
    # The seeds are those of a rank, so the responses are the same.
    assert_same_metrics(tmp_path / "1", tmp_path / "2", rtol=1e-4)
