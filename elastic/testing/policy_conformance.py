"""What every policy must be (`elastic.core.policy`), as tests of pytest: pure, and the same wherever it is asked again.

A run is replayed from its journal to the same state, in another process and years later. So a policy keeps nothing,
asks nothing but the view that it was given, and gives the same answer to the same question. A third party's policies,
once their entry points are installed, pass the suite from one file:

    from elastic.testing.policy_conformance import *
    from elastic.testing.policies import PolicyUnderTest

    @pytest.fixture(params=[[PolicyUnderTest("routing", "mine", {"weight": 2.0})]], ids=str)
    def policies_under_test(request):
        return request.param

Policies of different decisions may be tried together, in one run.
"""

# pyright: basic

import ast
import sys
from pathlib import Path

import pytest

from elastic.config import ConfigError
from elastic.testing.policies import PolicyUnderTest, history_elsewhere, live_through

IMPURE = [
    "aiohttp",
    "asyncio",
    "concurrent",
    "datetime",
    "httpx",
    "io",
    "multiprocessing",
    "numpy",
    "os",
    "pathlib",
    "random",
    "requests",
    "secrets",
    "select",
    "shutil",
    "signal",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "torch",
    "urllib",
    "uuid",
]
"""Modules by which a policy could ask something of the world: clocks, chance, files, processes and the network."""
BUILT_IN = frozenset(("open", "input", "print", "hash", "id", "globals", "exec", "eval", "__import__"))
"""The same of built-in functions; `hash` of a text and `id` differ from process to process."""
SEED = 1


def test_its_fields_are_its_settings_and_it_cannot_change(policies_under_test):
    for under_test in policies_under_test:
        one = under_test.make()
        assert one == under_test.make(), f"{under_test}: two with the same settings are not equal"
        for name in (*getattr(one, "__struct_fields__", getattr(one, "__dataclass_fields__", ())), "a_memory"):
            with pytest.raises((AttributeError, TypeError)):
                setattr(one, name, 1)


def test_it_asks_nothing_of_the_world(policies_under_test):
    """By what its module imports and calls."""
    for under_test in policies_under_test:
        path = sys.modules[type(under_test.make()).__module__].__file__
        assert path is not None
        tree = ast.parse(Path(path).read_text())
        asked = {name for name in imported_by(tree) if name.partition(".")[0] in IMPURE or of_other_rooms(name)}
        asked |= called_in(tree) & BUILT_IN
        assert not asked, f"{under_test}: {path} asks {', '.join(sorted(asked))}"


def imported_by(tree):
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {*names, *(node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)}


def of_other_rooms(module):
    """Whether it is of Elastic, and not of its core, which is as pure as policies are."""
    return module.startswith("elastic.") and not module.startswith("elastic.core.")


def called_in(tree):
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def test_a_run_full_of_faults_asks_it_ends_and_is_replayed_to_the_same_state(policies_under_test):
    lived = live_through(policies_under_test, SEED)
    assert all(lived.questions.values()), lived.questions


def test_another_process_comes_to_the_same(policies_under_test):
    assert history_elsewhere(policies_under_test, SEED) == live_through(policies_under_test, SEED).history


def test_settings_that_it_does_not_have_are_refused(policies_under_test):
    for under_test in policies_under_test:
        with pytest.raises(ConfigError, match="no_such_key: unknown key"):
            PolicyUnderTest(under_test.decision, under_test.name, {"no_such_key": 1}).make()
