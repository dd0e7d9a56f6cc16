"""What the command line says of itself."""

import sys
from pathlib import Path

import pytest

from elastic.cli.app import COMMANDS, Commands
from elastic.cli.reference import reference
from elastic.runtime.journal import DirectoryStore, RunDirectory

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(elastic, command: str) -> None:
    code, out, err = elastic(command, "--help")
    assert (code, err) == (0, "")
    assert "Example: " in out
    assert f"elastic {command}" in out.partition("Example: ")[2]


def test_the_list_of_commands_has_what_each_says_of_itself() -> None:
    for name, (_, words) in COMMANDS.items():
        command = Commands()[name]
        assert words == ("" if command.hidden else command.get_short_help_str(sys.maxsize)), name


def test_reference_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run: python -m elastic.cli.reference > docs/cli.md"


def test_an_error_without_words_says_what_was_waited_for(elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(store: DirectoryStore) -> list[RunDirectory]:
        raise TimeoutError

    monkeypatch.setattr(DirectoryStore, "runs", hang)
    assert elastic("runs") == (1, "", "error: TimeoutError in list_runs\n")


def test_unknown_command(elastic) -> None:
    code, out, err = elastic("nosuch")
    assert (code, out) == (2, "")
    assert "nosuch" in err
