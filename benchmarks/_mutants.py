"""Small deliberate mistakes in the code that decides, one at a time, and whether the tests notice.

A mutant is one changed expression or one statement left out, in a module of `elastic/core` or `policies`. Each is
judged in a forked process that imports the changed source in place of the module: first by worlds full of faults,
then by the unit tests. A mutant that makes either hang counts as noticed, since the judges have a time limit.
"""

import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType

from _common import ROOT

PACKAGES = ("elastic/core", "policies")
DATA_ONLY = ("types.py", "events.py", "commands.py", "__init__.py")
"""Modules without a decision in them."""
JUDGE_CPU_S = 120
JUDGE_WALL_S = 900
WORLDS = 60
TESTS = ("tests/core", "tests/policies")

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
    path: Path
    line: int
    what: str
    source: str

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.what}"


def all_mutants() -> list[Mutant]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).glob("*.py"))]
    return [mutant for path in paths if path.name not in DATA_ONLY for mutant in mutants_of(path)]


def mutants_of(path: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for parent in ast.iter_child_nodes(node):
            parent.parent = node  # type: ignore[attr-defined]
    places = [node for node in ast.walk(tree) if not _no_decision(node)]
    for place in places:
        for changed in _changes(place):
            what = f"{_shown(place)} → {_shown(changed)}"
            yield Mutant(path, getattr(place, "lineno", 0), what, _with(tree, place, changed))


def _shown(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:80]


def _no_decision(node: ast.AST) -> bool:
    """Annotations, assertions, what an error says, and what only describes."""
    here: ast.AST | None = node
    while here is not None:
        parent = getattr(here, "parent", None)
        if isinstance(here, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return True
        if isinstance(parent, ast.AnnAssign | ast.arg) and here is parent.annotation:
            return True
        if isinstance(parent, ast.FunctionDef) and (here is parent.returns or here in parent.decorator_list):
            return True
        if isinstance(parent, ast.ClassDef) and (here in parent.bases or here in parent.decorator_list):
            return True
        if isinstance(parent, ast.keyword) and isinstance(getattr(parent, "parent", None), ast.ClassDef):
            return True
        here = parent
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


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant's source under its module's name."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._mutant.path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.source, str(self._mutant.path), "exec"), module.__dict__)


def killed(mutant: Mutant) -> bool:
    """Whether a judge notices. Must not be called once the code under test is imported here."""
    pid = os.fork()
    if pid == 0:
        os._exit(_judge(mutant))
    deadline_s = time.monotonic() + JUDGE_WALL_S
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def _judge(mutant: Mutant) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (JUDGE_CPU_S, JUDGE_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(sink, stream)
    try:
        sys.meta_path.insert(0, _Changed(mutant))
        from elastic.sim.world import simulate

        for seed in range(WORLDS):
            simulate(seed)
        return _run_tests()
    except BaseException:
        return 1


def _run_tests() -> int:
    import pytest

    os.chdir(ROOT)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *TESTS]))


def sample(mutants: Sequence[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """All, or so many of them drawn evenly, the same for the same seed."""
    if count is None or count >= len(mutants):
        return list(mutants)
    return sorted(Random(seed).sample(list(mutants), count), key=lambda m: (m.path, m.line))
