"""The logs of our processes: how a pace holds is told where it is asked for."""

import json
import logging
import os
from pathlib import Path

import pytest
import structlog

from elastic.system.logs import PaceLog, log_to


class Always(PaceLog):
    EVERY_S = 0.0


@pytest.mark.parametrize(("level", "told"), [(logging.INFO, ["begun"]), (logging.DEBUG, ["begun", "pace", "pace"])])
def test_the_pace_is_logged_only_where_it_is_asked_for(tmp_path: Path, level: int, told: list[str]) -> None:
    path, former = tmp_path / "worker.log", structlog.get_config()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        log_to(descriptor, level)
        structlog.get_logger().info("begun")
        paces = Always("iterations")
        paces.took(held=True)
        paces.took(held=False)
    finally:
        structlog.configure(**former)
        os.close(descriptor)
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == told
