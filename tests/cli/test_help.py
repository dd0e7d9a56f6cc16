"""What the command line says of itself."""

from pathlib import Path

import pytest
from typer.main import get_command

from elastic.cli.app import app
from elastic.cli.reference import reference
from elastic.runtime.journal import DirectoryStore, RunDirectory

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(elastic, command: str) -> None:
    code, out, err = elastic(command, "--help")
    assert (code, err) == (0, "")
    assert "Example: " in out
    assert f"elastic {command}" in out.partition("Example: ")[2]


def test_reference_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run: python -m elastic.cli.reference > docs/cli.md"


def test_an_error_without_words_says_what_was_waited_for(elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(store: DirectoryStore) -> list[RunDirectory]:
        raise TimeoutError

    monkeypatch.setattr(DirectoryStore, "runs", hang)
    assert elastic("runs") == (1, "", "error: TimeoutError in runs_command\n")


def test_unknown_command(elastic) -> None:
    code, out, err = elastic("nosuch")
    assert (code, out) == (2, "")
    assert "nosuch" in err
