"""A real serving host whose workers only sleep; ELASTIC_STUB_AGENT says how they misbehave."""

import asyncio
import os

from elastic.system.imports import importing

with importing():
    from elastic.engine.base import DeviceShare
    from elastic.worker.serving_host import parse_settings, serve_host
    from providers.serving_messages import HOST_VARIABLE, LendOrder


async def agent(order: LendOrder, share: DeviceShare) -> None:
    match os.environ.get("ELASTIC_STUB_AGENT"):
        case "end":
            return
        case "fail":
            raise RuntimeError("out of luck")
        case "stubborn":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
        case _:
            await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(serve_host(parse_settings(os.environ[HOST_VARIABLE]), agent))
