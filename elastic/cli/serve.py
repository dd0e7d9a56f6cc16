"""`elastic serve` and `elastic runner`."""

import importlib.util
import os
import time
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from elastic.cli.output import bad_input, console, say
from elastic.cli.pool import prepared_pool
from elastic.compose.plan import TRAINER_PROVIDER
from elastic.compose.processes import run_loop
from elastic.compose.runs import private
from elastic.config import ConfigError
from elastic.protocol.api import AccessRole
from elastic.protocol.endpoint import Address, bare_host, is_loopback, is_wildcard
from elastic.protocol.proxies import HttpSettingsError, proxy_for
from elastic.system.given import read_text
from elastic.system.installed import installed
from providers.base import USD_MAX

if TYPE_CHECKING:
    from elastic.server.settings import ClaimMapping, OidcSettings

OIDC_SECRET_VARIABLE = "ELASTIC_OIDC_CLIENT_SECRET"
MISSING = "this needs the server's packages: pip install -e '.[server]' in a clone of elastic"


class OidcOptions(NamedTuple):
    """What `elastic serve` is told of the identity provider."""

    issuer: str
    client_id: str
    secret_file: Path | None
    members: list[str]
    scopes: list[str]
    name: str
    sign_in_s: float
    recheck_s: float


class RunsPlace(NamedTuple):
    """Where the server's runs listen for workers on other machines, as it is told: two hosts, or empty."""

    listen: str
    advertise: str

    def checked(self) -> "RunsPlace":
        """As settings have it. Raises `ConfigError`."""
        try:
            listen, advertise = self.listen and bare_host(self.listen), self.advertise and bare_host(self.advertise)
        except ValueError as error:
            raise ConfigError(f"--runs-listen, --runs-advertise: {error}") from None
        if is_wildcard(listen) and not advertise:
            raise ConfigError(
                f"--runs-advertise is missing: nobody can dial --runs-listen {self.listen}; name the address of this "
                "machine that workers reach"
            )
        if advertise and not listen:
            raise ConfigError("--runs-advertise is for --runs-listen HOST, which is missing")
        return RunsPlace(listen, advertise and str(Address(advertise, 0)).removesuffix(":0"))


@private()
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
    pools: list[Path],
    webhook_networks: list[str],
    trusted_proxies: list[str],
    prices: list[str],
    oidc: OidcOptions,
    uploads_gb: int,
    fair_share_period_s: float,
    runs: RunsPlace,
) -> None:
    """Serve until a signal comes; runs go on."""
    try:
        from elastic.server.runner import RunnerBusy
        from elastic.server.serving import first_key, listen, open_store, serve
        from elastic.server.settings import ServerSettings
        from elastic.server.store import StoreError, StoreUnavailable
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; {MISSING}") from error

    place = runs.checked()
    settings = ServerSettings(
        home=home,
        database=database,
        models=tuple(models),
        host_names=tuple(host_names),
        shared_trust=shared_trust,
        pools=tuple(prepared_pool(path) for path in pools),
        webhook_networks=tuple(_network(text) for text in webhook_networks),
        trusted_proxies=tuple(_network(text, "--trusted-proxies") for text in trusted_proxies),
        prices=dict(_price(text) for text in prices),
        oidc=_oidc(oidc),
        project_uploads_bytes_max=uploads_gb * 2**30,
        fair_share_period_s=fair_share_period_s,
        runs_listen=place.listen,
        runs_advertise=place.advertise,
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

    try:
        with listener:
            store = open_store(settings)
            secret = first_key(store)
            run_loop(serve(store, settings, listener, with_runner=runner, on_ready=ready))
            store.close()
    except* (StoreError, RunnerBusy) as group:
        bad_input(str(group.exceptions[0]))
    except* StoreUnavailable as group:
        bad_input(f"--database: {group.exceptions[0]}")


def _oidc(said: OidcOptions) -> "OidcSettings | None":
    """The identity provider, if there is to be one."""
    from elastic.server.identity.oidc import is_safe
    from elastic.server.settings import OidcSettings

    if not said.issuer:
        if said.client_id or said.secret_file or said.members or said.scopes or said.name:
            bad_input("--oidc-issuer: give it, or none of the other --oidc options")
        return None
    if importlib.util.find_spec("joserfc") is None:
        raise ConfigError(f"--oidc-issuer: no joserfc; {MISSING}")
    if not is_safe(said.issuer):
        bad_input(f"--oidc-issuer: found {said.issuer!r}; allowed: an https URL, or http on this machine")
    try:
        proxy_for(said.issuer)
    except HttpSettingsError as error:
        bad_input(f"--oidc-issuer: {error}")
    if not said.client_id:
        bad_input("--oidc-client-id: give what the provider calls this server")
    secret = os.environ.get(OIDC_SECRET_VARIABLE, "")
    if said.secret_file is not None:
        try:
            secret = read_text(said.secret_file)
        except (OSError, ValueError) as error:
            bad_input(f"--oidc-client-secret-file: {said.secret_file} cannot be read ({error})")
    scopes = dict.fromkeys([*OidcSettings.scopes, *said.scopes])
    return OidcSettings(
        issuer=said.issuer,
        client_id=said.client_id,
        client_secret=secret.strip(),
        name=said.name or urlsplit(said.issuer).hostname or said.issuer,
        scopes=tuple(scopes),
        mappings=tuple(_mapping(text) for text in said.members),
        sign_in_s=said.sign_in_s,
        recheck_s=said.recheck_s,
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


@private()
def runner_command(home: Path, database: str, fair_share_period_s: float, runs: RunsPlace) -> None:
    """Look after runs until a signal comes; they go on."""
    try:
        from elastic.server.runner import RunnerBusy
        from elastic.server.serving import open_store, run_runner
        from elastic.server.settings import ServerSettings
        from elastic.server.store import StoreError, StoreUnavailable
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; {MISSING}") from error

    place = runs.checked()
    settings = ServerSettings(
        home=home,
        database=database,
        fair_share_period_s=fair_share_period_s,
        runs_listen=place.listen,
        runs_advertise=place.advertise,
    )
    try:
        store = open_store(settings)
        say(f"the runner looks after the runs in {home}")
        run_loop(run_runner(store, settings))
        store.close()
    except* (StoreError, RunnerBusy) as group:
        bad_input(str(group.exceptions[0]))
    except* StoreUnavailable as group:
        bad_input(f"--database: {group.exceptions[0]}")


@private()
def support_command(home: Path, database: str, url: str, logs: list[Path], output: Path | None) -> None:
    """Write a bundle, and say what could not be had of it."""
    try:
        from elastic.server.settings import ServerSettings
        from elastic.server.support.bundle import write_bundle
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; {MISSING}") from error
    from elastic.cli.doctor import findings_of

    path = output or Path(time.strftime("elastic-support-%Y%m%d-%H%M%S.tar.gz"))
    doctor = msgspec.to_builtins(findings_of(None))
    if not home.is_dir():
        bad_input(f"--home: {home}: no such directory; allowed: that of a server")
    try:
        missing = write_bundle(path, ServerSettings(home=home, database=database), doctor, logs, url)
    except OSError as error:
        bad_input(f"--output: {path} cannot be written ({error.strerror})")
    for one in missing:
        say(f"not in the bundle: {one}")
    say(f"wrote {path}; look into it before you send it: it has logs, and paths of this machine")
