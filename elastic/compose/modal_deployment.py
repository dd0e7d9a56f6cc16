"""The app that runs call on Modal: deployed, and found to fit."""

import asyncio
import importlib
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from elastic.config import Config, ConfigError
from elastic.system.modal import (
    APP,
    APP_VARIABLE,
    MODULES_VARIABLE,
    PACKAGES_VARIABLE,
    ModalUnusable,
    check_deployment,
    version,
)
from elastic.system.plain_values import told

CHECK_TIMEOUT_S = 30.0
"""Limit for Modal to say whether an app exists."""
SOURCES_TIMEOUT_S = 10.0
"""Limit for git to list the sources, which Modal's client asks for too."""
DESCRIBES = "get_git_commit_info"
"""The coroutine of Modal's client that asks."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A finished deployment."""

    app: str
    version: str
    url: str


def deploy(app: str, packages: Sequence[str] = (), modules: Sequence[str] = (), environment: str = "") -> Deployment:
    """Deploy Elastic's app to Modal, as this machine has Elastic.

    `packages` are installed in its image besides, as pip takes them; `modules` are importable here and put into it,
    such as a reward function's. Raises `ConfigError`.
    """
    os.environ[APP_VARIABLE] = app
    os.environ[PACKAGES_VARIABLE], os.environ[MODULES_VARIABLE] = " ".join(packages), " ".join(modules)
    try:
        modal: Any = importlib.import_module("modal")
        deployed: Any = importlib.import_module("elastic.worker.modal_app")
        for module in ("elastic.worker.modal_rewards", "elastic.worker.modal_rollouts"):
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"elastic modal deploy: {error.name} is not installed; pip install -e '.[modal]' in a clone of elastic"
        ) from error
    try:
        _deployed(deployed.app, app, environment or None)
    except modal.exception.AuthError as error:
        raise ConfigError(
            f"elastic modal deploy: Modal does not let us in ({told(error)}); `modal token new` makes "
            "credentials, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
        ) from error
    except (modal.exception.Error, OSError) as error:
        raise ConfigError(f"elastic modal deploy: {app} could not be deployed: {told(error)}") from error
    return Deployment(
        app=app,
        version=version(),
        url=deployed.app.get_dashboard_url() or "",
    )


def _deployed(app: Any, name: str, environment: str | None) -> None:
    """Deploy, and leave nothing behind that is still under way where that fails.

    Modal's client has git describe the sources meanwhile, forgets about it if it is refused, and closes its event loop
    as the process ends, under git's processes.
    """
    try:
        app.deploy(name=name, environment_name=environment)
    except BaseException:
        importlib.import_module("modal._utils.async_utils").synchronize_api(_sources_described)()
        raise


async def _sources_described() -> None:
    asked = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == DESCRIBES]
    if asked:
        await asyncio.wait(asked, timeout=SOURCES_TIMEOUT_S)


def rewards_fault(config: Config) -> str | None:
    """Return the fault of the Modal app on which the configuration's rewards run; None if there is none or no such
    app."""
    if config.rewards.pool != "modal":
        return None
    place = config.rewards.pool_settings
    app, environment = str(place.get("app", APP)), str(place.get("environment", ""))
    try:
        asyncio.run(check_deployment(app, environment, CHECK_TIMEOUT_S))
    except ModalUnusable as error:
        return str(error)
    return ""
