"""Formulas as one writes them in PyTorch: what peers and truths are made of, and how far one is from the other."""

import torch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int, device: str = "cpu") -> torch.Tensor:
    """Standard normal numbers in fp32, the same each time on one device, which draws them."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def chosen(values, ids):
    """(..., V) at (...) ids."""
    return values.gather(-1, ids[..., None])[..., 0]


def entropy(logp):
    """(..., V) log-probabilities -> (...) nats; a token of probability 0 must not be -inf."""
    return -(logp.exp() * logp).sum(-1)


def largest(found, exact) -> float:
    """Largest difference, in fp64."""
    return (found.double() - exact).abs().max().item()


def relative(found, exact, least: float = 0.0) -> float:
    """Largest difference over the largest exact element, or over `least` where that is larger; of zeros itself."""
    scale = max(exact.abs().max().item(), least)
    return largest(found, exact) / (scale or 1.0)
