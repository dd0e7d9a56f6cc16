"""How large the project is and how it hangs together, read off its own sources.

A room is an entry of `elastic/`, or one of the packages beside it. An arrow is a pair of rooms of which one imports the
other: also inside functions, under `TYPE_CHECKING`, by `import_module` and by a string that names a module. Floors are
the layers of the import contract over all packages; an arrow is upward if that contract forbids it.
"""

import ast
import io
import itertools
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks import ROOT
from benchmarks._common import Arguments, Figures, benchmark, option

PACKAGES = ("elastic", "providers", "policies", "functions", "traces", "benchmarks", "examples", "infra")
IMPORTED = ("elastic", "providers", "policies", "functions", "traces")
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
BEGAN = {"commit": "710ee8e", "tokens": 806_860, "tokens_of_tests": 520_425, "lines": 116_098}
"""What the moves began with. Tokens are names, operators, numbers and strings."""
WORLDS = ("elastic.testing.faults",)
GROUPS = ("elastic.environments",)
MODULE = re.compile(rf"(?:{'|'.join(IMPORTED)})(?:\.\w+)+")


@dataclass(frozen=True)
class Source:
    """One file. `module` is its dotted name; `is_test` where it is below `tests`."""

    path: Path
    module: str
    is_test: bool

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    def tokens(self) -> int:
        read = io.StringIO(self.text).readline
        return sum(token.type in COUNTED for token in tokenize.generate_tokens(read))


def sources(root: Path) -> list[Source]:
    """The Python files of the project, in the order of their names."""
    return [_source(root, path) for name in (*PACKAGES, "tests") for path in sorted((root / name).rglob("*.py"))]


def _source(root: Path, path: Path) -> Source:
    parts = path.relative_to(root).with_suffix("").parts
    return Source(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts), parts[0] == "tests")


def room_of(module: str) -> str:
    """`elastic.weights.http` → `elastic.weights`; `providers.ec2` → `providers`. Empty for `elastic` itself."""
    parts = module.split(".")
    if parts[0] != "elastic":
        return parts[0]
    return ".".join(parts[:2]) if len(parts) > 1 else ""


