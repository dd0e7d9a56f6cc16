"""How the server is set up: what `elastic serve` is given."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from elastic.resources import AccessRole


@dataclass(frozen=True, kw_only=True)
class ClaimMapping:
    """Who has this value of a claim is a member of the project. Of `email`, a value may be such as `*@example.com`."""

    claim: str
    value: str
    project: str
    role: AccessRole


@dataclass(frozen=True, kw_only=True)
class OidcSettings:
    """An identity provider that people sign in with. Without a `client_secret` this server is a public client."""

    issuer: str
    client_id: str
    client_secret: str = field(default="", repr=False)
    name: str = "your organization"
    scopes: tuple[str, ...] = ("openid", "email", "profile")
    mappings: tuple[ClaimMapping, ...] = ()
    leeway_s: int = 60
    """How far clocks may be apart."""
    timeout_s: float = 5.0
    refresh_s: float = 3600.0
    """For so long the issuer's description and keys hold, unless a token needs newer keys."""
    sign_in_s: float = 24 * 3600.0
    """For so long it holds what the issuer has said of somebody: then their sessions end, and their keys rest."""
    recheck_s: float = 900.0
    """How often the issuer is asked again of people for whom it has given a refresh token."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """`home` holds all that the server keeps on disk; `models` are directories with base policies for every project.

    `host_names` are names, besides addresses, under which browsers and clients may reach it. With `shared_trust`
    several projects' runs may be processes of one Unix user.
    """

    home: Path
    database: str = ""
    models: tuple[Path, ...] = ()
    host_names: tuple[str, ...] = ()
    shared_trust: bool = False
    pools: tuple[Path, ...] = ()
    """Directories of the pools that it keeps up, and whose jobs it takes."""
    webhook_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Private networks that webhooks may lead into."""
    webhook_tick_s: float = 1.0
    """How often somebody looks at what webhooks are to be told."""
    tick_s: float = 0.25
    """How often the runner looks at what is wanted and at what its runs do."""
    observe_s: float = 1.0
    """How often it writes down how a run stands."""
    feed_interval_s: float = 0.1
    """How often a followed journal is looked at."""
    ping_s: float = 15.0
    """A stream in which nothing happens says so, lest somebody in between cut it."""
    body_bytes_max: int = 4 * 2**20
    project_uploads_bytes_max: int = 256 * 2**30
    """What a project's uploads may take of the disk."""
    open_upload_days: int = 7
    """An upload that is not complete is given up once nothing has come of it for so long."""
    oidc: OidcSettings | None = None
    session_s: float = 12 * 3600.0
    """How long a browser stays signed in."""
    housekeeping_s: float = 600.0
    """How often the runner removes what is kept no longer."""
    fair_share_period_s: float = 600.0
    """Within this, each run that wants some of a provider that is shared gets a lease of it."""
    stop_patience_s: float = 30.0
    """How long a run's process may take until it hears commands; before that no signal would find it ready."""
    restart_base_s: float = 1.0
    restart_max_s: float = 30.0
    command: tuple[str, ...] = ()
    """How a run's process begins; unless set, this interpreter's `elastic run`."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that runs' processes get besides those that all processes of runs inherit."""

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
        """Runs that are jobs of pools, in a directory for each project."""
        return self.home / "pooled"

    @property
    def projects(self) -> Path:
        return self.home / "projects"

    @property
    def all_uploads(self) -> Path:
        return self.home / "uploads"

    @property
    def incoming(self) -> Path:
        """Uploads that are not complete."""
        return self.home / "incoming"

    def uploads(self, project: str) -> Path:
        """A project's uploads, which its runs read and do not change."""
        return self.all_uploads / project

    def storage(self, project: str) -> Path:
        """A project's own files: what its submissions may name."""
        return self.projects / project
