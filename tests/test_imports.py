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


LIGHT = """
import sys
from elastic.system.imports import importing
with importing():
    from elastic.weights import directory, errors, http, records, relay, server
    import elastic.engine.base, elastic.engine.model.stored, elastic.front.process
    without_server = sorted({"sqlalchemy"} & sys.modules.keys())
    import elastic.cli.run, elastic.cli.jobs
print(*without_server, *sorted({"torch", "vllm", "transformers"} & sys.modules.keys()))
"""


def test_relays_fronts_engines_protocol_and_the_checks_of_a_run_need_no_torch() -> None:
    """Only a new interpreter shows what is imported; a front needs no database either."""
    looked = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert looked.stdout.split() == []


def test_garbage_is_looked_for_again_whatever_is_raised() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        import elastic.nothing  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
