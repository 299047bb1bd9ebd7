"""What the ranks score together is what one of them would score alone, each item once."""

import pytest
import torch

from fused_rl.trainers import sft
from fused_rl.trainers.models import scoring
from tests.distributed import run_distributed

COUNTS = (1, 2, 5, 6)  # fewer than ranks, as many, one more than they divide, and whole shares
LENGTHS = (7, 3, 9, 1, 5, 2)


def scored_together(rank, world):
    found = []
    for count in COUNTS:
        seen = []

        def score(indices, seen=seen):
            seen.append(indices)
            return torch.tensor([[i + 1.0, LENGTHS[i]] for i in indices], requires_grad=True)

        scores = scoring.score_all(LENGTHS[:count], 2, score)
        examples = [sft.Example([1], [i], f"row {i}") for i in range(count)]
        counted = [e.where for e in sft.held_out_share(examples) if e.trained is None]
        found.append((scores.tolist(), seen, counted))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_score_each_item_once_in_equally_many_micro_batches_of_similar_lengths(world):
    of_ranks = [scored_together(0, 1)] if world == 1 else run_distributed(scored_together, world)
    for count, *results in zip(COUNTS, *of_ranks, strict=True):
        scores, micro_batches, counted = zip(*results, strict=True)
        expected = [[i + 1.0, LENGTHS[i]] for i in range(count)]
        assert all(of_rank == expected for of_rank in scores)
        assert len({tuple(map(len, of_rank)) for of_rank in micro_batches}) == 1
        for of_rank in micro_batches:
            lengths = [LENGTHS[i] for indices in of_rank for i in indices]
            assert lengths == sorted(lengths)
        assert sorted(sum(counted, [])) == [f"row {i}" for i in range(count)]
