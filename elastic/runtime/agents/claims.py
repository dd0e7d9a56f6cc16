"""The holders of trajectories: groups that drivers have named, sessions, and what is over. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from elastic.core.ids import environment_of, group_of, parse_agent_id
from elastic.core.types import Nanoseconds, TrajectoryId
from elastic.protocol.front_messages import AgentCaller, TrajectoryStatus
from elastic.runtime.agents import notes
from elastic.runtime.agents.refusals import CallRefused
from elastic.runtime.agents.trajectory import AgentTrajectory
from elastic.runtime.blame import NO_DEATHS, Deaths
from elastic.runtime.status import LostPlays

ENDED_KEPT = 4096
"""Trajectories that are over and still answered for, the latest ones."""


@dataclass(slots=True)
class AgentGroup:
    """A launched group, and which of its members are not given out. Its driver's name for it is set at first use.

    `offered_ns` has the further members that came in the place of others, and since when nobody has asked for them.
    """

    members: list[TrajectoryId]
    number: int = 0
    """In the whole run."""
    environment: str = ""
    place: int = 0
    """How many groups of its environment came before it."""
    row: int | None = None
    """The row of its environment's data, where a curriculum has chosen one."""
    driver: str = ""
    name: str = ""
    since_ns: Nanoseconds | None = None
    offered_ns: dict[TrajectoryId, Nanoseconds] = field(default_factory=dict[TrajectoryId, Nanoseconds])

    def offer(self, trajectory: TrajectoryId, now_ns: Nanoseconds) -> None:
        """A further member comes in the place of one that has failed."""
        self.members.append(trajectory)
        self.offered_ns[trajectory] = now_ns

    def take(self, trajectory: TrajectoryId) -> None:
        """The member is given out, or nobody is to have it any more."""
        self.members.remove(trajectory)
        self.offered_ns.pop(trajectory, None)


@dataclass(slots=True)
class EndedTrajectory:
    """What is still told of a trajectory that is over."""

    status: TrajectoryStatus
    driver: str
    rewards: Mapping[str, float]
    """Those that it was given, by policy; empty is the name of the trajectory's own."""


@dataclass(frozen=True, slots=True)
class FormerPlays:
    """How often a trajectory has been begun again, and how many turns it had had by then; and the deaths of env workers
    by which that came."""

    restart: int = 0
    asked: int = 0
    deaths: Deaths = NO_DEATHS


NEVER_PLAYED = FormerPlays()


