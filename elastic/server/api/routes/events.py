"""Streams: what happens in a run or in a pool's job, and what its processes write. Each can be taken up again where it
was left."""

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from elastic.report.log_files import LogFollower, LogGone
from elastic.runtime.journal import JournalError
from elastic.server.api.auth import credentials_of
from elastic.server.api.routes.common import RunDep, StateDep, rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.routes.runs import RunId
from elastic.server.api.state import ServerState
from elastic.server.api.streams import EventStreamResponse
from elastic.server.history.apart import CannotBeRead
from elastic.server.history.events import EventBatch, EventLog, EventsGone, Position, as_sent
from elastic.server.history.readers import ReadFiles
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem, not_found, problem_of
from elastic.server.store import runs
from elastic.server.store.runs import HostedRunRow
from elastic.system import tenant_files

router = APIRouter(prefix="/v1/runs", tags=["streams"], route_class=ModelRoute)

LOGS, LOG = "logs", ".log"
SOURCE = "[A-Za-z0-9._-]{1,100}"
LastEventId = Annotated[str | None, Header(max_length=200, description="the id of the last event that was received")]
After = Annotated[str | None, Query(max_length=200, description="as Last-Event-ID, for who cannot send headers")]
Follow = Annotated[bool, Query(description="wait for more; with false the stream ends at what is there now")]
EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_EVENT = 'id: 5f0c-4712\nevent: lease.preempted\ndata: {"lease":"l-9","detail":""}\n\n'
_LINE = 'id: process:118\ndata: {"line":"step 1/100  success  35%"}\n\n'
STREAM: dict[str, Any] = {
    "responses": {
        200: {
            "description": "server-sent events; a comment whenever nothing else was sent for 15 s",
            "content": {"text/event-stream": {"itemSchema": EVENT}},
        },
        204: {"description": "what is followed has ended, and nothing follows: do not connect again"},
    }
}


class Followed(NamedTuple):
    """What is followed: a run or a job, which had `ended` when the request came. `over` says whether it has by now, and
    `last_event` what ends the stream of its events then."""

    id: str
    directory: Path
    project: str
    ended: bool
    over: Callable[[], Awaitable[bool]]
    last_event: Callable[[], Awaitable[bytes]]


async def _followed(request: Request) -> Followed | None:
    """What the dependency that came with the route has found; None where the path is not valid, which is told next."""
    return getattr(request.state, "followed", None)


FollowedDep = Annotated[Followed, Depends(_followed)]


def add_streams(router: APIRouter, place: str, find: Callable[..., Awaitable[Followed]]) -> None:
    """Add the routes of what is at this place, which `find`, a dependency, finds."""

    async def found(request: Request, followed: Annotated[Followed, Depends(find)]) -> None:
        request.state.followed = followed

    def add(name: str, endpoint: Callable[..., Any], said: dict[str, Any]) -> None:
        dependencies = [*said["dependencies"], Depends(found)]
        router.get(f"{place}/{name}", **{**said, "dependencies": dependencies})(endpoint)

    add("events", events, stream_rules(_EVENT, "events-gone"))
    add("logs", logs, stream_rules(_LINE, "events-gone"))
    add("log-sources", log_sources, _with_example(["orchestrator", "process"], rules(Action.RUNS_READ, "not-found")))


async def _known_only(request: Request) -> None:
    """A filter that there is not would let everything through."""
    allowed = sorted(one.alias for one in request.scope["route"].dependant.query_params)
    if unknown := sorted(set(request.query_params) - set(allowed)):
        raise ApiProblem("invalid-request", f"query: found {unknown[0][:100]!r}; allowed: {', '.join(allowed)}")


def stream_rules(example: str, *problems: str) -> dict[str, Any]:
    said = rules(Action.RUNS_READ, "not-found", "journal-unreadable", *problems)
    content = {"text/event-stream": {"itemSchema": EVENT, "example": example}}
    responses = said["responses"] | STREAM["responses"]
    responses[200] = {**responses[200], "content": content}
    dependencies = [*said["dependencies"], Depends(_known_only)]
    return {**said, "dependencies": dependencies, "responses": responses, "response_class": StreamingResponse}


def _with_example(example: Any, said: dict[str, Any]) -> dict[str, Any]:
    shown = {200: {"content": {"application/json": {"example": example}}}}
    return {**said, "responses": said["responses"] | shown}


