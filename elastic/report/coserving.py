"""How serving hosts fared while a run borrowed them, by what they said last."""

import msgspec

from elastic.report.history import History
from providers.serving_messages import SERVICE_NOTE, ServiceReport


class CoServingHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host with a real serving model. `harvest_share` is what rollouts made of the time that serving left them."""

    host: str
    service: ServiceReport
    harvest_share: float | None


def co_serving_of(history: History) -> list[CoServingHost]:
    """Hosts of each life of the run, since they count anew in each."""
    found = {
        life.prefix + key.removeprefix(SERVICE_NOTE): msgspec.json.decode(text, type=ServiceReport)
        for life in history.lives
        for key, text in life.meta().items()
        if key.startswith(SERVICE_NOTE)
    }
    return [
        CoServingHost(host=host, service=service, harvest_share=service.harvest_share)
        for host, service in sorted(found.items())
    ]
