"""`elastic worker`, `elastic serving-host`, `elastic pool-resident`: processes that providers and pools start."""

from pathlib import Path
from typing import NoReturn

from elastic import compose


def worker_command(join: str, ticket_file: Path | None, trainer: Path | None, *, resume: bool, pace: bool) -> NoReturn:
    compose.run_worker(join or None, ticket_file, trainer, resume=resume, pace=pace)


def serving_host_command() -> int:
    return compose.run_serving_host()


def pool_resident_command() -> NoReturn:
    compose.run_pool_resident()
