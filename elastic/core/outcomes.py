"""What the trajectories of the last steps came to: how many have failed, and why; and how many were replaced.

Source: docs/design.md, invariant 11.
"""

from dataclasses import dataclass, field

from elastic.core.agreement import OUTCOME_STEPS
from elastic.core.types import InfrastructureCause

MOST_CAUSES = 100
"""Different causes that are told apart in a step."""
OTHERS = "other causes"
CAUSE_CHARACTERS = 200
"""The most characters of a cause that is shown among others."""


@dataclass(slots=True)
class StepOutcomes:
    """Trajectories that have ended during a step: `finished` with a reward, and the failed ones by their causes."""

    finished: int = 0
    failed: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, outcome: float | str) -> None:
        """Count a trajectory that has ended: `outcome` is its reward, or the cause for which it has none."""
        if not isinstance(outcome, str):
            self.finished += 1
            return
        cause = outcome if outcome in self.failed or len(self.failed) < MOST_CAUSES else OTHERS
        self.failed[cause] = self.failed.get(cause, 0) + 1


@dataclass(slots=True)
class Outcomes:
    """What became of the trajectories of the last `OUTCOME_STEPS` steps, the last of which is still under way."""

    steps: list[StepOutcomes] = field(default_factory=lambda: [StepOutcomes()])
    refilled: dict[InfrastructureCause, int] = field(default_factory=dict[InfrastructureCause, int])
    """In whose place another trajectory came, in the whole run, by cause."""

    cut_off: dict[str, int] = field(default_factory=dict[str, int])
    """Members that ended since their groups had enough, in the whole run, by environment."""

    @property
    def now(self) -> StepOutcomes:
        return self.steps[-1]

    @property
    def enough(self) -> bool:
        """Whether there are as many steps as a run is judged by before its end."""
        return len(self.steps) == OUTCOME_STEPS

    def note_refill(self, cause: InfrastructureCause) -> None:
        self.refilled[cause] = self.refilled.get(cause, 0) + 1

    def note_cut_off(self, environment: str) -> None:
        self.cut_off[environment] = self.cut_off.get(environment, 0) + 1

    def begin_step(self) -> None:
        self.steps = [*self.steps, StepOutcomes()][-OUTCOME_STEPS:]

    def failing(self, most: float) -> str:
        """Why the run has failed: a larger share than `most` of its trajectories has. Empty where it has not."""
        failed = counted(*self.steps)
        count = sum(failed.values())
        total = count + sum(step.finished for step in self.steps)
        if count <= most * total:
            return ""
        return (
            f"{count} of {total} trajectories of the last {_steps(len(self.steps))} have failed, more than "
            f"rollout.max_failed_share = {most:g} allows; {in_words(failed)}"
        )


def counted(*steps: StepOutcomes) -> dict[str, int]:
    """How often trajectories failed, by cause, the commonest first."""
    counts: dict[str, int] = {}
    for step in steps:
        for cause, count in step.failed.items():
            counts[cause] = counts.get(cause, 0) + count
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def in_words(causes: dict[str, int], most: int = 3) -> str:
    """The commonest causes, each with how often it came."""
    commonest = [(shortened(cause), count) for cause, count in list(causes.items())[:most]]
    words = [f"{cause} ({count} times)" if count > 1 else cause for cause, count in commonest]
    if len(causes) > most:
        words.append(f"{sum(list(causes.values())[most:])} times for other causes")
    return "; ".join(words)


def shortened(cause: str) -> str:
    """A cause as one of several in a sentence; all of it stands with its trajectory."""
    return cause if len(cause) <= CAUSE_CHARACTERS else f"{cause[:CAUSE_CHARACTERS]}…"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
