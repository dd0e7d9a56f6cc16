"""`python -m tests.clouds.modal_server DIRECTORY [--site PATH]…`: serves until its input ends or a signal comes.

Prints one line of JSON: where the client dials, and where the bench does.
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from google.protobuf.json_format import MessageToDict
from grpclib.server import Server  # pyright: ignore[reportMissingImports]

from tests.clouds.modal_server.faults import Faults
from tests.clouds.modal_server.platform import Platform
from tests.clouds.modal_server.servicer import ModalServicer

HOST = "127.0.0.1"
REQUEST_BYTES_MAX = 1 << 30


class BenchSide:
    """What a test or benchmark asks of the server, beside the protocol; and blobs, which the client puts by HTTP."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.servicer: Any = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/record", self._record),
            web.put("/faults", self._faults),
            web.put("/token", self._token),
            web.post("/containers/{task}/{what}", self._end),
            web.get("/apps/{name}", self._app),
            web.put("/apps/{name}/tags", self._tags),
            web.delete("/apps/{name}", self._remove),
            web.put("/blobs/{blob}", self._put_blob),
            web.get("/blobs/{blob}", self._get_blob),
        ]

    async def _record(self, request: web.Request) -> web.Response:
        platform, now_s = self._platform, time.time()
        records = [record.shown(now_s) for record in platform.records.values()]
        return web.json_response(
            {
                "containers": records,
                "running": sorted(platform.containers),
                "unfinished_calls": [
                    call.id
                    for call in platform.calls.values()
                    if any(put.output is None for put in call.inputs) and not call.cancelled
                ],
                "usd": sum(float(str(record["usd"])) for record in records),
                "rpcs": self.servicer.calls,
                "faults": platform.chance.counts,
                "queues": len(platform.queues),
            }
        )

    async def _faults(self, request: web.Request) -> web.Response:
        self._platform.chance.set(msgspec.convert(await request.json(), Faults))
        return web.Response()

    async def _token(self, request: web.Request) -> web.Response:
        self.servicer.refuse_token = (await request.json())["refuse"]
        return web.Response()

    async def _end(self, request: web.Request) -> web.Response:
        container = self._platform.containers.get(request.match_info["task"])
        if container is None:
            return web.Response(status=404)
        self._platform.end(container, {"kill": "was killed", "preempt": "preempted"}[request.match_info["what"]])
        await container.gone.wait()
        return web.Response()

    async def _app(self, request: web.Request) -> web.Response:
        """What was deployed under a name: its tags, each function as it was asked for, and the variants of these."""
        platform = self._platform
        app = next((app for app in platform.apps.values() if app.name == request.match_info["name"]), None)
        if app is None:
            return web.Response(status=404)
        functions = [f for f in platform.functions.values() if f.app is app and not f.base]
        names = {f.id: f.definition.function_name for f in functions}
        variants = [
            {"of": names[f.base], "parameters": platform.parameters(f), "options": MessageToDict(f.options)}
            for f in platform.functions.values()
            if f.base in names
        ]
        mounts = {mount for f in functions for mount in f.definition.mount_ids}
        return web.json_response(
            {
                "tags": app.tags,
                "functions": {f.definition.function_name: MessageToDict(f.definition) for f in functions},
                "variants": variants,
                "files": sorted({file.filename for mount in mounts for file in platform.mounts.get(mount, ())}),
                "images": platform.images,
                "volumes": {name: held for (kind, name), held in platform.names.items() if kind == "volume"},
            }
        )

    async def _tags(self, request: web.Request) -> web.Response:
        tags = await request.json()
        for app in self._platform.apps.values():
            if app.name == request.match_info["name"]:
                app.tags = tags
        return web.Response()

    async def _remove(self, request: web.Request) -> web.Response:
        apps = self._platform.apps
        for app_id in [app_id for app_id, app in apps.items() if app.name == request.match_info["name"]]:
            apps[app_id].name = ""
        return web.Response()

    async def _put_blob(self, request: web.Request) -> web.Response:
        content = await request.read()
        (self._platform.directory / "blobs" / request.match_info["blob"]).write_bytes(content)
        return web.Response(headers={"ETag": f'"{hashlib.md5(content).hexdigest()}"'})

    async def _get_blob(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self._platform.directory / "blobs" / request.match_info["blob"])


async def serve(directory: Path, site: list[str], port: int) -> None:
    platform = Platform(directory, site)
    bench = BenchSide(platform)
    http = web.Application(client_max_size=REQUEST_BYTES_MAX)
    http.add_routes(bench.routes())
    runner = web.AppRunner(http, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    bench_url = f"http://{HOST}:{runner.addresses[0][1]}"
    bench.servicer = ModalServicer(platform, bench_url)
    server = Server([bench.servicer])
    await server.start(HOST, port)
    sockets: Any = server._server
    platform.url = f"http://{HOST}:{sockets.sockets[0].getsockname()[1]}"
    print(json.dumps({"url": platform.url, "bench": bench_url}), flush=True)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    loop.run_in_executor(None, _end_of_input, loop, over)
    await over.wait()
    await platform.aclose()
    server.close()
    await runner.cleanup()
    sys.stdout.flush()
    os._exit(0)  # The thread that reads the input cannot be woken.


def _end_of_input(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
    sys.stdin.buffer.read()
    loop.call_soon_threadsafe(over.set)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--site", action="append", default=[])
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.directory.resolve(), arguments.site, arguments.port))


if __name__ == "__main__":
    main()
