"""Checks of submissions in processes beside the server's, with a limit of time: what one costs delays nobody else."""

import contextlib
from dataclasses import dataclass

import structlog

from elastic.protocol.api import DryRun, Submission
from elastic.server.intake import submissions
from elastic.server.problems import ApiProblem
from elastic.server.settings import ServerSettings
from elastic.server.side_processes import NoneFree, SideLimits, SideProcesses, Starved, answer_orders
from elastic.server.store.runs import NewRun
from elastic.system.installed import installed, is_ours
from traces.errors import untrusted

log = structlog.get_logger(__name__)

LIMITS = SideLimits(processes=2, per_owner=1, kept=2, waiting=64, waiting_per_owner=8, wait_s=20.0)
"""Owners are projects."""
_LOOKED_AT = (
    "elastic.providers",
    "elastic.engines",
    "elastic.trainers",
    "elastic.environments",
    "elastic.function_pools",
    "elastic.policies",
)


@dataclass(frozen=True)
class _CheckOrder:
    settings: ServerSettings
    submission: Submission
    project: str


@dataclass(frozen=True)
class CheckedSubmission:
    """A run that may be submitted, and what it would hold at most."""

    new: NewRun
    would: DryRun


_processes = SideProcesses(__name__, LIMITS)
warm = _processes.warm


def checked(settings: ServerSettings, submission: Submission, project: str) -> CheckedSubmission:
    """Return the run that is asked for. Raises `ApiProblem` with all faults that can be told at once."""
    within_s = settings.check_timeout_s
    try:
        answer = _processes.ask(project, _CheckOrder(settings, submission, project), within_s)
    except NoneFree:
        raise ApiProblem("unavailable", "other submissions are being checked") from None
    except Starved as starved:
        busy = (
            f"its check had a processor for {starved} of {within_s:g} s: the machine is busy, or does not get to a file"
        )
        raise ApiProblem("unavailable", busy) from None
    except TimeoutError:
        raise ApiProblem(
            "invalid-configuration", f"its check took longer than {within_s:g} s; allowed: fewer keys, smaller files"
        ) from None
    except (EOFError, OSError) as error:
        log.error("a process that checks submissions has ended", error=str(error))
        raise ApiProblem("unavailable", "the check of the submission has broken off") from None
    if isinstance(answer, ApiProblem):
        raise answer
    if not isinstance(answer, CheckedSubmission):
        raise RuntimeError(f"a submission could not be checked: {answer}")
    return answer


def _checked(order: _CheckOrder) -> object:
    with untrusted():
        try:
            new, plan = submissions.check(order.settings, order.submission, order.project)
            return CheckedSubmission(new, submissions.dry_run(plan))
        except ApiProblem as problem:
            return problem
        except Exception as error:
            log.error("a submission could not be checked", exc_info=True)
            return type(error).__name__


def main(descriptor: int) -> None:
    """Answer until the server closes the socket of this descriptor.

    What checks look at is imported before the first, whose project would wait for it.
    """
    for group in _LOOKED_AT:
        for point in installed(group).values():
            if group == "elastic.environments" and not is_ours(point):
                continue  # Env workers alone import those.
            with contextlib.suppress(Exception):  # A submission that names it is told why.
                point.load()
    answer_orders(descriptor, _checked)
