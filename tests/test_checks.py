"""What is passed in place of a tensor is told in one short line, with the tensor that it holds: by every public op."""

import inspect
import typing

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

import fused_rl

LOGITS = torch.zeros(2, 3, 50)
TARGETS = torch.zeros(2, 3, dtype=torch.int64)
HIDDEN, HEAD = torch.zeros(2, 3, 4), torch.nn.Linear(4, 50)
ROWS, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
SCORES = torch.zeros(4)
CAME = {
    "CausalLMOutputWithPast, whose .logits is a tensor": CausalLMOutputWithPast(logits=LOGITS),
    "TokenLogprobs, whose .logprobs is a tensor": fused_rl.token_logprobs(LOGITS, TARGETS),
    "Linear, whose .weight is a tensor": HEAD,
    "Sequential Sequential( ": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    "dict {'logits': tensor": {"logits": LOGITS},
    "list [[[0.0": LOGITS.tolist(),
    "ndarray array([[[0": LOGITS.numpy(),
    "NoneType None": None,
}
OF_HEAD = {"hidden": HIDDEN, "weight": HEAD.weight, "targets": TARGETS}
OF_TOKENS = {"logprobs": ROWS, "old_logprobs": ROWS, "mask": MASK}
# What each takes: a new function of `fused_rl.__all__` needs a row.
TAKES = {
    "token_logprobs": {"logits": LOGITS, "targets": TARGETS},
    "linear_token_logprobs": OF_HEAD,
    "linear_token_loss": OF_HEAD | {"token_loss": lambda logprobs, entropy: -logprobs},
    "token_kl": {"logits": LOGITS, "ref_logits": LOGITS},
    "linear_token_kl": {"hidden": HIDDEN, "weight": HEAD.weight, "ref_hidden": HIDDEN, "ref_weight": HEAD.weight},
    "topk_kl": {"logprobs": ROWS - 9, "ref_logprobs": ROWS - 9},
    "vocab_parallel_token_logprobs": {"local_logits": LOGITS, "targets": TARGETS, "vocab_start": 0},
    "vocab_parallel_token_kl": {"local_logits": LOGITS, "local_ref_logits": LOGITS},
    "kl_estimate": {"logprobs": ROWS, "ref_logprobs": ROWS},
    "importance_ratio": OF_TOKENS,
    "policy_loss": OF_TOKENS | {"advantages": ROWS, "skip_impossible": True},
    "policy_token_loss": {"old_logprobs": ROWS, "advantages": ROWS, "mask": MASK},
    "value_loss": {"values": ROWS, "old_values": ROWS, "returns": ROWS, "mask": MASK},
    "entropy_bonus": {"entropy": ROWS, "mask": MASK, "entropy_coef": 1.0},
    "preference_loss": {"chosen_scores": SCORES, "rejected_scores": SCORES},
    "group_advantages": {"rewards": SCORES, "group_size": 2},
    "response_advantages": {"rewards": SCORES, "advantage": "batch-std", "group_size": 2},
    "gae": {"rewards": ROWS, "values": ROWS, "mask": MASK, "gamma": 1.0, "gae_lambda": 1.0},
    **{f"masked_{what}": {"values": ROWS, "mask": MASK} for what in ("mean", "sum", "var")},
    "whiten": {"values": ROWS, "mask": MASK},
}
FUNCTIONS = {name for name in fused_rl.__all__ if inspect.isfunction(getattr(fused_rl, name))} - {"tf_adam_epsilon"}


def tensors_of(name):
    """Parameter -> whether it may be None, of those that take a tensor."""
    hints = typing.get_type_hints(getattr(fused_rl, name))
    apart = {"return", "token_loss", "per_token"}  # a function, and what is told by its place: below
    kinds = {parameter: {hint, *typing.get_args(hint)} for parameter, hint in hints.items() if parameter not in apart}
    return {p: type(None) in kind for p, kind in kinds.items() if torch.Tensor in kind}


PLACES = [(name, parameter, optional) for name in TAKES for parameter, optional in tensors_of(name).items()]


def test_every_function_has_a_row():
    assert set(TAKES) == FUNCTIONS


@pytest.mark.parametrize("name", [name for name in TAKES if not name.startswith("vocab_parallel")])
def test_what_they_take_is_taken(name):
    getattr(fused_rl, name)(**TAKES[name])


@pytest.mark.parametrize(("name", "parameter", "optional"), PLACES)
def test_what_is_no_tensor_is_one_short_line(name, parameter, optional):
    for came, given in CAME.items():
        if given is None and optional:
            continue
        assert_told(lambda given=given: getattr(fused_rl, name)(**{**TAKES[name], parameter: given}), parameter, came)


@pytest.mark.parametrize("came", CAME)
def test_what_is_given_per_token(came):
    def loss(logprobs, entropy, x):
        return -logprobs

    assert_told(lambda: fused_rl.linear_token_loss(*OF_HEAD.values(), loss, CAME[came]), "per_token[0]", came)


def assert_told(call, parameter, came):
    with pytest.raises(ValueError, match="must be") as refused:
        call()
    said = str(refused.value)
    assert said.startswith((f"{parameter} must be", f"{parameter.removeprefix('local_')} must be"))
    assert f", got {came}" in said
    assert "\n" not in said and len(said) < 240
