"""What is installed is read once, and again where imports come from somewhere else."""

from pathlib import Path

import pytest

from elastic.system.installed import installed, passed_over
from elastic.system.logs import STANDARD_ERROR, log_to


def test_what_is_on_the_path_is_found_however_often_it_was_asked_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = installed("elastic.engines")
    assert "torch" in before
    assert installed("elastic.engines") is before
    about = tmp_path / "theirs-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[elastic.engines]\ntheirs = theirs:Engine\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path))
        assert set(installed("elastic.engines")) == {*before, "theirs"}
    assert "theirs" not in installed("elastic.engines")


def test_of_a_name_that_two_packages_have_one_stands_and_the_other_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for package in ("second", "first"):
        about = tmp_path / package / f"{package}-1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        names = f"routing.affinity = {package}:Affinity\nrouting.shared = {package}:Shared\n"
        (about / "entry_points.txt").write_text(f"[elastic.policies]\n{names}")
        monkeypatch.syspath_prepend(str(about.parent))
    log_to(STANDARD_ERROR)
    found = installed("elastic.policies")
    assert found["routing.affinity"].value == "policies.routing:AffinityRouting"
    assert found["routing.shared"].value == "first:Shared"
    told = passed_over("elastic.policies")
    second = "'routing.shared' of second 1 (second:Shared) is not used: first 1 has one of that name"
    assert set(told) == {
        f"elastic.policies: 'routing.affinity' of {one} 1 ({one}:Affinity) is not used: elastic-rl has one of that "
        "name; allowed: a name of its own"
        for one in ("first", "second")
    } | {f"elastic.policies: {second}; allowed: a name of its own"}
    said = capfd.readouterr().err
    assert all(said.count(words) == 1 for words in told), said
