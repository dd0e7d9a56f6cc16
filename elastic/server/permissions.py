"""Roles, and the actions that they allow. Pure."""

from collections.abc import Collection
from enum import StrEnum

from elastic.protocol.api import AccessRole


class Action(StrEnum):
    """What a request does. The scopes of keys are these values."""

    RUNS_READ = "runs:read"
    RUNS_WRITE = "runs:write"
    PROJECTS_READ = "projects:read"
    PROJECTS_WRITE = "projects:write"
    MEMBERS_READ = "members:read"
    MEMBERS_WRITE = "members:write"
    KEYS_READ = "keys:read"
    KEYS_WRITE = "keys:write"
    ME_WRITE = "me:write"
    SECRETS_READ = "secrets:read"
    SECRETS_WRITE = "secrets:write"
    UPLOADS_READ = "uploads:read"
    UPLOADS_WRITE = "uploads:write"
    WEBHOOKS_READ = "webhooks:read"
    WEBHOOKS_WRITE = "webhooks:write"
    AUDIT_READ = "audit:read"
    SERVER_WRITE = "server:write"


_LEAST_ROLE = {
    Action.RUNS_READ: AccessRole.VIEWER,
    Action.PROJECTS_READ: AccessRole.VIEWER,
    Action.MEMBERS_READ: AccessRole.VIEWER,
    Action.ME_WRITE: AccessRole.VIEWER,
    Action.UPLOADS_READ: AccessRole.VIEWER,
    Action.RUNS_WRITE: AccessRole.RUNNER,
    Action.UPLOADS_WRITE: AccessRole.RUNNER,
    Action.MEMBERS_WRITE: AccessRole.ADMIN,
    Action.KEYS_READ: AccessRole.ADMIN,
    Action.KEYS_WRITE: AccessRole.ADMIN,
    Action.PROJECTS_WRITE: AccessRole.ADMIN,
    Action.SECRETS_READ: AccessRole.RUNNER,
    Action.SECRETS_WRITE: AccessRole.ADMIN,
    Action.WEBHOOKS_READ: AccessRole.ADMIN,
    Action.WEBHOOKS_WRITE: AccessRole.ADMIN,
    Action.AUDIT_READ: AccessRole.ADMIN,
    Action.SERVER_WRITE: AccessRole.ADMIN,
}
"""The least role that an action needs."""
SERVER_WIDE = frozenset({Action.SERVER_WRITE})
"""Actions for keys of no project only."""
_RANKS = {role: rank for rank, role in enumerate(AccessRole)}


def allows(role: AccessRole, action: Action) -> bool:
    """Whether the role may do this in its project."""
    return _RANKS[role] >= _RANKS[_LEAST_ROLE[action]]


def may_grant(role: AccessRole, granted: AccessRole) -> bool:
    """Return whether a role may give another one: nobody gives more than they have."""
    return _RANKS[role] >= _RANKS[granted]


def lesser(role: AccessRole, other: AccessRole) -> AccessRole:
    """Return the weaker of two roles."""
    return min(role, other, key=_RANKS.__getitem__)


def actions_of(role: AccessRole, scopes: Collection[str], *, server_wide: bool) -> list[Action]:
    """Return all actions of a key: those of its role, limited to its scopes if it has any."""
    return [
        action
        for action in Action
        if allows(role, action) and (not scopes or action in scopes) and (server_wide or action not in SERVER_WIDE)
    ]
