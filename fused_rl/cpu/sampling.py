"""The CPU path of `fused_rl.kernels.sampling`: the same distribution and the same promises, from other numbers."""

import torch

from fused_rl.cpu import logprob


def sample_token(logits, philox_state, inv_temperature):
    """(N, V), (2,) int64, float -> tokens (N,) int64, log-probabilities (N,) fp32, broken (N,) bool."""
    seed, offset = philox_state.tolist()
    generator = torch.Generator("cpu")
    tokens = torch.empty(len(logits), dtype=torch.int64, device="cpu")
    for row, x in enumerate(logits):
        # a generator per row, so that no row depends on those before
        generator.manual_seed(hash((seed, offset, row)) % 2**63)
        # Gumbel's argmax in fp64: an fp32 number would be 0 once in 2^24 draws, and its token would win
        u = torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        times = -(-u).log1p()
        tokens[row] = (x.double() * inv_temperature - times.log()).argmax()
    broken = ~logits.amax(1).isfinite()
    logprobs = logprob.logprob_fwd(logits, tokens, None, inv_temperature, None).logprobs
    return tokens, logprobs.masked_fill(broken, torch.nan), broken
