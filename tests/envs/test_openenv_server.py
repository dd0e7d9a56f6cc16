"""A server that an env worker starts for kind `openenv`."""

import sys
from pathlib import Path

import pytest

from elastic.environments.from_openenv import OpenEnvSettings, Server

RUNTIME = """
HAPPENED = []


class LocalDockerProvider:
    def start_container(self, image):
        HAPPENED.append("started")
        return "http://127.0.0.1:9"

    def wait_for_ready(self, url, timeout_s):
        raise TimeoutError("not ready")

    def stop_container(self):
        HAPPENED.append("stopped")
"""


async def test_a_server_that_does_not_become_ready_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "openenv" / "core" / "containers"
    package.mkdir(parents=True)
    (package / "runtime.py").write_text(RUNTIME)
    monkeypatch.syspath_prepend(tmp_path)
    server = Server(OpenEnvSettings.model_validate({"image": "mine:1"}))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await server.url()
    await server.stop()
    runtime = sys.modules["openenv.core.containers.runtime"]
    assert runtime.HAPPENED == ["started", "stopped"] * 2
    for name in [name for name in sys.modules if name.partition(".")[0] == "openenv"]:
        del sys.modules[name]
