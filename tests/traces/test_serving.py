"""Serving traces: the shipped one is whole, times keep their fractions, and every broken line is named."""

import gzip
import itertools
from pathlib import Path

import pytest

from traces import TraceError, data_path
from traces.serving import COLUMNS, ServingRequest, read_serving_trace, replay_requests, scaled, window_at

HEADER = ",".join(COLUMNS)


def test_the_shipped_trace_is_whole() -> None:
    requests = read_serving_trace(data_path("azure-conversation"))
    assert len(requests) == 19_366
    assert requests[0] == ServingRequest(0.0, 374, 44)
    assert requests[-1].arrival_s == pytest.approx(3501.721937)
    assert sum(r.prompt_tokens for r in requests) / len(requests) == pytest.approx(1155, abs=1)


def test_times_count_from_the_first_request_to_the_last_decimal(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\n2023-11-16 23:59:59.9999999,3,1\r\n2023-11-17 00:00:01,4,2\n".encode()))
    assert [r.arrival_s for r in read_serving_trace(path)] == [0.0, pytest.approx(1.0000001, abs=1e-12)]


@pytest.mark.parametrize(
    ("rows", "line", "found"),
    [
        ("", None, "no rows"),
        ("2023-11-16 18:15:46.5,3\n", 2, "2 fields"),
        ("yesterday,3,1\n", 2, "'yesterday'"),
        ("2023-11-16 18:15:46.-5,3,1\n", 2, "'2023-11-16 18:15:46.-5'"),
        ("2023-11-16 18:15:46,3,1\n2023-11-16 18:15:45.9,3,1\n", 3, "18:15:45.9"),
        ("2024-05-10 00:00:00.0+0:00,3,1\n", 2, "time '2024-05-10 00:00:00.0+0:00'"),
        ("2024-05-10 00:00:00,3,1\n\n2024-05-10 00:00:01,3,1\n", 3, "1 fields in ''"),
        ("2023-11-16 18:15:46,3,-1\n", 2, "GeneratedTokens '-1'"),
        ("2023-11-16 18:15:46,3,1.5\n", 2, "GeneratedTokens '1.5'"),
    ],
)
def test_names_what_is_wrong_and_where(tmp_path: Path, rows: str, line: int | None, found: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}\n{rows}")
    with pytest.raises(TraceError) as error:
        read_serving_trace(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert found in message.partition("; allowed: ")[0]


AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:00.017335+02:00,2399,0
2024-05-09 19:00:00.027335-05:00,0,7

"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_azures_trace_of_2024(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "2024.csv"
    path.write_bytes(AZURE_2024.replace("\n", "\r\n").encode(encoding))
    requests = read_serving_trace(path)
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(2162, 5), (2399, 1), (1, 7)]
    assert [r.arrival_s for r in requests] == pytest.approx([0.0, 0.007405, 0.017405], abs=1e-9)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_another_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "2024.csv"
    path.write_bytes(AZURE_2024.encode(encoding))
    with pytest.raises(TraceError, match=r"2024\.csv: it is UTF-16 or UTF-32, or no text; save it as UTF-8"):
        read_serving_trace(path)


def test_another_header_or_a_broken_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n")
    with pytest.raises(TraceError, match=f":1: found 'a,b'; allowed: the header {HEADER}"):
        read_serving_trace(path)
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(HEADER.encode())[:-4])
    with pytest.raises(TraceError, match="cannot be read"):
        read_serving_trace(packed)
    packed.write_bytes(gzip.compress(HEADER.encode())[:10] + b"\xff" * 40)
    with pytest.raises(TraceError, match="cannot be read"):
        read_serving_trace(packed)


TRACE = tuple(ServingRequest(float(second), second + 1, 1) for second in range(12))


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
def test_hosts_share_the_requests_without_overlap(hosts: int) -> None:
    """`prompt_tokens` tells the requests of this trace apart."""
    shares = [replay_requests(TRACE, share=1 / hosts, phase=phase) for phase in range(hosts)]
    mine = [{next(share).prompt_tokens for _ in range(12 // hosts)} for share in shares]
    assert sorted(token for share in mine for token in share) == [r.prompt_tokens for r in TRACE]


def test_replay_starts_anywhere_runs_faster_and_goes_round() -> None:
    played = list(itertools.islice(replay_requests(TRACE, start_s=9.5, speed=2), 16))
    assert [r.prompt_tokens for r in played] == [11, 12, *range(1, 13), 1, 2]
    assert [r.arrival_s for r in played[:2]] == [0.25, 0.75]
    assert all(before.arrival_s < after.arrival_s for before, after in itertools.pairwise(played))


def written(path: Path, *seconds: int) -> Path:
    rows = [f"2023-11-16 {at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d},3,1" for at in seconds]
    path.write_text("\n".join([HEADER, *rows]))
    return path


def test_a_hole_in_the_recording_is_refused(tmp_path: Path) -> None:
    """An hour without a request among requests every second is no idle hour."""
    path = written(tmp_path / "trace.csv", *range(200), *range(3800, 3900))
    with pytest.raises(TraceError, match=r"trace\.csv:202: found a hole of 3601 s .*; allowed: up to 600 s"):
        read_serving_trace(path)
    assert len(read_serving_trace(written(tmp_path / "sparse.csv", *range(0, 60_000, 3600)))) == 17


def test_a_trace_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.csv", 0, 1)
    first = read_serving_trace(path)
    assert read_serving_trace(path) is first
    assert len(read_serving_trace(written(path, 0, 1, 2))) == 3


def test_scaling_keeps_lengths_within_bounds() -> None:
    (small, large) = scaled(
        [ServingRequest(4, 3, 2), ServingRequest(8, 8000, 900)], speed=2, length=0.1, most_prompt=400, most_output=50
    )
    assert (small.arrival_s, small.prompt_tokens, small.output_tokens) == (2, 1, 1)
    assert (large.arrival_s, large.prompt_tokens, large.output_tokens) == (4, 400, 50)


def test_a_window_counts_from_its_start() -> None:
    assert [request.arrival_s for request in window_at(TRACE, 2.5, 3.0)] == [0.5, 1.5, 2.5]
