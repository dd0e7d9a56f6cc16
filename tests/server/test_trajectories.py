"""What the policy said, over HTTP: by the checkpoint's tokenizer, in a process beside the server, within limits."""

import os
from pathlib import Path
from typing import Any

import pytest

from elastic.protocol.api import AccessRole
from elastic.server.history.trajectories import NOT_WITHIN_LIMITS
from tests.report.chat_run import MARKUP, ChatRun
from tests.server.conftest import Site, Submission


@pytest.fixture
def chats(site: Site, submission: Submission) -> tuple[Site, str, Path]:
    """A site with a run of conversations, and the directory of its checkpoint."""
    body = submission()
    body["config"]["front"] = {"tool_parser": "hermes"}
    run = site.member(AccessRole.RUNNER).post("/v1/runs", json=body).json()["id"]
    policy = site.settings.models[0] / "policy"
    journal = ChatRun(site.settings.run_dir(run), policy)
    journal.small()
    journal.close()
    return site, run, policy


def test_a_trajectory_has_its_messages_under_its_name(chats: tuple[Site, str, Path]) -> None:
    site, run, _ = chats
    viewer = site.member(AccessRole.VIEWER)
    found = viewer.get(f"/v1/runs/{run}/trajectories/2/1/0").json()
    assert (found["id"], found["no_text"]) == ("2/1/0", "")
    assert [one["role"] for one in found["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert found["messages"][2]["tool_calls"] == [{"name": "add", "arguments": '{"a": 1, "b": 1}'}]
    assert found["rewards"] == {"right": 1.0, "short": 0.1}
    assert [one["policy"] for one in found["branches"]] == ["critic"]
    assert viewer.get(f"/v1/runs/{run}/trajectories/9/9/9").status_code == 404
    assert site.member(AccessRole.VIEWER, "theirs").get(f"/v1/runs/{run}/trajectories/2/1/0").status_code == 404


def test_trajectories_are_found_by_what_became_of_them(chats: tuple[Site, str, Path]) -> None:
    site, run, _ = chats
    viewer = site.member(AccessRole.VIEWER)

    def names(**wanted: str | int | bool) -> list[str]:
        answer = viewer.get(f"/v1/runs/{run}/trajectories", params={"limit": 100, **wanted})
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()["data"]]

    assert names(failed=True) == ["2/1/3"]
    assert names(truncated=True) == ["2/1/2"]
    assert names(group="1/0", order="worst") == [f"1/0/{member}" for member in range(5)]
    assert names(order="best")[0] == names(order="reward")[0] == "2/1/0"
    assert names(order="worst")[0] == "2/1/1"
    assert names(step=2, failed=True, truncated=True) == []


def test_what_is_said_is_searched_within_the_filters(chats: tuple[Site, str, Path]) -> None:
    site, run, policy = chats
    viewer = site.member(AccessRole.VIEWER)

    def part(**wanted: str | int | bool) -> dict[str, Any]:
        answer = viewer.get(f"/v1/runs/{run}/trajectory-search", params=wanted)
        assert answer.status_code == 200, answer.text
        return answer.json()

    found = part(text="let me ADD")
    assert [one["id"] for one in found["data"]] == ["2/1/0"]
    assert (found["searched"], found["has_more"], found["no_text"]) == (17, False, "")
    assert [one["found"] for one in found["data"][0]["passages"]] == ["Let me add"], "once where contexts begin alike"
    first = part(text="1 + 1", step=2, order="worst", limit=2)
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (["2/0/0", "2/0/1"], True)
    rest = part(text="1 + 1", step=2, order="worst", starting_after=first["searched_to"])
    assert [one["id"] for one in rest["data"]] == ["2/0/2", "2/0/3", "2/1/0", "2/1/3"]
    assert first["searched"] + rest["searched"] == 8
    assert part(text="1 + 1", failed=True)["searched"] == 1
    for wrong in ({}, {"text": ""}, {"text": "x" * 201}, {"text": "x", "starting_after": "9/9/9"}):
        assert viewer.get(f"/v1/runs/{run}/trajectory-search", params=wrong).status_code == 400
    (policy / "tokenizer.json").unlink()
    found = part(text="anything else")
    assert (found["data"], found["has_more"]) == ([], False)
    assert found["no_text"] == "policy/tokenizer.json: cannot be read (No such file or directory)"


def test_the_report_shows_trajectories_and_runs_nothing(chats: tuple[Site, str, Path]) -> None:
    site, run, _ = chats
    page = site.member(AccessRole.VIEWER).get(f"/v1/runs/{run}/report", params={"format": "html"})
    assert "What is 1 + 1?" in page.text
    assert MARKUP not in page.text
    assert "<script" not in page.text
    assert "script-src" not in page.headers["content-security-policy"]


def test_a_tokenizer_beyond_the_limits_costs_the_text_alone(chats: tuple[Site, str, Path]) -> None:
    """The file is as large as a user's may be: only such a size reaches the reader's real limits."""
    site, run, policy = chats
    with (policy / "tokenizer.json").open("w") as file:
        file.write("[" + '{"":0},' * 5_000_000 + "0]")
    viewer = site.member(AccessRole.VIEWER)
    found = viewer.get(f"/v1/runs/{run}/trajectories/2/1/0").json()
    assert found["no_text"] == NOT_WITHIN_LIMITS
    assert found["token_ids"]
    assert found["messages"] is None
    (policy / "tokenizer.json").unlink()
    os.mkfifo(policy / "tokenizer.json")
    found = viewer.get(f"/v1/runs/{run}/trajectories/2/1/0").json()
    assert found["no_text"].endswith("tokenizer.json: is no file")
