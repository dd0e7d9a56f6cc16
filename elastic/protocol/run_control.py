"""Commands to a run that goes on, through the socket in its directory: stop, caps by provider, a budget, its status.
`elastic.pool.control_messages` speaks to pools of many jobs in the same way.

- The socket (`control.sock`) belongs to the process that is at the run now, and to its user: nobody else can connect.
- A command is acknowledged once it is durable in the run's journal, and holds for every later process of the run.
- A command that is repeated under its id is acknowledged once more, and done once. So a client without an answer may
  repeat it.
- One connection carries one request and one answer, each a line of JSON (`Request`, `Answer`).
"""

import asyncio
import contextlib
import os
import pwd
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

SOCKET = "control.sock"
SERVED_VARIABLE = "ELASTIC_SERVED"
"""Environment variable with the hosted run and its proof, for its process only and not for that process's children."""
_PEER = struct.Struct("3i")
"""The kernel's record of the listening process: process, user, group."""
REQUEST_BYTES_MAX = 16 * 1024
ANSWER_BYTES_MAX = 4 * 1024 * 1024
ADDRESS_BYTES_MAX = 100
"""The kernel takes 107 bytes for a socket's path."""
GPUS_MAX, USD_MAX = 10_000_000, 1e9
"""Above any fleet and any bill: what is larger is a mistake."""

CommandId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class _ControlRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", forbid_unknown_fields=True):
    pass


class StopRun(_ControlRequest, frozen=True, tag="stop"):
    """Checkpoint, give everything back, and end as `stopped`; the run can be resumed."""

    id: CommandId
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class CapProvider(_ControlRequest, frozen=True, tag="cap"):
    """Hold at most `gpus` GPUs of the provider with this name; None for as many as its section allows."""

    id: CommandId
    provider: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    gpus: Annotated[int, msgspec.Meta(ge=0, le=GPUS_MAX)] | None


class SetBudget(_ControlRequest, frozen=True, tag="budget"):
    """The run is never to cost more than `usd` in all, what it has cost so far included; None for no limit."""

    id: CommandId
    usd: Annotated[float, msgspec.Meta(ge=0, le=USD_MAX)] | None


class AskStatus(_ControlRequest, frozen=True, tag="status"):
    pass


Request: TypeAlias = StopRun | CapProvider | SetBudget | AskStatus


class _Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="answer"):
    pass


class Acknowledged(_Reply, frozen=True, tag="acknowledged"):
    """The command is durable. `repeated`: it was before, and nothing was done now."""

    id: str
    repeated: bool = False


class Refused(_Reply, frozen=True, tag="refused"):
    """Nothing was done. `kind` is one of `invalid`, `unknown_provider`, `conflict` (the id belongs to another command)
    and `ending` (the run is giving everything back already)."""

    kind: str
    message: str


class RunStatusReply(_Reply, frozen=True, tag="status"):
    """How the run stands: `status` as `elastic run --json` samples it, with its caps, budget and conditions."""

    run: str
    pid: int
    status: dict[str, Any]


Answer: TypeAlias = Acknowledged | Refused | RunStatusReply
A = TypeVar("A", bound=_Reply)
T = TypeVar("T")


class ControlError(Exception):
    """The process of a run, or of a pool, could not be asked.

    ControlError
    ├── RunNotFound         nothing is at it now
    ├── RunOfAnotherUser    somebody else's process is
    ├── RunSilent           no answer in time; the command may have been done, and may be repeated under its id
    └── CommandRefused      the run says no, and why
    """


class RunNotFound(ControlError):
    pass


class RunOfAnotherUser(ControlError):
    pass


class RunSilent(ControlError):
    pass


class CommandRefused(ControlError):
    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


def new_command_id() -> str:
    return secrets.token_hex(16)


class ExpectedPeer(NamedTuple):
    """The process that must listen at a socket in a directory that others can change. A field that is None does not
    matter."""

    uid: int | None
    pid: int | None


ANYBODY = ExpectedPeer(None, None)


