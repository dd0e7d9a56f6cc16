"""The files of jobs on a node of another machine: what its residents need, and what of theirs goes back to the pool.

`files/` has what was fetched, by digest, and `jobs/` a directory for each start of a job. When there is no room for
more, those go first that were used last the longest ago; what a resident uses stays. What a script may write is a copy.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import structlog

from elastic.core.cluster.types import JobId
from elastic.pool import messages as w
from elastic.pool.file_exchange import PART, FileFetcher, FileServer, FilesUnavailable
from elastic.pool.job_files import SCRIPT_LOG, SubmittedFile, check_path, submitted_file
from elastic.protocol.best_checkpoint import note_returned
from elastic.system.files import write_whole
from elastic.system.host import here

log = structlog.get_logger(__name__)

LOOK_S, LOOK_MOST_S, LOOK_TIMES = 0.25, 5.0, 10.0
"""How often a node agent looks for what goes back: so many times as long as the look took, within these bounds."""
LOG_BYTES, LOG_EVERY_NS = 256 * 1024, 5_000_000_000
"""How much of the end of a script's log goes back, and how often."""
FILES, JOBS = "files", "jobs"
SayOfFiles = Callable[[w.OfFiles], object]


@dataclass
class _Start:
    """A start of a job on the node. `digests` are those of its files, `said` what goes back, `kept` what has gone."""

    order: w.StartResidentFrame
    place: Path
    digests: Collection[str] = ()
    said: w.FilesThere | None = None
    kept: Collection[str] = ()
    runs: bool = True
    returning: "asyncio.Task[None] | None" = None
    answer: "asyncio.Future[w.FilesNeeded]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def tail(self) -> Path:
        """Where the end of a script's log is."""
        return self.place.parent / SCRIPT_LOG

    @property
    def uses(self) -> bool:
        return self.runs or (self.returning is not None and not self.returning.done())

    @property
    def question(self) -> w.AskFiles:
        return w.AskFiles(self.order.job, self.order.placement, self.order.files_token)

    def is_of(self, message: w.FilesNeeded | w.FilesKept) -> bool:
        return message.placement == self.order.placement


class _Seen(NamedTuple):
    """A file of a start that may go back, as it was at the last look. `file`: as which the pool is told of it, if it
    is."""

    size_bytes: int
    mtime_ns: int
    file: SubmittedFile | None


