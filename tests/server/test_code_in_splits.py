"""Code that a submission names is seen in what is evaluated alone, too, whatever that is like."""

from typing import Any

import pytest

from elastic.server.intake.submissions import code_in

SETTINGS = {"url": "http://10.0.0.1"}
WORDS = {"name": "words", "kind": "openenv"}


@pytest.mark.parametrize(
    "split",
    [
        {"name": "held", "kind": "openenv"},
        {"name": "held", "like": "words"},
        {"name": "frozenlake", "like": "words"},
        {"like": "words"},
        {"name": "openenv", "kind": "", "like": "frozenlake"},
        {"name": "held", "kind": "openenv", "like": "frozenlake"},
    ],
)
@pytest.mark.parametrize("trained", [{"environment": WORDS}, {"environments": [{}, WORDS]}])
def test_code_of_a_split_is_seen(split: dict[str, Any], trained: dict[str, Any]) -> None:
    raw = {**trained, "evaluation": {"splits": [{**split, "settings": SETTINGS}]}}
    assert list(code_in(raw)) == [("evaluation", "splits", "0", "settings", "url")]
