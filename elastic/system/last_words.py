"""What a process said last before it ended, of its log: bounded, and without secrets."""

import json
import os
import re
import stat
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, cast

READ_BYTES, LINES, WORDS_CHARS = 16 * 1024, 3, 400
SECRET_CHARS_MIN = 6
"""A shorter value is no secret, and would take ordinary words out."""
REMOVED = "[removed]"
_USERINFO = re.compile(r"(?<=://)[^/\s]+@")
RUN_KEY = re.compile(r"(?:agent|driver|viewer)\.(?:[\w-]+\.){1,2}[\w-]{43}")
"""As `elastic.protocol.run_secrets` makes them for agents, drivers and viewers of a run, whatever stands before one."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def last_words(log: Path, secrets: Iterable[str] = ()) -> str:
    """Return the last lines of a log, once each where one is repeated; empty where there are none, or it is no regular
    file.

    None of the `secrets` is in them, nor a URL's user and password, nor a key of a run.
    """
    lines = [line for line, _ in groupby(filter(None, map(_plain, _end_of(log).splitlines())))]
    words = RUN_KEY.sub(REMOVED, _USERINFO.sub(f"{REMOVED}@", " | ".join(lines[-LINES:])))
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SECRET_CHARS_MIN:
            words = words.replace(secret, REMOVED)
    return words if len(words) <= WORDS_CHARS else f"… {words[-WORDS_CHARS:]}"


def _end_of(log: Path) -> str:
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return ""
        return os.pread(descriptor, READ_BYTES, max(0, found.st_size - READ_BYTES)).decode(errors="replace")
    finally:
        os.close(descriptor)


def _plain(line: str) -> str:
    """A line without colours; of a structured one, what happened and the last line of its traceback."""
    try:
        found: Any = json.loads(line)
    except ValueError:
        return _CONTROL.sub("", line).strip()
    if not isinstance(found, dict) or "event" not in found:
        return line.strip()
    said = cast("dict[str, Any]", found)
    error = str(said.get("exception", "")).strip().rpartition("\n")[2]
    rest = [f"{key}={value}" for key, value in said.items() if key not in ("event", "exception", "timestamp", "level")]
    return _CONTROL.sub("", ": ".join(part for part in (str(said["event"]), ", ".join(rest), error) if part))
