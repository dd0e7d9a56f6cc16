"""What the server knows of every container, and what it bills for it.

The prices are those of https://modal.com/pricing in 2026: CPU by the physical core and memory by the GiB, as they are
reserved, GPUs by the piece; all by the second of a container's life, its start included and idle time, too.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

USD_PER_CORE_S = 0.0000131
USD_PER_GIB_S = 0.00000222
USD_PER_GPU_S: Mapping[str, float] = {
    "T4": 0.000164,
    "L4": 0.000222,
    "A10": 0.000306,
    "L40S": 0.000542,
    "A100": 0.000583,
    "A100-80GB": 0.000694,
    "H100": 0.001097,
    "H200": 0.001261,
    "B200": 0.001736,
}
CORES_MIN, MEMORY_MB_MIN = 0.125, 128


@dataclass
class Container:
    """One container: which function's, since when, until when, and why it ended."""

    task: str
    function: str
    run: str
    cores: float
    memory_mb: int
    gpu: str
    gpus: int
    enqueued_s: float
    started_s: float = 0.0
    finished_s: float = 0.0
    ended_by: str = ""
    calls: list[str] = field(default_factory=list)

    @property
    def usd_per_s(self) -> float:
        cores, memory_mb = max(self.cores, CORES_MIN), max(self.memory_mb, MEMORY_MB_MIN)
        gpus = self.gpus * USD_PER_GPU_S.get(self.gpu, 0.0)
        return cores * USD_PER_CORE_S + memory_mb / 1024 * USD_PER_GIB_S + gpus

    def shown(self, now_s: float) -> dict[str, object]:
        """With what it costs so far."""
        end_s = self.finished_s or now_s
        usd = (end_s - self.started_s) * self.usd_per_s if self.started_s else 0.0
        return dataclasses.asdict(self) | {"usd": usd, "usd_per_s": self.usd_per_s}
