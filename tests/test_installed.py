"""What is installed is read once, and again where imports come from somewhere else."""

from pathlib import Path

import pytest

from elastic.system.installed import installed


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
