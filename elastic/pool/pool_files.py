"""The pool's side of the files of its jobs on other machines: which files a start of a job is told of and may ask for,
and what comes back of it."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from elastic.core.cluster.types import JobId, NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.file_exchange import FileFetcher, FileServer, FilesUnavailable
from elastic.pool.job_files import SubmittedFile
from elastic.pool.ports import JobEntry
from elastic.protocol.admission import is_secret
from elastic.protocol.frames import WireError
from elastic.system.isolation import IsolatedLoop

SayOfFiles = Callable[[w.OfFiles], object]
log = structlog.get_logger(__name__)

AT_WORK_MAX = 64
"""Messages of a node on files that may be at work."""
FREE_BYTES_MIN = 1_000_000_000
"""Of the pool's disk, for its journals and its jobs', whatever nodes keep."""
AGAIN_S = 5.0
"""After which what a node keeps is fetched again where that failed."""


class FilePrograms(Protocol):
    """Says which files jobs have, and where they are kept. All but `files_token` block."""

    def files_token(self, job: JobId, placement: int, node: NodeId) -> str: ...

    def files(self, entry: JobEntry, phase: PhaseKind) -> Sequence[SubmittedFile]:
        """Returns what a resident for this phase needs. Raises `ValueError` if it is not what was submitted."""
        ...

    def lacking(self, entry: JobEntry, placement: int, files: Sequence[w.JobFile]) -> Sequence[tuple[w.JobFile, Path]]:
        """Returns the files that the pool has not, of those that a trainer keeps or a script puts out, each with where
        to fetch it to. A trainer's come all or none; of a script's those are left out for which there is no room.
        Raises `ValueError` for what is none of these."""
        ...

    def keep(self, entry: JobEntry, placement: int, files: Sequence[w.JobFile]) -> Sequence[str]:
        """Gives what was fetched its names, and removes what is not kept there any more. Returns the digests of those
        that are here: a trainer's are all. Raises `OSError`."""
        ...


class FileShell(Protocol):
    """What the pool's shell knows of jobs and nodes."""

    def entry_of(self, job: JobId, placement: int) -> JobEntry | None: ...

    def phase_of(self, node: NodeId) -> PhaseKind | None: ...

    def returns(self, job: JobId, *, goes_on: bool) -> None:
        """Note whether a checkpoint of the job's trainer is on its way."""
        ...

    def job_unfit(self, job: JobId, placement: int, cause: str) -> None: ...


class PoolFiles:
    """Serves the nodes of a pool, which `shell` knows. A node that sends nothing is waited for as long as
    `patience_s`."""

    def __init__(
        self,
        programs: FilePrograms,
        shell: FileShell,
        isolated: IsolatedLoop,
        patience_s: float,
    ) -> None:
        self.programs, self.shell, self.isolated, self.patience_s = programs, shell, isolated, patience_s
        self._desks: dict[NodeId, _Desk] = {}

    def entry(self, node: NodeId, message: w.AskFiles | w.FilesThere) -> tuple[JobEntry | None, PhaseKind | None]:
        """Return the record of the job whose start on this node the message is of, and what the node is for."""
        job, placement = message.job, message.placement
        if not is_secret(message.token, self.programs.files_token(job, placement, node)):
            return None, None
        return self.shell.entry_of(job, placement), self.shell.phase_of(node)

    def heard(self, node: NodeId, message: w.OfFiles, say: SayOfFiles) -> None:
        """Take a message of a node's agent, to whom `say` sends. Raises `WireError` for too many at once."""
        desk = self._desks.get(node)
        if desk is None or desk.say != say:
            self.left(node)
            desk = self._desks[node] = _Desk(node, say, self)
        desk.heard(message)

    def left(self, node: NodeId) -> None:
        """The node's agent is gone, or another one is there."""
        desk = self._desks.pop(node, None)
        if desk is not None:
            desk.close()


