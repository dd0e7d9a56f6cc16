"""A pool's process whose residents and jobs are those of `stubs`: `python stub_programs.py DIR`.

It stands apart from them, since it imports much more than they need.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from elastic.system.imports import importing

with importing():
    from elastic.compose.pool import PoolPrograms, PoolWiring, run_pool
    from elastic.core.cluster.types import NodeId, PhaseKind
    from elastic.pool import messages as w
    from elastic.pool.ports import JobEnding, JobEntry
    from elastic.system.logs import STANDARD_ERROR, log_to
    from tests.pool.stubs import STUB

STUB_POOL = (sys.executable, str(Path(__file__).resolve()))


class StubPrograms(PoolPrograms):
    def run_command(self, entry: JobEntry) -> Sequence[str]:
        return (*STUB, "job", entry.directory)

    def resident_command(self, entry: JobEntry, phase: PhaseKind) -> Sequence[str]:
        return (*STUB, "resident", entry.directory, phase.value)

    def resident(
        self,
        entry: JobEntry,
        placement: int,
        node: NodeId,
        phase: PhaseKind,
        ticket: w.WorkerTicketFrame | None,
        ranks: w.RankPlaces | None = None,
    ) -> w.StartResidentFrame:
        frame = super().resident(entry, placement, node, phase, ticket, ranks)
        frame.environment.update(
            STUB_NODE=node, STUB_PLACEMENT=str(placement), STUB_DEVICES=str(self._directory.resolve() / "devices")
        )
        return frame

    def ended(self, entry: JobEntry, kept: Mapping[str, str], status: int | None) -> JobEnding:
        for how in ("finished", "stopped", "failed"):
            if (Path(entry.directory) / how).exists():
                return JobEnding(how, "as it said")
        return JobEnding("died", "its process died" if status is None else f"status {status}")

    def admit(self, entry: JobEntry) -> JobEntry:
        said = json.loads((Path(entry.directory) / "script.json").read_text())
        script = (*STUB, "job", entry.directory) if entry.script else ()
        return msgspec.structs.replace(entry, max_restarts=said.get("max_restarts", 3), script=script)


if __name__ == "__main__":
    log_to(STANDARD_ERROR)
    raise SystemExit(run_pool(Path(sys.argv[1]), PoolWiring(programs=StubPrograms)))
