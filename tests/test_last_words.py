"""The last words of a log: bounded, without secrets, whatever the file is."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.core.types import TrajectoryId
from elastic.protocol.run_secrets import RunSecrets
from elastic.system.last_words import WORDS_CHARS, last_words

SECRET = "a-token-of-ours"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=2_000), st.booleans())
def test_they_are_bounded_and_have_no_secret(tmp_path: Path, said: bytes, structured: bool) -> None:
    log = tmp_path / "worker.log"
    line = json.dumps({"event": "failed", "error": f"with {SECRET}", "level": "error"}) if structured else SECRET
    log.write_bytes(said + b"\n" + f"{line}\nhttps://us:{SECRET}@host/ \x1b[31mred".encode())
    words = last_words(log, [SECRET, ""])
    assert SECRET not in words
    assert "\x1b" not in words
    assert "red" in words
    assert len(words) <= WORDS_CHARS + 2


def test_a_key_of_a_run_is_no_word(tmp_path: Path) -> None:
    secrets = RunSecrets(b"root" * 8)
    log = tmp_path / "agent_0.log"
    keys = secrets.agent_key(TrajectoryId("0/5/1"), 2), secrets.driver_key("agent_0"), secrets.viewer_key()
    log.write_text(f"calling with {' and '.join(keys)}, as agent.py:3 does\n")
    assert last_words(log) == "calling with [removed] and [removed] and [removed], as agent.py:3 does"


def test_the_error_of_a_traceback_is_what_counts(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("Traceback (most recent call last):\n  File 'x'\nRuntimeError: no locator available\n\n")
    assert last_words(log).endswith("RuntimeError: no locator available")
    log.write_text(json.dumps({"event": "ended", "exception": "Traceback\nKeyError: 'x'", "timestamp": "now"}) + "\n")
    assert last_words(log) == "ended: KeyError: 'x'"


def test_what_is_said_again_and_again_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "agent_0.log"
    log.write_text("begun\n" + "error: no such function\n" * 3)
    assert last_words(log) == "begun | error: no such function"


@pytest.mark.parametrize("made", ["nothing", "link", "fifo", "directory"])
def test_what_is_no_regular_file_says_nothing_and_holds_nobody(tmp_path: Path, made: str) -> None:
    log = tmp_path / "worker.log"
    if made == "link":
        (tmp_path / "secret").write_text("another's")
        log.symlink_to(tmp_path / "secret")
    elif made == "fifo":
        os.mkfifo(log)
    elif made == "directory":
        log.mkdir()
    assert last_words(log) == ""
