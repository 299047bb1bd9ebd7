"""TRL's chunked primitives from full logits in fp64: what a run is measured against.

Results are fp64 in a run in fp64, and rounded to fp32, which is what TRL returns, in any other.
"""

import torch

from tests.integrations import formulas


def _rounded(hidden, outputs):
    if hidden.dtype == torch.float64:
        return tuple(outputs)
    return tuple(value.float() if value is not None and value.is_floating_point() else value for value in outputs)


def _wide(*head):
    return [None if x is None else x.double() for x in head]


class _ChunkedLogProbFunction:
    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=()):
        logits = formulas.scores(*_wide(hidden, weight, bias), temperature, softcap, scale)
        selected, entropy, *others = formulas.row_outputs(logits, targets)
        others = [x.detach() for x in others]
        names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        asked = [x if name in outputs else None for name, x in zip(names, (entropy, *others), strict=True)]
        return _rounded(hidden, [selected, *asked])


class ChunkedDivergenceFunction:
    @staticmethod
    def apply(*heads_and_options):
        heads, (beta, *options) = heads_and_options[:6], heads_and_options[6:]
        temperature, *scales = [*options, *(1.0, 1.0, None, 1.0, None)[len(options) :]]
        x = formulas.scores(*_wide(*heads[:3]), temperature, scales[1], scales[0])
        y = formulas.scores(*_wide(*heads[3:]), temperature, scales[3], scales[2])
        divergence, entropy = formulas.divergence(x, y.detach(), beta)
        return _rounded(heads[0], [divergence, entropy.detach()])
