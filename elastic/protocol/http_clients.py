"""Makes the clients of HTTP servers: the one place, so that all go the same ways. See `elastic.protocol.proxies`."""

import os
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ssl import PROTOCOL_TLS_CLIENT, SSLContext, SSLObject, SSLSocket
from typing import Any

import certifi
import httpx

from elastic.protocol.proxies import HttpSettingsError, proxy_for, without_password
from elastic.system.host import here


class PublicTrust(SSLContext):
    """Trusts the public certificates. To read them takes 20 ms, so that waits until a server speaks TLS."""

    _read = False

    def wrap_socket(self, *arguments: Any, **options: Any) -> SSLSocket:
        self._read_once()
        return super().wrap_socket(*arguments, **options)

    def wrap_bio(self, *arguments: Any, **options: Any) -> SSLObject:
        self._read_once()
        return super().wrap_bio(*arguments, **options)

    def _read_once(self) -> None:
        if not self._read:
            self.load_verify_locations(certifi.where())
            self._read = True


_PUBLIC = PublicTrust(PROTOCOL_TLS_CLIENT)


def sync_client(
    url: str, *, by_proxy: bool, transport: httpx.BaseTransport | None = None, **options: Any
) -> httpx.Client:
    """A client of the server at `url`; with `by_proxy` through the environment's proxy, if it names one for it, and
    trusting whom the environment trusts. Raises `HttpSettingsError`."""
    proxy, transport = None, transport or here().http_transport(url)
    if by_proxy and transport is None:
        found = proxy_for(url)
        proxy = found.url if found else None
        if url.startswith("https:"):
            options.setdefault("verify", _trust())
    options.setdefault("verify", _PUBLIC)
    try:
        return httpx.Client(trust_env=False, proxy=proxy, transport=transport, **options)
    except httpx.InvalidURL as error:
        raise HttpSettingsError(f"{without_password(url)}: {error}") from error


def far_client(url: str, **options: Any) -> httpx.AsyncClient:
    """A client of the server at `url`: through the environment's proxy, if it names one for it, and trusting whom the
    environment trusts. It keeps no cookies. Raises `HttpSettingsError`."""
    found = proxy_for(url)
    options.setdefault("verify", _trust() if url.startswith("https:") else _PUBLIC)
    none = CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))
    return httpx.AsyncClient(trust_env=False, proxy=found.url if found else None, cookies=none, **options)


def async_client(**options: Any) -> httpx.AsyncClient:
    """A client that goes through no proxy."""
    options.setdefault("verify", _PUBLIC)
    return httpx.AsyncClient(trust_env=False, **options)


def _trust() -> SSLContext:
    """By the certificates of SSL_CERT_FILE or SSL_CERT_DIR, such as an organisation's own, or of the public ones."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        variable = "SSL_CERT_FILE" if os.environ.get("SSL_CERT_FILE") else "SSL_CERT_DIR"
        found = os.environ.get(variable, "")
        raise HttpSettingsError(f"{variable}: {found!r} has no certificates that can be read ({error})") from error
