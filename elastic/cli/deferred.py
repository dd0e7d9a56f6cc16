"""The modules that carry commands out. Each is imported when a command first uses it, so that `--help` is quick."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic.cli import (  # noqa: F401
        account,
        capacity,
        configuration,
        control,
        disk_logs,
        doctor,
        faults,
        job_simulation,
        jobs,
        modal_deployment,
        pool,
        pool_report,
        profile,
        remote,
        remote_access,
        remote_quotas,
        report,
        run,
        serve,
        simulate,
        supervise,
        tenancy,
        ticket,
        uploads,
        worker,
    )


def __getattr__(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"elastic.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"elastic.cli.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error
