"""Runs on disk: made, and claimed by one process at a time. `elastic.runtime.journal` finds them."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from secrets import token_hex

from elastic.config import Config, ConfigError, load_config
from elastic.runtime.journal import CONFIG, DirectoryStore, RunDirectory
from elastic.system.files import replace_durably, write_whole
from elastic.system.tenant_files import opened

NAME_BYTES = 3
"""Random bytes in the name of a run."""
_CLAIM_WAIT_S = 1.0
"""For so long a claim may be held without a run: by `is_claimed`, or by a child that a dead process was starting."""


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Within it, files that this process and its children create are readable by their owner alone."""
    former = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(former)


def new_run_dir(config: Config) -> Path:
    """Create a directory for a new run, named after the run, the time and chance, for its user only.

    Machines that know nothing of each other name their runs differently.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for _ in range(1000):
        path = config.run.directory / f"{config.run.name}-{stamp}-{token_hex(NAME_BYTES)}"
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run.directory: {path} cannot be made ({error.strerror})") from error
        save_run_config(path, config)
        _note_start(path)
        return path
    raise ConfigError(f"run.directory: {config.run.directory} has too many runs of this second")


def _note_start(run_dir: Path) -> None:
    try:
        DirectoryStore(run_dir.parent).note_start(RunDirectory(run_dir), time.time_ns())
    except OSError as error:
        raise ConfigError(f"run.directory: {run_dir} cannot be written ({error.strerror})") from error


def discard_run(run_dir: Path) -> None:
    """A run that could not begin leaves nothing."""
    shutil.rmtree(run_dir, ignore_errors=True)


def load_run_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration that a run was started with."""
    return load_config(run_dir / CONFIG, overrides)


def save_run_config(run_dir: Path, config: Config) -> None:
    """Write the run's configuration for its other processes and for resuming. A crash leaves the old file or the new
    one."""
    path = run_dir / CONFIG
    try:
        write_whole(path, config.model_dump_json(indent=2).encode())
    except OSError as error:
        raise ConfigError(f"run.directory: {path} cannot be written ({error.strerror})") from error


@contextlib.contextmanager
def config_replaced(run_dir: Path, config: Config) -> Iterator[Callable[[], None]]:
    """The run's configuration is `config`; what is yielded puts the former one back, which needs no room on disk."""
    path = run_dir / CONFIG
    former = path.with_name(f"{CONFIG}.former")
    former.unlink(missing_ok=True)
    try:
        os.link(path, former)
    except OSError as error:
        raise ConfigError(f"run.directory: {former} cannot be made ({error.strerror})") from error
    try:
        save_run_config(run_dir, config)
        yield lambda: replace_durably(former, path)
    finally:
        former.unlink(missing_ok=True)


CLAIM = "lock"
"""The file that the process holds which is at a run, or is a pool's."""


@contextlib.contextmanager
def claimed(run_dir: Path, claim: str = CLAIM, what: str = "run") -> Iterator[None]:
    """The run, or `what` the directory is of, is ours alone. Raises `ConfigError` while another process is at it; the
    claim of one that has died is void."""
    with (run_dir / claim).open("a") as lock:
        deadline_s = time.monotonic() + _CLAIM_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    message = f"{what} {run_dir} is still going on in another process; stop that one first"
                    raise ConfigError(message) from error
            time.sleep(0.02)
        with contextlib.suppress(OSError):  # On a full disk: then nobody can wait for its end.
            os.truncate(lock.fileno(), 0)
            os.write(lock.fileno(), str(os.getpid()).encode())
        yield


def claimant(run_dir: Path, claim: str = CLAIM) -> int | None:
    """Return a descriptor of the process that is at the run now, as of `os.pidfd_open`; None if there is none."""
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = _claimant(run_dir, claim)
        descriptor = os.pidfd_open(pid)
        # Only now: before, the claim could have passed to another one, and the id, too.
        if is_claimed(run_dir, claim) and _claimant(run_dir, claim) == pid:
            return descriptor
        os.close(descriptor)
    return None


def _claimant(run_dir: Path, claim: str) -> int:
    with opened(run_dir, claim) as lock:
        return int(lock.read())


def is_claimed(run_dir: Path, claim: str = CLAIM) -> bool:
    """Whether a process is at the run now."""
    with contextlib.suppress(FileNotFoundError), opened(run_dir, claim) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
