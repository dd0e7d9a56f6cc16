"""A support bundle: how a server is set up, the conditions of its runs, and its logs.

It contains no secrets: of the configuration only what is listed here; no run's configuration, journal or labels; no
keys, members or webhooks. Known secrets, and text that looks like one, are removed from everything.
"""

import importlib.metadata
import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import psutil
import sqlalchemy as sa

from elastic.protocol.api import concealed
from elastic.protocol.http_clients import sync_client
from elastic.protocol.proxies import HttpSettingsError, through
from elastic.server.clock import rfc3339
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, StoreError, StoreUnavailable, revisions
from elastic.server.store.database import now_us, sqlite_path
from elastic.server.store.tables import projects, runs, secrets, webhooks
from elastic.server.store.vault import KEY_FILE, Vault, VaultError
from elastic.server.support.redaction import SECRET_NAME, Redaction
from elastic.system import tenant_files

RUNS = 50
"""The newest, with their conditions."""
LOGGED_RUNS = 10
LOG_BYTES = 256 * 1024
"""The end of a log."""
PACKAGES = ("elastic-rl", "alembic", "fastapi", "psycopg", "pydantic", "sqlalchemy", "starlette", "torch", "uvicorn")
URL_TIMEOUT_S = 5.0


def write_bundle(
    output: Path, settings: ServerSettings, doctor: object, logs: Sequence[Path] = (), url: str = ""
) -> list[str]:
    """Write a `.tar.gz` for this user alone; returns what of it could not be had, and why. Raises `OSError`."""
    missing: list[str] = []
    with open(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        store = _store(settings, missing)
        try:
            redaction = Redaction([*_of_environment(), *_of_store(store, settings, missing)])
            with tarfile.open(fileobj=file, mode="w:gz") as bundle:
                for name, content in _parts(settings, store, doctor, logs, url, missing):
                    _add(bundle, name, redaction.text(content))
                _add(bundle, "missing.txt", redaction.text("".join(f"{one}\n" for one in missing)))
        finally:
            if store is not None:
                store.close()
    return missing


def _add(bundle: tarfile.TarFile, name: str, content: str) -> None:
    encoded = content.encode(errors="replace")
    entry = tarfile.TarInfo(f"elastic-support/{name}")
    entry.size, entry.mode, entry.mtime = len(encoded), 0o600, time.time()
    bundle.addfile(entry, io.BytesIO(encoded))


def _parts(
    settings: ServerSettings,
    store: Store | None,
    doctor: object,
    logs: Sequence[Path],
    url: str,
    missing: list[str],
) -> Iterator[tuple[str, str]]:
    newest: list[Mapping[str, Any]] = []
    yield "versions.json", _json(_versions())
    yield "doctor.json", _json(doctor)
    yield "settings.json", _json(_settings(settings))
    yield "health.json", _json(_health(settings, store, url))
    if store is not None:
        read = _attempt("the store", lambda: _store_says(store), missing)
        newest = [] if read is None else read.pop("runs")
        yield "store.json", _json(read)
        yield "runs.json", _json(newest)
    for path in logs:
        if (text := _attempt(str(path), partial(_end_of, partial(path.open, "rb")), missing)) is not None:
            yield f"logs/{path.name}", text
    for run in newest[:LOGGED_RUNS]:
        directory = settings.run_dir(run["id"])
        for name, _ in tenant_files.files(directory, "logs", ".log"):
            opened = partial(tenant_files.opened, directory, f"logs/{name}")
            if (text := _attempt(f"{directory}/logs/{name}", partial(_end_of, opened), missing)) is not None:
                yield f"runs/{run['id']}/{name}", text


def _attempt(what: str, read: Callable[[], Any], missing: list[str]) -> Any:
    try:
        return read()
    except (OSError, StoreUnavailable, StoreError, VaultError) as error:
        missing.append(f"{what}: {error}")
        return None


def _json(value: object) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def _versions() -> dict[str, Any]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": found}


def _settings(settings: ServerSettings) -> dict[str, Any]:
    """Return the server's settings. Of settings that may hold a secret, only whether they are set."""
    if (path := sqlite_path(settings.database_url)) is not None:
        database = {"kind": "sqlite", "host": None, "name": str(path)}
    else:
        url = sa.make_url(settings.database_url)
        database = {"kind": url.get_backend_name(), "host": url.host, "name": url.database}
    return {
        "home": str(settings.home.resolve()),
        "database": database,
        "models": [str(path) for path in settings.models],
        "host_names": settings.host_names,
        "shared_trust": settings.shared_trust,
        "webhook_networks": [str(network) for network in settings.webhook_networks],
        "variables": sorted(name for name in os.environ if name.startswith("ELASTIC")),
    }


def _health(settings: ServerSettings, store: Store | None, url: str) -> dict[str, Any]:
    found: dict[str, Any] = {"at": rfc3339(now_us()), "database": _database_says(store), "runner": _runner(settings)}
    try:
        usage = psutil.disk_usage(str(settings.home))
        found["disk"] = {"free_bytes": usage.free, "total_bytes": usage.total}
    except OSError as error:
        found["disk"] = str(error)
    found["memory"] = psutil.virtual_memory()._asdict()
    if url:
        for path in ("healthz", "readyz"):
            try:
                with sync_client(url, by_proxy=True, timeout=URL_TIMEOUT_S) as client:
                    answer = client.get(f"{url.rstrip('/')}/{path}")
                found[path] = {"status": answer.status_code, "body": answer.text[:2_000]}
            except (httpx.HTTPError, HttpSettingsError) as error:
                found[path] = f"{type(error).__name__}: {error}{through(url)}"
    return found


def _database_says(store: Store | None) -> str:
    if store is None:
        return "cannot be used"
    try:
        with store.reading() as connection:
            connection.exec_driver_sql("SELECT 1")
    except StoreUnavailable as error:
        return f"does not answer: {error}"
    return "answers"


def _runner(settings: ServerSettings) -> dict[str, Any]:
    """Return which process attended to the runs last, and whether it lives."""
    try:
        text = (settings.home / "runner.lock").read_text().strip()
    except OSError:
        return {"process": None, "alive": False}
    return {"process": text, "alive": text.isdecimal() and psutil.pid_exists(int(text))}


def _store(settings: ServerSettings, missing: list[str]) -> Store | None:
    def opened() -> Store:
        # SQLite would make an empty one.
        if (path := sqlite_path(settings.database_url)) is not None and not path.is_file():
            raise StoreError(f"{path}: no such database")
        return Store(settings.database_url)

    return _attempt("the database", opened, missing)


def _store_says(store: Store) -> dict[str, Any]:
    with store.reading() as connection:
        found, known = revisions(connection)
        phases = connection.execute(sa.select(runs.c.phase, sa.func.count()).group_by(runs.c.phase)).all()
        newest = connection.execute(sa.select(runs).order_by(runs.c.id.desc()).limit(RUNS)).mappings().all()
        counted = connection.scalar(sa.select(sa.func.count()).select_from(projects))
    return {
        "revision": found,
        "revision_of_this_version": known,
        "runs_by_phase": {str(row[0]): int(row[1]) for row in phases},
        "projects": counted,
        "runs": [_run(row) for row in newest],
    }


def _run(row: sa.RowMapping) -> dict[str, Any]:
    told = ("id", "project", "phase", "cause", "conditions", "wanted", "generation", "observed_generation", "managed")
    further = ("providers", "caps", "attempt", "restarts", "max_restarts", "process", "figures")
    times = {name: rfc3339(row[f"{name}_us"]) for name in ("created", "started", "ended")}
    return {**{name: row[name] for name in (*told, *further)}, **times}


def _end_of(opened: Callable[[], BinaryIO]) -> str:
    with opened() as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        content = file.read()
    if size > LOG_BYTES:
        # The first line is cut, and so may be a secret in it.
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")


def _of_environment() -> list[str]:
    return [value for name, value in os.environ.items() if SECRET_NAME.search(name)]


def _of_store(store: Store | None, settings: ServerSettings, missing: list[str]) -> list[str]:
    """Every secret that the server keeps, so that none is told."""
    found: list[str] = []
    if (key := _attempt(KEY_FILE, lambda: _vault_key(settings), missing)) is not None:
        found.append(key)
    is_file = sqlite_path(settings.database_url) is not None
    password = None if is_file else sa.make_url(settings.database_url).password
    found += [str(password)] if password else []
    if store is None or key is None:
        return found

    def sealed() -> list[tuple[str, bytes]]:
        with store.reading() as connection:
            kept = (sa.select(secrets.c.name, secrets.c.sealed), sa.select(webhooks.c.id, webhooks.c.secret))
            return [(name, bytes(value)) for query in kept for name, value in connection.execute(query)]

    vault = Vault(settings.home)
    for name, one in _attempt("the store's secrets", sealed, missing) or []:
        opened = _attempt("a secret of the store", lambda one=one: vault.opened(one), missing)
        if opened is not None:
            found += concealed(name, opened)
    return found


def _vault_key(settings: ServerSettings) -> str:
    path = settings.home / KEY_FILE
    return path.read_text().strip() if path.exists() else ""
