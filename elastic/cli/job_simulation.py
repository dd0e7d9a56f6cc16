"""`elastic simulate --jobs`: display around a simulated pool of many jobs."""

from pathlib import Path

import msgspec

from elastic.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, emit, say
from elastic.compose.pool_config import PoolLimits
from elastic.config import ConfigError
from elastic.report.jobs import as_page, as_text
from elastic.runtime.loop_watch import LoopWatch
from elastic.simulation.jobs.simulate import load_workload, simulate_jobs
from elastic.simulation.jobs.world import JobsWorldFailed


def simulate_jobs_command(workload: Path, policy: str, page: Path | None, *, as_json: bool) -> int:
    """Simulate to the end and report; returns the exit code. Raises `ConfigError`."""
    try:
        with LoopWatch(say, PoolLimits().plug_in_s).watching_plug_ins():  # type: ignore[call-arg]
            report, slices = simulate_jobs(load_workload(workload), policy, str(workload))
    except JobsWorldFailed as error:
        say(f"error: the simulation failed: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        say("interrupted; a simulation of jobs has no report before its end")
        return EXIT_INTERRUPTED
    if page is not None:
        try:
            page.write_text(as_page(report, slices), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {page}: {error.strerror}") from error
    if as_json:
        emit(msgspec.to_builtins(report))
    else:
        print(as_text(report))
    return 0
