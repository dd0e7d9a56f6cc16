import msgspec
import pytest

from elastic.report.html import as_html
from elastic.report.text import as_json, as_markdown
from providers.serving_messages import SERVICE_NOTE, ServiceReport

SERVICE = ServiceReport(
    requests=1200,
    failed=3,
    ttft_slo_ms=500.0,
    ttft_p50_ms=42.0,
    ttft_p99_ms=338.0,
    tpot_slo_ms=150.0,
    tpot_p50_ms=31.0,
    tpot_p99_ms=136.0,
    violated_minutes=0.25,
    lent_s=100.0,
    serving_s=20.0,
    rollout_s=72.0,
    reclaims=4,
    reclaim_p99_ms=12.0,
)


@pytest.fixture
def summary(summary_of):
    def fill(run) -> None:
        for host in ("serving-host-1", "serving-host-0"):
            run.journal.meta(f"{SERVICE_NOTE}{host}", "{}")
            run.journal.meta(f"{SERVICE_NOTE}{host}", msgspec.json.encode(SERVICE).decode())

    return summary_of(fill)


def test_what_a_host_said_last_stands_in_every_format(summary):
    assert [host.host for host in summary.co_serving] == ["serving-host-0", "serving-host-1"]
    (row,) = [line for line in as_markdown(summary).splitlines() if line.startswith("| serving-host-0")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        *("serving-host-0", "1,200", "3", "42 ms", "338 ms", "500 ms", "31 ms", "136 ms", "150 ms"),
        *("15 s", "20.0 %", "90.0 %", "4", "12 ms"),
    ]
    assert "Co-serving" in as_html(summary)
    found = as_json(summary)["co_serving"][0]
    assert found["idle_utilisation"] == pytest.approx(0.9)
    assert found["service"]["ttft_p99_ms"] == 338.0


def test_a_host_that_was_never_lent_has_no_idle_utilisation_yet():
    assert msgspec.structs.replace(SERVICE, lent_s=0.0, serving_s=0.0).idle_utilisation is None
