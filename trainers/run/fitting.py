"""Which micro-batches fit into the memory of a GPU.

Two trial passes measure what a token takes, and so how many tokens fit. The loss of a trial is multiplied by 0, so that
it adds gradients of 0 and nothing has to be undone.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..base import ranks

USED = 0.75  # of a GPU's free memory: fragments, and what libraries take later, are not measured
MOST_SEQUENCES = 256  # of a micro-batch


def fitting_tokens(engines: Sequence[Any], longest: int) -> int:
    """Return the tokens of the largest micro-batch that fits into the memory of every rank. Call on all ranks.

    Args:
        engines: those of the models that are trained, which an update runs together.
        longest: the tokens of the longest sequence, which always fits: a micro-batch has one at least.
    """
    device = engines[0].device
    # Others may hold a part of the GPU, such as a server; what PyTorch holds is ours.
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    usable = int(USED * free)
    # The optimizer without ZeRO makes its two fp32 moments in its first step.
    for engine in engines:
        if not engine.optimizer.state:
            trained = [
                p.numel() for group in engine.optimizer.param_groups for p in group["params"]
            ]
            usable -= 8 * sum(trained)
    peak_of_one = _peak(engines, longest, 1)
    # A second sequence takes no more than the first: without room for it all ranks go without that pass.
    needed = 2 * peak_of_one - torch.cuda.memory_allocated(device)
    if any(ranks.gather_processes(needed > usable)):
        return longest
    per_token = max(_peak(engines, longest, 2) - peak_of_one, 1) / longest
    tokens = longest + int((usable - peak_of_one) / per_token)
    tokens_of_processes = ranks.gather_processes(min(tokens, MOST_SEQUENCES * longest))
    return max(longest, min(tokens_of_processes))


def _peak(engines: Sequence[Any], length: int, sequences: int) -> int:
    """Return the most bytes that were allocated while a micro-batch went forward and backward."""
    device = engines[0].device
    torch.cuda.reset_peak_memory_stats(device)
    input_ids = torch.zeros(sequences, length, dtype=torch.long, device=device)
    outputs = [engine(**engine.module.trial_inputs(input_ids)) for engine in engines]
    for engine, output in zip(engines, outputs, strict=True):
        loss = output.sum() if isinstance(output, torch.Tensor) else output.loss
        engine.backward(loss * 0)
    return torch.cuda.max_memory_allocated(device)