class NodeFiles:
    """The files of one node, in its `directory`, of at most `bytes_max` together."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._root, self._bytes_max = directory, bytes_max
        self._say: SayOfFiles = _nobody
        self._fetcher, self._server = FileFetcher(), FileServer(lambda message: self._say(message))
        self._serving: asyncio.Task[None] | None = None
        self._starts: dict[JobId, _Start] = {}
        self._checked: dict[str, tuple[int, int]] = {}
        """Size and time of change of blobs that had their digest when they were looked at."""
        self._changing = asyncio.Lock()

    def joined(self, say: SayOfFiles, patience_s: float) -> None:
        """The pool is there, and is told again what it may not have heard. It is waited for as long as `patience_s`."""
        self._say = say
        self._fetcher.joined(say, patience_s)
        self._serving = self._serving or asyncio.create_task(self._server.run(), name="files that go back")
        for start in self._starts.values():
            if not start.answer.done():
                say(start.question)
            if start.said is not None:
                say(start.said)

    def left(self) -> None:
        self._say = _nobody
        self._fetcher.left()

    async def aclose(self) -> None:
        tasks = [self._serving, *(start.returning for start in self._starts.values())]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    def heard(self, message: w.OfFiles) -> None:
        match message:
            case w.FilesNeeded(job=job) if job in self._starts and self._starts[job].is_of(message):
                if not self._starts[job].answer.done():
                    self._starts[job].answer.set_result(message)
            case w.FilesKept(job=job) if job in self._starts and self._starts[job].is_of(message):
                self._note_kept(self._starts[job], message.digests)
            case w.AskChunk():
                self._server.asked(message)
            case w.FileChunk():
                self._fetcher.heard(message)
            case _:
                pass

    async def bring(self, order: w.StartResidentFrame) -> dict[str, str]:
        """Have the files of this start in its directory; returns the resident's variables.

        Raises `FilesUnavailable`.
        """
        former = self._starts.get(order.job)
        if former is not None and former.returning is not None:
            former.returning.cancel()
        start = self._starts[order.job] = _Start(order, self._root / order.directory)
        self._say(start.question)
        try:
            async with asyncio.timeout(self._fetcher.patience_s):
                needed = await start.answer
        except TimeoutError:
            raise FilesUnavailable(
                f"the pool did not say within {self._fetcher.patience_s:g} s which files there are"
            ) from None
        if needed.cause:
            raise FilesUnavailable(needed.cause)
        try:
            await self._have(start, needed.files)
        except OSError as error:
            raise FilesUnavailable(f"{self._root}: {error.strerror or error}") from error
        if order.returned or order.script:
            start.returning = asyncio.create_task(self._return(start), name=f"what {order.job} keeps")
        return {w.FILES_VARIABLE: str(start.place)}

    def over(self, job: JobId) -> None:
        """The job's resident is gone; what it has kept goes back nevertheless."""
        if job in self._starts:
            self._starts[job].runs = False

    async def _have(self, start: _Start, files: w.JobFiles) -> None:
        try:
            for file in files:
                check_path(file.path)
        except ValueError as error:
            raise FilesUnavailable(str(error)) from error
        start.digests = {file.digest for file in files}
        by_digest = {file.digest: file for file in files}
        async with self._changing:  # One start at a time makes room, and fills it.
            lacking = [file for file in by_digest.values() if not await asyncio.to_thread(self._has, file)]
            copied = sum(file.size_bytes for file in files) if start.order.script else 0
            await asyncio.to_thread(self._make_room, sum(file.size_bytes for file in lacking) + copied)
            for file in lacking:
                try:
                    await self._fetcher.fetch(file, self._blob(file))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    await asyncio.to_thread(self._make_room, file.size_bytes, all_that_may=True)
                    await self._fetcher.fetch(file, self._blob(file))
                self._note(file)
            await asyncio.to_thread(self._place, start, files)

    def _blob(self, file: w.JobFile) -> Path:
        return self._root / FILES / file.digest

    def _note(self, file: w.JobFile) -> None:
        self._blob(file).chmod(0o400)
        found = self._blob(file).lstat()
        self._checked[file.digest] = found.st_size, found.st_mtime_ns

    def _has(self, file: w.JobFile) -> bool:
        """Whether the file is here, and is what it should be; what is not goes. Blocks."""
        blob = self._blob(file)
        with contextlib.suppress(FileNotFoundError):
            found = blob.lstat()
            known = self._checked.get(file.digest)
            if known == (found.st_size, found.st_mtime_ns):
                return True
            with contextlib.suppress(ValueError):
                if submitted_file(blob, file.path).file.digest == file.digest:
                    self._note(file)
                    return True
            log.warning("a file of the node was damaged, and is fetched again", path=file.path)
            blob.unlink()
        return False

    def _make_room(self, needed_bytes: int, *, all_that_may: bool = False) -> None:
        """Remove what was used last the longest ago until there is room. Blocks. Raises `FilesUnavailable`, without
        having removed anything, if there cannot be enough."""
        (self._root / FILES).mkdir(mode=0o700, exist_ok=True)
        (self._root / JOBS).mkdir(mode=0o700, exist_ok=True)
        used = [start for start in self._starts.values() if start.uses]
        pinned = {digest for start in used for digest in start.digests}
        places = {start.place.parent for start in used}
        entries = [one for one in (self._root / FILES).iterdir() if one.name.removesuffix(PART) not in pinned]
        entries += [one for job in (self._root / JOBS).iterdir() for one in job.iterdir() if one not in places]
        of_entries = {entry: _regular(entry) for entry in entries}
        of_all = [*_regular(self._root / FILES), *_regular(self._root / JOBS)]
        names = Counter(its.st_ino for its in of_all)  # One as a file that has come, and one in each of its starts.
        sizes = {its.st_ino: its.st_size for its in of_all}
        going = Counter(its.st_ino for found in of_entries.values() for its in found)
        held_bytes, stays_bytes = sum(sizes.values()), sum(sizes[one] for one in names - going)
        could_free_bytes = shutil.disk_usage(self._root).free + held_bytes - stays_bytes
        if stays_bytes + needed_bytes > self._bytes_max:
            raise FilesUnavailable(
                f"its files take {needed_bytes} bytes, and the node's residents have {stays_bytes} already; allowed "
                f"there: {self._bytes_max} together (elastic pool join --files-gb)"
            )
        if needed_bytes > could_free_bytes:
            raise FilesUnavailable(
                f"its files take {needed_bytes} bytes, and the disk of {self._root} has room for {could_free_bytes}"
            )
        for entry in sorted(entries, key=lambda one: one.lstat().st_atime_ns):
            free_bytes = shutil.disk_usage(self._root).free
            if not all_that_may and held_bytes + needed_bytes <= self._bytes_max and needed_bytes <= free_bytes:
                return
            names.subtract(its.st_ino for its in of_entries[entry])
            held_bytes -= sum(sizes.pop(its.st_ino, 0) for its in of_entries[entry] if names[its.st_ino] <= 0)
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _place(self, start: _Start, files: w.JobFiles) -> None:
        """Give the files their names for a start. Blocks."""
        place, now_ns = start.place, here().unix_ns()
        if not start.order.script and place.parent.parent.is_dir():
            for other in place.parent.parent.iterdir():
                if other != place.parent:
                    shutil.rmtree(other)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(place.parent, ns=(now_ns, now_ns))
        for file in files:
            target, blob = place / file.path, self._blob(file)
            os.utime(blob, ns=(now_ns, blob.lstat().st_mtime_ns))
            for parent in [*(place / file.path).relative_to(place).parents][-2::-1]:
                if (place / parent).is_symlink() or (place / parent).is_file():
                    (place / parent).unlink()
                (place / parent).mkdir(exist_ok=True)
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            draft = place / f".{file.digest}{PART}"
            draft.unlink(missing_ok=True)
            if start.order.script:
                shutil.copyfile(blob, draft)
                draft.chmod(0o700 if file.executable else 0o600)
            else:
                os.link(blob, draft)
            draft.replace(target)
        for name in start.order.returned if not start.order.script else ():
            (place / name).mkdir(exist_ok=True)
            note_returned(place / name, ())

    async def _return(self, start: _Start) -> None:
        """Tell the pool what there is to go back whenever that changes, until all has gone of a resident that is
        gone."""
        seen: Mapping[Path, _Seen] = {}
        left_out: Mapping[str, str] = {}
        loop = asyncio.get_running_loop()
        while True:
            last, began_s = not start.runs, loop.time()
            with contextlib.suppress(ValueError, OSError):  # Something changes just now: the next look tells.
                if start.order.script:
                    with contextlib.suppress(OSError):
                        await asyncio.to_thread(_copy_tail, self._root / start.order.log, start.tail, last=last)
                former, (seen, stays) = left_out, await asyncio.to_thread(_looked, start, seen, last=last)
                if new := {path: why for path, why in stays.items() if path not in former}:
                    log.warning("what a script puts out stays on its node", job=start.order.job, **_few(new))
                left_out = {**former, **new}
                found = [one.file for one in seen.values() if one.file is not None]
                order, files = start.order, tuple(one.file for one in found)
                said = w.FilesThere(order.job, order.placement, order.files_token, files)
                if said != start.said:
                    self._server.offer(found)
                    start.said = said
                    self._say(said)
                if last and {one.digest for one in files} <= {*start.kept}:
                    return
            await asyncio.sleep(min(max(LOOK_S, LOOK_TIMES * (loop.time() - began_s)), LOOK_MOST_S))

    def _note_kept(self, start: _Start, digests: Collection[str]) -> None:
        start.kept = digests
        lacking = {one.path for one in (start.said.files if start.said else ()) if one.digest not in {*digests}}
        there = {one.path for one in (start.said.files if start.said else ())}
        for name in start.order.returned if not start.order.script else ():
            tops, late = (
                {path.split("/")[1] for path in paths if path.startswith(f"{name}/")} for paths in (there, lacking)
            )
            with contextlib.suppress(OSError):
                note_returned(start.place / name, tops - late)


