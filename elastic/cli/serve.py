"""`elastic serve`, `elastic runner` and `elastic support-bundle`."""

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from elastic.cli.output import bad_input, console, say
from elastic.cli.pool import prepared_pool
from elastic.compose.plan import TRAINER_PROVIDER
from elastic.compose.processes import run_loop
from elastic.compose.runs import private
from elastic.config import ConfigError
from elastic.protocol.api import AccessRole
from elastic.protocol.endpoint import Address, bare_host, is_loopback, is_wildcard
from elastic.protocol.proxies import HttpSettingsError, proxy_for
from elastic.protocol.sockets import listening_socket
from elastic.system.given import read_text
from elastic.system.imports import importing
from elastic.system.installed import installed
from providers.base import USD_MAX

if TYPE_CHECKING:
    from elastic.server.settings import ClaimMapping, OidcSettings, ServerSettings
    from elastic.server.store import Store

OIDC_SECRET_VARIABLE = "ELASTIC_OIDC_CLIENT_SECRET"
MISSING = "this needs the server's packages: pip install -e '.[server]' in a clone of elastic"


RunsListen = Annotated[
    str, typer.Option(metavar="HOST", help="Where runs listen for workers on other machines, on free ports, by TLS.")
]
RunsAdvertise = Annotated[
    str, typer.Option(metavar="HOST", help="How those workers reach this machine, if by another name.")
]
FairSharePeriod = Annotated[
    float,
    typer.Option(
        "--fair-share-period-s",
        min=1,
        max=31_536_000,
        help="Within it each run gets a lease of what is scarce: more runs take turns.",
    ),
]
Home = Annotated[Path, typer.Option(help="Where the server keeps runs, projects' files and its database.")]
Database = Annotated[
    str, typer.Option(metavar="URL", help="postgresql://USER@HOST/NAME; else SQLite in the server's home.")
]


@private()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback put TLS in front.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7430,
    home: Home = Path("elastic-server"),
    database: Database = "",
    models: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Base policies that every project may start from; .cache unless given."),
    ] = None,
    host_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host name that leads to this server; addresses need none."),
    ] = None,
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(metavar="NETWORK", help="Proxies in front, whose x-forwarded-for says who asks; may be repeated."),
    ] = None,
    runner: Annotated[bool, typer.Option(help="Look after the runs too, or leave it to `elastic runner`.")] = True,
    shared_trust: Annotated[
        bool, typer.Option("--shared-trust", help="Let several projects' runs be processes of one Unix user.")
    ] = False,
    uploads_gb: Annotated[int, typer.Option(min=0, help="GB of disk that a project's uploads may take.")] = 256,
    oidc_issuer: Annotated[
        str, typer.Option(metavar="URL", help="People sign in with this OpenID Connect provider.")
    ] = "",
    oidc_client_id: Annotated[str, typer.Option(metavar="ID", help="This server's id at the provider.")] = "",
    oidc_client_secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Has the client's secret; else ELASTIC_OIDC_CLIENT_SECRET, or there is none."
        ),
    ] = None,
    oidc_member: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLAIM=VALUE:PROJECT:ROLE",
            help="Who is a member by what the provider says, such as groups=rl:agents:runner.",
        ),
    ] = None,
    oidc_scope: Annotated[
        list[str] | None,
        typer.Option(metavar="SCOPE", help="A further scope besides openid, email and profile, such as groups."),
    ] = None,
    oidc_name: Annotated[str, typer.Option(metavar="NAME", help="The provider's name on the page.")] = "",
    oidc_sign_in_hours: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=8760,
            help="Hours after which people sign in again, unless the provider has confirmed them since.",
        ),
    ] = 24.0,
    oidc_recheck_minutes: Annotated[
        float, typer.Option(min=0.1, max=1440, help="How often it is asked again, where it gives refresh tokens.")
    ] = 15.0,
    pool: Annotated[
        list[Path] | None,
        typer.Option(metavar="POOL.toml", help="A pool to keep up, whose jobs come over the API; may be repeated."),
    ] = None,
    webhook_network: Annotated[
        list[str] | None, typer.Option(metavar="CIDR", help="A private network that webhooks may lead into.")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=USD",
            help="Least price of a GPU for an hour, by kind of provider and of the trainer; may be repeated.",
        ),
    ] = None,
    fair_share_period_s: FairSharePeriod = 600.0,
    runs_listen: RunsListen = "",
    runs_advertise: RunsAdvertise = "",
) -> None:
    """Serve the control API, for many runs and many people. Runs outlive it; a server that is started again finds them.

    On a fresh home it makes a project and prints the first admin key, once.

    Example: elastic serve --home /var/lib/elastic
    """
    with _packages():
        from elastic.server.serving import first_key, listen
        from elastic.server.serving import serve as serve_runs
        from elastic.server.settings import ServerSettings

    dialled = _place(runs_listen, runs_advertise)
    for directory in models or ():
        if not directory.is_dir():
            bad_input(f"--models: {directory}: no such directory; allowed: one that has base policies")
    settings = ServerSettings(
        home=home,
        database=database,
        models=tuple(models or [Path(".cache")]),
        host_names=tuple(host_name or ()),
        shared_trust=shared_trust,
        pools=tuple(prepared_pool(path) for path in pool or ()),
        webhook_networks=tuple(_network(text) for text in webhook_network or ()),
        trusted_proxies=tuple(_network(text, "--trusted-proxies") for text in trusted_proxies or ()),
        prices=dict(_price(text) for text in price or ()),
        oidc=_oidc(
            oidc_issuer,
            oidc_client_id,
            oidc_client_secret_file,
            oidc_member or [],
            oidc_scope or [],
            oidc_name,
            oidc_sign_in_hours * 3600,
            oidc_recheck_minutes * 60,
        ),
        project_uploads_bytes_max=uploads_gb * 2**30,
        fair_share_period_s=fair_share_period_s,
        runs_listen=dialled[0],
        runs_advertise=dialled[1],
    )
    try:
        listener = listen(host, port)
    except OSError as error:
        bad_input(f"--host, --port: {Address(host, port)} cannot be listened on ({error.strerror})")
    if not is_loopback(host):
        say("warning: keys and logs cross the network in clear text; have a proxy with TLS in front of this server")

    def ready(url: str) -> None:
        say(f"elastic serves {url}; runs are kept in {home}")
        if secret is not None:
            console().print(f"first admin key, shown this once: {secret}", highlight=False, soft_wrap=True)
            say(f"log in with: elastic api login {url}")

    with listener, _store(settings) as store:
        secret = first_key(store)
        run_loop(serve_runs(store, settings, listener, with_runner=runner, on_ready=ready))


