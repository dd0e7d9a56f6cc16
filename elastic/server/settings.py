"""The server's settings, as `elastic serve` gets them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any

from elastic.protocol.api import AccessRole


@dataclass(frozen=True, kw_only=True)
class ClaimMapping:
    """Makes people with this value of a claim members of the project. A value of `email` may be a pattern such as
    `*@example.com`."""

    claim: str
    value: str
    project: str
    role: AccessRole


@dataclass(frozen=True, kw_only=True)
class OidcSettings:
    """An identity provider for sign-ins. Without a `client_secret` this server is a public client."""

    issuer: str
    client_id: str
    client_secret: str = field(default="", repr=False)
    name: str = "your organization"
    scopes: tuple[str, ...] = ("openid", "email", "profile")
    mappings: tuple[ClaimMapping, ...] = ()
    leeway_s: int = 60
    """Largest difference between clocks."""
    timeout_s: float = 5.0
    refresh_s: float = 3600.0
    """How long the issuer's metadata and keys are cached, unless a token needs newer keys."""
    sign_in_s: float = 24 * 3600.0
    """How long a statement of the issuer is valid. After that sessions end and the person's keys rest."""
    recheck_s: float = 900.0
    """How often the issuer is asked again about people for whom it has given a refresh token."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """`home` holds everything that the server keeps on disk. `models` are directories of base policies for every
    project.

    `host_names` are names, besides addresses, by which browsers and clients may reach the server. With `shared_trust`
    the runs of several projects may be processes of one Unix user.
    """

    home: Path
    database: str = ""
    models: tuple[Path, ...] = ()
    host_names: tuple[str, ...] = ()
    shared_trust: bool = False
    pools: tuple[Path, ...] = ()
    """Directories of the pools that the server supervises and whose jobs it accepts."""
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Proxies whose `x-forwarded-for` says where requests come from."""
    webhook_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Private networks to which webhooks may connect."""
    webhook_tick_s: float = 0.5
    """How often the server looks for deliveries that are due."""
    tick_s: float = 0.25
    """How often the runner looks at the requests for its runs and at their processes."""
    observe_s: float = 1.0
    """How often the runner records the status of a run."""
    feed_interval_s: float = 0.1
    """How often a followed journal is read."""
    ping_s: float = 15.0
    """How often an idle stream sends a ping, so that no proxy cuts it."""
    body_bytes_max: int = 4 * 2**20
    database_timeout_s: float = 20.0
    """Longest that a request waits for the database's answer: a connection and one statement, each to its own limit."""
    check_timeout_s: float = 10.0
    """Longest that the check of a submission takes; then it is refused."""
    prices: Mapping[str, float] = field(default_factory=dict[str, float])
    """Least price of a GPU for an hour, by kind of provider and of the `trainer`. Submissions cannot go below it."""
    project_uploads_bytes_max: int = 256 * 2**30
    """Most that a project's uploads may take of the disk."""
    open_upload_days: int = 7
    """An incomplete upload is deleted when no file of it has arrived for so long."""
    oidc: OidcSettings | None = None
    session_s: float = 12 * 3600.0
    """How long a browser stays signed in."""
    housekeeping_s: float = 600.0
    """How often the runner applies retention."""
    fair_share_period_s: float = 600.0
    """Period within which each run that wants GPUs of a shared provider gets a lease."""
    stop_patience_s: float = 30.0
    """Longest start of a run's process until it accepts commands. A signal before that would be lost."""
    restart_base_s: float = 1.0
    restart_max_s: float = 30.0
    runs_listen: str = ""
    """The host on which runs listen for their workers, each on free ports; beyond loopback by TLS. Else loopback."""
    runs_advertise: str = ""
    """The host under which workers elsewhere reach them, if another."""
    command: tuple[str, ...] = ()
    """The command of a run's process; by default `elastic run` of this interpreter."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of runs' processes, besides those that all processes of runs inherit."""

    @property
    def runs_place(self) -> dict[str, str]:
        """Where runs listen, as the keys of their configuration's section `run`."""
        return {"host": self.runs_listen or "127.0.0.1", "advertise": self.runs_advertise}

    def placed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A run's configuration with the place where it listens here, its fronts too, as far as it is well-formed."""
        own, front = config.get("run", {}), config.get("front")
        placed = {**config, "run": {**own, **self.runs_place}} if isinstance(own, dict) else dict(config)
        return {**placed, "front": {**front, "host": self.runs_place["host"]}} if isinstance(front, dict) else placed

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite:///{self.home.resolve() / 'elastic.sqlite'}"

    @property
    def runs(self) -> Path:
        return self.home / "runs"

    def run_dir(self, run: str) -> Path:
        return self.runs / run

    @property
    def pooled(self) -> Path:
        """The directory of runs that are jobs of pools; it has a directory for each project."""
        return self.home / "pooled"

    def job_dir(self, project: str, job: str) -> Path:
        return self.pooled / project / job

    @property
    def projects(self) -> Path:
        return self.home / "projects"

    @property
    def all_uploads(self) -> Path:
        return self.home / "uploads"

    @property
    def incoming(self) -> Path:
        """The directory of incomplete uploads."""
        return self.home / "incoming"

    def uploads(self, project: str) -> Path:
        """Return the directory of a project's uploads. Its runs may read it and not change it."""
        return self.all_uploads / project

    def storage(self, project: str) -> Path:
        """Return the directory of a project's own files, which its submissions may name."""
        return self.projects / project

    def without_places(self, message: str, project: str) -> str:
        """Return a message as the project may read it: with its files as its submissions name them, and without the
        server's directories."""
        return _renamed(message, self._places(project))

    def shown_config(self, config: Mapping[str, Any], project: str) -> dict[str, Any]:
        """Return a run's configuration as the project may read it: it names files as submissions do."""
        places = self._places(project)

        def shown(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: shown(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [shown(inner) for inner in value]
            return _renamed(value, places) if isinstance(value, str) else value

        return {section: shown(value) for section, value in config.items()}

    def _places(self, project: str) -> list[tuple[str, str]]:
        """Return directories of the server, the innermost first, each with what the project calls it."""
        names = {self.uploads(project): "upload:", self.storage(project): ""}
        return [
            (f"{place.resolve()}/", name)
            for place, name in (names | dict.fromkeys((self.home, *self.models), "")).items()
        ]


def _renamed(text: str, places: Sequence[tuple[str, str]]) -> str:
    for place, name in places:
        text = text.replace(place, name)
    return text
