"""The per-row results that the gradients read, by name; the CPU path imports this without Triton."""

from typing import NamedTuple

from torch import Tensor

LOG_2 = 0.69314712  # the largest fp32 number that is not above log 2


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
    """Results of `js_fwd`, rows of a tensor (3, N) fp32, with a = log(p / mean(p, q)) and b = log(q / mean(p, q))."""

    divergence: Tensor
    p_a: Tensor
    """sum of p a."""
    q_b: Tensor
    """sum of q b."""


def bounded(sums: Tensor) -> Tensor:
    """`JensenShannonSums` (3, N), in place: what rounding took out of 0 to log 2, a mean above it, is at the bound."""
    sums[0].clamp_(0, LOG_2)
    sums[1:].clamp_(max=LOG_2)
    return sums


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
