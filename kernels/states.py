"""Named tuples of the per-row results that the gradients read; the CPU path imports this module without Triton."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class RowStatistics(NamedTuple):
    """The results of `logprob_fwd`, each (N,) fp32.

    Here x are the logits after the soft cap, and s = (x - max x) / temperature.
    """

    logprobs: Tensor
    """The log-probability of each row's target in nats; (N, K) from `targets_fwd`."""
    entropy: Tensor
    """In nats."""
    lse: Tensor
    """The log-sum-exp of x / temperature in nats."""
    m: Tensor
    """max x, before the temperature."""
    rest: Tensor
    """sum(exp(s)) - 1: the maximum is left out, because beside it small terms would lose their digits."""


class KLState(NamedTuple):
    """What `kl_fwd` keeps of each row for the gradients: the rows of a tensor (9, N) fp32.

    `fused_rl.kernels.kl` derives the formulas. T is the temperature, P are the probabilities of x and Q those of y,
    d = x - y, and u = d / T - mean with mean = offset / T + c. A column is banned where its logit is -inf.
    """

    m: Tensor
    """max x."""
    w: Tensor
    """The sum of exp((x - m) / T) over the columns that Q allows."""
    w_all: Tensor
    """The same sum over all columns."""
    offset: Tensor
    """A constant that is subtracted from d before the temperature, so that c is small and keeps its bits."""
    c: Tensor
    """The mean of d / T under P, minus offset / T."""
    n: Tensor
    """max y."""
    f: Tensor
    """The sum of w (exp(-u) - 1 + u), times exp((m - n) / T - mean), where w = exp((x - m) / T) is per column."""
    s: Tensor
    """The sum of exp((y - n) / T)."""
    k: Tensor
    """The constant of the row in log(P / Q) = u + k."""


class JensenShannonSums(NamedTuple):
    """The results of `js_fwd` in nats, which are the rows of a tensor (3, N) fp32.

    With p, q the probabilities of the two rows and m their mixture, a = log(p / m) and b = log(q / m).
    """

    divergence: Tensor
    p_a: Tensor
    """The sum of p a, which is KL(p || m)."""
    q_b: Tensor
    """The sum of q b, which is KL(q || m)."""


class Shares(NamedTuple):
    """The weights of P and Q in the mixture of the Jensen-Shannon divergence: both are above 0, and they sum to 1.

    Kernels take None in place of two halves, because halves need less than half of the arithmetic.
    """

    p: float
    q: float


def shares_of(jsd_beta: float) -> Shares | None:
    """Return the weights of a mixture in which Q has the weight `jsd_beta`, or None where both are one half."""
    return None if jsd_beta == 0.5 else Shares(1 - jsd_beta, jsd_beta)


def bounded(sums: Tensor, shares: Shares | None = None) -> Tensor:
    """Clamp the `JensenShannonSums` (3, N) in place to the range of the exact sums, which rounding may leave."""
    p, q = shares or Shares(0.5, 0.5)
    of_p, of_q = -math.log(p), -math.log(q)  # p / m is at most 1 / share of p
    sums[0].clamp_(0, _fp32_below(p * of_p + q * of_q))
    sums[1].clamp_(max=_fp32_below(of_p))
    sums[2].clamp_(max=_fp32_below(of_q))
    return sums


@functools.lru_cache(maxsize=16)
def _fp32_below(bound: float) -> float:
    """Return the largest fp32 number that is not above the bound, so that no output ever is."""
    nearest = torch.tensor(bound, dtype=torch.float32, device="cpu")
    if nearest.item() > bound:
        nearest = torch.nextafter(nearest, torch.zeros_like(nearest))
    return nearest.item()


class RowSupport(NamedTuple):
    """The kept ids of each row: row i keeps ids[begin[i]:end[i]], or the whole vocabulary where that is empty."""

    ids: Tensor
    """(M,) integers, the kept ids of all rows one after another."""
    begin: Tensor
    """(...) int64, one number per row, as in `end`."""
    end: Tensor

    def at(self, rows) -> "RowSupport":
        """Return the support of the rows with these indices alone."""
        return self._replace(begin=self.begin[rows], end=self.end[rows])

    def keeps_all(self, mask: Tensor | None) -> Tensor:
        """Return which rows keep the whole vocabulary and are not masked, (N,) bool."""
        is_empty = self.begin == self.end
        return is_empty if mask is None else is_empty & mask
