"""Sequences of which each process holds a part are scored, and trained on, as whole ones in one process."""

import pytest
import torch
import transformers

from fused_rl import TokenSupport
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.models import packing, sequences
from fused_rl.trainers.models.language_model import LanguageModel
from fused_rl.trainers.models.reward_model import Critic, RewardModel
from tests.distributed import run_distributed
from tests.trainers import divided, tiny


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
    for of_sequences in (None, module.divided):
        module.divided, before = of_sequences, module.divided
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
        module.divided = before if of_sequences is None else of_sequences
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
        model = LanguageModel(lm, loss_from, divided=sequences.Divided(lm, 16))
        worst += in_both_forms(model, lambda m: m(ids, mask, 0.7)[:2])
        worst += in_both_forms(model, lambda m: m(ids, mask, support=support)[:2])
        worst += in_both_forms(model, lambda m: [m(ids, mask, token_loss=token_loss).loss])
    attended = torch.nn.functional.pad(mask, (1, 0), value=True)
    for kind, inputs in ((RewardModel, (ids, attended)), (Critic, (ids, mask))):
        model = kind.from_pretrained(folder, **reading)
        torch.nn.init.normal_(model.classifier.score.weight)
        torch.distributed.broadcast(model.classifier.score.weight.data, 0)
        model.divided = sequences.Divided(model.classifier, 16)
        worst += in_both_forms(model, lambda m, inputs=inputs: [m(*inputs)])
    return worst


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_are_scored_as_whole_sequences(world, tmp_path):
    # Of 4 processes two have the same head of keys, of 2 processes those of one head have both.
    folder = divided.model_folder(tmp_path, key_heads=world // 2)
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
# Models and options that the parts would be wrong for, and what each is told.
REFUSED = [
    ("Qwen2Config", {"attn_implementation": "eager"}, "eager needs a mask of all pairs"),
    ("Qwen2Config", {"num_attention_heads": 1, "num_key_value_heads": 1}, "head count 1"),
    ("MistralConfig", {"sliding_window": 8}, "sliding_window=8 is shorter"),
    ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "tokens meet otherwise"),
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
            sequences.Divided(lm, 16)
            messages.append("nothing")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    # Rows that hold several sequences, which sdpa would not keep apart in parts.
    lm = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SMALL))
    difference = seen_of_the_other_sequence(lm)
    options = {"option": "packing", "otherwise": "demonstrations are padded"}
    assert packing.packing_costs(lm, 16, None, **options) is None
    try:
        packing.packing_costs(lm, 16, True, **options)
    except InputError as error:
        messages.append(str(error))
    # A model that keeps options to itself, in place of what transformers passes on.
    forward = lm.base_model.forward
    lm.base_model.forward = lambda divided=None, **options: forward(**options)
    try:
        sequences.Divided(lm, 16)
    except InputError as error:
        messages.append(str(error))
    return [*messages, f"{difference:.1e}"]


@torch.no_grad()
def seen_of_the_other_sequence(lm) -> float:
    """How far a sequence's states are from those alone, in parts of a row of two whose positions start again."""
    of_parts = sequences.Divided(lm.eval(), 16)
    ids = torch.randint(8, 60, (1, 16), generator=torch.Generator().manual_seed(0))
    alone = lm.base_model(ids[:, 8:], use_cache=False).last_hidden_state
    states = lm.base_model(
        ids[:, 8 * of_parts.part :][:, :8],
        position_ids=torch.arange(8)[None],
        use_cache=False,
        divided=of_parts,
    ).last_hidden_state
    return (states - alone).abs().max().item() if of_parts.part == 1 else 0.0


def test_what_parts_would_be_wrong_for_is_refused():
    for found in run_distributed(what_is_refused, 2):
        *messages, of_packing, of_options, difference = found
        for message, (_, _, expected) in zip(messages, REFUSED, strict=True):
            assert message.startswith("InputError: sequence_parallel=2: "), (message, expected)
            assert expected in message
        assert of_packing.startswith("packing: sequence_parallel divides rows of one sequence")
        assert "does not pass on to its attention" in of_options
    # The reason, of the second process, which has the second sequence of a row.
    assert float(difference) > 1e-2


def test_processes_that_it_does_not_divide_and_a_teacher_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: False)
    assert ranks.planned_ranks(2) == 3
    with pytest.raises(InputError, match="sequence_parallel=4 does not divide the 6 processes"):
        ranks.planned_ranks(4)
    with pytest.raises(InputError, match="sequence_parallel=2 divides sequences that a teacher"):
        tiny.config_of("distill", teacher="m", sequence_parallel=2)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    runs = {name: divided.RUNS[name] for name in ("sft", "grpo")}
    divided.compare(divided.make_files(tmp_path), tmp_path, runs, 2, 2)
