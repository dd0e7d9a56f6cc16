"""What the command line is started with: terminals of few characters, closed streams, pipes, users without a home."""

import io
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from typer.main import get_command

from elastic.cli import main
from elastic.cli.app import app
from elastic.cli.output import console, emit
from elastic.cli.tables import show_listing
from elastic.config import ConfigError, load_config
from elastic.engine.model.stored import CheckpointError, read_config
from elastic.runtime.journal import CONFIG, DirectoryStore, RunDirectory
from elastic.simulation.jobs.simulate import load_workload

ROOT = Path(__file__).parents[2]
NULL = """
import os, sys
from elastic.cli.output import prepare_streams
report = int(sys.argv[1])
prepare_streams()
print("said", flush=True)
print("said", file=sys.stderr, flush=True)
sys.stdin.read()
found = [f"{os.readlink(f'/proc/self/fd/{n}')} {os.get_inheritable(n)}" for n in range(3)]
os.write(report, "\\n".join(found).encode())
"""


def every_command(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*path, name))


def latin_1(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """Standard output becomes a terminal that knows Latin-1 alone."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1", write_through=True))
    return shown


@pytest.mark.parametrize("command", [*every_command(get_command(app))], ids=" ".join)
def test_help_on_a_terminal_of_few_characters(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = latin_1(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert b"--help" in shown.getvalue()


def test_json_is_whole_on_a_terminal_of_few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = latin_1(monkeypatch)
    emit({"words": "…é"})
    assert json.loads(shown.getvalue()) == {"words": "…é"}


@pytest.mark.parametrize("closed", [(1, 2), (0, 1, 2)])
def test_closed_streams_lead_nowhere(closed: tuple[int, ...]) -> None:
    read, write = os.pipe()

    def close() -> None:
        for number in closed:
            os.close(number)

    nothing = subprocess.DEVNULL
    command = [sys.executable, "-c", NULL, str(write)]
    with open(read) as report:
        process = subprocess.Popen(
            command, pass_fds=[write], preexec_fn=close, stdin=nothing, stdout=nothing, stderr=nothing
        )
        os.close(write)
        assert report.read().splitlines() == ["/dev/null True"] * 3
        assert process.wait(20) == 0


def test_tables_in_pipes_have_names_whole(elastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    names = [f"{'qwen3-8b-frozenlake-grpo-lr1e-5-seed' * 2}-{number}" for number in range(2)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text("{}")
    code, out, _ = elastic("runs", "--directory", tmp_path)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == names
    assert all(line == line.rstrip() for line in out.splitlines())


@pytest.mark.parametrize("columns", ["", "80", "40"])
def test_what_is_copied_from_tables_is_whole(columns: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    keys = [f"key_01JD3K5T7WQ8M2N4P6R8S0V2X{number}" for number in range(3)]
    mails = [f"somebody.with.a.long.name.{number}@research.example.com" for number in range(3)]
    said = "a job that several people wait for, and which is told at length" * 2
    show_listing(("id", "label", "email"), [(key, said, mail) for key, mail in zip(keys, mails, strict=True)])
    out = capsys.readouterr().out
    assert all(key in out and mail in out for key, mail in zip(keys, mails, strict=True))


def test_lists_of_objects_are_made_in_one_place() -> None:
    """Elsewhere a table is of figures: it lists nothing that has an id."""
    made = {path.name for path in (ROOT / "elastic" / "cli").glob("*.py") if re.search(r"\bTable\(", path.read_text())}
    assert made == {"doctor.py", "jobs.py", "progress.py", "tables.py"}


def test_ctrl_c_while_modules_are_imported_is_one_line() -> None:
    impatient = """
import sys
from elastic.cli import main
class Impatient:
    def find_spec(self, name, path, target=None):
        if name == "elastic.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Impatient())
main()
"""
    ended = subprocess.run([sys.executable, "-c", impatient], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_output_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    """A short one as it is flushed, and a long one as it is written."""
    command = ("policies",)
    with open("/dev/full", "w") as full:
        ended = elastic_with(command, tmp_path, full)
    assert (ended.returncode, ended.stderr) == (1, "error: standard output: No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as left:
        ended = elastic_with(command, tmp_path, left)
    assert (ended.returncode, ended.stderr) == (1, "")


def elastic_with(command: tuple[str, ...], cwd: Path, stdout: IO[str]) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "elastic.cli", *command]
    return subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, cwd=cwd, check=False)


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("report: /runs/[bold]/[/x]", highlight=False)
    assert capsys.readouterr().out == "report: /runs/[bold]/[/x]\n"


def test_every_table_goes_through_one_console() -> None:
    makes = {
        path.name for path in (ROOT / "elastic" / "cli").glob("*.py") if re.search(r"\bConsole\(", path.read_text())
    }
    assert makes == {"output.py"}


def test_the_latest_run_is_the_one_that_began_last(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for number, now_ns in enumerate((100, 300, 200, 50)):
        run = RunDirectory(tmp_path / "ceab"[number])
        run.path.mkdir()
        (run.path / CONFIG).write_text("{}")
        store.note_start(run, now_ns)
        assert store.find("latest").path == run.path
    os.utime(tmp_path / "c" / CONFIG)
    assert [run.name for run in store.runs()] == ["c", "e", "a", "b"]
    assert [run.start_ns() for run in store.runs()] == [100, 300, 301, 302]


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in passwd, as in containers."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CONFIG_HOME", "ELASTIC_API_URL", "ELASTIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize(
    "command",
    [
        ("api", "info"),
        ("api", "logout"),
        ("run", "--remote", "{config}"),
        ("runs", "show", "--remote"),
        ("stop", "run_1"),
    ],
    ids=" ".join,
)
def test_without_a_home_nobody_is_logged_in(homeless: None, refused, elastic, config: Path, command) -> None:
    refused(elastic(*(word.format(config=config) for word in command)), "no home directory", "ELASTIC_API_URL")


@pytest.mark.parametrize("command", ["stop", "logs", "report", "cap"])
def test_without_a_home_runs_on_disk_are_found(homeless: None, refused, elastic, tmp_path: Path, command: str) -> None:
    more = ("spot=1",) if command == "cap" else ()
    refused(elastic(command, "nosuch", *more, "--directory", tmp_path), "no run 'nosuch'")


def test_without_a_home_a_path_in_it_is_refused(homeless: None, refused, elastic, config: Path) -> None:
    refused(
        elastic("run", config, "--set", "run.directory=~/runs"), "run.directory", "no home directory is known for ~"
    )


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_files_as_editors_save_them(tmp_path: Path, config: Path, checkpoint: Path, encoding: str) -> None:
    files = {
        tmp_path / "config.toml": (config.read_text(), load_config, ConfigError),
        tmp_path / "jobs.toml": ((ROOT / "examples" / "jobs.toml").read_text(), load_workload, ConfigError),
        tmp_path / "config.json": ((checkpoint / "config.json").read_text(), None, CheckpointError),
    }
    for path, (text, read, error) in files.items():
        path.write_bytes(text.encode(encoding))
        attempt = (lambda path: read_config(path.parent)) if read is None else read
        if encoding == "utf-8-sig":
            assert attempt(path) is not None
        else:
            with pytest.raises(error, match=f"{path.name}.*UTF-16 or UTF-32.*save it as UTF-8"):
                attempt(path)
