"""Spot traces: what is read is what is written, every broken line is named, and replay keeps the market's order."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import TraceError, data_path, find, shipped
from traces.spot import SpotChange, SpotEvent, SpotTrace, read_spot_trace, replay

HEADER = "time_s,event,instance_id,kind\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


@st.composite
def spot_traces(draw: st.DrawFn) -> SpotTrace:
    """Any legal history of up to five instances."""
    there: set[str] = set()
    time_s = 0.0
    events = []
    for _ in range(draw(st.integers(1, 30))):
        time_s += draw(st.integers(0, 5))
        instance = draw(st.sampled_from("abcde"))
        change = SpotChange.REMOVE if instance in there else SpotChange.ADD
        there ^= {instance}
        events.append(SpotEvent(time_s, change, instance))
    return SpotTrace(tuple(events))


@pytest.mark.parametrize(
    ("name", "adds", "removes", "average"), [("a", 13, 8, 6.53), ("b", 8, 9, 4.58), ("c", 6, 2, 6.06)]
)
def test_shipped_segments_have_the_papers_numbers(name: str, adds: int, removes: int, average: float) -> None:
    trace = read_spot_trace(data_path(f"rlboost-{name}"))
    inside = [e for e in trace.events if e.time_s > 0]
    times = [0.0, *(e.time_s for e in inside), 7200.0]
    lived_s = sum((b - a) * len(trace.available(a)) for a, b in itertools.pairwise(times))
    assert sum(e.change is SpotChange.ADD for e in inside) == adds
    assert sum(e.change is SpotChange.REMOVE for e in inside) == removes
    assert lived_s / 7200 == pytest.approx(average, abs=0.1)


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    expected = (SpotEvent(0, SpotChange.ADD, "n1"), SpotEvent(1.5, SpotChange.REMOVE, "n1"))
    with_header = written(tmp_path, HEADER + "0,add,n1,initial\n1.5,remove,n1,preemption\n")
    assert read_spot_trace(with_header).events == expected
    assert read_spot_trace(written(tmp_path, "time_s,event,instance_id\n0,add,n1\n1.5,remove,n1\n")).events == expected
    assert read_spot_trace(written(tmp_path, "0,add,n1\n1500,remove,n1\n")).events == expected


@pytest.mark.parametrize(
    ("text", "line", "found", "allowed"),
    [
        ("", 1, "''", "time_s,event,instance_id,kind"),
        (HEADER, None, "no rows", "at least one"),
        ("time,what\n", 1, "time,what", "time_s,event,instance_id,kind"),
        (HEADER + "1,add,n1\n", 2, "3 fields", "4"),
        (HEADER + "1,add,n1,allocation\n\n2,remove,n1,preemption\n", 3, "1 fields", "4"),
        (HEADER + "-1,add,n1,allocation\n", 2, "'-1'", "from 0 on"),
        (HEADER + "nan,add,n1,allocation\n", 2, "'nan'", "from 0 on"),
        (HEADER + "soon,add,n1,allocation\n", 2, "'soon'", "from 0 on"),
        (HEADER + "2,add,n1,allocation\n1,add,n2,allocation\n", 3, "'1'", "from 2 on"),
        (HEADER + "1,start,n1,allocation\n", 2, "'start'", "add, remove"),
        (HEADER + "1,add,,allocation\n", 2, "no instance", "name"),
        (HEADER + "1,add,n1,preemption\n", 2, "'preemption'", "initial, allocation"),
        (HEADER + "1,add,n1,initial\n", 2, "at 1 s", "time 0"),
        (HEADER + "1,remove,n1,preemption\n", 2, "'n1'", "that are there"),
        (HEADER + "1,add,n1,allocation\n2,add,n1,allocation\n", 3, "second add", "remove it first"),
        ("5,add,n1\n6,gone,n1\n", 2, "'gone'", "add, remove"),
    ],
)
def test_names_what_is_wrong_and_where(tmp_path: Path, text: str, line: int | None, found: str, allowed: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as error:
        read_spot_trace(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert found in message.partition("; allowed: ")[0]
    assert allowed in message.partition("; allowed: ")[2]


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.csv: cannot be read"):
        read_spot_trace(tmp_path / "absent.csv")
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="UTF-8"):
        read_spot_trace(path)


def test_traces_are_found_by_name_or_path(tmp_path: Path) -> None:
    path = written(tmp_path, "0,add,n1\n")
    assert find("rlboost-a") == data_path("rlboost-a") == shipped()["rlboost-a"]
    assert find(str(path)) == path
    with pytest.raises(TraceError, match="rlboost-a, rlboost-b, rlboost-c"):
        find("rlboost-z")


@given(spot_traces(), st.integers(0, 20), st.sampled_from([0.5, 1.0, 30.0]))
def test_replay_is_the_trace_from_the_window_on(trace: SpotTrace, start_s: int, speed: float) -> None:
    end_s = max(trace.end_s, start_s + 1)
    played = SpotTrace(tuple(replay(trace, start_s=start_s, end_s=end_s, speed=speed)))
    for time_s in {start_s, *(e.time_s for e in trace.events if start_s <= e.time_s)}:
        assert set(played.available((time_s - start_s) / speed)) == set(trace.available(time_s))


@given(spot_traces(), st.integers(0, 20))
def test_a_repeated_replay_is_a_legal_trace_with_equal_cycles(trace: SpotTrace, start_s: int) -> None:
    window_s = 25
    played = replay(trace, start_s=start_s, end_s=start_s + window_s, repeat=True)
    events = tuple(itertools.takewhile(lambda e: e.time_s <= 4 * window_s, itertools.islice(played, 500)))
    there: set[str] = set()
    for before, event in itertools.pairwise((SpotEvent(0, SpotChange.ADD, ""), *events)):
        assert event.time_s >= before.time_s
        assert (event.instance in there) is (event.change is SpotChange.REMOVE)
        there ^= {event.instance}
    again = SpotTrace(events)
    for offset_s in range(window_s):
        expected = set(trace.available(start_s + offset_s))
        assert all(set(again.available(k * window_s + offset_s)) == expected for k in range(3))


def test_a_window_must_hold_time() -> None:
    trace = SpotTrace((SpotEvent(5, SpotChange.ADD, "n1"),))
    with pytest.raises(TraceError, match="start < end"):
        replay(trace, start_s=5)


def test_a_life_is_estimated_from_the_past_alone() -> None:
    trace = SpotTrace(
        (
            SpotEvent(0, SpotChange.ADD, "n1"),
            SpotEvent(10, SpotChange.ADD, "n2"),
            SpotEvent(30, SpotChange.REMOVE, "n1"),
            SpotEvent(40, SpotChange.REMOVE, "n2"),
        )
    )
    assert trace.mean_life_s(29) is None
    assert trace.mean_life_s(30) == 30 + 20
    assert trace.mean_life_s(40) == (30 + 30) / 2
