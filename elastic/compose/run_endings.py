"""How a run's process ended, as its journal tells, else as its exit status and its log do."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from elastic.compose.runs import is_claimed
from elastic.runtime.journal import INTERRUPTED as INTERRUPTED_STATUS
from elastic.runtime.journal import RUNNING, UNEXPECTED, JournalError, RunDirectory
from elastic.system.host import here
from elastic.system.outages import EXIT_OUTAGE
from elastic.system.processes import identity
from elastic.system.supervision import how_ended
from elastic.system.tenant_files import opened

FINISHED, FAILED, STOPPED, INTERRUPTED = "finished", "failed", "stopped", "interrupted"
"""How a process ended, as its journal says."""
BAD_INPUT, DIED, OUTAGE = "bad input", "died", "outage"
"""How one ended without an end of the run in its journal."""
EXIT_BAD_INPUT = 2
CAUSE_CHARACTERS = 2_000
_LOG_TAIL_BYTES = 16_384


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run's last process ended; `with_world` where machine or container went down, too."""

    how: str
    cause: str = ""
    with_world: bool = False


def world() -> str:
    """Return an identity that changes when the machine or container goes down: its boot, and this namespace's first
    process."""
    first = identity(1)
    return f"{here().boot_id()}:{first.start_ticks if first else 0}"


def ending_of(path: Path, log: Path, journals: int, its_world: str, status: int | None) -> Ending:
    """How the last process of the run in `path` ended, which wrote to `log` there.

    Before it the run had so many `journals`; it was begun in `its_world`; its exit `status` is None if not known.
    """
    directory = RunDirectory(path)
    with_world = its_world != world()
    how = ""
    if len(directory.journal_paths()) > journals:
        with contextlib.suppress(JournalError, OSError), directory.newest_journal() as journal:
            how = journal.meta().get("status", "")
    if how == "finished":
        return Ending(how=FINISHED)
    if how.startswith("stopped"):
        return Ending(how=STOPPED, cause=how.partition(": ")[2][:CAUSE_CHARACTERS])
    if how == f"failed: {INTERRUPTED_STATUS}":
        return Ending(how=INTERRUPTED)
    if how and how not in (RUNNING, UNEXPECTED):
        return Ending(how=FAILED, cause=how.removeprefix("failed: ")[:CAUSE_CHARACTERS])
    if status == EXIT_BAD_INPUT and not is_claimed(path):
        return Ending(how=BAD_INPUT, cause=_last_words(path, log))
    if status == EXIT_OUTAGE:
        return Ending(how=OUTAGE, cause=_last_words(path, log), with_world=with_world)
    if status == 0 and not how:
        return Ending(how=FINISHED)
    return Ending(how=DIED, cause=_death(status, with_world, path, log), with_world=with_world)


def _death(status: int | None, with_world: bool, path: Path, log: Path) -> str:
    if with_world:
        return "its machine or container went down"
    if status is None:
        return "its process died"
    words = "" if status < 0 else _last_words(path, log)
    return f"its process {how_ended(status)}{f': {words}' if words else ''}"


def _last_words(path: Path, log_path: Path) -> str:
    """Return the last message of the process on its failure."""
    with contextlib.suppress(OSError), opened(path, str(log_path)) as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
        begins = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        if begins:
            return "\n".join(lines[begins[-1] :]).removeprefix("error: ")[:CAUSE_CHARACTERS]
    return ""
