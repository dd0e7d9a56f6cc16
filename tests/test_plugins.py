"""The example of a plug-in passes the suites, and it and the documentation keep to modules that others may import."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "examples" / "plugin"
PROJECT = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "plugins.md").read_text()
LINES_MAX = {"engine.py": 150}
"""By file; others have 60."""
OURS = ("elastic", "functions", "policies", "providers", "traces")


def public_modules() -> dict[str, list[str]]:
    """By what they are for."""
    table = PAGE[PAGE.index("## Modules that you may import") :]
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \|$", table, re.MULTILINE)
    return {purpose: re.findall(r"`([\w.]+)`", modules) for purpose, modules in rows}


def imported(path: Path) -> set[str]:
    tree = ast.walk(ast.parse(path.read_text()))
    return {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}


@pytest.fixture
def installed_plugin(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has the plug-in, as `pip install` would leave it."""
    about = tmp_path / f"elastic_office-{PROJECT['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n")
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
        for group, found in PROJECT["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("".join(points))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PLUGIN, tmp_path, ROOT)))}


@pytest.mark.nightly
def test_the_example_passes_the_suites(installed_plugin: dict[str, str]) -> None:
    """But that of engines, and what starts Python once more: `make test-plugin` runs all, on what pip has installed."""
    left_out = ["--ignore", str(PLUGIN / "tests/test_engine.py"), "-k", "not another_process"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(PLUGIN / "tests")]
    ended = subprocess.run([*command, *left_out], env=installed_plugin, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout[-4000:]


def test_the_example_is_small_and_its_readme_says_how_small() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in (PLUGIN / "elastic_office").glob("[!_]*.py")}
    assert len(lines) == 5
    assert all(found <= LINES_MAX.get(name, 60) for name, found in lines.items()), lines
    told = dict(re.findall(r"\[(\w+\.py)\]\(elastic_office/\w+\.py\) \| (\d+) \|", (PLUGIN / "README.md").read_text()))
    assert told == {name: str(found) for name, found in lines.items()}


def test_the_example_imports_public_modules_alone() -> None:
    public = {module for modules in public_modules().values() for module in modules}
    used = {module for path in PLUGIN.rglob("*.py") for module in imported(path) if module.split(".")[0] in OURS}
    assert used - public == set()


def test_public_modules_are_there_and_contracts_import_little() -> None:
    listed = public_modules()
    assert len(listed) == 4
    assert [module for modules in listed.values() for module in modules if find_spec(module) is None] == []
    contracts, helpers, *_ = listed.values()
    code = (
        f"import sys, {', '.join([*contracts, *helpers])}; print([m for m in ('torch', 'pytest') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (found.stdout, found.stderr) == ("[]\n", "")
