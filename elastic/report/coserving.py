"""Serving hosts while a run borrowed them, by their last reports."""

import msgspec

from elastic.report.history import History
from providers.serving_messages import SERVICE_NOTE, ServiceReport


class CoServingHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host with a real serving model. `idle_utilisation` is what rollouts made of the time that serving left them."""

    host: str
    service: ServiceReport
    idle_utilisation: float | None


def co_serving_of(history: History) -> list[CoServingHost]:
    """Hosts of each segment of the run, since they count anew in each."""
    found = {
        segment.prefix + key.removeprefix(SERVICE_NOTE): msgspec.json.decode(text, type=ServiceReport)
        for segment in history.segments
        for key, text in segment.meta().items()
        if key.startswith(SERVICE_NOTE)
    }
    return [
        CoServingHost(host=host, service=service, idle_utilisation=service.idle_utilisation)
        for host, service in sorted(found.items())
    ]
