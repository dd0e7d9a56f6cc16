"""Runs on disk: made, found, and claimed by one process at a time."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic.config import Config, ConfigError, load_config


@contextlib.contextmanager
def private() -> Iterator[None]:
    """What this process and those that it starts write meanwhile is nobody else's to read: prompts, text, weights."""
    former = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(former)


def new_run_dir(config: Config) -> Path:
    """A directory of its own for a new run, named after it and the time; nobody else can enter it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        path = config.run.directory / f"{config.run.name}-{stamp}{suffix}"
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run.directory: {path} cannot be made ({error.strerror})") from error
        save_run_config(path, config)
        return path
    raise ConfigError(f"run.directory: {config.run.directory} has too many runs of this second")


def discard_run(run_dir: Path) -> None:
    """A run that could not begin leaves nothing."""
    shutil.rmtree(run_dir, ignore_errors=True)


def find_run(directory: Path, name: str) -> Path:
    """A run by its path, its name, or `latest`. Raises `ConfigError` that names those there are."""
    runs = list_runs(directory)
    if name == "latest" and runs:
        return runs[-1]
    for candidate in (Path(name), directory / name):
        if (candidate / "config.json").is_file():
            return candidate
    there = ", ".join(path.name for path in runs[-5:]) or "none"
    raise ConfigError(f"no run {name!r} in {directory}; the latest are: {there}")


def list_runs(directory: Path) -> list[Path]:
    """Runs in a directory, oldest first."""
    return sorted(
        (p.parent for p in directory.glob("*/config.json")), key=lambda p: (p / "config.json").stat().st_mtime
    )


def load_run_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration that a run was started with."""
    return load_config(run_dir / "config.json", overrides)


def save_run_config(run_dir: Path, config: Config) -> None:
    """What the run's other processes, and whoever resumes it, read."""
    path = run_dir / "config.json"
    try:
        path.write_text(config.model_dump_json(indent=2))
    except OSError as error:
        raise ConfigError(f"run.directory: {path} cannot be written ({error.strerror})") from error


@contextlib.contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """The run is ours alone. Raises `ConfigError` while another process is at it; a dead one's claim is void."""
    with (run_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"run {run_dir} is still going on in another process; stop that one first") from error
        yield


def is_claimed(run_dir: Path) -> bool:
    """Whether a process is at the run now."""
    with contextlib.suppress(FileNotFoundError), (run_dir / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
