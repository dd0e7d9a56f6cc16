"""The benchmarks are run in one way, and their tables have what they name."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import HERE, ROOT, _configurations
from benchmarks.__main__ import Played, keep, read_kept
from benchmarks._common import flattened
from benchmarks._configurations import KINDS, configuration
from benchmarks._shapes import SHAPES
from elastic.engine.model.config import Qwen3Config


@pytest.mark.parametrize("path", sorted(HERE.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_every_benchmark_prints_as_the_others(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"benchmark\(\s*__doc__,", text) or "emit(figures, given, began_s)" in text


def test_every_kind_of_configuration_is_one() -> None:
    for kind in KINDS:
        configuration(kind, policy="policy")


def test_keys_go_before_those_of_kinds_and_kinds_before_earlier_ones() -> None:
    made = configuration("paced", "patient", "endless", policy="policy", scheduler={"stall_timeout_s": 5.0})
    limits = made.scheduler
    assert (limits.heartbeat_timeout_s, limits.stall_timeout_s, limits.boot_timeout_s) == (20.0, 5.0, 240.0)
    assert str(made.model.checkpoint) == "policy"
    room = _configurations.endless(policy=Path("policy"), turns=6, engine={"max_pending": 2}).engine
    assert (room.max_batch, room.max_pending, room.pacing is not None) == (6, 2, True)


def test_every_shape_is_one() -> None:
    for fields in SHAPES.values():
        Qwen3Config(**fields)


def test_figures_within_figures_have_dots() -> None:
    assert flattened({"a": 1, "b": {"c": {"d": 2}, "e": []}}) == [("a", 1), ("b.c.d", 2), ("b.e", [])]


GOOD, BAD = Played("good", 1.0, 1.0, {"a": 1}), Played("bad", 1.0, 1.0, {}, "exited with 1")


def test_those_that_have_failed_are_run_again(tmp_path: Path) -> None:
    mended = BAD._replace(failed="")
    file = tmp_path / "kept"
    for one in (GOOD, BAD):
        keep(file, one)
    assert read_kept(file) == {"good": GOOD}
    keep(file, mended)
    assert read_kept(file) == {"good": GOOD, "bad": mended}
    assert read_kept(file, quick=False) == {}


def test_what_was_cut_as_it_was_kept_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    keep(file, GOOD)
    whole = file.read_bytes()
    for cut in range(len(whole)):
        file.write_bytes(whole + whole[:cut])
        assert read_kept(file) == {"good": GOOD}
        keep(file, BAD)
        assert file.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("kept", ["# Elastic\n", "Elastic", '{"a": 1}\n', "[1]\n", '{"name": 1}\n', b"\xff\xfe\n"])
def test_a_file_of_something_else_is_not_taken_for_one_that_is_kept(tmp_path: Path, kept: str | bytes) -> None:
    file = tmp_path / "kept"
    file.write_bytes(kept if isinstance(kept, bytes) else kept.encode())
    with pytest.raises(ValueError, match=r"line 1 is no benchmark's|can't decode byte"):
        read_kept(file)


BENCHMARK = """
import multiprocessing, subprocess, time
from benchmarks._processes import Child, scratch_directory

if __name__ == "__main__":
    with scratch_directory() as scratch:
        program = subprocess.Popen(["sleep", "600"], start_new_session=True)
        child = Child(lambda pipe: time.sleep(600), context=multiprocessing.get_context("fork"))
        print(program.pid, child._process.pid, scratch, flush=True)
        time.sleep(600)
"""

ENDED = {
    signal.SIGINT: (130, "-c was ended by a signal\n"),
    signal.SIGTERM: (143, "-c was ended by a signal\n"),
    signal.SIGKILL: (-signal.SIGKILL, ""),
}


@pytest.mark.parametrize("number", ENDED)
def test_nothing_outlives_a_benchmark_that_is_ended(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stderr is not None
        *pids, scratch = benchmark.stdout.readline().split()
        started = [os.pidfd_open(int(pid)) for pid in pids]
        if number is signal.SIGINT:  # A terminal's, which its processes get, too.
            os.killpg(benchmark.pid, number)
        else:
            benchmark.send_signal(number)
        for descriptor in started:
            assert select.select([descriptor], [], [], 60)[0]
            os.close(descriptor)
        told = benchmark.stderr.read()
    assert (benchmark.returncode, told) == ENDED[number]
    ended_s = time.monotonic() + 60
    while Path(scratch).exists():
        assert time.monotonic() < ended_s
        time.sleep(0.01)
