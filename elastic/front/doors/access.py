"""Access to doors: by one of the run's keys, or by the network that a peer comes from.

A trainer's control key opens all of them, and a requests key those for requests. Peers of a `plain` network need none,
since some trainers send no key and speak no TLS.
"""

import ipaddress
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import NamedTuple

from starlette.datastructures import Headers

from elastic.front.keys import shown_keys
from elastic.protocol.http_server import is_within
from elastic.protocol.openai.errors import FrontError
from elastic.protocol.run_secrets import RunSecrets

Network = IPv4Network | IPv6Network


def read_network(said: str) -> Network:
    """The network of `CIDR`, or of one address. Raises `ValueError`."""
    try:
        return ipaddress.ip_network(said)
    except ValueError as error:
        raise ValueError(f"found {said!r}; allowed: a network such as 10.0.0.0/8, or an address: {error}") from None


class DoorAccess(NamedTuple):
    """Checks callers against the run's keys and the networks whose peers need none."""

    secrets: RunSecrets
    plain: Sequence[Network] = ()

    def check(self, headers: Headers, address: str, *, control: bool) -> None:
        """Raises `FrontError`: 401 without a key of the run, 403 for a key that opens no door of `control`."""
        if is_within(address, self.plain):
            return
        keys = list(shown_keys(headers))
        if any(map(self.secrets.may_control, keys)):
            return
        if not any(map(self.secrets.may_request, keys)):
            raise FrontError(
                401,
                "the key is missing or none of this run's; send it as Authorization: Bearer KEY or in the URL "
                "(https://run:KEY@HOST), or have --plain name your network",
            )
        if control:
            raise FrontError(403, "a requests key offers no weights and pauses nothing; use the run's control key")
