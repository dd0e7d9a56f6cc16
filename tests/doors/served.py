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
from elastic.protocol.http_server import serving
from elastic.protocol.run_secrets import RunSecrets
from tests.doors.memory_run import MemoryRun

SECRETS = RunSecrets(b"d" * 32)
REQUESTS, CONTROL = SECRETS.requests_key(), SECRETS.control_key()
THEIRS = "/shared/weights"
"""What the trainer calls the root of its weights."""
METRICS = 'vllm:num_requests_running{engine="spot-1"} 1\n'


class ServedDoors:
    """`root` is where the directories are that the trainer calls `THEIRS`."""

    def __init__(self, run: MemoryRun, doors: TrainerDoors, root: Path, url: str) -> None:
        self.run, self.doors, self.root, self.url = run, doors, root, url

    def with_key(self, key: str) -> str:
        """The URL of a client that can send no header."""
        return self.url.replace("http://", f"http://run:{key}@")


@contextlib.asynccontextmanager
async def served_doors(
    root: Path, opened: Sequence[str] = tuple(DOORS), plain: Sequence[str] = ()
) -> AsyncIterator[ServedDoors]:
    run = MemoryRun()
    listener = socket.create_server(("127.0.0.1", 0))

    async def metrics() -> str:
        return METRICS

    async def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    doors = TrainerDoors(
        run=run,
        roots=WeightsRoots([WeightsRoot(PurePosixPath(THEIRS), root)]),
        access=DoorAccess(SECRETS, [read_network(one) for one in plain]),
        alive=lambda: True,
        metrics=metrics,
        decode=decode,
        opened=opened,
    )
    app = Starlette(routes=doors.routes(), exception_handlers=ERROR_SHAPES)
    async with serving(app, listener) as url:
        yield ServedDoors(run, doors, root, url)
