"""`python -m elastic.pool.phases.run FILE SCRIPT|-m MODULE [ARGUMENTS]`: runs a program with phases that FILE names.

Functions are wrapped when their modules are imported, and functions of the program's own file when it is compiled. If
FILE names a function that does not exist, the program ends with exit code 2.
"""

import ast
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from elastic.pool.phases import PhaseError, ScriptPhase
from elastic.pool.phases.files import MAIN, PhasesFile, PhasesFileError, PhaseTarget, load_phases, split
from elastic.system.plain_values import with_article

HOOK = "__elastic_wrapped__"
EXIT_BAD_INPUT = 2
USAGE = "usage: python -m elastic.pool.phases.run FILE SCRIPT|-m MODULE [ARGUMENTS]"

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class PhaseWrapper:
    """Wraps the functions that a phases file names as their modules appear, and records which have not appeared."""

    def __init__(self, file: PhasesFile) -> None:
        self.file = file
        self._phases = {target.name: _phase_of(target) for target in file.targets}
        self._done: set[str] = set()

    def wraps(self, module: str) -> dict[str, list[Wrap]]:
        """Return the wrapper of each named function of a module, by the function's path within the module."""
        found: dict[str, list[Wrap]] = {}
        for target in self.file.targets:
            if target.module == module:
                found.setdefault(target.path, []).append(functools.partial(self._begins, target))
        for target in self.file.targets:
            if target.until is not None and target.until[0] == module:
                found.setdefault(target.until[1], []).append(functools.partial(self._ends, target))
        return found

    def apply(self, module: ModuleType) -> None:
        """Wrap the named functions of a module. Raises `PhasesFileError` if the module lacks one."""
        for path, wraps in self.wraps(module.__name__).items():
            holder, name = _place(module, path, f"phases file {self.file.path}")
            function = inspect.getattr_static(holder, name)
            kind = type(function) if isinstance(function, staticmethod | classmethod) else None
            function = getattr(function, "__func__", function)
            if not callable(function) or isinstance(function, type):
                found = f"{module.__name__}:{path} is {with_article(type(function).__name__)}"
                raise PhasesFileError(f"phases file {self.file.path}: {found}; allowed: a function or a method")
            for wrap in wraps:
                function = wrap(function)
            setattr(holder, name, function if kind is None else kind(function))
            self._done.add(f"{module.__name__}:{path}")

    def wrap_main(self, path: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of the program's own file when it is defined."""
        for wrap in self.wraps(MAIN).get(path, ()):
            function = wrap(function)
        self._done.add(f"{MAIN}:{path}")
        return function

    def missed(self) -> list[str]:
        """Functions that the file names and that never appeared."""
        return sorted({f"{module}:{path}" for module, path in self.file.functions()} - self._done)

    def _begins(self, target: PhaseTarget, function: Callable[..., Any]) -> Callable[..., Any]:
        phase = self._phases[target.name]
        if target.until is None and not target.state:
            return phase(function)
        signature = inspect.signature(function) if any(":" not in one for one in target.state) else None

        def states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            bound = signature.bind(*args, **kwargs).arguments if signature is not None else {}
            return [_state(target, one, bound) for one in target.state]

        if target.until is not None:

            @functools.wraps(function)
            def lingering(*args: Any, **kwargs: Any) -> Any:
                phase.of(lambda: states(args, kwargs)).begin(lingers=True)
                return function(*args, **kwargs)

            return lingering

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            return phase.of(lambda: states(args, kwargs))(function)(*args, **kwargs)

        return inside

    def _ends(self, target: PhaseTarget, function: Callable[..., Any]) -> Callable[..., Any]:
        phase = self._phases[target.name]

        @functools.wraps(function)
        def last(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                phase.end()

        return last


class _Finder(MetaPathFinder):
    """An import finder before all others: wraps the named functions of a module once the module is imported."""

    def __init__(self, wrapper: PhaseWrapper) -> None:
        self._wrapper = wrapper
        self._modules = wrapper.file.modules() - {MAIN}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in self._modules:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._wrapper)  # type: ignore[assignment]
                return spec
        return None


class _Loader(Loader):
    def __init__(self, loader: Any, wrapper: PhaseWrapper) -> None:
        self._loader, self._wrapper = loader, wrapper

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            self._wrapper.apply(module)
        except PhasesFileError as error:
            # The importing code may take any exception for a module that is not there.
            raise SystemExit(_told(error)) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Decorate(ast.NodeTransformer):
    """Adds the wrappers to the functions of the program's own file as decorators."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.left = set(paths)
        self._within: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._decorated(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._decorated(node)

    def _decorated(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        path = ".".join((*self._within, node.name))
        if path not in self.left:
            return node
        self.left.discard(path)
        call = ast.Call(func=ast.Name(HOOK, ast.Load()), args=[ast.Constant(path)], keywords=[])
        # A static or class method is made of the wrapped function, so the wrapping is nearest to it.
        node.decorator_list.append(ast.copy_location(call, node))
        return ast.fix_missing_locations(node)

    def _inside(self, node: ast.ClassDef) -> ast.AST:
        self._within.append(node.name)
        try:
            return self.generic_visit(node)
        finally:
            self._within.pop()


def main(arguments: Sequence[str]) -> int:
    """Run the program in this process, as Python would. Returns its exit code, or raises what the program raises."""
    if len(arguments) < 2 or (arguments[1] == "-m" and len(arguments) < 3):
        print(f"error: {USAGE}", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        wrapper = PhaseWrapper(load_phases(Path(arguments[0])))
        sys.meta_path.insert(0, _Finder(wrapper))
        code, file, argv = _module(arguments[2:], wrapper) if arguments[1] == "-m" else _script(arguments[1:], wrapper)
        for name in sorted(wrapper.file.modules() - {MAIN}):
            _check_module(wrapper.file, name)
        program = ModuleType(MAIN)
        vars(program).update(__file__=file, __builtins__=__builtins__, __cached__=None, __package__=_package(arguments))
        setattr(program, HOOK, lambda path: lambda function: wrapper.wrap_main(path, function))
        sys.modules[MAIN], sys.argv = program, argv
        for name in (wrapper.file.modules() - {MAIN}) & set(sys.modules):
            wrapper.apply(sys.modules[name])
    except PhasesFileError as error:
        return _told(error)
    try:
        exec(code, vars(program))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if missed := wrapper.missed():
        return _told(PhasesFileError(f"phases file {wrapper.file.path}: never there, so no phase: {', '.join(missed)}"))
    return 0


def _told(error: PhaseError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _script(arguments: Sequence[str], wrapper: PhaseWrapper) -> tuple[CodeType, str, list[str]]:
    """Run a script file. Raises `PhasesFileError` if the file cannot be read, or lacks a named function."""
    path = Path(arguments[0])
    try:
        source = path.read_bytes()
    except OSError as error:
        raise PhasesFileError(f"{path}: {error.strerror or error}") from error
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    return _compiled(source, str(path), wrapper), str(path), list(arguments)


def _module(arguments: Sequence[str], wrapper: PhaseWrapper) -> tuple[CodeType, str, list[str]]:
    """Run a module as `python -m` does. Raises `PhasesFileError` if the module is missing or has no source."""
    name = arguments[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.{MAIN}")
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise PhasesFileError(f"-m {name}: there is no such module, with its source, to be run")
    code = _compiled(Path(spec.origin).read_bytes(), spec.origin, wrapper)
    return code, spec.origin, [spec.origin, *arguments[1:]]


def _package(arguments: Sequence[str]) -> str | None:
    if arguments[1] != "-m":
        return None
    spec = _spec(arguments[2])
    if spec is not None and spec.submodule_search_locations is not None:
        return arguments[2]
    return arguments[2].rpartition(".")[0]


def _compiled(source: bytes, path: str, wrapper: PhaseWrapper) -> CodeType:
    tree = ast.parse(source, path)
    decorate = _Decorate(wrapper.wraps(MAIN))
    tree = decorate.visit(tree)
    if decorate.left:
        names = ", ".join(f"{MAIN}:{name}" for name in sorted(decorate.left))
        raise PhasesFileError(f"phases file {wrapper.file.path}: {path} has no {names}")
    return compile(tree, path, "exec", dont_inherit=True)


def _check_module(file: PhasesFile, name: str) -> None:
    """Raises `PhasesFileError` if the module's top package cannot be found."""
    top = name.partition(".")[0]
    if _spec(top) is None:
        raise PhasesFileError(f"phases file {file.path}: there is no module {top!r} here, of {name!r}")


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _place(module: ModuleType, path: str, what: str) -> tuple[Any, str]:
    """Return the object that holds the last name of a path. Raises `PhasesFileError` if part of the path is missing."""
    *holders, name = path.split(".")
    holder: Any = module
    for at, part in enumerate((*holders, name)):
        if not hasattr(holder, part):
            raise PhasesFileError(
                f"{what}: {module.__name__}:{path} is not there: {'.'.join(path.split('.')[: at + 1])}"
            )
        if part is not name or at < len(holders):
            holder = getattr(holder, part)
    return holder, name


def _phase_of(target: PhaseTarget) -> ScriptPhase:
    return ScriptPhase(target.phase, (), both=target.both, name=target.name, inner=True)


def _state(target: PhaseTarget, named: str, parameters: dict[str, Any]) -> Any:
    """Return the object that a state's name refers to. Raises `PhaseError` if there is none now."""
    if ":" in named:
        module, path = split(named, target.name)
        thing, parts = sys.modules.get(module), path.split(".")
        known = thing is not None
    else:
        first, *parts = named.split(".")
        thing, known = parameters.get(first), first in parameters
    for part in parts:
        if not known or not hasattr(thing, part):
            known = False
            break
        thing = getattr(thing, part)
    if not known:
        raise PhaseError(f"{target.name}, phase {target.phase!r}: its state {named!r} is not there")
    return thing


if __name__ == "__main__":
    # What the program imports is the module that it would get, not this one run as a program.
    from elastic.pool.phases.run import main as run_program  # pyrefly: ignore[missing-module-attribute]

    sys.exit(run_program(sys.argv[1:]))
