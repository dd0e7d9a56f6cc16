"""Shared state of requests: the store, the settings, the wake-up of loops, the feeds of events."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

from fastapi import Request

from elastic.server.api.request_log import RequestFigures
from elastic.server.api.run_changes import RunChanges
from elastic.server.api.streams import OpenStreams
from elastic.server.history.answers import KeptAnswers
from elastic.server.history.feeds import Feeds
from elastic.server.history.looks import SharedLooks
from elastic.server.history.readers import TenantReaders
from elastic.server.identity.oidc import IdentityProvider
from elastic.server.intake.differences import differences
from elastic.server.settings import ServerSettings
from elastic.server.store import Store
from elastic.server.store.gathered import GatheredReads
from elastic.system.isolation import LoopFaults

CONFIGS_KEPT = 64
"""Runs' configurations that are kept as they are shown, those that were asked for last."""


class ShownConfig(NamedTuple):
    """A run's configuration as its project may read it, and what of it differs from the defaults. To be read only."""

    config: dict[str, Any]
    differences: dict[str, Any]


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

    @cached_property
    def reads(self) -> GatheredReads:
        return GatheredReads(self.store, self.settings.database_timeout_s)

    @cached_property
    def shown_config(self) -> Callable[[str, str], ShownConfig]:
        """Returns how a configuration, as JSON, is shown to a project."""

        def shown(config: str, project: str) -> ShownConfig:
            read = self.settings.shown_config(json.loads(config), project)
            return ShownConfig(read, differences(read))

        return lru_cache(CONFIGS_KEPT)(shown)


async def state_of(request: Request) -> ServerState:
    """No thread is needed for this."""
    return cast(ServerState, request.app.state.server)
