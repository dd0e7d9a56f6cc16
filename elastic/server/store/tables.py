"""The store's tables. A change of these is a new revision in `migrations/versions`, and `tests/server/kept_tables.py`
keeps the tables that the revision makes.

Times are microseconds since 1970, so that they sort, compare and fit both databases alike.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)
_ID = String(40)

server = Table(
    "server",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
    comment="what holds of the whole installation, such as where its runs are kept",
)

projects = Table(
    "projects",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("unix_user", String(32)),
    Column("created_us", BigInteger, nullable=False),
    Column("version", Integer, nullable=False, default=1),
)

users = Table(
    "users",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("email", String(254), unique=True, comment="in lower case; one that an admin gave, or an issuer verified"),
    Column("issuer", String(255), comment="who says who this is; null until the first sign-in"),
    Column("subject", String(255), comment="what the issuer calls this person"),
    Column("name", String(200), nullable=False, default=""),
    Column("created_us", BigInteger, nullable=False),
    Column("vouched_until_us", BigInteger, comment="until then holds what their issuer has said of them"),
    Index(None, "issuer", "subject", unique=True),
)

refresh_tokens = Table(
    "refresh_tokens",
    metadata,
    Column("person", _ID, ForeignKey("users.id"), primary_key=True),
    Column("sealed", LargeBinary, nullable=False, comment="encrypted by the server's vault"),
    Column("checked_us", BigInteger, nullable=False),
    comment="by which the identity provider is asked again",
)

members = Table(
    "members",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project", _ID, ForeignKey("projects.id"), nullable=False),
    Column("user", _ID, ForeignKey("users.id"), nullable=False),
    Column("role", String(16), nullable=False),
    Column("source", String(16), nullable=False, comment="given by an admin, or mapped from a claim at sign-in"),
    Column("version", Integer, nullable=False, default=1),
    Column("created_us", BigInteger, nullable=False),
    Column("removed_us", BigInteger, comment="null while this is a membership"),
    Index(None, "project", "user", unique=True),
    Index(None, "user"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project", _ID, ForeignKey("projects.id")),
    Column("name", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("hash", LargeBinary(32), nullable=False, unique=True),
    Column("hint", String(16), nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    Column("revoked_us", BigInteger),
    Column("member", _ID, ForeignKey("members.id"), comment="whose it is; null for a key of the project itself"),
    Index(None, "project", "id"),
    Index(None, "member"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("hash", LargeBinary(32), primary_key=True),
    Column("key", _ID, ForeignKey("keys.id"), comment="that signed in; else a member did"),
    Column("member", _ID, ForeignKey("members.id"), index=True),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False, index=True),
)

used_nonces = Table(
    "used_nonces",
    metadata,
    Column("hash", LargeBinary(32), primary_key=True),
    Column("expires_us", BigInteger, nullable=False, index=True),
    comment="of sign-ins that were finished",
)

runs = Table(
    "runs",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project", _ID, ForeignKey("projects.id"), nullable=False),
    Column("name", String(64), nullable=False),
    # What is wanted
    Column("config", Text, nullable=False),
    Column("providers", JSON, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("wanted", String(16), nullable=False),
    Column("force", Boolean, nullable=False, default=False),
    Column("budget_usd", Float),
    Column("caps", JSON, nullable=False),
    Column("max_restarts", Integer, nullable=False),
    Column("generation", Integer, nullable=False, default=1),
    Column("created_by", _ID, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # What the runner has seen
    Column(
        "managed", Boolean, nullable=False, default=True, comment="whether the runner has anything to do or to watch"
    ),
    Column("observed_generation", Integer, nullable=False, default=0),
    Column("phase", String(16), nullable=False),
    Column("cause", Text, nullable=False, default=""),
    Column("conditions", JSON, nullable=False),
    Column("figures", JSON, nullable=False),
    Column("process", JSON, comment="the run's process: id, start, boot; null while there is none"),
    Column("attempt", Integer, nullable=False, default=0, comment="times that a process was begun"),
    Column("restarts", Integer, nullable=False, default=0, comment="since it last came to another step"),
    Column("furthest_step", Integer, nullable=False, default=0),
    Column("not_before_us", BigInteger, nullable=False, default=0, comment="when the next process may begin"),
    Column("started_us", BigInteger),
    Column("ended_us", BigInteger),
    # What quotas and budgets allow it
    Column("needs", JSON, comment="what it asks of quotas; null where nobody has looked yet"),
    Column("shares", JSON, comment="its share of capacity that is shared, by provider"),
    Column("limits", JSON, comment="the caps and budget that its process is to have"),
    Column("told", JSON, comment="those that its process has in its journal"),
    Column("limits_number", Integer, nullable=False, default=0),
    Column("allotted_nano_usd", BigInteger, comment="the sum of its slices; null where it needs none"),
    Column("cost_nano_usd", BigInteger, nullable=False, default=0),
    Column("day", Integer, nullable=False, default=0),
    Column("day_base_nano_usd", BigInteger, nullable=False, default=0),
    Column("warned", Boolean, nullable=False, default=False),
    Column("waits", JSON, comment="why it does not begin yet: a reason and a message"),
    Column("retired", JSON, comment="what retention has removed, or is about to; the run stays"),
    Index(None, "project", "id"),
    Index(None, "phase", "id"),
    Index(None, "managed"),
)

quotas = Table(
    "quotas",
    metadata,
    Column("project", _ID, ForeignKey("projects.id"), primary_key=True),
    Column("gpus", JSON, nullable=False),
    Column("runs_max", Integer),
    Column("usd_per_day", Float),
    Column("budget_usd", Float),
    Column("weight", Float, nullable=False),
    Column("version", Integer, nullable=False),
)

accounts = Table(
    "accounts",
    metadata,
    Column("project", _ID, ForeignKey("projects.id"), primary_key=True),
    Column("deleted_nano_usd", BigInteger, nullable=False, comment="what runs cost that are deleted"),
    Column("day", Integer, nullable=False, comment="days since 1970, in UTC"),
    Column("deleted_today_nano_usd", BigInteger, nullable=False),
    Column("marks", JSON, nullable=False, comment="pairs of a time and what was spent until then"),
    Column("warned", JSON, nullable=False, comment="of which limits it was said that they are nearly used"),
    Column("jobs_usd", Float, nullable=False, comment="what jobs of pools cost that are kept no longer"),
)

capacities = Table(
    "capacities",
    metadata,
    Column("provider", String(64), primary_key=True),
    Column("gpus", Integer),
    Column("version", Integer, nullable=False),
)

retention = Table(
    "retention",
    metadata,
    Column("scope", _ID, primary_key=True, comment="a project, or `server` for all others"),
    Column("runs_days", Integer),
    Column("trajectories_days", Integer),
    Column("checkpoints_days", Integer),
    Column("logs_days", Integer),
    Column("uploads_days", Integer),
    Column("version", Integer, nullable=False),
)

secrets = Table(
    "secrets",
    metadata,
    Column("project", _ID, ForeignKey("projects.id"), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("sealed", LargeBinary, nullable=False, comment="encrypted by the server's vault"),
    Column("updated_us", BigInteger, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project", _ID, ForeignKey("projects.id"), nullable=False),
    Column("pool", String(64), nullable=False),
    Column("fingerprint", String(64), nullable=False, comment="of the request that submitted it"),
    Column("config", Text, nullable=False),
    Column("train_gpus", Integer, nullable=False),
    Column("usd", Float, nullable=False, comment="what it had cost when its pool was last asked"),
    Column("waits", Text, comment="why it waits for its project's quota"),
    Column("created_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger, comment="when it was first seen to be over"),
    Column("retired", JSON, comment="what retention has removed, or is about to"),
    Column("announced", Integer, comment="how often it had been resubmitted when it was last said that it is over"),
    Index(None, "project", "ended_us"),
    comment="jobs of pools that were submitted here",
)

uploads = Table(
    "uploads",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project", _ID, ForeignKey("projects.id"), nullable=False),
    Column("name", String(64), nullable=False),
    Column("files", JSON, nullable=False, comment="which it is to have; which it has is seen on disk"),
    Column("bytes", BigInteger, nullable=False),
    Column("created_by", _ID, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Index(None, "project", "id"),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project", _ID, ForeignKey("projects.id"), nullable=False),
    Column("url", Text, nullable=False),
    Column("events", JSON, nullable=False),
    Column("secret", LargeBinary, nullable=False, comment="encrypted by the server's vault"),
    Column("disabled", Text, comment="why nothing is sent; null while it is"),
    Column("failures", Integer, nullable=False, server_default="0", comment="attempts in a row that failed"),
    Column(
        "open_until_us",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="until then its circuit is open, and nothing is sent",
    ),
    Column(
        "claimed_until_us",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="until then a server is sending to it",
    ),
    Column("version", Integer, nullable=False, default=1),
    Column("created_us", BigInteger, nullable=False),
    Index(None, "project", "id"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("webhook", _ID, ForeignKey("webhooks.id"), nullable=False),
    Column("type", String(64), nullable=False),
    Column("body", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False, default=0),
    Column("not_before_us", BigInteger, nullable=False, default=0),
    Column("answer", Text, nullable=False, default=""),
    Column("created_us", BigInteger, nullable=False),
    Index(None, "webhook", "id"),
    Index(None, "state", "not_before_us"),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("actor", _ID, primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("headers", JSON, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("created_us", BigInteger, nullable=False, index=True),
)

audit = Table(
    "audit",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("at_us", BigInteger, nullable=False),
    Column("actor", _ID, nullable=False),
    Column("action", String(64), nullable=False),
    Column("resource", String(200), nullable=False),
    Column("project", _ID),
    Column("status", Integer, nullable=False),
    Column("request_id", _ID, nullable=False),
    Index(None, "project", "id"),
)
