"""A run's secrets: the same for whoever takes it up, different for everybody and everything else."""

import os
import stat
from pathlib import Path

import pytest

from elastic.core.types import TrajectoryId
from elastic.protocol.run_secrets import FILE, RunSecrets


def all_of(run: RunSecrets) -> list[str]:
    names = ("spot-1", "spot-1.1", "")
    made = (run.join_token, run.session_key, run.relay_token, run.host_token)
    return [make(name) for make in made for name in names] + [run.relay_owner()]


def test_the_next_process_knows_them_and_no_two_are_alike(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    found = all_of(RunSecrets.of(first))
    assert found == all_of(RunSecrets.of(first))
    assert len({*found, *all_of(RunSecrets.of(other))}) == 2 * len(found)
    assert all(len(secret) >= 43 for secret in found)


def test_only_the_owner_reads_the_file_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        RunSecrets.of(tmp_path)
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_process_that_died_while_it_made_one_leaves_none(tmp_path: Path) -> None:
    (tmp_path / f"{FILE}.new").write_bytes(b"half")
    assert all_of(RunSecrets.of(tmp_path)) == all_of(RunSecrets.of(tmp_path))


def test_what_is_no_secret_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"short")
    with pytest.raises(ValueError, match=r"secret: found 5 bytes; a run's secret has 32"):
        RunSecrets.of(tmp_path)


def test_a_trainers_keys_open_what_they_are_for_and_name_no_caller() -> None:
    run, other = RunSecrets(b"a" * 32), RunSecrets(b"b" * 32)
    control, requests = run.control_key(), run.requests_key()
    assert (run.may_control(control), run.may_request(control)) == (True, True)
    assert (run.may_control(requests), run.may_request(requests)) == (False, True)
    agents = (run.driver_key("main"), run.viewer_key(), run.agent_key(TrajectoryId("0/3/1"), 1))
    for key in (*agents, "", "control", "control.", control[:-1], other.control_key(), other.requests_key()):
        assert not run.may_control(key)
        assert not run.may_request(key)
    assert run.caller_of(control) is None
    assert run.caller_of(requests) is None
