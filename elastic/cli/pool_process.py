"""A pool's own process, its supervisor, and the keeper of a node: each imports no more than it needs."""

from pathlib import Path
from typing import Annotated

import typer


def pool_run(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The pool's directory.")],
    supervise: Annotated[int | None, typer.Option(min=0, help="Instead: keep such a process up.")] = None,
) -> int:
    """Be the process of a pool, or its supervisor.

    Example: elastic pool-run pools/lab
    """
    if supervise is not None:
        from elastic.cli.pool import supervise_pool

        return supervise_pool(directory, supervise)
    from elastic.compose.pool import run_pool

    return run_pool(directory)


def pool_host() -> int:
    """Be the keeper of a pool's node, as the environment says.

    Example: elastic pool-host
    """
    from elastic.compose.pool_host import run_pool_host

    return run_pool_host()
