"""Instances as processes of this machine: each runs its own user data, as a session of its own.

What a package manager would bring (`pip`, `apt-get`, the AWS command line) does nothing, or is a stand-in, and
`elastic` is this tree's. `shutdown` ends the instance.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from elastic.system.processes import inherited
from tests.clouds.aws_server.record import Rented

MARK = "STAND_IN_INSTANCE"

_SHUTDOWN = """#!/bin/bash
[ "$2" = now ] || exit 0
exec 3<>/dev/tcp/127.0.0.1/{port}
printf 'POST /power-off/%s HTTP/1.0\\r\\n\\r\\n' "$STAND_IN_INSTANCE" >&3
cat <&3 >/dev/null
"""
_AWS = """#!{python}
import os, sys
import boto3
name = sys.argv[sys.argv.index("--secret-id") + 1]
client = boto3.client("secretsmanager", region_name="us-east-1", endpoint_url="http://127.0.0.1:{port}",
                      aws_access_key_id="instance", aws_secret_access_key="instance")
print(client.get_secret_value(SecretId=name)["SecretString"])
"""


class Machines:
    def __init__(self, directory: Path, port: int, boot_s: float) -> None:
        self._directory, self._port, self.boot_s = directory, port, boot_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._gone: set[str] = set()
        self.deaf: set[tuple[str, str]] = set()
        """Pools whose instances boot, and then do nothing."""
        self.began_ns: dict[str, int] = {}
        """When each instance began with its user data, on this machine's monotonic clock."""
        self._lock = threading.Lock()
        bin_dir = directory / "bin"
        bin_dir.mkdir(parents=True)
        python = sys.executable
        for name, text in {
            "shutdown": _SHUTDOWN.format(port=port),
            "aws": _AWS.format(python=python, port=port),
            "elastic": f'#!/bin/bash\nexec {python} -m elastic.cli "$@"\n',
            "pip": "#!/bin/bash\nexit 0\n",
            "apt-get": "#!/bin/bash\nexit 0\n",
        }.items():
            path = bin_dir / name
            path.write_text(text)
            path.chmod(0o755)
        self._path = f"{bin_dir}:{os.environ['PATH']}"

    def start(self, one: Rented) -> None:
        threading.Timer(self.boot_s, self._boot, [one]).start()

    def _boot(self, one: Rented) -> None:
        script = self._directory / f"{one.id}.sh"
        script.write_text(one.user_data)
        script.chmod(0o700)
        environment = {
            **inherited(),
            "PATH": self._path,
            MARK: one.id,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{self._port}/imds/{one.id}",
        }
        with self._lock, (self._directory / f"{one.id}.log").open("ab") as output:
            if one.id in self._gone:
                return
            self.began_ns[one.id] = time.monotonic_ns()
            self._processes[one.id] = subprocess.Popen(
                ["sleep", "86400"] if one.pool in self.deaf else ["bash", str(script)],
                env=environment,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self, instance: str) -> None:
        """Returns once nothing of it lives."""
        with self._lock:
            self._gone.add(instance)
            process = self._processes.pop(instance, None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline_s = time.monotonic() + 5
        while self._members(process.pid) and time.monotonic() < deadline_s:
            time.sleep(0.005)

    def processes(self, instance: str) -> list[psutil.Process]:
        """Of the instance that live."""
        process = self._processes.get(instance)
        return self._members(process.pid) if process else []

    def log(self, instance: str) -> str:
        path = self._directory / f"{instance}.log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        for instance in tuple(self._processes):
            self.kill(instance)

    @staticmethod
    def _members(session: int) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in psutil.process_iter(["pid", "status"]):
            with contextlib.suppress(OSError):
                if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found