async def events(
    request: Request,
    found: FollowedDep,
    state: StateDep,
    last_event_id: LastEventId = None,
    after: After = None,
    follow: Follow = True,
    tail: Annotated[
        int | None, Query(ge=1, le=10_000, description="without an id: begin with the newest so many; none is followed")
    ] = None,
    until: Annotated[
        str | None, Query(max_length=200, description="with `tail`: the newest so many up to the event of this id")
    ] = None,
    routine: Annotated[
        bool, Query(description="false leaves out trajectories, groups and single workers' weights; none is followed")
    ] = True,
) -> Response:
    """Stream what happens in a run or a job, from its beginning or behind the event of an id: leases, workers, steps.

    Each event has an `id`; send the last one as Last-Event-ID to go on behind it. A `run.ended` event without an id
    ends the stream of a run that is over, `job.ended` a job's, an `error` with a problem one that cannot be read to its
    end. The newest begin with a `begin` event: `until` its id there are older ones, if its data says so.
    """
    begin = last_event_id or after or ""
    log, read_files = EventLog(found.directory), state.readers.of(found.project)
    # Before the answer begins, so that it can be a problem.
    if not follow and not begin and tail is not None:
        wanted = _Newest(tail, until or "", not routine)
        newest = await state.looks.at((found.id, wanted), lambda: _newest(log, wanted), read_files)
        return streamed(state, request, found.project, _reading(log, newest, read_files))
    few = not follow and not routine
    first = await state.looks.at((found.id, begin, few, "events"), lambda: _first(log, begin, few=few), read_files)
    if begin and found.ended and first.whole and not first.events:
        return Response(status_code=204)
    read = _EventsRead(first, few)
    body = _following(state, found, begin) if follow else _reading(log, read, read_files)
    return streamed(state, request, found.project, body)


def streamed(state: ServerState, request: Request, project: str, body: AsyncIterator[bytes]) -> Response:
    """Return a stream about a run of the project, which ends once its caller may not read the runs any more."""
    credentials = credentials_of(request)
    whole = EventStreamResponse(body)
    return state.streams.while_admitted(request, credentials, Action.RUNS_READ, project, whole)


class _Newest(NamedTuple):
    """What is asked for: so many of the newest events up to the one of this id, or but for routine ones."""

    most: int
    until: str
    few: bool


class _EventsRead(NamedTuple):
    """Events of which a batch has been read, up to an end if there is one; `head` is sent before them."""

    batch: EventBatch
    few: bool
    end: Position | None = None
    head: bytes = b""


def _first(log: EventLog, event: str, *, few: bool) -> EventBatch:
    """Return the first events behind the one of this id. Raises `ApiProblem`."""
    with _as_problems(event):
        return log.read(log.after(event), routine=not few)


def _newest(log: EventLog, wanted: _Newest) -> _EventsRead:
    """Return the newest events; of a journal whose end cannot be read the first ones. Raises `ApiProblem`."""
    with _as_problems(wanted.until):
        end = begin = Position(0, 0)
        try:
            end = log.until(wanted.until)
            begin = log.behind_last(wanted.most, end, routine=not wanted.few)
        except JournalError:
            if wanted.until:
                raise
        batch = log.read(begin, routine=not wanted.few, end=end if wanted.until else None)
    older = b"true" if begin != Position(0, 0) else b"false"
    head = b'id: %s\nevent: begin\ndata: {"older":%s}\n\n' % (log.id_at(begin).encode(), older)
    return _EventsRead(batch, wanted.few, end if wanted.until else None, head)


@contextlib.contextmanager
def _as_problems(event: str) -> Iterator[None]:
    try:
        yield
    except EventsGone:
        raise ApiProblem("events-gone", f"no event {event[:100]!r} is in the journals") from None
    except (JournalError, OSError) as error:
        raise unreadable(error) from error


def unreadable(error: JournalError | OSError) -> ApiProblem:
    """Return the problem of a journal that cannot be read: which file, and why, without its place on the server."""
    if isinstance(error, JournalError):
        path, _, cause = str(error).partition(": ")
        why = f"{Path(path).name}: {cause}; what stands before that is shown, and what needs no journal"
    else:
        why = str(error) if isinstance(error, CannotBeRead) else error.strerror or type(error).__name__
    return ApiProblem("journal-unreadable", f"the journal cannot be read now: {why}")


async def _reading(log: EventLog, read: _EventsRead, read_files: ReadFiles) -> AsyncIterator[bytes]:
    """Yield the events that exist now, of which a batch has been read. What cannot be read ends them with an `error`,
    which is a problem. Of `few` events the last one, `read`, says up to where."""
    batch, few, end, head = read
    if head:
        yield head
    while True:
        yield b"".join(as_sent(event) for _, event in batch.events)
        if batch.whole:
            if few and (id_ := log.id_at(batch.position)):
                yield b"id: %s\nevent: read\ndata: {}\n\n" % id_.encode()
            return
        try:
            batch = await read_files(functools.partial(log.read, batch.position, routine=not few, end=end))
        except (JournalError, OSError) as error:
            yield _error_event(error)
            return


