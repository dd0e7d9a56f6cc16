"""Processes that providers, pools and runs start, or people, such as `elastic worker`; each imports what it needs."""

from pathlib import Path
from typing import Annotated

import typer

from elastic.compose.processes import run_env_worker, run_front, run_pool_resident, run_serving_host, run_worker


def worker(
    join: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to dial, if elsewhere than the ticket says.")
    ] = "",
    ticket_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A ticket of `elastic ticket`; else ELASTIC_TICKET holds one.")
    ] = None,
    trainer: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Be the run's trainer.", hidden=True)] = None,
    pace: Annotated[
        bool, typer.Option("--pace", help="Of a ticket: log, too, how an engine holds the speed that it models.")
    ] = False,
    resume: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve rollout turns to a run: dial its orchestrator and generate until the lease ends.

    Three ways to start one. By hand, on any machine that can dial the run, with a ticket of `elastic ticket`:

      elastic worker --ticket-file FILE

    In a container, with the image of infra/worker.Dockerfile:

      docker run --gpus all -e ELASTIC_TICKET="$(cat FILE)" elastic-worker

    By a provider of the run, which hands over a lease's one-time token in the environment.

    Example: elastic worker --join trainer.example:7433 --ticket-file FILE
    """
    run_worker(join or None, ticket_file, trainer, resume=resume, pace=pace)


def serving_host() -> int:
    """Be a serving host with a replayed load, and lend its idle time to runs.

    Example: ELASTIC_SERVING_HOST='{…}' elastic serving-host
    """
    return run_serving_host()


def pool_resident(
    _: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of the job's run, by which people find it.")] = Path(),
) -> None:
    """Be a job's resident on a node of a pool; its node agent says when it has the device, and as which worker.

    Example: ELASTIC_NODE_AGENT_FD=3 elastic pool-resident runs/one
    """
    run_pool_resident()


def env_worker(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    environment: Annotated[str, typer.Option(metavar="NAME", help="The environment whose episodes are played.")],
) -> None:
    """Be an env worker of a run: play its episodes by users' code.

    Example: elastic env-worker runs/one --environment agent
    """
    run_env_worker(run_dir, environment)


def front(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    descriptor: Annotated[int, typer.Option("--fd", metavar="N", help="The socket on which agents are served.")],
) -> None:
    """Be a front of a run: serve agents on an inherited socket.

    Example: elastic front runs/one --fd 3
    """
    run_front(run_dir, descriptor)
