"""A surrogate of the user's: on copies, with generators of its own, and refused in a line where it is none."""

import random

import pytest
import torch

from fused_rl.surrogates import needs_sequences
from fused_rl.trainers import grpo
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.policy import options
from fused_rl.trainers.policy.own_surrogate import load_surrogate

HERE = "tests.trainers.test_own_surrogate"


def plain(log_ratio, advantages, logprobs, sequences, options):
    return -log_ratio.exp() * advantages


@needs_sequences
def of_sequences(log_ratio, advantages, logprobs, sequences, options):
    return -sequences.expand(sequences.mean(log_ratio)) * advantages


def edits(log_ratio, advantages, logprobs, sequences, options):
    torch.manual_seed(0), random.seed(0)
    advantages *= 2
    logprobs += 1
    return -log_ratio.mul_(3).exp() * advantages


def reduces(log_ratio, advantages, logprobs, sequences, options):
    return plain(log_ratio, advantages, logprobs, sequences, options).sum()


def constant(log_ratio, advantages, logprobs, sequences, options):
    return advantages


def raises(log_ratio, advantages, logprobs, sequences, options):
    raise KeyError("one\ntwo" + "x" * 10_000)


def nothing(log_ratio, advantages, logprobs, sequences, options):
    return None


def two(log_ratio, advantages):
    return -log_ratio * advantages


class Made:
    def __init__(self, log_ratio, advantages, logprobs, sequences, options):
        pass


none = None


def call(name, **changed):
    log_ratio = torch.zeros(2, 3, requires_grad=True)
    given = {"advantages": torch.ones(2, 3), "logprobs": torch.zeros(2, 3)}
    loss = load_surrogate(f"{HERE}:{name}")(log_ratio, *given.values(), None, None)
    loss.sum().backward()
    return loss, log_ratio.grad, given


def test_it_is_the_function_on_copies_with_generators_of_its_own():
    before = torch.get_rng_state(), random.getstate()
    loss, gradient, given = call("edits")
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert (given["advantages"] == 1).all() and (given["logprobs"] == 0).all()
    assert (loss == -2).all() and (gradient == -6).all()
    assert load_surrogate(f"{HERE}:of_sequences").needs_sequences


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reduces", r"returned torch.float32 \(\); it must return a loss for each token, \(2, 3\), unreduced"),
        ("nothing", "returned None; it must return a loss for each token"),
        ("constant", "returned a loss without a gradient"),
        ("raises", r"raised KeyError: 'one.*\(test_own_surrogate.py, line \d+\)$"),
        ("two", "cannot be called: too many positional arguments; expected a function of .log_ratio, advantages"),
        ("Made", "is a class; expected a function of .log_ratio"),
        ("none", "NoneType is not a function"),
        ("missing", "AttributeError: module .* has no attribute 'missing'"),
    ],
)
def test_what_is_no_surrogate_is_one_line(name, message):
    with pytest.raises(InputError, match=f"^surrogate '{HERE}:{name}'.*{message}") as refused:
        call(name)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_a_run_is_refused_before_it_begins_where_it_can_be_known():
    config = grpo.GRPOConfig(model="m", dataset="d", output_dir="o", surrogate=f"{HERE}:two")
    with pytest.raises(InputError, match="cannot be called"):
        options.check_loss_options(config)