def _nobody(message: w.OfFiles) -> None:
    """There is no connection."""


def _looked(start: _Start, seen: Mapping[Path, _Seen], *, last: bool) -> tuple[Mapping[Path, _Seen], dict[str, str]]:
    """Return the files of a start that may go back, as they are now, and why which of a script's do not. Blocks.

    What is hidden stays, but within a trainer's checkpoint. What a script is writing goes back once it is as it was at
    the look before, and until then as it has gone already. Raises `ValueError` or `OSError` where a trainer's files
    change meanwhile: a part of a checkpoint is none.
    """
    script, found, stays = start.order.script, dict[Path, _Seen](), dict[str, str]()
    for name in start.order.returned:
        for source in sorted(start.place.joinpath(name).rglob("*")):
            path = source.relative_to(start.place)
            if any(part.startswith(".") for part in (path.parts if script else path.parts[:2])):
                continue
            try:
                its = source.lstat()
                if not stat.S_ISREG(its.st_mode):
                    continue
                if len(found) >= w.FILES_MAX - 1:
                    stays[path.as_posix()] = f"more than {w.FILES_MAX - 1} files"
                    continue
                found[source] = _as_seen(start, source, its, seen.get(source), at_once=last or not script)
            except FileNotFoundError:
                if not script:
                    raise
            except (ValueError, OSError) as error:
                if not script:
                    raise
                stays[path.as_posix()] = str(error)
    if start.tail.is_file():
        found[start.tail] = _as_seen(start, start.tail, start.tail.lstat(), seen.get(start.tail), at_once=True)
    return found, stays


