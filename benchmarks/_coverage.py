"""Which lines of some modules' functions have run. What runs as a module is imported does not count.

A function that has shown nothing new for a while is looked at now and then only, so that tracing costs little: a
share that is told is never too high.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

KNOWN_AFTER = 200
"""Calls that have shown nothing new, after which a function is looked at …"""
LOOKED_AT = 16
"""… once in so many calls."""


class Coverage:
    def __init__(self, paths: Sequence[Path]) -> None:
        self.seen: set[tuple[str, int]] = set()
        self._files = {str(path) for path in paths}
        self._calls: Counter[CodeType] = Counter()

    def __enter__(self) -> "Coverage":
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        self._calls[code] += 1
        calls = self._calls[code]
        return self._line if calls < KNOWN_AFTER or calls % LOOKED_AT == 0 else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            if place not in self.seen:
                self.seen.add(place)
                self._calls[frame.f_code] = 0
        return self._line


def lines_of(paths: Sequence[Path]) -> set[tuple[str, int]]:
    return {(str(path), line) for path in paths for line in _lines_of(path)}


def _lines_of(path: Path) -> set[int]:
    """Of all functions, but for those that only stand for something (`...`)."""
    source = path.read_text()
    stubs = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_stub(node.body[-1])
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return {
        line
        for code in _functions(compile(source, str(path), "exec"))
        for _, _, line in code.co_lines()
        if line is not None and line != code.co_firstlineno and line not in stubs
    }


def _is_stub(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _functions(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 0x1:  # CO_OPTIMIZED: a function, no class
                yield inner
            yield from _functions(inner)
