"""What rounding explains: by how much numbers may differ that were computed in two ways."""

import torch


def relative_difference(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Return the largest difference () of two tensors of one shape, in deviations of the second, beyond rounding.

    1 is as much as rounding may explain, in the tensors' dtype.
    """
    rounding = 1e-3 if two.dtype == torch.float32 else 0.05
    one, two = one.float(), two.float()
    return (one - two).abs().max() / two.std() / rounding
