"""What the kinds share that play the environments of other people's packages, in env workers.

A kind is a module with the settings of its configuration and an async function that makes of them what plays an
episode. The package is imported by that function, and so in env workers alone.
"""

import importlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import httpx
from pydantic import BaseModel, Field

from elastic.environments.agent import DemonstratedSettings, PlayedTrajectory
from elastic.system.named_code import CodeUnusable, where
from elastic.system.plain_values import plain, told

NAMES_SHOWN = 8
SEEDS = 2**31
"""Seeds that every environment takes are below it."""


class KindSettings(DemonstratedSettings):
    concurrency: int = Field(32, ge=1, le=4096, description="episodes at once in each of the environment's processes")


@dataclass(frozen=True, kw_only=True)
class KindMeans:
    """What an env worker gives to a kind.

    `http` makes calls; `seed` is the run's; `checkpoint` has the policy's tokenizer. `key` is the driver's, with which
    a call is of the trajectory that its session is bound to; `bind` binds one. `lasting` ends what lasts as long as the
    env worker.
    """

    http: httpx.AsyncClient
    model: str
    checkpoint: Path
    seed: int
    key: str
    bind: Callable[[PlayedTrajectory, str], Awaitable[None]]
    lasting: AsyncExitStack


def package(module: str, distribution: str, allowed: str) -> Any:
    """Import a package that a kind needs. Raises `CodeUnusable`; `allowed` says what is to be installed."""
    try:
        return importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise CodeUnusable(
            f"{distribution} cannot be imported by {sys.executable}: {told(error)}{where(error)}; allowed: an "
            f"environment.python with `{allowed}`"
        ) from error


def generation(distribution: str) -> tuple[int, ...]:
    """The first two numbers of the version that is installed; none where nothing is."""
    try:
        return tuple(int(part) for part in version(distribution).split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return ()


def unusable(key: str, found: Any, error: BaseException, names: Iterable[str] = ()) -> CodeUnusable:
    """Why a package makes no environment of what a setting says: the last line of its own traceback, the interpreter,
    and which names there are that are near."""
    near = get_close_matches(str(found), sorted(names), n=NAMES_SHOWN)
    hint = f"; near are: {', '.join(near)}" if near else ""
    return CodeUnusable(
        f"environment.settings.{key}: found {found!r}, of which {sys.executable} makes no environment: "
        f"{told(error)}{where(error)}{hint}"
    )


def as_text(value: Any) -> str:
    """A text as it is, and else JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    if callable(as_list := getattr(value, "tolist", None)):
        return as_list()
    try:
        return plain(value)
    except TypeError:
        return str(value)
