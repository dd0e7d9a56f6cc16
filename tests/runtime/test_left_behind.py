"""What a run may have left is known until it is proven gone."""

from pathlib import Path

from elastic.runtime.left_behind import FILE, left_behind, write_down


def test_what_may_be_left_is_known_until_it_is_proven_gone(tmp_path: Path) -> None:
    assert left_behind(tmp_path) == {}
    write_down(tmp_path, {"ec2": "an instance", "modal": ""})
    write_down(tmp_path, {"modal": "a call"})
    assert left_behind(tmp_path) == {"ec2": "an instance", "modal": "a call"}
    write_down(tmp_path, {"ec2": ""})
    assert left_behind(tmp_path) == {"modal": "a call"}
    write_down(tmp_path, {"modal": ""})
    assert not (tmp_path / FILE).exists()
