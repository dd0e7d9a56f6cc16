"""Sums of gradients that are the same, bit for bit, in whatever order they are added."""

from collections.abc import Sequence

import torch
from torch import Tensor

_FRACTION_BITS = 36
"""A token-sum gradient is kept to 2⁻³⁶ ≈ 1.5e-11: far below Adam's ε once the token count divides it."""

MAGNITUDE_MAX = 2.0**16
"""Larger gradients mean divergence and are refused; 2¹¹ that large still fit into 63 bits."""


class GradientOverflow(ArithmeticError):
    """A gradient is not finite or too large to be summed exactly."""


class GradientAccumulator:
    """Fixed-point sums, one a parameter. Integer addition is associative; that of floats is not."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.sums = [torch.zeros_like(parameter, dtype=torch.int64, requires_grad=False) for parameter in parameters]
        self.is_zero = True

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add one gradient a parameter. Raises `GradientOverflow` and adds nothing if one cannot be held."""
        for index, gradient in enumerate(gradients):
            largest = float(gradient.abs().max()) if gradient.numel() else 0.0
            if not largest <= MAGNITUDE_MAX:
                raise GradientOverflow(f"gradient {index}: magnitude {largest}; at most {MAGNITUDE_MAX} can be summed")
        self.is_zero = False
        for total, gradient in zip(self.sums, gradients, strict=True):
            total += (gradient * 2.0**_FRACTION_BITS).round().long()

    def take(self, divisor: float) -> list[Tensor]:
        """The sums over `divisor` in float32; starts again from zero."""
        means = [(total.double() * (2.0**-_FRACTION_BITS / divisor)).float() for total in self.sums]
        for total in self.sums:
            total.zero_()
        self.is_zero = True
        return means
