"""pass@k against enumeration, and lengths of solved and unsolved responses by hand."""

import itertools

import pytest
import torch

from fused_rl.trainers.rollouts.solved import outcome_sums, outcomes, pass_at, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_responses(n):
    # Every problem with n responses.
    right = torch.tensor(list(itertools.product([False, True], repeat=n)))
    for k in range(1, n + 1):
        chosen = torch.tensor(list(itertools.combinations(range(n), k)))
        expected = right[:, chosen].any(2).double().mean(1)
        torch.testing.assert_close(pass_at_k(right, k), expected, atol=1e-15, rtol=0)


def test_pass_at_k_of_many_responses_neither_overflows_nor_cancels():
    right = torch.zeros(1, 2000, dtype=torch.bool)
    right[0, 0] = True
    assert pass_at_k(right, 1000).item() == 0.5
    right[0, :1001] = True
    assert pass_at_k(right, 1000).item() == 1.0  # fewer wrong ones than k


def test_the_ks_are_powers_of_two_and_all():
    for n, ks in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])):
        assert list(pass_at(torch.ones(1, n, dtype=torch.bool))) == [f"pass_at_{k}" for k in ks]


def test_lengths_and_truncation_add_up_over_parts():
    solved = torch.tensor([True, False, True, False, False])
    lengths = torch.tensor([3, 10, 5, 4, 10])

    def sums_of(part, solved=solved):
        sums = outcome_sums(solved[part], lengths[part], lengths[part] < 10)
        return {name: value.item() for name, value in sums.items()}

    first, second = sums_of(slice(2)), sums_of(slice(2, 5))
    assert outcomes({name: first[name] + second[name] for name in first}) == {
        "mean_length": 32 / 5,
        "clipped_ratio": 2 / 5,
        "mean_length_solved": 4.0,
        "mean_length_unsolved": 8.0,
    }
    none = outcomes(sums_of(slice(5), torch.zeros_like(solved)))
    assert "mean_length_solved" not in none and none["mean_length_unsolved"] == 32 / 5
