"""The app that runs call on Modal: deployed, and found to fit."""

import asyncio
import importlib
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from elastic.config import Config, ConfigError
from elastic.modal_platform import APP, ModalUnusable, check_deployment, told, version
from elastic.worker.modal_variables import APP_VARIABLE, MODULES_VARIABLE, PACKAGES_VARIABLE

CHECK_TIMEOUT_S = 30.0
"""For Modal to say whether an app is there."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What was deployed."""

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
            f"elastic modal deploy: {error.name} is not installed; pip install 'elastic-rl[modal]'"
        ) from error
    try:
        deployed.app.deploy(name=app, environment_name=environment or None)
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


def rewards_fault(config: Config) -> str | None:
    """What is wrong with the app on Modal that a configuration's rewards run on, if anything; None for none there."""
    if config.rewards.pool != "modal":
        return None
    place = config.rewards.pool_settings
    app, environment = str(place.get("app", APP)), str(place.get("environment", ""))
    try:
        asyncio.run(check_deployment(app, environment, CHECK_TIMEOUT_S))
    except ModalUnusable as error:
        return str(error)
    return ""
