"""Through which proxy a server is reached, as `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy` say.

Libraries' own readings of these differ, and some stop at a value that others take. Here nothing goes through a proxy to
this machine, or to what `no_proxy` names: hosts with their subdomains, addresses and networks, `*` for all.
"""

import importlib.util
import ipaddress
import os
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from elastic.protocol.endpoint import is_loopback

SCHEMES = ("http", "https")
PROXY_SCHEMES = (*SCHEMES, "socks5", "socks5h")


VARIABLES = tuple(
    spelling for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for spelling in (name, name.upper())
)
"""Those of the environment that are read here."""


class HttpSettingsError(ValueError):
    """A server's URL, or what the environment says of the way there, cannot be used; the message says what and why."""


class Proxy(NamedTuple):
    """A proxy, and the variable that named it."""

    url: str
    variable: str

    def __str__(self) -> str:
        return f"the proxy {without_password(self.url)} of {self.variable}"


def proxy_for(url: str, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy through which `url` is reached. Raises `HttpSettingsError`."""
    parts = _split(url, url, SCHEMES)
    if is_loopback(parts.hostname or "") or _bypassed(parts.hostname or "", environment):
        return None
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        # The client of a CGI program chooses its HTTP_PROXY.
        spellings = (name,) if name == "http_proxy" and "REQUEST_METHOD" in environment else (name, name.upper())
        for variable in spellings:
            if value := environment.get(variable, "").strip():
                return Proxy(_checked(value, variable), variable)
    return None


def through(url: str) -> str:
    """What an error about `url` says besides: through which proxy it is reached, or nothing."""
    try:
        found = proxy_for(url)
    except HttpSettingsError:
        return ""
    return f" (through {found})" if found else ""


def proxies_of_boto(endpoint_url: str | None) -> dict[str, str] | None:
    """As a setting of botocore: no proxy to an endpoint on this machine, else what the environment says of AWS's."""
    return {} if endpoint_url and is_loopback(urlsplit(endpoint_url).hostname or "") else None


def without_password(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _split(url: str, what: str, schemes: tuple[str, ...]) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in schemes and parts.hostname and parts.port != 0 and not any(map(str.isspace, url)):
            return parts
        why = f"allowed: {'://, '.join(schemes)}://, then HOST:PORT"
    except ValueError as error:
        why = str(error)
    raise HttpSettingsError(f"{without_password(what)}: found {without_password(url)!r}: {why}")


def _checked(value: str, variable: str) -> str:
    url = value if "://" in value else f"http://{value}"
    parts = _split(url, variable, PROXY_SCHEMES)
    if parts.scheme.startswith("socks") and importlib.util.find_spec("socksio") is None:
        raise HttpSettingsError(
            f"{variable}: {without_password(url)} needs the package socksio (pip install 'httpx[socks]'); or name the "
            "server's host in no_proxy"
        )
    return url


def _bypassed(host: str, environment: Mapping[str, str]) -> bool:
    said = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    return any(_covers(entry.strip().lower(), host.lower()) for entry in said.split(",") if entry.strip())


def _covers(entry: str, host: str) -> bool:
    """Whether an entry of `no_proxy` is about this host. A scheme, a port and brackets in it mean nothing more."""
    if entry == "*":
        return True
    bare = entry.partition("://")[2] or entry
    bare = bare[1:].partition("]")[0] if bare.startswith("[") else bare
    bare = bare.partition(":")[0] if bare.count(":") == 1 else bare
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(bare, strict=False)
    except ValueError:
        bare = bare.removeprefix("*").removeprefix(".")
        return bool(bare) and (host == bare or host.endswith(f".{bare}"))
