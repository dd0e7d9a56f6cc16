"""What requests share: the store, the settings, the runner to wake, the feeds of runs' events."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request

from elastic.server.api.request_log import RequestFigures
from elastic.server.history.answers import KeptAnswers
from elastic.server.history.feeds import Feeds
from elastic.server.identity.oidc import IdentityProvider
from elastic.server.settings import ServerSettings
from elastic.server.store import Store


@dataclass
class ServerState:
    """Of one application. `wake` tells the runner, where it is in this process, that something is wanted."""

    store: Store
    settings: ServerSettings
    feeds: Feeds
    wake: Callable[[], None] = lambda: None
    provider: IdentityProvider | None = None
    """Whom people sign in with, if with anybody."""
    ready: Callable[[], list[str]] = field(default=list)
    """What keeps the server from doing its work; nothing, if it does."""
    requests: RequestFigures = field(default_factory=RequestFigures)
    answers: KeptAnswers = field(default_factory=KeptAnswers)


async def state_of(request: Request) -> ServerState:
    """No thread is needed for this."""
    return cast(ServerState, request.app.state.server)
