"""`elastic serve` and `elastic runner`."""

import asyncio
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path

from elastic import compose
from elastic.cli.output import bad_input, console, say
from elastic.config import ConfigError
from elastic.endpoint import is_loopback

MISSING = "this needs the server's packages: pip install 'elastic-rl[server]'"


@compose.private()
def serve_command(
    host: str,
    port: int,
    home: Path,
    database: str,
    models: list[Path],
    host_names: list[str],
    *,
    runner: bool,
    shared_trust: bool,
    webhook_networks: list[str],
    uploads_gb: int,
    fair_share_period_s: float,
) -> None:
    """Serve until a signal comes; runs go on."""
    try:
        from elastic.server.runner import RunnerBusy
        from elastic.server.serving import first_key, listen, open_store, serve
        from elastic.server.settings import ServerSettings
        from elastic.server.store import StoreError, StoreUnavailable
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; {MISSING}") from error

    settings = ServerSettings(
        home=home,
        database=database,
        models=tuple(models),
        host_names=tuple(host_names),
        shared_trust=shared_trust,
        webhook_networks=tuple(_network(text) for text in webhook_networks),
        project_uploads_bytes_max=uploads_gb * 2**30,
        fair_share_period_s=fair_share_period_s,
    )
    try:
        listener = listen(host, port)
    except OSError as error:
        bad_input(f"--host, --port: {host}:{port} cannot be listened on ({error.strerror})")
    if not is_loopback(host):
        say("warning: keys and logs cross the network in clear text; have a proxy with TLS in front of this server")

    def ready(url: str) -> None:
        say(f"elastic serves {url}; runs are kept in {home}")
        if secret is not None:
            console().print(f"first admin key, shown this once: {secret}", highlight=False, soft_wrap=True)
            say(f"log in with: elastic api login {url}")

    try:
        with listener:
            store = open_store(settings)
            secret = first_key(store)
            asyncio.run(serve(store, settings, listener, with_runner=runner, on_ready=ready))
            store.close()
    except* (StoreError, RunnerBusy) as group:
        bad_input(str(group.exceptions[0]))
    except* StoreUnavailable as group:
        bad_input(f"--database: {group.exceptions[0]}")


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError as error:
        bad_input(f"--webhook-network: {error}; allowed: such as 10.1.0.0/16")


@compose.private()
def runner_command(home: Path, database: str, fair_share_period_s: float) -> None:
    """Look after runs until a signal comes; they go on."""
    try:
        from elastic.server.runner import RunnerBusy
        from elastic.server.serving import open_store, run_runner
        from elastic.server.settings import ServerSettings
        from elastic.server.store import StoreError, StoreUnavailable
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; {MISSING}") from error

    settings = ServerSettings(home=home, database=database, fair_share_period_s=fair_share_period_s)
    try:
        store = open_store(settings)
        say(f"the runner looks after the runs in {home}")
        asyncio.run(run_runner(store, settings))
        store.close()
    except* (StoreError, RunnerBusy) as group:
        bad_input(str(group.exceptions[0]))
    except* StoreUnavailable as group:
        bad_input(f"--database: {group.exceptions[0]}")
