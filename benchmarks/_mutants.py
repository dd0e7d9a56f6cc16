"""Small deliberate mistakes in the code that decides, one at a time.

A mutant is one changed expression or one statement left out, in a module of `elastic/core`, its cluster or
`policies`. Those that cannot be told from the original by what they do stand in `equivalent_mutants.toml`, each with
the reason.
"""

import ast
import copy
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks import HERE, ROOT

PACKAGES = ("elastic/core", "elastic/core/cluster", "policies")
DATA_ONLY = ("types.py", "events.py", "commands.py", "__init__.py")
"""Modules without a decision in them."""
EQUIVALENT = HERE / "equivalent_mutants.toml"

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """`tree` is the module's, `changed` stands in it for `place`; `where` names the function around it."""

    path: Path
    where: str
    line: int
    what: str
    tree: ast.Module = field(repr=False, compare=False)
    place: ast.AST = field(repr=False, compare=False)
    changed: ast.AST = field(repr=False, compare=False)

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)

    @property
    def key(self) -> str:
        """What it is called whatever is written above it."""
        return f"{self.module}:{self.where}: {self.what}"

    def source(self) -> str:
        return _with(self.tree, self.place, self.changed)

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.where}: {self.what}"


def all_mutants() -> list[Mutant]:
    """Every mutant, without those that are known to be no mistake."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).glob("*.py"))]
    found = [mutant for path in paths if path.name not in DATA_ONLY for mutant in mutants_of(path)]
    known = equivalents()
    for key in known - {mutant.key for mutant in found}:
        print(f"{EQUIVALENT.name}: there is no such mutant any more: {key}", file=sys.stderr)
    return [mutant for mutant in found if mutant.key not in known]


def equivalents() -> set[str]:
    """Keys of the mutants that are no mistake."""
    return {key for keys in tomllib.loads(EQUIVALENT.read_text()).values() for key in keys}


def sample(mutants: Sequence[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """All, or so many of them drawn evenly, the same for the same seed."""
    if count is None or count >= len(mutants):
        return list(mutants)
    return sorted(Random(seed).sample(list(mutants), count), key=lambda m: (m.path, m.line))


def mutants_of(path: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for parent in ast.iter_child_nodes(node):
            parent.parent = node  # type: ignore[attr-defined]
    for place in ast.walk(tree):
        if not _no_decision(place):
            for changed in _changes(place):
                what = f"{_shown(place)} → {_shown(changed)}{_of_statement(place)}"
                yield Mutant(path, _where(place), getattr(place, "lineno", 0), what, tree, place, changed)


def _up(node: ast.AST) -> Iterator[ast.AST]:
    """The node, and what it stands in."""
    here: ast.AST | None = node
    while here is not None:
        yield here
        here = getattr(here, "parent", None)


def _where(node: ast.AST) -> str:
    names = [here.name for here in _up(node) if isinstance(here, ast.FunctionDef | ast.ClassDef)]
    return ".".join(reversed(names)) or "module"


def _of_statement(node: ast.AST) -> str:
    """A bare constant says little without what it stands in."""
    statements = (here for here in _up(node) if isinstance(here, ast.stmt))
    return f" in {_shown(next(statements))}" if isinstance(node, ast.Constant) else ""


def _shown(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:80]


def _no_decision(node: ast.AST) -> bool:
    """Annotations, assertions, what an error says, how things are stored, and what only describes."""
    for here in _up(node):
        parent = getattr(here, "parent", None)
        if isinstance(here, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return True
        if isinstance(here, ast.Assign) and _shown(here).startswith("__slots__"):
            return True
        if isinstance(parent, ast.AnnAssign | ast.arg) and here is parent.annotation:
            return True
        if isinstance(parent, ast.FunctionDef) and (here is parent.returns or here in parent.decorator_list):
            return True
        if isinstance(parent, ast.ClassDef) and (here in parent.bases or here in parent.decorator_list):
            return True
        if isinstance(parent, ast.keyword) and isinstance(getattr(parent, "parent", None), ast.ClassDef):
            return True
    return False


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            yield _changed(node, ops=[_COMPARISONS[type(op)]()])
        case ast.BoolOp(op=op):
            yield _changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            yield _changed(node, op=_ARITHMETIC[type(op)]())
        case ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
            yield _changed(node, op=_ARITHMETIC[type(op)]())
        case ast.Constant(value=bool() as value):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value=value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield _changed(node, body=orelse, orelse=body)
        case ast.If() | ast.While():
            yield _changed(node, test=ast.Constant(value=False))
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.Continue():
            yield ast.Pass()
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            if isinstance(value, ast.Compare | ast.BoolOp):
                yield ast.Return(value=ast.Constant(value=True))


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _with(tree: ast.Module, place: ast.AST, changed: ast.AST) -> str:
    """The module's source with one node in place of another."""
    parent = place.parent  # type: ignore[attr-defined]
    for name, value in ast.iter_fields(parent):
        if value is place:
            setattr(parent, name, changed)
            source = ast.unparse(ast.fix_missing_locations(tree))
            setattr(parent, name, place)
            return source
        if isinstance(value, list) and any(item is place for item in value):
            at = next(i for i, item in enumerate(value) if item is place)
            value[at] = changed
            source = ast.unparse(ast.fix_missing_locations(tree))
            value[at] = place
            return source
    raise AssertionError("a node is among its parent's fields")
