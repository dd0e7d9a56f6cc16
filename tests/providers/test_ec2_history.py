"""Interruptions that runs have seen, from one to the next."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from providers.ec2_history import FILE, KEPT_S, Ec2History, PastInstance
from providers.ec2_market import PoolHistory, SpotPool

A, B = SpotPool("g5.xlarge", "us-east-1a"), SpotPool("g5.xlarge", "us-east-1b")


def test_what_one_run_saw_the_next_one_knows(tmp_path: Path) -> None:
    assert Ec2History(tmp_path, "").pools() == {}
    for pool, held_s, taken in ((A, 100.0, True), (A, 50.0, False), (B, 7.0, False)):
        Ec2History(tmp_path, "").add(pool, held_s, taken=taken)
    assert Ec2History(tmp_path, "").pools() == {A: PoolHistory(150.0, 1), B: PoolHistory(7.0, 0)}
    assert Ec2History(tmp_path, "http://another").pools() == {}


def test_what_is_old_or_torn_counts_for_nothing(tmp_path: Path) -> None:
    history = Ec2History(tmp_path, "")
    history.add(A, 100.0, taken=True)
    old = PastInstance(time.time() - KEPT_S - 1, "", *B, 5.0, True)
    with (tmp_path / FILE).open("ab") as file:
        file.write(msgspec.json.encode(old) + b"\n" + b'{"at_s": 1}\n\xff\n[]\n')
        file.write(msgspec.json.encode(old)[:20] + b"\n")
    assert history.pools() == {A: PoolHistory(100.0, 1)}


def test_runs_that_write_at_once_lose_nothing_also_while_it_is_shortened(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(
        b"".join(msgspec.json.encode(PastInstance(1.0, "", *B, 5.0, True)) + b"\n" for _ in range(500))
    )
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: Ec2History(tmp_path, "", bytes_max=20_000).add(A, 1.0, taken=n % 2 == 0), range(64)))
    assert Ec2History(tmp_path, "").pools() == {A: PoolHistory(64.0, 32)}
    assert (tmp_path / FILE).stat().st_size < 20_000


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    history = Ec2History(tmp_path / "none" / os.devnull.strip("/"), "")
    history.add(A, 1.0, taken=False)
    assert history.pools() == {}