def _as_seen(start: _Start, source: Path, its: os.stat_result, before: _Seen | None, *, at_once: bool) -> _Seen:
    path = SCRIPT_LOG if source == start.tail else check_path(source.relative_to(start.place).as_posix())
    now, file = (its.st_size, its.st_mtime_ns), None if before is None else before.file
    if file is not None and now == (file.file.size_bytes, file.mtime_ns):
        return _Seen(*now, file)
    if at_once or (before is not None and now == (before.size_bytes, before.mtime_ns)):
        return _Seen(*now, submitted_file(source, path))
    return _Seen(*now, file if file is not None and file.file.digest in start.kept else None)


def _few(stays: Mapping[str, str]) -> dict[str, object]:
    """Return what is logged of files that stay: how many, and one of them with the reason."""
    path, why = next(iter(stays.items()))
    return {"files": len(stays), "such_as": repr(path), "why": why}


def _copy_tail(log: Path, tail: Path, *, last: bool) -> None:
    """Copy the end of a log if it was written since, unless that was just now and it is not the `last` time. Blocks."""
    with contextlib.suppress(FileNotFoundError):
        its, copied_ns = log.stat(), tail.stat().st_mtime_ns if tail.is_file() else 0
        if its.st_mtime_ns - copied_ns < (1 if last else LOG_EVERY_NS):
            return
        with log.open("rb") as file:
            file.seek(max(0, its.st_size - LOG_BYTES))
            write_whole(tail, file.read(LOG_BYTES), durable=False)
        os.utime(tail, ns=(its.st_atime_ns, its.st_mtime_ns))


def _regular(place: Path) -> list[os.stat_result]:
    """Return what the system knows of a file, or of each that is below a directory just now. Blocks."""
    found: list[os.stat_result] = []
    below = (Path(root, name) for root, _, names in os.walk(place) for name in names)
    for one in below if place.is_dir() else [place]:
        with contextlib.suppress(FileNotFoundError):
            found.append(one.lstat())
    return [its for its in found if stat.S_ISREG(its.st_mode)]
