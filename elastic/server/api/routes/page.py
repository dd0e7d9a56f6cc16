"""The page at `/`: static files, which the browser takes from this server alone and runs nothing else besides.

It shows what the API answers to whoever has signed in; by itself it tells nothing.
"""

import importlib.metadata
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from elastic.server.problems import not_found

router = APIRouter(include_in_schema=False)
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_FILES = Path(__file__).parents[1] / "page"
_TYPES = {
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


@router.get("/")
def index() -> Response:
    """The page, which knows of which version of the server it is."""
    version = importlib.metadata.version("elastic-rl")
    html = (_FILES / "index.html").read_text(encoding="utf-8").replace("{{version}}", version)
    return Response(html, headers=HEADERS, media_type="text/html; charset=utf-8")


@router.get("/page/{name}")
def file(name: str) -> Response:
    """What the page is made of."""
    if name not in _TYPES:
        raise not_found("file", name)
    return Response((_FILES / name).read_bytes(), headers=HEADERS, media_type=_TYPES[name])
