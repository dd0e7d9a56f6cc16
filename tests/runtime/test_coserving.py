"""A live run on serving hosts with real serving models, one of which is killed."""

from collections.abc import Iterator
from typing import Any

import pytest

from elastic.core import events as e
from elastic.core.types import EndCause
from elastic.protocol.sampled import ids_of
from elastic.report import summarise
from elastic.runtime.journal import JournalReader, MoveRow, RunDirectory, TrajectoryRow

pytestmark = [pytest.mark.slow, pytest.mark.alone]

PATIENT = {"heartbeat_timeout_s": 20.0, "stall_timeout_s": 30.0, "turn_stall_timeout_s": 60.0, "boot_timeout_s": 200.0}
"""Only the crash may end a lease, however busy the machine is."""


@pytest.fixture
def config(live_config, tmp_path) -> Any:
    executor = {"kv_pages": 64, "page_kib": 64, "max_context_tokens": 256, "profiles": str(tmp_path / "profiles")}
    base = live_config()
    serving = {"hosts": 2, "max_workers": 2, "lost_after_s": 60.0, "executor": executor}
    providers = base.model_dump(mode="json")["providers"]
    scheduler = base.model_dump(mode="json")["scheduler"]
    return live_config(providers={**providers, "serving": serving}, scheduler={**scheduler, **PATIENT})


def journal_of(run: Any) -> Iterator[JournalReader]:
    reader = run.journal()
    yield reader
    reader.close()


@pytest.mark.nightly
async def test_turns_of_a_serving_host_that_crashes_go_on_elsewhere(live, config, host_killer) -> None:
    run = await live(config, ("serving",), kills=1, hunter=host_killer)
    assert run.outcome.failed == ""
    assert run.kills == 1
    for reader in journal_of(run):
        trajectories, moves = reader.rows(TrajectoryRow), reader.rows(MoveRow)
        ended = [event for _, event in reader.events_of("LeaseEnded") if isinstance(event, e.LeaseEnded)]
    summary = summarise(RunDirectory(run.run_dir))
    (crashed,) = [event for event in ended if "serving-host-0 died" in event.detail]
    assert crashed.cause is EndCause.LOST
    lost_workers = [w.worker for w in run.scheduler.ledger.books.values() if w.lease == crashed.lease]
    assert [move for move in moves if move.from_worker in lost_workers]
    # Nothing is lost: every trajectory is whole, and none failed for the crash.
    assert len(trajectories) == 2 * 4 * 4
    assert {row.cause for row in trajectories} == {""}
    for row in trajectories:
        assert len(ids_of(row.token_ids)) == 3 + row.policy_tokens + 2 * (row.turns - 1)
    assert run.scheduler.ledger.imbalance_ns() == 0
    # The killed one may not have been looked at while it was lent.
    *_, other = summary.co_serving
    assert other.host == "serving-host-1"
    assert other.service.failed == 0
    assert 0 < other.service.serving_s + other.service.rollout_s <= other.service.lent_s
