"""`elastic worker` and `elastic serving-host`: the processes that providers start."""

from pathlib import Path
from typing import NoReturn

from elastic import compose


def worker_command(join: str, ticket_file: Path | None, trainer: Path | None, *, resume: bool) -> NoReturn:
    compose.run_worker(join or None, ticket_file, trainer, resume=resume)


def serving_host_command() -> int:
    return compose.run_serving_host()
