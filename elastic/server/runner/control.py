"""What a run's process can be told while it lives."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Control(Protocol):
    """Commands to a run. Each is durable in the run's journal once this returns, and returns False where nobody hears."""

    async def stop(self, run_dir: Path) -> bool:
        """Checkpoint, give everything back and end."""
        ...

    async def set_caps(self, run_dir: Path, caps: Mapping[str, int]) -> bool:
        """Hold no more workers than this of each provider; excess drains."""
        ...

    async def set_budget(self, run_dir: Path, budget_usd: float | None) -> bool:
        """Cost no more than this in all."""
        ...


class NoControl:
    """Nobody can be told anything: runs are stopped by signals."""

    async def stop(self, run_dir: Path) -> bool:
        return False

    async def set_caps(self, run_dir: Path, caps: Mapping[str, int]) -> bool:
        return False

    async def set_budget(self, run_dir: Path, budget_usd: float | None) -> bool:
        return False