class RunControl:
    """Asks the process that is at a run. Every call raises `ControlError`, and takes at most `timeout_s`."""

    def __init__(self, run_dir: Path, timeout_s: float = 10.0, peer: ExpectedPeer = ANYBODY) -> None:
        self._line = ControlLine("run", run_dir, timeout_s, peer)

    async def stop(self, reason: str, command: str = "") -> Acknowledged:
        """Returns once the run is bound to stop, before it has."""
        return await self._ask(StopRun(id=command or new_command_id(), reason=reason), Acknowledged)

    async def cap(self, provider: str, gpus: int | None, command: str = "") -> Acknowledged:
        return await self._ask(CapProvider(id=command or new_command_id(), provider=provider, gpus=gpus), Acknowledged)

    async def budget(self, usd: float | None, command: str = "") -> Acknowledged:
        return await self._ask(SetBudget(id=command or new_command_id(), usd=usd), Acknowledged)

    async def status(self) -> RunStatusReply:
        return await self._ask(AskStatus(), RunStatusReply)

    async def _ask(self, request: Request, kind: type[A]) -> A:
        answer = await self._line.ask(request, Answer)
        if isinstance(answer, Refused):
            raise CommandRefused(answer.kind, answer.message)
        return self._line.expected(answer, kind)


class ControlLine:
    """Asks whatever listens at the socket in a directory: one request, one answer. `what` it is stands in messages."""

    def __init__(self, what: str, directory: Path, timeout_s: float, peer: ExpectedPeer = ANYBODY) -> None:
        self._what = what
        self._peer = peer
        self._directory = directory
        self._timeout_s = timeout_s

    @property
    def _name(self) -> str:
        return f"{self._what} {self._directory}"

    async def ask(self, request: msgspec.Struct, answers: Any) -> Any:
        """One of `answers`, a union of messages. Raises `ControlError`, and takes at most `timeout_s`."""
        try:
            asked = msgspec.json.encode(request) + b"\n"
        except UnicodeEncodeError as error:
            raise CommandRefused("invalid", f"found {error.object!r}; allowed: text in UTF-8") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                line = await self._exchange(asked)
        except TimeoutError:
            raise RunSilent(f"{self._name}: its process did not answer within {self._timeout_s:g} s") from None
        try:
            return msgspec.json.decode(line, type=answers)
        except msgspec.DecodeError as error:
            said = "its process ended before it had answered" if not line else f"its answer is none: {error}"
            raise RunSilent(f"{self._name}: {said}") from error

    def expected(self, answer: object, kind: type[T]) -> T:
        if not isinstance(answer, kind):
            raise RunSilent(f"{self._name}: it answered another question ({type(answer).__name__})")
        return answer

    async def _exchange(self, line: bytes) -> bytes:
        reader, writer = await self._connect()
        try:
            self._check(writer.get_extra_info("socket"))
            writer.write(line)
            await writer.drain()
            return await reader.readline()
        except (ConnectionError, asyncio.LimitOverrunError, ValueError):
            return b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _check(self, connected: socket.socket) -> None:
        """Raises `RunOfAnotherUser` if somebody else listens than should."""
        pid, uid, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if self._peer.uid not in (None, uid) or self._peer.pid not in (None, pid):
            raise RunOfAnotherUser(f"{self._name}: process {pid} of user {uid} listens at its socket")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            with socket_address(self._directory) as address:
                return await asyncio.open_unix_connection(address, limit=ANSWER_BYTES_MAX)
        except PermissionError as error:
            raise RunOfAnotherUser(
                f"{self._name} belongs to {_owner(self._directory)}, and so do its commands"
            ) from error
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
            gone = "no process is at it now" if self._directory.is_dir() else f"there is no such {self._what}"
            raise RunNotFound(f"{self._name}: {gone}") from error
        except OSError as error:
            raise RunNotFound(f"{self._name}: its control socket: {error.strerror or error}") from error


@contextlib.contextmanager
def socket_address(run_dir: Path, name: str = SOCKET) -> Iterator[str]:
    """A path of the socket of this name in a directory that the kernel takes, for as long as the context lasts, however
    long the directory's own path is. Raises `OSError`."""
    path = str(run_dir / name)
    if len(os.fsencode(path)) <= ADDRESS_BYTES_MAX:
        yield path
        return
    directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{name}"
    finally:
        os.close(directory)


def private_socket(directory: Path, name: str = SOCKET) -> socket.socket:
    """Bind a socket of this name that only its user can open, where a former process has left one in its place.

    It does not listen yet. Raises `OSError`.
    """
    (directory / name).unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with socket_address(directory, name) as address:
            bound.bind(address)
        (directory / name).chmod(0o600)  # Before it listens nobody can connect.
    except BaseException:
        bound.close()
        raise
    return bound


def _owner(run_dir: Path) -> str:
    try:
        uid = run_dir.stat().st_uid
    except OSError:
        return "another user"
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