@dataclass(slots=True)
class AgentClaims:
    groups: dict[str, AgentGroup] = field(default_factory=dict[str, AgentGroup])
    trajectories: dict[TrajectoryId, AgentTrajectory] = field(default_factory=dict[TrajectoryId, AgentTrajectory])
    """Those that are open."""
    ended: dict[TrajectoryId, EndedTrajectory] = field(default_factory=dict[TrajectoryId, EndedTrajectory])
    sessions: dict[tuple[str, str], TrajectoryId] = field(default_factory=dict[tuple[str, str], TrajectoryId])
    """By driver and session."""
    begun: dict[tuple[str, str], notes.Begun] = field(default_factory=dict[tuple[str, str], notes.Begun])
    """By driver and idempotency key."""
    former: dict[TrajectoryId, FormerPlays] = field(default_factory=dict[TrajectoryId, FormerPlays])
    """The former plays of trajectories that were begun again."""
    lost: dict[str, LostPlays] = field(default_factory=dict[str, LostPlays])
    """In the whole run, by environment."""

    def group(self, driver: str, name: str, played: Collection[str] = ()) -> AgentGroup:
        """The driver's group of this name, or one that nobody has named yet, of no environment that is `played` by env
        workers. Raises `CallRefused`."""
        groups = [group for group in self.groups.values() if group.environment not in played]
        named = next((group for group in groups if (group.driver, group.name) == (driver, name)), None)
        found = named or next((group for group in groups if group.since_ns is None and group.members), None)
        if found is None:
            raise CallRefused(
                429, "no_group", "the run wants no other group now: the step has all of its groups", retry_after_s=1.0
            )
        if not found.members:
            raise CallRefused(409, "group_full", f"group {name!r} has all of its members", retry=False)
        return found

    def give(self, begun: notes.Begun) -> None:
        """A driver has a member of a group from now on."""
        group = self.groups[group_of(begun.trajectory)]
        group.take(begun.trajectory)
        group.driver, group.name = begun.driver, begun.name
        group.since_ns = begun.at_ns if group.since_ns is None else group.since_ns
        asked = self.former.get(begun.trajectory, NEVER_PLAYED).asked
        self.trajectories[begun.trajectory] = AgentTrajectory(
            begun.trajectory,
            begun.at_ns,
            begun.driver,
            begun.name,
            begun.task,
            begun.at_ns,
            asked=asked,
            asked_before=asked,
        )
        if begun.key:
            self.begun[begun.driver, begun.key] = begun

    def due(self, driver: str) -> tuple[AgentGroup, TrajectoryId] | None:
        """The member of a group that an env worker is to play next; None while there is none for it.

        What is to be played alone comes first, once an env worker has nothing else under way: the one that has the
        least is given nothing more until then.
        """
        environment = environment_of(driver)
        due = (
            (group, member)
            for group in self.groups.values()
            if group.environment == environment
            for member in group.members
        )
        alone = {trajectory for trajectory, former in self.former.items() if former.deaths.alone}
        if not alone:
            return next(due, None)
        playing = Counter(one.driver for one in self.trajectories.values() if environment_of(one.driver) == environment)
        exclusive = {one.driver for one in self.trajectories.values() if one.trajectory in alone}
        if driver in exclusive:
            return None
        together, first_alone = None, None
        for group, member in due:
            if member not in alone:
                together = together or (group, member)
            else:
                first_alone = first_alone or (group, member)
        if first_alone is None:
            return together
        if not playing[driver]:
            return first_alone
        least = min(playing.keys() - exclusive, key=lambda one: (playing[one], one))
        return None if driver == least else together

    def restart(self, trajectory: TrajectoryId) -> int:
        """How often it has been begun again."""
        return self.former.get(trajectory, NEVER_PLAYED).restart

    def deaths(self, trajectory: TrajectoryId) -> Deaths:
        """Return the deaths of env workers that have played the trajectory."""
        return self.former.get(trajectory, NEVER_PLAYED).deaths

    def begin_again(self, trajectory: TrajectoryId, tokens: int, *, ran: bool) -> None:
        """Nobody plays it, and it may be given out once more. What was said of it so far is void, and so many tokens
        were sampled for nothing. `ran` is as in `BegunAgain`."""
        left = self.trajectories.pop(trajectory)
        deaths = self.deaths(trajectory).one_more(running=ran)
        self.former[trajectory] = FormerPlays(self.restart(trajectory) + 1, left.asked, deaths)
        self.sessions = {key: of for key, of in self.sessions.items() if of != trajectory}
        if (group := self.groups.get(group_of(trajectory))) is not None:
            group.members.insert(0, trajectory)
            lost = self.lost.setdefault(group.environment, LostPlays())
            lost.times, lost.tokens = lost.times + 1, lost.tokens + tokens

    def is_free(self, driver: str, session: str, trajectory: TrajectoryId = "") -> bool:
        """Whether the session is bound to no other trajectory. Raises `CallRefused` if it is, or names a trajectory."""
        if _trajectory(session):
            raise CallRefused(
                400, "invalid_session", f"session {session!r} is the id of a trajectory", param="session_id"
            )
        bound = self.sessions.get((driver, session))
        if bound not in (None, trajectory):
            raise CallRefused(409, "session_bound", f"session {session!r} is bound to another trajectory", retry=False)
        return bound is None

    def open(self, caller: AgentCaller) -> AgentTrajectory:
        """The open trajectory that is meant. Raises `CallRefused`."""
        if (ended := self.over(caller)) is not None:
            raise gone(ended)
        if caller.trajectory and caller.restart != self.restart(caller.trajectory):
            raise CallRefused(410, "trajectory_over", "the trajectory was begun again with another key", retry=False)
        trajectory = self.trajectories.get(self._meant(caller))
        if trajectory is None or (caller.driver and caller.driver != trajectory.driver):
            named = caller.trajectory or caller.named
            said = f"no trajectory or session {named!r}" if named else "the call names no trajectory"
            raise CallRefused(404, "trajectory_not_found", said, retry=False)
        return trajectory

    def over(self, caller: AgentCaller) -> EndedTrajectory | None:
        """The trajectory that is meant, if it is over."""
        ended = self.ended.get(self._meant(caller))
        return ended if ended is not None and caller.driver in ("", ended.driver) else None

    def _meant(self, caller: AgentCaller) -> TrajectoryId:
        if caller.trajectory:
            return caller.trajectory
        return self.sessions.get((caller.driver, caller.named)) or _trajectory(caller.named)

    def leave(self, trajectory: TrajectoryId, status: TrajectoryStatus) -> None:
        """An open trajectory is over."""
        left = self.trajectories.pop(trajectory)
        rewards = left.policy_rewards if left.reward is None else {**left.policy_rewards, "": left.reward}
        self.ended[trajectory] = EndedTrajectory(status, left.driver, rewards)
        if len(self.ended) > ENDED_KEPT:
            del self.ended[next(iter(self.ended))]
            self.sessions = {key: of for key, of in self.sessions.items() if self._known(of)}
            self.begun = {key: of for key, of in self.begun.items() if self._known(of.trajectory)}

    def _known(self, trajectory: TrajectoryId) -> bool:
        return trajectory in self.trajectories or trajectory in self.ended

    def unclaim(self, trajectory: TrajectoryId) -> None:
        """Nobody is given it any more."""
        group = self.groups.get(group_of(trajectory))
        if group is not None and trajectory in group.members:
            group.take(trajectory)


def _trajectory(named: str) -> TrajectoryId:
    """The trajectory with this id; empty for what is none."""
    try:
        return parse_agent_id(named) if "/" not in named else ""
    except ValueError:
        return ""


def gone(ended: EndedTrajectory) -> CallRefused:
    status = ended.status
    why = status.cause or f"its reward is {status.reward}"
    return CallRefused(410, "trajectory_over", f"the trajectory is over ({status.state}): {why}", retry=False)
