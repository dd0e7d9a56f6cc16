"""What the ranks of one trainer do together. `Ranks` itself is of one alone, which has nothing to do with others.

All ranks call the same methods in the same order, and come to the same results.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """A trainer of one rank."""

    rank = 0
    size = 1
    apart = False
    """Whether they are on several machines, which have no files in common."""

    def all_of(self, mine: bool) -> bool:
        """Whether it holds on every rank."""
        return mine

    def texts(self, mine: str) -> list[str]:
        """What each rank says, in order."""
        return [mine]

    def gather(self, mine: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Each rank's tensor, in order; they differ in their first dimension alone, which has so many `rows` each."""
        return [mine]

    def collect(self, mine: Tensor, rows: Sequence[int], to: int) -> Tensor | None:
        """As `gather`, one after the other in a single tensor, on this rank alone; None on the others."""
        return mine

    def in_turns(self, work: Callable[[], T]) -> T:
        """Do this on one rank after the other: each takes memory that is free again when it is over."""
        return work()

    def shares(self, rows: int) -> list[range]:
        """The rows of a parameter that each rank holds, as `torch.chunk` cuts them."""
        step = -(-rows // self.size)
        return [range(min(rank * step, rows), min((rank + 1) * step, rows)) for rank in range(self.size)]


ALONE = Ranks()


class ProcessRanks(Ranks):
    """Ranks that are processes, joined by torch's process group."""

    def __init__(self, rank: int, size: int, *, apart: bool = False) -> None:
        self.rank, self.size, self.apart = rank, size, apart

    @classmethod
    def joined(
        cls,
        rank: int,
        size: int,
        device: torch.device,
        meeting: "int | tuple[str, int]",
        timeout_s: float,
        listener: int | None = None,
    ) -> "ProcessRanks":
        """Join the others, on all of which this is called. Blocks.

        On one machine they meet by a file that they alone have open, and keep so: `meeting` is its descriptor. On
        several it is the host and port of the first one, which listens there with `listener`. Tensors on CPUs go by
        gloo, those on GPUs by nccl.
        """
        import torch.distributed as dist

        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_s)
        if isinstance(meeting, int):
            store = dist.FileStore(f"/proc/self/fd/{meeting}", size)  # pyright: ignore[reportPrivateImportUsage]
        else:
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                *meeting, size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener
            )
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        return cls(rank, size, apart=not isinstance(meeting, int))

    def all_of(self, mine: bool) -> bool:
        import torch.distributed as dist

        odd = torch.tensor(int(not mine))
        dist.all_reduce(odd)
        return not odd.item()

    def texts(self, mine: str) -> list[str]:
        said = torch.frombuffer(bytearray(mine.encode() + b"\0"), dtype=torch.uint8)
        lengths = torch.cat(self.gather(torch.tensor([len(said)]), [1] * self.size)).tolist()
        return [bytes(one.tolist())[:-1].decode() for one in self.gather(said, lengths)]

    def gather(self, mine: Tensor, rows: Sequence[int]) -> list[Tensor]:
        import torch.distributed as dist

        padded = _padded(mine, max(rows))
        found = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(found, padded)
        return [tensor[:count] for tensor, count in zip(found, rows, strict=True)]

    def collect(self, mine: Tensor, rows: Sequence[int], to: int) -> Tensor | None:
        import torch.distributed as dist

        padded = _padded(mine, max(rows))
        found = [torch.empty_like(padded) for _ in rows] if self.rank == to else None
        dist.gather(padded, found, dst=to)
        if found is None:
            return None
        return torch.cat([tensor[:count] for tensor, count in zip(found, rows, strict=True)])

    def in_turns(self, work: Callable[[], T]) -> T:
        import torch.distributed as dist

        found: list[T] = []
        for turn in range(self.size):
            if turn == self.rank:
                found.append(work())
            dist.barrier()
        return found[0]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    if len(tensor) == rows:
        return tensor.contiguous()
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    return padded
