"""Where agents reach a run's fronts."""

from elastic.config import Config
from elastic.protocol.endpoint import Address, is_loopback


def agents_url(config: Config, served: Address) -> str:
    """The base URL that agents take of fronts at this address."""
    at = served.here()
    if config.front is None or is_loopback(config.front.host):
        return f"http://{at}/v1"
    return f"https://{Address(config.run.advertised_host or at.host, at.port)}/v1"
