"""A pool's own process, its supervisor, the node agent of a node and the relay of a site: each imports no more than it
needs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from elastic.system.imports import importing


def pool_run(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The pool's directory.")],
    supervise: Annotated[int | None, typer.Option(min=0, help="Instead: keep such a process up.")] = None,
    standby: Annotated[bool, typer.Option("--standby", help="Begin by a line on standard input.")] = False,
) -> int:
    """Be the process of a pool, or its supervisor.

    Example: elastic pool-run pools/lab
    """
    if supervise is not None:
        with importing():
            from elastic.cli.pool import supervise_pool

        return supervise_pool(directory, supervise)
    with importing():
        from elastic.compose.pool import run_pool

    if standby and sys.stdin.readline() == "":
        return 0
    return run_pool(directory)


def pool_host() -> int:
    """Be the node agent of a pool's node, as the environment says.

    Example: elastic pool-host
    """
    with importing():
        from elastic.compose.pool_host import run_pool_host

    return run_pool_host()


def pool_site(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The relay's directory.")],
    host: Annotated[str, typer.Option(help="Of this machine, where others reach it; else none does.")] = "",
) -> int:
    """Be the relay of a site until standard input ends.

    Example: elastic pool-site nodes/lab-rollout-1/site --host 10.0.0.7
    """
    with importing():
        from elastic.compose.site_relay import run_site_relay

    return run_site_relay(directory, host)
