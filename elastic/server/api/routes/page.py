"""The page at `/`: static files, which the browser takes from this server alone and runs nothing else besides.

It shows what the API answers to the person who has signed in, and holds no data itself.
"""

import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from elastic.report.document import colours
from elastic.server.problems import not_found

router = APIRouter(include_in_schema=False)
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types elastic"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
INDEX, MODULE, COLOURS, LOADING = "index.html", ".js", "colours.css", "loading.js"
_PAGE = Path(__file__).parents[1] / "page"
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}


@router.get("/")
def index() -> Response:
    """The page, which knows of which version of the server it is."""
    version = importlib.metadata.version("elastic-rl")
    own = [name for name in _files() if (_PAGE / name).is_file() and name != LOADING]
    modules = sorted(name for name in own if name.endswith(MODULE))
    # Their imports would be found one after the other.
    links = "\n    ".join(f'<link rel="modulepreload" href="/page/{name}" />' for name in modules)
    html = (_PAGE / INDEX).read_text(encoding="utf-8").replace("{{version}}", version).replace("{{modules}}", links)
    return Response(html, headers=HEADERS, media_type="text/html; charset=utf-8")


@router.get("/page/{name}")
def file(name: str, request: Request) -> Response:
    """What the page is made of. A browser that has it already is told so."""
    content = _files().get(name)
    if content is None:
        raise not_found("file", name)
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    """Everything that the page is made of, by name: its own files, what is vendored, and the colours of reports."""
    own = [path for path in (*_PAGE.iterdir(), *(_PAGE / "vendor").iterdir()) if path.suffix in _TYPES]
    return {path.name: path.read_bytes() for path in own} | {COLOURS: colours().encode()}
