"""Sums of gradients that are the same, bit for bit, in whatever order they are added."""

from collections.abc import Sequence

import torch
from torch import Tensor

_FRACTION_BITS = 36
"""A token-sum gradient is kept to 2⁻³⁶ ≈ 1.5e-11: far below Adam's ε once the token count divides it."""

_PIECE = 1 << 16
"""So many numbers at a time stay in a CPU's cache while they become integers; a GPU takes all at once."""

MAGNITUDE_MAX = 2.0**16
"""Larger gradients mean divergence and are refused; 2¹¹ that large still fit into 63 bits."""


class GradientOverflow(ArithmeticError):
    """A gradient is not finite or too large to be summed exactly."""


class GradientAccumulator:
    """Fixed-point sums, one a parameter. Integer addition is associative; that of floats is not."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.sums = [torch.zeros(each.shape, dtype=torch.int64, device=each.device) for each in parameters]
        self.is_zero = True

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add one gradient a parameter. Raises `GradientOverflow` and adds nothing if one cannot be held."""
        for index, gradient in enumerate(gradients):
            largest = float(torch.stack(gradient.aminmax()).abs().max()) if gradient.numel() else 0.0
            if not largest <= MAGNITUDE_MAX:
                raise GradientOverflow(f"gradient {index}: magnitude {largest}; at most {MAGNITUDE_MAX} can be summed")
        self.is_zero = False
        for total, gradient in zip(self.sums, gradients, strict=True):
            piece = _PIECE if total.device.type == "cpu" else max(1, total.numel())
            for sums, values in zip(total.view(-1).split(piece), gradient.reshape(-1).split(piece), strict=True):
                sums += (values * 2.0**_FRACTION_BITS).round_().long()

    def take(self, divisor: float) -> list[Tensor]:
        """The sums over `divisor` in float32; starts again from zero."""
        means = [(total.double() * (2.0**-_FRACTION_BITS / divisor)).float() for total in self.sums]
        for total in self.sums:
            total.zero_()
        self.is_zero = True
        return means
