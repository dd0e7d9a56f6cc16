"""Shared state of requests: the store, the settings, the wake-up of loops, the feeds of events."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request

from elastic.server.api.request_log import RequestFigures
from elastic.server.api.run_changes import RunChanges
from elastic.server.api.streams import OpenStreams
from elastic.server.history.answers import KeptAnswers
from elastic.server.history.feeds import Feeds
from elastic.server.history.looks import SharedLooks
from elastic.server.history.readers import TenantReaders
from elastic.server.identity.oidc import IdentityProvider
from elastic.server.settings import ServerSettings
from elastic.server.store import Store
from elastic.system.isolation import LoopFaults


@dataclass
class ServerState:
    """The state of one application. `wake` tells the loops of this process that a request has changed something."""

    store: Store
    settings: ServerSettings
    feeds: Feeds
    looks: SharedLooks
    streams: OpenStreams
    run_changes: RunChanges
    wake: Callable[[], None] = lambda: None
    provider: IdentityProvider | None = None
    """The identity provider of sign-ins, if any."""
    ready: Callable[[], list[str]] = field(default=list)
    """Returns the reasons why the server cannot do its work; empty if it can."""
    requests: RequestFigures = field(default_factory=RequestFigures)
    faults: LoopFaults = field(default_factory=LoopFaults)
    """The unexpected exceptions of this process's loops."""
    answers: KeptAnswers = field(default_factory=KeptAnswers)
    readers: TenantReaders = field(default_factory=TenantReaders)


async def state_of(request: Request) -> ServerState:
    """No thread is needed for this."""
    return cast(ServerState, request.app.state.server)