def imports_of(source: Source, modules: frozenset[str]) -> Iterator[str]:
    """The project's modules that a file names, in imports and in strings.

    No import is what a process is told to run, nor the group of plug-ins that bears the name of a room.
    """
    programs = {id(name) for node in ast.walk(source.tree) for name in _programs(node)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(source, node)
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = MODULE.match(node.value) and id(node) not in programs and node.value not in GROUPS
            names = [node.value.partition(":")[0]] if is_name else []
        else:
            continue
        yield from (name for name in names if name in modules)


def _programs(node: ast.AST) -> Iterator[ast.expr]:
    """The words after `-m` in a command."""
    if isinstance(node, ast.List | ast.Tuple):
        for flag, name in itertools.pairwise(node.elts):
            if isinstance(flag, ast.Constant) and flag.value == "-m":
                yield name


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.package.split(".")
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def arrows_of(found: Iterable[Source]) -> set[tuple[str, str]]:
    """Pairs of rooms, of which the first imports the second."""
    found = [source for source in found if not source.is_test]
    modules = frozenset(source.module for source in found)
    pairs = {(room_of(source.module), room_of(name)) for source in found for name in imports_of(source, modules)}
    return {(a, b) for a, b in pairs if a and b and a != b}


def layers_of(root: Path) -> list[list[str]]:
    """The layers of the contract over all packages, the highest first."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [one["layers"] for one in contracts if one["type"] == "layers" and not one.get("containers")]
    return [re.split(r"\s*[|:]\s*", layer) for layer in layers]


def upward_of(arrows: Iterable[tuple[str, str]], layers: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Arrows that do not lead to a lower layer, of those between rooms of the contract."""
    floor = {room: number for number, layer in enumerate(reversed(layers)) for room in layer}
    return sorted((a, b) for a, b in arrows if a in floor and b in floor and floor[a] <= floor[b])


def circles_of(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Sets of rooms that import each other in a ring."""
    below: dict[str, set[str]] = {}
    for a, b in arrows:
        below.setdefault(a, set()).add(b)
        below.setdefault(b, set())
    reached = {room: _reach(room, below) for room in below}
    rings = {frozenset(b for b in reached[a] if a in reached[b]) for a in below if a in reached[a]}
    return sorted(sorted(ring) for ring in rings)


def _reach(room: str, below: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(below[room])
    while left:
        if (one := left.pop()) not in found:
            found.add(one)
            left += below[one]
    return found


def public_names(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Classes, functions and methods whose names do not begin with an underscore."""
    for node in tree.body:
        yield from _public(node)


def _public(node: ast.stmt) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
        yield node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield from _public(inner)


def docstring_lines(tree: ast.Module) -> int:
    """The lines of all docstrings of a module, its classes and functions."""
    documented = (
        ast.get_docstring(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return sum(len(text.splitlines()) for text in documented if text)


PUBLIC_BY_THEIR_DOCUMENTATION = {"_replace", "_asdict", "_fields", "_make", "_exit", "_getframe"}
"""Names of named tuples and of `os` and `sys`, whose underscores say something else."""


def foreign_private(tree: ast.Module) -> list[str]:
    """The names of looks at an underscored name of something that is not `self`, `cls` or `super()`."""
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC_BY_THEIR_DOCUMENTATION
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()")
    ]


def replacements(tree: ast.Module) -> int:
    """Calls that put something else in the place of code, uses of `unittest.mock`, and assignments to what a module
    imports."""
    imported, count = imported_names(tree), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_patch = isinstance(node.func.value, ast.Name) and "patch" in node.func.value.id
            count += is_patch and node.func.attr in ("setattr", "setitem", "delattr")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unittest.mock"):
            count += 1
        else:
            count += _assigns(node, imported)
    return count


def imported_names(tree: ast.Module) -> set[str]:
    """The names that a module binds by importing."""
    return {
        alias.asname or alias.name.rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def global_patches(tree: ast.Module) -> int:
    """Names of other modules that a world assigns to: entries `(module, "NAME", value)` and `setattr` calls."""
    imported = imported_names(tree)
    return sum(_assigns(node, imported) or _lists(node, imported) for node in ast.walk(tree))


def _lists(node: ast.AST, imported: set[str]) -> bool:
    if not (isinstance(node, ast.Tuple) and len(node.elts) == 3):
        return False
    where, name, _ = node.elts
    text = isinstance(name, ast.Constant) and isinstance(name.value, str)
    return text and _names(where) and _base(where) in imported


def _assigns(node: ast.AST, imported: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "setattr" and _base(node.args[0]) in imported
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Attribute) and _base(target) in imported for target in targets)


def _names(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _names(node.value))


def _base(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def measure(root: Path) -> Figures:
    found = sources(root)
    code, tests = [s for s in found if not s.is_test], [s for s in found if s.is_test]
    arrows, layers = arrows_of(found), layers_of(root)
    top = {room for room in map(room_of, (s.module for s in code)) if room.startswith("elastic.")}
    names = sum(1 for s in code for _ in public_names(s.tree))
    tokens, tokens_of_tests = (sum(s.tokens() for s in part) for part in (code, tests))
    beside = {package for package in PACKAGES if package != "elastic" and (root / package).is_dir()}
    return {
        "rooms": len(top | beside),
        "floors": len(layers),
        "arrows": len(arrows),
        "upward": len(upward_of(arrows, layers)),
        "circles": len(circles_of(arrows)),
        "top_entries": len(top),
        "tokens": tokens,
        "tokens_before": BEGAN["tokens"],
        "tokens_with_tests": tokens + tokens_of_tests,
        "tokens_with_tests_before": BEGAN["tokens"] + BEGAN["tokens_of_tests"],
        "statements": sum(isinstance(node, ast.stmt) for s in code for node in ast.walk(s.tree)),
        "lines": sum(len(s.text.splitlines()) for s in code),
        "lines_before": BEGAN["lines"],
        "docstring_lines_per_public_name": round(sum(docstring_lines(s.tree) for s in code) / names, 3),
        "foreign_private_in_tests": sum(len(foreign_private(s.tree)) for s in tests),
        "replacements_in_tests": sum(replacements(s.tree) for s in tests),
        "global_patches_in_worlds": sum(global_patches(s.tree) for s in code if s.module.startswith(WORLDS)),
    }


def main(arguments: Arguments) -> Figures:
    figures = measure(arguments.root)
    if arguments.arrows:
        figures["pairs"] = sorted(f"{a} -> {b}" for a, b in arrows_of(sources(arguments.root)))
    return figures


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--arrows", action="store_true", help="print the pairs of rooms, too"),
        option("--root", type=Path, default=ROOT, help="of which checkout"),
    )
