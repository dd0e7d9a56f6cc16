"""What a phases file names and a program's sources have not, found without running any of them.

Only the program's own file and modules beside it are looked at: what is installed elsewhere may be another one where
the program runs. What a source cannot tell for sure (inherited methods, names bound by import) counts as there.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic.pool.phases.files import MAIN, PhasesFile, PhasesFileError, program_at

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def check_sources(file: PhasesFile, script: Sequence[str], directory: Path) -> None:
    """`script` is the command line as it was given, started in `directory`. Raises `PhasesFileError`."""
    at = program_at(script)
    if any(option in ("-I", "-P") for option in script[1:at]):
        return
    by_module = script[at] == "-m"
    own = _module(directory, script[at + 1]) if by_module else directory / script[at]
    if own is None:
        return
    beside = directory if by_module else own.parent
    for module, path in sorted(file.functions()):
        source = own if module == MAIN else _module(beside, module)
        if source is None or (tree := _parsed(source)) is None:
            continue
        if not _has(tree.body, path.split("."), functions_only=module == MAIN):
            raise PhasesFileError(f"phases file {file.path}: {source} has no {module}:{path}")


def _module(directory: Path, module: str) -> Path | None:
    """The module's source below the directory; None where there is none."""
    place = directory.joinpath(*module.split("."))
    for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if path.is_file():
            return path
    return None


def _parsed(source: Path) -> ast.Module | None:
    try:
        return ast.parse(source.read_bytes(), str(source))
    except (OSError, SyntaxError, ValueError):
        return None  # Python itself reports it when it runs the file.


def _has(body: Sequence[ast.stmt], path: Sequence[str], *, functions_only: bool) -> bool:
    name, rest = path[0], path[1:]
    for statement in _statements(body):
        if isinstance(statement, ast.ClassDef) and statement.name == name and rest:
            inherits = bool(statement.bases or statement.decorator_list) and not functions_only
            if inherits or _has(statement.body, rest, functions_only=functions_only):
                return True
        elif isinstance(statement, _FUNCTIONS):
            if statement.name == name and not rest:
                return True
        elif not functions_only and not _bound(statement).isdisjoint((name, "*")):
            return True
    return False


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of this level, also under conditions."""
    for statement in body:
        yield statement
        if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
            handlers = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.ExceptHandler)]
            yield from _statements([*inner, *(child for handler in handlers for child in handler.body)])


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement binds by import or assignment; what `import *` brings is every name."""
    if isinstance(statement, ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(one.asname or one.name).partition(".")[0] for one in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
