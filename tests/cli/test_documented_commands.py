"""Every command in the documentation works in a clone, or is marked with what it needs.

A block of commands that needs more than a clone has `<!-- needs: WHAT -->` before it, such as an account or a GPU. In
every block, marked or not, the commands of Elastic are ones that exist, with options that exist, and files of the clone
that a command names are there. Those that take less than some seconds are run.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

from elastic.cli.app import app
from elastic.compose.plan import resolve
from elastic.config import load_config

CLONE = Path(__file__).parents[2]
LEFT_OUT = ("docs/cli.md", "CHANGELOG.md")
"""Pages that are made of the code, or tell of what was."""
PAGES = [
    page
    for place in (CLONE, CLONE / "docs", CLONE / "infra")
    for page in sorted(place.glob("**/*.md" if place.name == "infra" else "*.md"))
    if str(page.relative_to(CLONE)) not in LEFT_OUT
]
NEEDS = ("an account", "a GPU", "a cluster", "a run", "a server", "another machine", "root", "vLLM")
_BLOCK = re.compile(r"(?:<!-- needs: ([^\n]*) -->\n\n?)?^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`((?:elastic|make|python|pip) [^`\n]+)`")
_PROGRAMS = ("elastic", "make", "python", "pip", "nohup")
_ELSEWHERE = ("curl", "docker", "modal", "packer", "terraform", "vllm", "ray", "aws", "ssh", "sudo", "kubectl")
_FIRST_WORDS = (*_PROGRAMS, *_ELSEWHERE, "infra/", ".cache/")
_TAKES = re.compile(r"\b(examples|benchmarks|tests|infra|docs|traces|elastic)/\S+\.\w+")
_TOP: Any = get_command(app)
"""Typer has classes of its own for what Click calls by the same names."""
QUICK = (
    "elastic simulate --jobs examples/jobs.toml --policy ours --output pool.html",
    "elastic profile --help",
    "elastic runs",
)


@dataclass(frozen=True)
class Documented:
    page: str
    command: str
    needs: str = ""


def _lines(block: str) -> Iterator[str]:
    """The commands of a block: without prompts, comments and what was printed."""
    for line in block.replace("\\\n", " ").splitlines():
        command = re.split(r"\s#\s", line.removeprefix("$ "))[0].strip()
        for each in re.split(r"\s(?:&&|\|)\s", command):
            words = re.sub(r"^(\w+=\S+ )+", "", each.strip())
            if words.startswith(_FIRST_WORDS) and not words.startswith("python -c"):
                yield words


def _documented() -> Iterator[Documented]:
    for path in PAGES:
        page, text = str(path.relative_to(CLONE)), path.read_text()
        for needs, kind, block in _BLOCK.findall(text):
            if kind in ("", "console", "sh", "bash"):
                yield from (Documented(page, command, needs) for command in _lines(block))
        for command in _INLINE.findall(text):
            yield from (Documented(page, each) for each in _lines(command))


def _words(command: str) -> list[str]:
    """The arguments, up to where the shell takes over."""
    found: list[str] = []
    for word in shlex.split(command):
        if word in (">", "<", "&", "2>&1"):
            break
        found.append(word)
    return found


def _check_elastic(words: list[str]) -> None:
    """Each command and option exists; values are of their kinds."""
    command: Any = _TOP
    context: Any = click.Context(_TOP, info_name="elastic")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        inner = command.get_command(context, name)
        assert inner is not None, f"there is no `{context.command_path} {name}`"
        command, context = inner, click.Context(inner, info_name=name, parent=context)
    parser = command.make_parser(context)
    parser.ignore_unknown_options = False
    try:
        parser.parse_args(list(words))
    except click.UsageError as error:
        raise AssertionError(f"{context.command_path}: {error.format_message()}") from error
    if context.info_name == "run" and words and words[0].startswith("examples/"):
        _check_run(command, context, words)


def _check_run(command: Any, context: Any, words: list[str]) -> None:
    """A run of an example resolves with what is set."""
    options, _, _ = command.make_parser(context).parse_args(list(words))
    config = load_config(CLONE / words[0], options.get("overrides") or [])
    resolve(config, [name for name in (options.get("providers") or "").split(",") if name], words[0])


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, f"there is no module {words[1]}"
        return
    script = CLONE / words[0]
    if words[0].endswith(".py") and "/" in words[0]:
        text = script.read_text()
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            of_all = option in ("--json", "--quick") and re.search(r"benchmark\(\s*__doc__", text) is not None
            assert of_all or f'"{option}"' in text, f"{words[0]} has no option {option}"


def _check(command: str) -> None:
    for match in _TAKES.finditer(command):
        assert (CLONE / match[0]).exists() or "*" in match[0], f"there is no {match[0]}"
    program, *words = _words(command)
    match program:
        case "nohup":
            _check(command.removeprefix("nohup "))
        case "elastic":
            _check_elastic(words)
        case "make":
            makefile = (CLONE / "Makefile").read_text()
            for target in (word for word in words if "=" not in word and not word.startswith("-")):
                assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"make has no {target}"
        case "python" | ".cache/clouds/bin/python":
            _check_python(words)
        case "pip":
            pyproject = (CLONE / "pyproject.toml").read_text()
            for extra in re.findall(r"\.\[([\w,]+)\]", command):
                for name in extra.split(","):
                    assert re.search(rf"^{name} = \[", pyproject, re.MULTILINE), f"there is no extra {name}"
        case _:
            pass


@pytest.mark.parametrize("page", sorted({each.page for each in _documented()}))
def test_documented_commands_exist_with_their_options_and_files(page: str) -> None:
    faults: list[str] = []
    for each in _documented():
        if each.page != page:
            continue
        try:
            if each.needs and each.needs not in NEEDS:
                raise AssertionError(f"needs: found {each.needs!r}; allowed: {', '.join(NEEDS)}")
            if each.command.startswith(_ELSEWHERE):
                assert each.needs, "it is no command of a clone, and its block is not marked"
            _check(each.command)
        except (AssertionError, ValueError, OSError) as error:
            faults.append(f"{each.command}: {error}")
    assert not faults, "\n".join([page, *faults])


@pytest.mark.parametrize("command", QUICK)
def test_quick_ones_run_in_a_clone(elastic, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    assert any(each.command == command for each in _documented())
    (tmp_path / "examples").symlink_to(CLONE / "examples")
    monkeypatch.chdir(tmp_path)
    code, _, err = elastic(*shlex.split(command)[1:])
    assert code == 0, err


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    sources = [
        *PAGES,
        *(path for room in ("elastic", "providers", "functions") for path in CLONE.glob(f"{room}/**/*.py")),
    ]
    said = re.compile(r"pip install [^\n`]*elastic-rl\[\w+\](?! @ )")
    assert [str(path) for path in sources if said.search(path.read_text())] == []
