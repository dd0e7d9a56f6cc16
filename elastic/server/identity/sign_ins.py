"""Effects of an identity provider's statements about people, at sign-in and in later checks.

- A statement is valid for `sign_in_s`. After that a person's sessions end, and the person's keys rest until the next
  one.
- If the provider gave a refresh token, the server asks it again every `recheck_s`. Claims then give and take
  memberships as at a sign-in, and a person whom the provider rejects is out at once. Without a token, people sign in
  again.
"""

import asyncio
from functools import partial

import sqlalchemy as sa
import structlog

from elastic.protocol.api import AccessRole
from elastic.server import ids
from elastic.server.identity.oidc import GrantEnded, IdentityProvider, IssuerUnavailable, SignedIn, mapped_roles
from elastic.server.permissions import Action
from elastic.server.settings import OidcSettings, ServerSettings
from elastic.server.store import Store, StoreUnavailable, audit, members, people, sign_ins
from elastic.server.store.database import now_us
from elastic.server.store.vault import Vault, VaultError
from elastic.system.isolation import IsolatedLoop, LoopFaults

log = structlog.get_logger(__name__)

ACTOR = "identity provider"
TICKS = 10
"""Passes over the people within one interval between two checks of a person."""


def admitted(tx: sa.Connection, settings: OidcSettings, vault: Vault, who: SignedIn) -> str:
    """Apply the provider's present statement about a person; returns the person. Raises `VaultError`."""
    person = members.person_of_sign_in(tx, issuer=settings.issuer, subject=who.subject, email=who.email, name=who.name)
    roles: dict[str, AccessRole] = {}
    for name, role in mapped_roles(settings.mappings, who).items():
        project = people.project(tx, name)
        if project is None:
            log.warning("a claim is mapped to a project that is not there", project=name)
        else:
            roles[project["id"]] = role
    members.map_claims(tx, person, roles)
    sealed = vault.sealed(who.refresh_token) if who.refresh_token else None
    sign_ins.vouched(tx, person, settings.sign_in_s, sealed)
    return person


class SignInChecks:
    """Asks the provider again about people who have a session or a key."""

    def __init__(
        self, store: Store, settings: ServerSettings, provider: IdentityProvider, faults: LoopFaults | None = None
    ) -> None:
        self._store = store
        self._settings = provider.settings
        self._vault = Vault(settings.home)
        self._provider = provider
        self._isolated = IsolatedLoop("sign-ins", faults or LoopFaults(), outages=(StoreUnavailable,))

    async def run(self) -> None:
        """Check people until cancelled."""
        await self._isolated.repeat(partial(asyncio.to_thread, self.look), self._settings.recheck_s / TICKS)

    def look(self) -> None:
        """Check everybody who is due. Raises `StoreUnavailable`."""
        with self._store.reading() as connection:
            due = sign_ins.due(connection, now_us() - int(self._settings.recheck_s * 1e6))
        for one in due:
            if self._isolated.wait_s(one["person"]):
                continue
            with self._store.writing() as tx:
                mine = sign_ins.claim(tx, one["person"], one["checked_us"])
            if mine:
                with self._isolated.attempt(one["person"]):
                    self._ask(one)

    def _ask(self, one: sa.RowMapping) -> None:
        try:
            who = self._provider.again(self._vault.opened(bytes(one["sealed"])), one["subject"])
        except (IssuerUnavailable, VaultError) as error:
            log.warning("a sign-in cannot be looked at again now", person=one["person"], error=str(error))
        except GrantEnded as error:
            log.info("the identity provider lets somebody in no more", person=one["person"], reason=str(error))
            with self._store.writing() as tx:
                sign_ins.ended(tx, one["person"])
                audit.write(
                    tx,
                    actor=ACTOR,
                    action=Action.ME_WRITE,
                    resource=f"/v1/session/oidc: {one['person']}",
                    project=None,
                    status=403,
                    request_id=ids.new_id(ids.REQUEST),
                )
        else:
            with self._store.writing() as tx:
                admitted(tx, self._settings, self._vault, who)
