"""For schemathesis: requests keep no cookies. One that begins a session would sign in those that show no key."""

import requests.cookies  # pyright: ignore[reportMissingImports, reportMissingModuleSource]


def _no_cookie(*_: object, **__: object) -> None:
    return None


requests.cookies.RequestsCookieJar.set_cookie = _no_cookie
