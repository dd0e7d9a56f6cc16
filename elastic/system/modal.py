"""Modal as pools of functions and providers of workers see it: whether Elastic's app is there, what it costs, how
containers are. The client is an extra, and is imported when it is used.

Source of the prices: https://modal.com/pricing, read in 2026. A container costs what it reserves, CPU by the physical
core (0.125 at least) and memory by the GiB, with each second of its life, idle ones included.
"""

import asyncio
import functools
import hashlib
import importlib
import importlib.metadata
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from elastic.system.outages import Outage
from elastic.system.plain_values import told

APP = "elastic"
VERSION_TAG = "elastic-version"
APP_VARIABLE = "ELASTIC_MODAL_APP"
"""How the command that deploys tells the app's module its name: Modal imports that module by itself."""
PACKAGES_VARIABLE, MODULES_VARIABLE = "ELASTIC_MODAL_PACKAGES", "ELASTIC_MODAL_MODULES"
"""What is installed in the app's image besides, and what is put into it."""
SOURCES = ("elastic", "functions", "policies", "providers", "traces")
"""The packages that a deployment consists of."""

USD_PER_CORE_S = 0.0000131
USD_PER_GIB_S = 0.00000222
USD_PER_GPU_S: Mapping[str, float] = {
    "T4": 0.000164,
    "L4": 0.000222,
    "A10": 0.000306,
    "L40S": 0.000542,
    "A100": 0.000583,
    "A100-40GB": 0.000583,
    "A100-80GB": 0.000694,
    "H100": 0.001097,
    "H200": 0.001261,
    "B200": 0.001736,
}
CORES_MIN = 0.125
MEMORY_MB_MIN = 128

GONE_POLL_S = 0.05


class ModalUnusable(Exception):
    """Modal cannot be used as it stands; the message says what was tried, and what would mend it."""


class ModalSilent(ModalUnusable, Outage):
    """Modal does not answer now."""


class Life(NamedTuple):
    """The times of a container's life, in Unix time: 0 for what has not come yet."""

    started_s: float
    finished_s: float


def modal() -> Any:
    """The package, which types need not know. Raises `ModalUnusable`."""
    try:
        return importlib.import_module("modal")
    except ModuleNotFoundError as error:
        raise ModalUnusable(
            "Modal's client is not installed here; pip install -e '.[modal]' in a clone of elastic"
        ) from error


@functools.cache
def version() -> str:
    """Return a digest of Elastic's sources here. A deployment fits a run with the same digest."""
    digest = hashlib.blake2b(digest_size=6)
    root = Path(__file__).parents[2]
    for package in SOURCES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{importlib.metadata.version('elastic-rl')}-{digest.hexdigest()}"


async def check_deployment(app: str, environment: str, timeout_s: float) -> None:
    """Raises `ModalUnusable` where the app is not deployed, is another version's, or Modal does not let us in."""
    package = modal()
    where = f"app {app!r} in Modal's environment {environment!r}" if environment else f"app {app!r} on Modal"
    own = ("" if app == APP else f" --app {app}") + (f" --environment {environment}" if environment else "")
    deploy = f"`elastic modal deploy{own}`"
    try:
        async with asyncio.timeout(timeout_s):
            found = await package.App.lookup.aio(app, environment_name=environment or None)
            tags = await found.get_tags.aio()
    except package.exception.NotFoundError as error:
        raise ModalUnusable(f"there is no {where}: {deploy} makes it") from error
    except package.exception.AuthError as error:
        raise ModalUnusable(
            f"Modal does not let us in ({told(error)}): `modal token new` makes credentials, or set MODAL_TOKEN_ID and "
            "MODAL_TOKEN_SECRET"
        ) from error
    except (package.exception.Error, OSError, TimeoutError) as error:
        raise ModalSilent(f"{where} could not be asked for ({told(error)}): is Modal reachable from here?") from error
    if tags.get(VERSION_TAG) != version():
        raise ModalUnusable(
            f"{where} was deployed by another version of Elastic (found {tags.get(VERSION_TAG, 'none')}, here is "
            f"{version()}): {deploy} replaces it"
        )


def usd_per_s(cores: float, memory_mb: int, gpu: str = "", gpus: int = 0) -> float:
    """What a second of a container with these reservations costs. Raises `ModalUnusable` for an unknown GPU."""
    if gpu and gpu not in USD_PER_GPU_S:
        raise ModalUnusable(f"no price is known of GPU {gpu!r}; known: {', '.join(USD_PER_GPU_S)}; or set its price")
    of_gpus = gpus * USD_PER_GPU_S[gpu] if gpu else 0.0
    return max(cores, CORES_MIN) * USD_PER_CORE_S + max(memory_mb, MEMORY_MB_MIN) / 1024 * USD_PER_GIB_S + of_gpus


async def life_of(container: str) -> Life:
    """Since when and until when Modal charges for a container, by its own record."""
    info = (await _ask("TaskGetInfo", "TaskGetInfoRequest", task_id=container)).info
    return Life(info.started_at, info.finished_at)


async def gone(container: str, timeout_s: float) -> Life:
    """The container's whole life, once it is over. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while True:
            life = await life_of(container)
            if life.finished_s:
                return life
            await asyncio.sleep(GONE_POLL_S)


async def stop_container(container: str) -> None:
    """End a container that is idle, before its scale-down would."""
    await _ask("ContainerStop", "ContainerStopRequest", task_id=container)


async def calls_of(function_id: str) -> dict[str, bool]:
    """The calls that Modal knows of a function's variant, and whether each has something left to do."""
    found = await _ask("FunctionCallList", "FunctionCallListRequest", function_id=function_id)
    return {one.function_call_id: one.pending_inputs.total > 0 for one in found.function_calls}


async def containers_of(call: Any) -> list[str]:
    """In which containers the inputs of a call have been last."""
    return [one.task_id for one in await call.get_call_graph.aio() if one.task_id]


async def _ask(method: str, request: str, **fields: Any) -> Any:
    """One call of Modal's protocol that its client makes on the command line alone."""
    client = await modal().Client.from_env.aio()
    message = getattr(importlib.import_module("modal_proto.api_pb2"), request)(**fields)
    return await _asked().aio(client, method, message)


@functools.cache
def _asked() -> Any:
    """On the event loop that Modal's client keeps for itself."""

    async def _call(client: Any, method: str, message: Any) -> Any:
        return await getattr(client._stub, method)(message)

    synchronize: Callable[[Callable[..., Coroutine[Any, Any, Any]]], Any] = importlib.import_module(
        "modal._utils.async_utils"
    ).synchronize_api
    return synchronize(_call)