@private()
def runner(
    home: Home = Path("elastic-server"),
    database: Database = "",
    fair_share_period_s: FairSharePeriod = 600.0,
    runs_listen: RunsListen = "",
    runs_advertise: RunsAdvertise = "",
) -> None:
    """Look after a server's runs in a process of its own, beside `elastic serve --no-runner`.

    Example: elastic runner --home /var/lib/elastic
    """
    with _packages():
        from elastic.server.serving import run_runner
        from elastic.server.settings import ServerSettings

    dialled = _place(runs_listen, runs_advertise)
    settings = ServerSettings(
        home=home,
        database=database,
        fair_share_period_s=fair_share_period_s,
        runs_listen=dialled[0],
        runs_advertise=dialled[1],
    )
    with _store(settings) as store:
        say(f"the runner looks after the runs in {home}")
        run_loop(run_runner(store, settings))


@private()
def support_bundle(
    home: Home = Path("elastic-server"),
    database: Database = "",
    url: Annotated[str, typer.Option(help="The server's address, to ask whether it is ready.")] = "",
    log: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="The server's or the runner's log file, whose end is added."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write; by default a new file here."),
    ] = None,
) -> None:
    """Collect what helps to find a server's fault: versions, health, states of runs and logs, without secrets.

    Example: elastic support-bundle --home /var/lib/elastic --log /var/log/elastic.log
    """
    with _packages():
        from elastic.server.settings import ServerSettings
        from elastic.server.support.bundle import write_bundle
    from elastic.cli.doctor import findings_of

    path = output or Path(time.strftime("elastic-support-%Y%m%d-%H%M%S.tar.gz"))
    doctor = msgspec.to_builtins(findings_of(None))
    if not home.is_dir():
        bad_input(f"--home: {home}: no such directory; allowed: that of a server")
    try:
        missing = write_bundle(path, ServerSettings(home=home, database=database), doctor, log or [], url)
    except OSError as error:
        bad_input(f"--output: {path} cannot be written ({error.strerror})")
    for one in missing:
        say(f"not in the bundle: {one}")
    say(f"wrote {path}; look into it before you send it: it has logs, and paths of this machine")


@contextmanager
def _packages() -> Iterator[None]:
    """Around the imports of the server. Raises `ConfigError` where what it needs is not installed."""
    try:
        with importing():
            yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; {MISSING}") from error


