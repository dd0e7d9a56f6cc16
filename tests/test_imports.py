"""What a process imports costs it nothing further, and no more is imported than it shows."""

import gc
import subprocess
import sys

import pytest

from elastic.system.imports import importing

LOOKS = """
import gc, sys
from elastic.system.imports import importing
with importing():
    assert not gc.isenabled()
    import elastic.cli.app
assert gc.isenabled() and gc.get_freeze_count() > 10_000
print(*sorted({"rich", "structlog", "torch", "pydantic"} & sys.modules.keys()))
import rich
"""


def test_what_a_process_of_ours_imports_is_left_out_of_garbage_collections() -> None:
    looked = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, check=True)
    assert looked.stdout.split() == ["structlog"]


def test_garbage_is_looked_for_again_whatever_is_raised() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ModuleNotFoundError), importing():
        import elastic.nothing  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen, "nothing was imported"
