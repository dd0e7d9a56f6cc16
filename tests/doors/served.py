"""A run's doors, served over a real socket."""

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path, PurePosixPath

from starlette.applications import Starlette

from elastic.front.doors.access import DoorAccess, read_network
from elastic.front.doors.doors import DOORS, TrainerDoors
from elastic.front.doors.roots import WeightsRoot, WeightsRoots
from elastic.front.errors import ERROR_SHAPES
from elastic.protocol.http_server import PeerLimits, serving
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.tls import Certificate
from tests.doors.memory_run import MemoryRun

SECRETS = RunSecrets(b"d" * 32)
REQUESTS, CONTROL = SECRETS.requests_key(), SECRETS.control_key()
THEIRS = "/shared/weights"
"""What the trainer calls the root of its weights."""
METRICS = 'vllm:num_requests_running{engine="spot-1"} 1\n'


class ServedDoors:
    """`root` is where the directories are that the trainer names, below `THEIRS` unless a test says otherwise."""

    def __init__(self, run: MemoryRun, doors: TrainerDoors, root: Path, url: str) -> None:
        self.run, self.doors, self.root, self.url = run, doors, root, url

    def with_key(self, key: str) -> str:
        """The URL of a client that can send no header."""
        return self.url.replace("http://", f"http://run:{key}@")


@contextlib.asynccontextmanager
async def served_doors(
    root: Path,
    opened: Sequence[str] = tuple(DOORS),
    plain: Sequence[str] = (),
    certificate: Certificate | None = None,
    head_timeout_s: float = 5.0,
    theirs: str = THEIRS,
) -> AsyncIterator[ServedDoors]:
    run = MemoryRun()
    networks = [read_network(one) for one in plain]
    listener = socket.create_server(("127.0.0.1", 0))

    async def metrics() -> str:
        return METRICS

    async def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    doors = TrainerDoors(
        run=run,
        roots=WeightsRoots([WeightsRoot(PurePosixPath(theirs), root)]),
        access=DoorAccess(SECRETS, networks),
        alive=lambda: True,
        metrics=metrics,
        decode=decode,
        opened=opened,
    )
    app = Starlette(routes=doors.routes(), exception_handlers=ERROR_SHAPES)
    limits = PeerLimits(head_timeout_s=head_timeout_s)
    async with serving(app, listener, limits, certificate=certificate, plain=networks) as url:
        yield ServedDoors(run, doors, root, url)
