import gc
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.processes import pytest_addoption, pytest_runtestloop  # noqa: F401
from tests.seeds import NIGHTLY

# How long an example takes depends on what else the machine does; pytest's timeout bounds the whole test.
settings.register_profile("change", deadline=None, max_examples=6)
settings.register_profile(NIGHTLY, deadline=None, max_examples=50)
settings.load_profile("change")


# Models of tests are so small that a second thread of torch's costs more than it computes, here and in processes that
# tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nothing here asks a public server, and httpx would read all public certificates for every client: a folder is read
# only where a certificate has to be looked for.
os.environ.setdefault("SSL_CERT_DIR", str(Path(__file__).parent))

# Much of what is tested waits until the disk has it: a file system in memory answers at once.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Whoever starts the tests in the background may have switched these off, and what a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).parents[1]


HOMES = (Path(tempfile.gettempdir()), MEMORY, ROOT, Path(os.environ.get("HOME", "/")))
FOLDERS = sorted({str(parent) for home in HOMES for parent in (home, *home.parents) if parent.is_dir()})
IGNORED = {line.strip().strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}


def surroundings() -> dict[str, str]:
    """What no test may change: modes and owners of the folders that are not its own, the names in those where a path
    that nobody has resolved ends up, and where this process stands."""
    found = {"current directory": os.getcwd()}
    with open("/proc/self/status") as status:
        found["umask"] = next(line.split()[1] for line in status if line.startswith("Umask:"))
    for folder in FOLDERS:
        now = os.stat(folder)
        found[f"mode and owner of {folder}"] = f"{now.st_mode & 0o7777:o} {now.st_uid}:{now.st_gid}"
    for name in os.listdir(ROOT):
        if not name.startswith(".") and name not in IGNORED:
            found[f"{ROOT}/{name}"] = "there"
    return found


BEFORE = surroundings()


def _changed() -> str:
    now = surroundings()
    if now == BEFORE:
        return ""
    return "; ".join(
        f"{what}: {BEFORE.get(what, 'not there')} became {now.get(what, 'not there')}"
        for what in sorted(BEFORE.keys() | now.keys())
        if BEFORE.get(what) != now.get(what)
    )


# What is imported and collected stays to the end: nobody looks through it for garbage again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test changes nothing outside its own folder."""
    global BEFORE
    yield
    if changed := _changed():
        BEFORE = surroundings()
        pytest.fail(f"this test, or one beside it, changed what is not its own: {changed}", pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nor does what is imported, or a process that a test left behind."""
    if changed := _changed():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nthe tests changed what is not theirs: {changed}")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy as small as can be, on disk. Most tests need no torch, so it is imported here."""
    import torch

    from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
    from elastic.engine.model.config import Qwen3Config
    from elastic.engine.model.qwen3 import Qwen3

    tiny = Qwen3Config(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_checkpoint(directory, tiny, model_tensors(Qwen3(tiny)))
    return directory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    options = ("-t", "tmpfs", "-o", "size=512k", "elastic-test")
    if mount is None or subprocess.run([mount, *options, path], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
