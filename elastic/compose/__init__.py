"""The composition root: reads a configuration, picks policies, providers and environment, and wires a run.

The only room that knows everybody. Commands of the command line end here.
"""

from elastic.compose.execution import INTERRUPTED, RunOutcome, execute
from elastic.compose.incarnations import (
    RUNNING,
    UNEXPECTED,
    PastIncarnations,
    configured_budget,
    journaled,
    past_incarnations,
    replay,
)
from elastic.compose.plan import (
    TRACE_PLAYERS,
    TRAINER_PROVIDER,
    Acquisition,
    RewardCalls,
    RunPlan,
    acquisitions,
    check_live,
    check_policy,
    installed,
    kind_of,
    read_model_config,
    resolve,
    reward_calls,
)
from elastic.compose.preparation import Prepared, prepare
from elastic.compose.processes import run_loop, run_serving_host, run_worker
from elastic.compose.runs import (
    claimed,
    discard_run,
    is_claimed,
    load_run_config,
    new_run_dir,
    private,
    save_run_config,
)
from elastic.compose.scheduling import limits, policies, run_plan, short_limits

__all__ = [
    "INTERRUPTED",
    "RUNNING",
    "TRACE_PLAYERS",
    "TRAINER_PROVIDER",
    "UNEXPECTED",
    "Acquisition",
    "PastIncarnations",
    "Prepared",
    "RewardCalls",
    "RunOutcome",
    "RunPlan",
    "acquisitions",
    "check_live",
    "check_policy",
    "claimed",
    "configured_budget",
    "discard_run",
    "execute",
    "installed",
    "is_claimed",
    "journaled",
    "kind_of",
    "limits",
    "load_run_config",
    "new_run_dir",
    "past_incarnations",
    "policies",
    "prepare",
    "private",
    "read_model_config",
    "replay",
    "resolve",
    "reward_calls",
    "run_loop",
    "run_plan",
    "run_serving_host",
    "run_worker",
    "save_run_config",
    "short_limits",
]
