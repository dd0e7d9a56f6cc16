"""The weights at a step's beginning, kept while the step makes several updates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class FirstWeights:
    """Copies of parameters, in their types. `there` brings them back for a while, bit for bit."""

    def __init__(self) -> None:
        self.copies: list[Tensor] = []

    def keep(self, parameters: Sequence[Tensor], home: torch.device | None = None) -> None:
        """Keep them as they are, on the device `home` (None: where they are)."""
        self.copies = [one.detach().to(home or one.device, copy=True) for one in parameters]

    def forget(self) -> None:
        self.copies = []

    @contextmanager
    def there(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """While it lasts the parameters are as they were kept. No gradient of theirs may be under way."""
        self._exchange(parameters)
        try:
            yield
        finally:
            self._exchange(parameters)

    @torch.no_grad()
    def _exchange(self, parameters: Sequence[Tensor]) -> None:
        for parameter, copy in zip(parameters, self.copies, strict=True):
            present = parameter.detach().to(copy.device, copy=True)
            parameter.copy_(copy)
            copy.copy_(present)
