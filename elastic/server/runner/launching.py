"""Starts processes of runs, finds them again, and judges how they ended."""

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic.compose.run_endings import ending_of, world
from elastic.protocol.run_control import SERVED_VARIABLE, ExpectedPeer, RunControl
from elastic.runtime.journal import CONFIG
from elastic.server.history.apart import apart
from elastic.server.history.journals import count_journals
from elastic.server.runner.decisions import DIED, Ending
from elastic.server.settings import ServerSettings
from elastic.server.store.runs import HostedRunRow, RunLimits
from elastic.server.store.vault import Vault
from elastic.server.vendors import environment_of
from elastic.system import tenant_files
from elastic.system.files import write_whole
from elastic.system.processes import Identity, identity, inherited, marked
from elastic.system.supervision import WatchedProcess, start_detached

Begin = Callable[[ServerSettings, HostedRunRow, str | None, Mapping[str, str]], tuple["subprocess.Popen[bytes]", int]]
EndingOf = Callable[[ServerSettings, HostedRunRow, int | None], Ending]
LOG = Path("logs") / "process.log"
NO_LIMITS = RunLimits()


@dataclass
class HeldProcess:
    """A run's process. Its exit status is known if this server started it."""

    watched: WatchedProcess
    since_s: float = field(default_factory=time.monotonic)
    stopped: bool = False
    forced_s: float | None = None

    def stop(self) -> None:
        """Ask the process to end. The first call lets it checkpoint and give everything back; the second kills
        everything."""
        self.stopped = True
        self.watched.send(signal.SIGTERM)

    def force(self, patience_s: float) -> None:
        """Have the process kill everything; one that has not ended after this patience is killed."""
        if self.forced_s is None:
            self.forced_s = time.monotonic()
            self.stop()
            self.stop()
        elif time.monotonic() - self.forced_s >= patience_s:
            self.watched.kill()


def prepare(settings: ServerSettings, run: HostedRunRow, user: str | None, passed_on: Sequence[str]) -> None:
    """Create the run's directory and its project's storage if missing, and write the run's configuration with its
    present limits and place; all are the user's.

    The run's children get the variables that are `passed_on`. Raises `OSError`.
    """
    path, storage = settings.run_dir(run.id), settings.storage(run.project)
    for directory in (storage, path):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if user is not None:
            account = pwd.getpwnam(user)
            tenant_files.hand_over(directory, account.pw_uid, account.pw_gid)
    config, limits = json.loads(run.config), run.limits or NO_LIMITS
    own = {"caps": limits.caps, "budget_usd": limits.budget_usd, "pass_env": list(passed_on)}
    config["run"] |= own
    config = settings.placed(config)
    with tenant_files.as_owner(path):
        write_whole(path / CONFIG, json.dumps(config, indent=2).encode())


def begin(
    settings: ServerSettings, run: HostedRunRow, user: str | None, secrets: Mapping[str, str]
) -> tuple["subprocess.Popen[bytes]", int]:
    """Start a process that continues the run; returns it, and how many journals were before it. Raises `OSError`.

    The process, its workers and its reward functions get the project's `secrets` as variables; its credentials for
    vendors the process alone.
    """
    path, storage = settings.run_dir(run.id).resolve(), settings.storage(run.project).resolve()
    journals = count_journals(path)
    variables, passed_on = environment_of(secrets, user)
    prepare(settings, run, user, passed_on)
    command = [*(settings.command or (sys.executable, "-P", "-m", "elastic.cli", "run")), "--resume", str(path)]
    command += ["--providers", ",".join(run.providers)]
    # The project's files are no place to import from.
    environment = {**inherited(), **settings.environment, **variables, "PYTHONSAFEPATH": "1"}
    environment[SERVED_VARIABLE] = proof_of(settings, run.id)
    uid: int | None = None
    gid: int | None = None
    if user is not None:
        account = pwd.getpwnam(user)
        environment |= {"HOME": account.pw_dir, "USER": user, "LOGNAME": user}
        uid, gid = account.pw_uid, account.pw_gid
        _share_uploads(settings.uploads(run.project), gid)
    with tenant_files.appended(path, str(LOG)) as log:
        child = start_detached(
            command,
            environment,
            log,
            stdout=subprocess.DEVNULL,  # Its report, which is made whenever it is asked for.
            cwd=storage,
            umask=0o077,
            user=uid,
            group=gid,
            extra_groups=None if uid is None else [],
        )
    return child, journals


def proof_of(settings: ServerSettings, run: str) -> str:
    """Return what only the run's own process, and its user, have in their environment. Raises `VaultError`."""
    return f"{run}:{Vault(settings.home).mark(f'{SERVED_VARIABLE} {run}')}"


def living(settings: ServerSettings, run: HostedRunRow) -> Identity | None:
    """Return the run's process if it lives, whichever server started it. Raises `VaultError`.

    One that the store does not know yet shows the run's proof, and is a process of the directory's owner.
    """
    known = run.identity
    if known is not None and identity(known.pid) == known:
        return known
    uid = user_of(settings, run)
    return None if uid is None else marked(SERVED_VARIABLE, proof_of(settings, run.id), uid)


def user_of(settings: ServerSettings, run: HostedRunRow) -> int | None:
    """Return the id of the user whose processes the run's are; None before it has a directory."""
    try:
        return settings.run_dir(run.id).stat().st_uid
    except FileNotFoundError:
        return None


def control_of(settings: ServerSettings, run: HostedRunRow, timeout_s: float) -> RunControl:
    """Return the line to the run's process; another program that answers at its socket learns nothing."""
    known = run.identity
    peer = ExpectedPeer(user_of(settings, run), None if known is None else known.pid)
    return RunControl(settings.run_dir(run.id), timeout_s, peer)


def ending(settings: ServerSettings, run: HostedRunRow, status: int | None) -> Ending:
    """Return how the run's last process ended: from the journal that it wrote, else from its exit status."""
    known = run.process
    journals, its_world = (0, world()) if known is None else (known.journals, known.world)
    return _ending(settings.run_dir(run.id), journals, its_world, status)


@apart()
def _ending(run_dir: Path, journals: int, its_world: str, status: int | None) -> Ending:
    try:
        with tenant_files.as_owner(run_dir):
            return ending_of(run_dir, LOG, journals, its_world, status)
    except tenant_files.NotAFile as error:
        return Ending(how=DIED, cause=f"how its process ended cannot be read: {error.filename} is {error.strerror}")


def _share_uploads(uploads: Path, gid: int) -> None:
    """Let the project's user read its uploads, and not change them."""
    for upload in uploads.iterdir() if uploads.is_dir() else ():
        if upload.stat().st_gid != gid:
            for path in (*upload.rglob("*"), upload):  # The directory last: by its group one sees that all is done.
                os.chown(path, -1, gid, follow_symlinks=False)
                path.chmod(0o750 if path.is_dir() else 0o640)
