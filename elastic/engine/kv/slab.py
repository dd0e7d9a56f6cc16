"""The page backend for any device: one large buffer, which every model sees through its own dtype.

All pages are reachable all the time; a page's index in a view is its physical number, and virtual addresses
exist only as the caller's block tables.
"""

import torch
from torch import Tensor


class SlabBackend:
    def __init__(self, total: int, page_bytes: int, device: torch.device | str = "cpu") -> None:
        self.total = total
        self.page_bytes = page_bytes
        self._slab = torch.zeros(total, page_bytes, dtype=torch.uint8, device=device)

    def begin(self, space: int) -> None:
        pass

    def map(self, space: int, virtual: int, physical: int) -> int:
        # What one model wrote may read as infinities in another's dtype, which masking cannot silence.
        self._slab[physical].zero_()
        return physical

    def unmap(self, space: int, virtual: int, physical: int) -> None:
        pass

    def view(self, space: int, dtype: torch.dtype) -> Tensor:
        return self._slab.view(-1).view(dtype)

    def end(self, space: int) -> None:
        pass

    def close(self) -> None:
        self._slab = torch.empty(0, self.page_bytes, dtype=torch.uint8)
