"""What the policy did, in a terminal: found by what became of it, and read in words that steer no terminal."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.chat_run import CONTROLS, MARKUP, ChatRun

NAME = re.compile(r"^ ?(e?\d+/\d+/\d+)\b", re.MULTILINE)
"""The first column of a listing, whose other cells may go on in further lines."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with a run of conversations."""
    chats = ChatRun(tmp_path / "runs" / "chats", tmp_path / "policy")
    chats.small()
    for number in range(3):
        chats.trajectory(f"e{8 + number}/1/0", chats.spoken("1 + 1?", (f"It is {number}.", ())), number / 2)
    (chats.close().path / "config.json").write_text(json.dumps(chats.config))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (("--failed",), ["2/1/3"]),
        (("--truncated", "--step", 2), ["2/1/2"]),
        (("--group", "1/0", "--worst", 2), ["1/0/0", "1/0/1"]),
        (("--best", 1), ["2/1/0"]),
        (("--newest", 3), ["2/1/3", "2/1/2", "2/1/1"]),
        (("--reward-min", 0.6, "--reward-max", 0.9), ["2/0/3", "1/0/3", "0/0/3"]),
        (("--step", 9), []),
        (("--evaluation",), ["e10/1/0", "e9/1/0", "e8/1/0"]),
        (("--evaluation", "--step", 10, "--best", 1), ["e10/1/0"]),
        (("--evaluation", "--group", "e9/1", "--reward-max", 0.5), ["e9/1/0"]),
    ],
)
def test_trajectories_are_found(elastic: Callable, runs: Path, wanted: tuple[object, ...], expected: list[str]) -> None:
    code, out, _ = elastic("runs", "trajectories", "chats", "--directory", runs, *wanted, "--json")
    found = json.loads(out)
    assert (code, [one["id"] for one in found["trajectories"]]) == (0, expected)
    code, out, _ = elastic("runs", "trajectories", "latest", "--directory", runs, *wanted)
    assert NAME.findall(out) == expected
    assert ("there are more" in out) == found["has_more"]


def test_a_trajectory_is_read(elastic: Callable, runs: Path) -> None:
    code, out, _ = elastic("runs", "trajectory", "chats", "2/1/0", "--directory", runs)
    assert code == 0
    for words in (
        "2/1/0: reward 1.1, 4 turns, 80 tokens",
        "rewards by part: right 1, short 0.1",
        'task {"row": 7}',
        '  calls add({"a": 1, "b": 1})',
        "branch 1, policy critic",
        "3 messages are as in a context above",
    ):
        assert words in out.splitlines()
    assert sum(line.startswith("assistant  tokens: ") for line in out.splitlines()) == 3
    code, out, _ = elastic("runs", "trajectory", "chats", "2/1/0", "--directory", runs, "--tokens")
    assert '"<|im_end|>"' in out
    code, out, _ = elastic("runs", "trajectory", "chats", "2/1/0", "--directory", runs, "--json")
    detail = json.loads(out)
    assert "".join(detail["pieces"]) == detail["text"]


@pytest.mark.parametrize("tokens", [(), ("--tokens",)])
def test_nothing_that_was_said_steers_the_terminal(elastic: Callable, runs: Path, tokens: tuple[str, ...]) -> None:
    for name in ("2/1/1", "2/1/2", "2/1/3"):
        code, out, _ = elastic("runs", "trajectory", "chats", name, "--directory", runs, *tokens)
        assert code == 0
        assert not set(out) & set(CONTROLS) - set("[2Jevil31m\nnext line")
    assert MARKUP in elastic("runs", "trajectory", "chats", "2/1/1", "--directory", runs).out


def test_what_is_not_there_is_said(elastic: Callable, runs: Path, tmp_path: Path) -> None:
    code, _, err = elastic("runs", "trajectory", "chats", "2/1/99", "--directory", runs)
    assert (code, err.strip()) == (
        2,
        "error: no trajectory '2/1/99' in chats that is over; the newest are: 2/1/3, 2/1/2, 2/1/1, 2/1/0, 2/0/3",
    )
    code, _, err = elastic("runs", "trajectories", "chats", "--directory", runs, "--best", 1, "--worst", 1)
    assert (code, err.strip()) == (2, "error: --best, --worst: found 2 of them; allowed: one")
    for group, others in (("a/b/c/d", ()), ("2/1/0", ()), ("e9/1", ()), ("2/1", ("--evaluation",))):
        code, _, err = elastic("runs", "trajectories", "chats", "--directory", runs, "--group", group, *others)
        allowed = "VERSION/TASK such as e10/3" if others else "STEP/NUMBER such as 3/0, with --evaluation e10/3"
        assert (code, err.strip()) == (2, f"error: --group: found {group!r}; allowed: {allowed}")
    (tmp_path / "policy" / "tokenizer.json").unlink()
    code, out, _ = elastic("runs", "trajectory", "chats", "2/1/0", "--directory", runs)
    assert code == 0
    assert "there is no text: policy/tokenizer.json: cannot be read (No such file or directory)" in out
    code, out, _ = elastic("runs", "trajectory", "chats", "2/1/0", "--directory", runs, "--tokens", "--json")
    own = [place for place, trained in enumerate(json.loads(out)["trained"]) if trained]
    code, out, _ = elastic("runs", "trajectory", "chats", "2/1/0", "--directory", runs, "--tokens")
    first_context = next(part for part in out.split("\n\n") if part.startswith("tokens"))
    assert [int(line.split()[0]) for line in first_context.splitlines()[2:]] == own
