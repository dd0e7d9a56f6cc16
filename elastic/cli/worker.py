"""`elastic worker`, `elastic serving-host`, `elastic pool-resident`: processes that providers and pools start."""

from pathlib import Path
from typing import NoReturn

from elastic.compose.processes import run_pool_resident, run_serving_host, run_worker


def worker_command(join: str, ticket_file: Path | None, trainer: Path | None, *, resume: bool, pace: bool) -> NoReturn:
    run_worker(join or None, ticket_file, trainer, resume=resume, pace=pace)


def serving_host_command() -> int:
    return run_serving_host()


def pool_resident_command() -> NoReturn:
    run_pool_resident()
