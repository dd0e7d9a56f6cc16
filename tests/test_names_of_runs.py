"""Runs of one name and second are told apart, wherever their resources are."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from elastic.compose.runs import new_run_dir
from elastic.config import Config, load_config
from elastic.protocol.run_secrets import RunSecrets
from tests.providers.conftest import context_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "frozenlake.toml"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(EXAMPLE, [f'run.directory="{tmp_path}"'])


def test_runs_of_one_second_have_names_of_their_own_on_every_machine(config: Config, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as starts:
        first = list(starts.map(lambda _: new_run_dir(config), range(12)))
    elsewhere = config.model_copy(update={"run": config.run.model_copy(update={"directory": tmp_path / "elsewhere"})})
    second = [new_run_dir(elsewhere) for _ in range(12)]
    assert len({run.name for run in (*first, *second)}) == 24
    assert len({RunSecrets.of(run).tag("name") for run in (*first, *second)}) == 24


def test_what_a_run_owns_bears_its_secrets_hash(tmp_path: Path) -> None:
    context = context_of("run", tmp_path, 0)
    another = msgspec.structs.replace(context, secret=lambda host: f"another token of {host}")
    assert context.tag("modal m") == context.tag("modal m") != another.tag("modal m")
    assert context.tag("modal m") != context.tag("ray m")
    assert context.tag("modal m").startswith("run-")
