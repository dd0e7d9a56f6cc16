"""The composition root: reads a configuration, picks policies, providers and environment, and wires a run.

The only room that knows everybody. Commands of the command line end here.
"""

from elastic.compose.execution import CANNOT_BEGIN, INTERRUPTED, RunOutcome, end_left_behind, execute, notes_of
from elastic.compose.incarnations import (
    RUNNING,
    UNEXPECTED,
    PastIncarnations,
    configured_budget,
    cost_nano_usd,
    journaled,
    past_incarnations,
    replay,
)
from elastic.compose.plan import (
    TRAINER_PROVIDER,
    Acquisition,
    RewardCalls,
    RunPlan,
    acquisitions,
    asks_a_vendor,
    check_live,
    check_policy,
    kind_of,
    read_model_config,
    resolve,
    reward_calls,
    unpriced,
)
from elastic.compose.preparation import Prepared, prepare
from elastic.compose.processes import run_loop, run_pool_resident, run_serving_host, run_worker
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