class _Desk:
    """One connection of a node's agent, to whom `say` sends."""

    def __init__(self, node: NodeId, say: SayOfFiles, files: PoolFiles) -> None:
        self.say = say
        self._node, self._files = node, files
        self._server, self._fetcher = FileServer(say), FileFetcher(FREE_BYTES_MIN)
        self._fetcher.joined(say, files.patience_s)
        self._tasks = {asyncio.create_task(self._server.run(), name=f"files for {node}")}
        self._there: dict[JobId, w.FilesThere] = {}
        """What the node said last that there is of a job."""
        self._taking: dict[JobId, asyncio.Event] = {}
        """By job of which something is taken: set when the node says something else."""
        self._telling = asyncio.Lock()

    def close(self) -> None:
        self._fetcher.left()
        for task in self._tasks:
            task.cancel()

    def heard(self, message: w.OfFiles) -> None:
        match message:
            case w.AskChunk():
                self._server.asked(message)
            case w.FileChunk():
                self._fetcher.heard(message)
            case w.AskFiles():
                self._spawn(self._tell(message))
            case w.FilesThere(job=job):
                if self._files.entry(self._node, message)[0] is None:
                    return
                self._there[job] = message
                if job in self._taking:
                    self._taking[job].set()
                    return
                self._taking[job] = asyncio.Event()
                self._spawn(self._take(job))
            case _:
                raise WireError(f"a node does not say {type(message).__name__}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        if len(self._tasks) > AT_WORK_MAX:
            work.close()
            raise WireError(f"asks for more than {AT_WORK_MAX} things at once")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tell(self, asked: w.AskFiles) -> None:
        entry, phase = self._files.entry(self._node, asked)
        job, placement = asked.job, asked.placement
        with self._files.isolated.attempt(f"files of {job}") as attempt:
            try:
                if entry is None or phase is None:
                    raise FilesUnavailable("the pool has no such start of this job any more")
                async with self._telling:  # A node that asks often keeps no more than one thread busy.
                    found = await asyncio.to_thread(self._files.programs.files, entry, phase)
            except FilesUnavailable as error:
                self.say(w.FilesNeeded(job, placement, cause=str(error)))
            except ValueError as error:
                self.say(w.FilesNeeded(job, placement, cause=str(error)))
                self._files.shell.job_unfit(job, placement, str(error))
            else:
                self._server.offer(found)
                self.say(w.FilesNeeded(job, placement, tuple(one.file for one in found)))
        if attempt.fault:
            self.say(w.FilesNeeded(job, placement, cause=f"its files cannot be told: {attempt.fault}"))

    async def _take(self, job: JobId) -> None:
        """Take what there is of a job until all of it is here. What is being fetched comes to its end, whatever is said
        meanwhile: of a large file beside one that is written often nothing would be fetched otherwise."""
        told, newer = "", self._taking[job]
        try:
            while True:
                newer.clear()
                with self._files.isolated.attempt(f"what {job} keeps"):
                    try:
                        await self._take_once(self._there[job])
                        if not newer.is_set():
                            return
                    except (FilesUnavailable, OSError, ValueError) as error:
                        self._files.shell.returns(job, goes_on=False)
                        if not newer.is_set() and told != (told := str(error)):
                            log.warning("what a node keeps cannot be had", node=self._node, job=job, cause=told)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        await newer.wait()
        finally:
            del self._taking[job], self._there[job]
            self._files.shell.returns(job, goes_on=False)

    async def _take_once(self, there: w.FilesThere) -> None:
        """Have what the node said, if the job has such a start. No file of a script's keeps its others from coming.
        Raises `FilesUnavailable`, `OSError` and `ValueError`."""
        programs, cause = self._files.programs, ""
        entry, phase = self._files.entry(self._node, there)
        if entry is None or phase is not PhaseKind.TRAIN:
            return
        lacking = await asyncio.to_thread(programs.lacking, entry, there.placement, there.files)
        if lacking and not entry.script:
            self._files.shell.returns(there.job, goes_on=True)
        for file, place in lacking:
            try:
                await self._fetcher.fetch(file, place)
            except (FilesUnavailable, OSError) as error:
                if not entry.script:
                    raise
                cause = str(error)
        kept = tuple(await asyncio.to_thread(programs.keep, entry, there.placement, there.files))
        self.say(w.FilesKept(there.job, there.placement, kept))
        if left := [file for file in there.files if file.digest not in {*kept}]:
            raise FilesUnavailable(
                cause or f"the pool's disk has no room for {left[0].path}: {left[0].size_bytes} bytes"
            )