def _error_event(error: JournalError | OSError) -> bytes:
    return b"event: error\ndata: %s\n\n" % problem_of(unreadable(error)).model_dump_json().encode()


async def _following(state: ServerState, found: Followed, begin: str) -> AsyncIterator[bytes]:
    """Yield existing and new events until what is followed is over."""
    read_files = state.readers.of(found.project)
    async with state.feeds.following(found.id, found.directory, found.over, read_files) as feed:
        position = await read_files(functools.partial(feed.log.after, begin))
        yield b": hello\n\n"
        while True:
            over = feed.over
            try:
                told, position, whole = await feed.after(position)
            except (JournalError, OSError) as error:
                yield _error_event(error)
                return
            if told:
                yield told
            elif whole and over:
                yield await found.last_event()
                return
            elif whole and not await feed.changed_behind(position, state.settings.ping_s):
                yield b": ping\n\n"


async def look_at(state: ServerState, run: str) -> HostedRunRow | None:
    """Return a run as it is now, or was a moment ago: many streams ask again and again."""

    def find() -> HostedRunRow | None:
        with state.store.reading() as connection:
            return runs.find(connection, run)

    return await state.looks.at(run, find)


async def _run(run: RunId, found: RunDep, state: StateDep) -> Followed:
    async def over() -> bool:
        now = await look_at(state, run)
        return now is None or now.ended

    async def last_event() -> bytes:
        now = await look_at(state, run)
        phase, cause = ("deleted", "") if now is None else (now.phase.value, now.cause)
        return end_event("run.ended", {"phase": phase, "cause": cause})

    return Followed(run, state.settings.run_dir(run), found.project, found.ended, over, last_event)


def end_event(name: str, said: dict[str, str | None]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(said)}\n\n".encode()


async def logs(
    request: Request,
    found: FollowedDep,
    state: StateDep,
    last_event_id: LastEventId = None,
    after: After = None,
    follow: Follow = True,
    source: Annotated[str, Query(pattern=f"^{SOURCE}$", description="whose: see `log-sources`")] = "process",
    tail: Annotated[int | None, Query(ge=0, le=100_000, description="begin with the last lines only")] = None,
) -> Response:
    """Stream a run's or a job's log, line by line: `process` has its progress and what it says of failures.

    A `log.ended` event without an id ends the log of a run or a job that is over.
    """
    name, begin = f"{LOGS}/{source}{LOG}", last_event_id or after or ""
    follower = LogFollower(source, lambda: tenant_files.opened(found.directory, name))

    def at_end() -> bool:
        if source != "process" and not tenant_files.is_file(found.directory, name):
            raise not_found("log", source)
        try:
            follower.seek(begin, tail)
        except LogGone:
            raise ApiProblem("events-gone", f"{begin[:100]!r} is no place in log {source!r}") from None
        return follower.at_end()

    if await state.readers.of(found.project)(at_end) and begin and found.ended:
        return Response(status_code=204)
    return streamed(state, request, found.project, _lines(state, found, follower, follow=follow))


async def _lines(state: ServerState, found: Followed, follower: LogFollower, *, follow: bool) -> AsyncIterator[bytes]:
    yield b": hello\n\n"
    read_files = state.readers.of(found.project)
    quiet_s, interval_s, seen = 0.0, state.settings.feed_interval_s, None
    while True:
        ended = await found.over()
        over = ended or not follow
        size = await state.looks.at((found.id, follower.name), follower.size, read_files)
        lines = [] if size == seen and not over else await read_files(functools.partial(follower.read, over=ended))
        seen = None if lines else size
        if lines:
            quiet_s = 0.0
            yield b"".join(
                b"id: %s\ndata: %s\n\n" % (one.id.encode(), one.model_dump_json(include={"line"}).encode())
                for one in lines
            )
        elif over:
            if follow:
                yield b"event: log.ended\ndata: {}\n\n"
            return
        else:
            quiet_s += interval_s
            if quiet_s >= state.settings.ping_s:
                quiet_s = 0.0
                yield b": ping\n\n"
            await asyncio.sleep(interval_s)


async def log_sources(found: FollowedDep, state: StateDep) -> list[str]:
    """Name the logs that a run or a job has: of its process, its orchestrator, its trainer and its workers."""
    listed = functools.partial(tenant_files.files, found.directory, LOGS, LOG)
    sources = [name.removesuffix(LOG) for name, _ in await state.readers.of(found.project)(listed)]
    return [source for source in sources if re.fullmatch(SOURCE, source)]


add_streams(router, "/{run}", _run)