@contextmanager
def _store(settings: "ServerSettings") -> "Iterator[Store]":
    """The server's store, around what works on it: a store that is none of ours or away, and another runner on it, end
    the program."""
    from elastic.server.runner import RunnerBusy
    from elastic.server.serving import open_store
    from elastic.server.store import StoreError, StoreUnavailable

    try:
        store = open_store(settings)
        yield store
        store.close()
    except* (StoreError, RunnerBusy) as group:
        bad_input(str(group.exceptions[0]))
    except* StoreUnavailable as group:
        bad_input(f"--database: {group.exceptions[0]}")


def _place(listen: str, advertise: str) -> tuple[str, str]:
    """Where the server's runs listen for workers on other machines, as settings have it. Raises `ConfigError`."""
    try:
        host, dialled = listen and bare_host(listen), advertise and bare_host(advertise)
    except ValueError as error:
        raise ConfigError(f"--runs-listen, --runs-advertise: {error}") from None
    if is_wildcard(host) and not dialled:
        raise ConfigError(
            f"--runs-advertise is missing: nobody can dial --runs-listen {listen}; name the address of this "
            "machine that workers reach"
        )
    if dialled and not host:
        raise ConfigError("--runs-advertise is for --runs-listen HOST, which is missing")
    try:
        if host:
            listening_socket(host, 0).close()
    except OSError as error:
        raise ConfigError(f"--runs-listen: {host} cannot be listened on ({error.strerror})") from None
    return host, dialled and str(Address(dialled, 0)).removesuffix(":0")


def _oidc(
    issuer: str,
    client_id: str,
    secret_file: Path | None,
    members: list[str],
    scopes: list[str],
    name: str,
    sign_in_s: float,
    recheck_s: float,
) -> "OidcSettings | None":
    """The identity provider, if there is to be one."""
    from elastic.server.identity.oidc import is_safe
    from elastic.server.settings import OidcSettings

    if not issuer:
        if client_id or secret_file or members or scopes or name:
            bad_input("--oidc-issuer: give it, or none of the other --oidc options")
        return None
    if importlib.util.find_spec("joserfc") is None:
        raise ConfigError(f"--oidc-issuer: no joserfc; {MISSING}")
    if not is_safe(issuer):
        bad_input(f"--oidc-issuer: found {issuer!r}; allowed: an https URL, or http on this machine")
    try:
        proxy_for(issuer)
    except HttpSettingsError as error:
        bad_input(f"--oidc-issuer: {error}")
    if not client_id:
        bad_input("--oidc-client-id: give what the provider calls this server")
    secret = os.environ.get(OIDC_SECRET_VARIABLE, "")
    if secret_file is not None:
        try:
            secret = read_text(secret_file)
        except (OSError, ValueError) as error:
            bad_input(f"--oidc-client-secret-file: {secret_file} cannot be read ({error})")
    return OidcSettings(
        issuer=issuer,
        client_id=client_id,
        client_secret=secret.strip(),
        name=name or urlsplit(issuer).hostname or issuer,
        scopes=tuple(dict.fromkeys([*OidcSettings.scopes, *scopes])),
        mappings=tuple(_mapping(text) for text in members),
        sign_in_s=sign_in_s,
        recheck_s=recheck_s,
    )


def _mapping(text: str) -> "ClaimMapping":
    from elastic.server.settings import ClaimMapping

    claim, equals, rest = text.partition("=")
    value, _, last = rest.rpartition(":")
    value, _, project = value.rpartition(":")
    if not (claim and equals and value and project) or last not in list(AccessRole):
        bad_input(
            f"--oidc-member: found {text!r}; allowed: CLAIM=VALUE:PROJECT:ROLE, such as groups=rl:agents:runner; "
            f"roles: {', '.join(AccessRole)}"
        )
    return ClaimMapping(claim=claim, value=value, project=project, role=AccessRole(last))


def _price(text: str) -> tuple[str, float]:
    kind, _, usd = text.partition("=")
    try:
        price = float(usd)
    except ValueError:
        price = -1.0
    kinds = [TRAINER_PROVIDER, *sorted(installed("elastic.providers"))]
    if kind not in kinds or not 0 <= price <= USD_MAX:
        bad_input(
            f"--price: found {text!r}; allowed: KIND=USD with USD from 0 to {USD_MAX:g}; kinds: {', '.join(kinds)}"
        )
    return kind, price


def _network(text: str, option: str = "--webhook-network") -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError as error:
        bad_input(f"{option}: {error}; allowed: such as 10.1.0.0/16")
