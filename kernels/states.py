"""The per-row results that the gradients read, by name; the CPU path imports this without Triton."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class RowStatistics(NamedTuple):
    """Results of `logprob_fwd`, (N,) fp32 each, nats; with x the capped logits and s = (x - max x) / temperature."""

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor
    m: Tensor
    """max x, before the temperature."""
    rest: Tensor
    """sum(exp(s)) - 1: the maximum is left out, so that it does not drown the others."""


class KLState(NamedTuple):
    """Results of `kl_fwd`, rows of a tensor (9, N) fp32; `fused_rl.kernels.kl` has the formulas. T is the temperature.

    P are the probabilities of x, Q those of y, d = x - y, and u = d / T - mean with mean = offset / T + c.
    """

    m: Tensor
    """max x."""
    w: Tensor
    """sum of exp((x - m) / T) over the columns that Q allows."""
    w_all: Tensor
    """The same over all columns."""
    offset: Tensor
    """Subtracted from d before it is scaled, so that c is small and keeps its bits."""
    c: Tensor
    """The mean of d / T under P, minus offset / T."""
    n: Tensor
    """max y."""
    f: Tensor
    """sum w (exp(-u) - 1 + u), times exp((m - n) / T - mean)."""
    s: Tensor
    """sum of exp((y - n) / T)."""
    k: Tensor
    """log(P / Q) = u + k."""


class JensenShannonSums(NamedTuple):
    """Results of `js_fwd`, rows of a tensor (3, N) fp32, with a = log(p / m), b = log(q / m) and m the mixture."""

    divergence: Tensor
    p_a: Tensor
    """sum of p a."""
    q_b: Tensor
    """sum of q b."""


class Shares(NamedTuple):
    """The weights of P and Q in the mixture of Jensen-Shannon, both above 0, with a sum of 1.

    Functions of the row take None for halves: these need less than half of the arithmetic.
    """

    p: float
    q: float


def shares_of(jsd_beta: float) -> Shares | None:
    """Return the weights of a mixture whose weight of Q is `jsd_beta`; None for halves."""
    return None if jsd_beta == 0.5 else Shares(1 - jsd_beta, jsd_beta)


def bounded(sums: Tensor, shares: Shares | None = None) -> Tensor:
    """`JensenShannonSums` (3, N), in place: what rounding took out of its range is at the bound."""
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
    """The support of rows: row i keeps ids[begin[i]:end[i]], or the whole vocabulary where that is empty."""

    ids: Tensor
    """(M,) integers."""
    begin: Tensor
    """(...) int64, as end: one per row."""
    end: Tensor

    def at(self, rows) -> "RowSupport":
        """That of some rows."""
        return self._replace(begin=self.begin[rows], end=self.end[rows])

    def whole(self, mask: Tensor | None) -> Tensor:
        """(N,) bool: rows that keep the whole vocabulary and count."""
        whole = self.begin == self.end
        return whole if mask is None else whole & mask
