"""Answers of policies that come from other packages, checked before anybody acts on them.

The core trusts what policies answer. A policy of another package that raises, or answers what its decision does not
allow, ends with `PolicyFault`: one message that names the policy, its package, the answer and what is allowed.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import Any, get_type_hints

from elastic.core.cluster.groups import JobGroup
from elastic.core.cluster.policy import BillShare, PlacementChoice, PoolView, Relocation, SliceView
from elastic.core.cluster.types import JobRequest
from elastic.core.decisions import DECISIONS
from elastic.core.device_sharing import Budget
from elastic.core.policy import BatchView, FleetView, LeavingView, LoadView, MarketView, Move, SeedingPlan, TurnView
from elastic.core.rows import PassOrder, PassView, listed
from elastic.core.types import INTEGER_MAX, Offer, PolicyFault
from elastic.system.plain_values import whole
from elastic.system.plug_ins import AskedPlugIn

LAUNCHES_MOST = 100
"""Times the groups that are wanted: no policy may launch more at once."""
REASON_CHARACTERS = 1000
TYPES: Mapping[type[Any], str] = {
    int: "a whole number",
    bool: "True or False",
    SeedingPlan: "a SeedingPlan",
    Budget: "a Budget",
}
"""The words for types of answers; others are shown as they are annotated."""


class CheckedPolicy:
    """A policy whose answers are checked as they are given. It has the attributes of that policy besides.

    `whose` names the policy and the package that it comes from.
    """

    __slots__ = ("_asked", "_plug_in", "unchecked")

    def __init__(self, policy: Any, decision: str, whose: str) -> None:
        self.unchecked, self._plug_in = policy, AskedPlugIn(whose, PolicyFault)
        self._asked = _answers(decision)

    def __getattr__(self, name: str) -> Any:
        asked = self._asked.get(name)
        if asked is None:
            return getattr(self.unchecked, name)
        if name == "cycle":
            return partial(self._ask, name, int)
        is_method, kind = asked
        return partial(self._ask, name, kind) if is_method else self._ask(name, kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckedPolicy) and (self.unchecked, self._plug_in) == (other.unchecked, other._plug_in)

    def __hash__(self) -> int:
        return hash((CheckedPolicy, self._plug_in))

    def __repr__(self) -> str:
        return repr(self.unchecked)

    def __str__(self) -> str:
        return self._plug_in.whose

    def _ask(self, name: str, kind: Any, *arguments: Any) -> Any:
        def call() -> Any:
            found = getattr(self.unchecked, name)
            return found(*map(_own, arguments)) if arguments or callable(found) else found

        plug_in = self._plug_in
        answer = plug_in.ask(name, call)
        if kind is PassOrder:
            return self._ordered(name, answer, *arguments)
        found = plug_in.made(name, answer, kind, TYPES.get(kind, ""))
        if name in _ALLOWED and (allowed := _ALLOWED[name](found, *arguments)):
            raise plug_in.wrong(name, answer, allowed)
        return found

    def _ordered(self, name: str, answer: Any, view: PassView) -> PassOrder:
        try:
            first, last = (map(_row, rows) for rows in (answer.first, answer.last))
            return PassOrder(*listed(PassOrder(first, last), view.rows))  # type: ignore[arg-type]
        except PolicyFault as fault:
            raise self._plug_in.fault(f"{self._plug_in.whose}: {name} {fault}") from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._plug_in.wrong(name, answer, "a PassOrder, of lists of rows") from error


@cache
def _answers(decision: str) -> Mapping[str, tuple[bool, Any]]:
    """What a decision asks of its policy, by name: whether that is a method, and the type of the answer."""
    asked = {name: found for name, found in vars(DECISIONS[decision]).items() if not name.startswith("_")}
    return {
        name: (not isinstance(found, property), get_type_hints(getattr(found, "fget", found))["return"])
        for name, found in asked.items()
    }


def _own(argument: Any) -> Any:
    """A list or mapping of the core's as one that a policy may change."""
    return copy(argument) if isinstance(argument, list | dict) else argument


def _within(answer: int, most: int, least: int = 0) -> str:
    return "" if least <= answer <= most else f"a whole number from {least} to {most}"


def _not_negative(answer: int | None, *_: object) -> str:
    if answer is None or answer >= 0:
        return "" if (answer or 0) <= INTEGER_MAX else f"at most {INTEGER_MAX}"
    return "nothing negative"


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(sorted(names)[:8]) or "there is none"


def _route(answer: str | None, turn: TurnView, fleet: FleetView) -> str:
    known = answer is None or fleet.with_room(answer, turn.oldest_version) is not None
    return "" if known else "None, or the id of a worker that `least_loaded` or `with_room` has returned for this turn"


def _moves(answer: Sequence[Move], loads: Sequence[LoadView], _: object) -> str:
    if not answer:
        return ""
    turns = {turn for load in loads for turn in (*load.movable_pending(), *load.movable_executing())}
    workers = {load.id for load in loads}
    moved = [move.turn for move in answer]
    if len(set(moved)) == len(moved) and turns.issuperset(moved) and all(move.to in workers for move in answer):
        return ""
    return f"moves of movable turns, each once, to workers among {_listed(list(workers))}"


def _row(row: Any) -> Any:
    found = whole(row)
    return row if found is None else found


def _plan(answer: SeedingPlan, *_: object) -> str:
    fits = answer.window_ns >= 0 and (answer.worker_bound or 0) >= 0
    fits = fits and max(answer.window_ns, answer.worker_bound or 0) <= INTEGER_MAX
    return "" if fits else f"a window_ns and a worker_bound that are not negative, and at most {INTEGER_MAX}"


def _reason(answer: str | None, _: object) -> str:
    fits = answer is None or (answer.isprintable() and 0 < len(answer) <= REASON_CHARACTERS)
    return "" if fits else f"None, or a reason: 1 to {REASON_CHARACTERS} printable characters"


def _wanted(answer: int, offer: Offer, market: MarketView) -> str:
    return _within(answer, market.available(offer.provider))


def _stays(answer: Mapping[str, int], turns: Sequence[TurnView], leaving: LeavingView) -> str:
    fits = answer.keys() == {turn.id for turn in turns} and all(0 <= ns <= leaving.left_ns for ns in answer.values())
    return "" if fits else f"for each of the turns, from 0 to {leaving.left_ns}"


def _launches(answer: int, batch: BatchView, _: object) -> str:
    return _within(answer, LAUNCHES_MOST * max(1, batch.wanted))


def _choice(answer: PlacementChoice | None, request: JobRequest, pool: PoolView) -> str:
    if answer is None:
        return ""
    group = pool.groups.get(answer.group or "")
    taken = [*answer.new, *answer.train]
    if answer.group is not None and group is None:
        return f"None as group, or one of the groups: {_listed(pool.groups)}"
    if len(set(answer.rollout)) < len(answer.rollout) or not set(answer.rollout) <= set(group.rollout if group else ()):
        return "rollout nodes of the group, each once"
    if bool(answer.train) == (group is not None) or len(set(answer.train)) > 1:
        return "training nodes of one kind for a new group, and none for another"
    if any(kind not in pool.spec.kinds or taken.count(kind) > pool.free(kind) for kind in taken):
        return f"kinds of nodes that are free, of {_listed(pool.spec.kinds)}"
    nodes = len(answer.rollout) + len(answer.new)
    return "" if nodes == request.rollout_nodes else f"{request.rollout_nodes} rollout nodes in all"


def _relocations(answer: Sequence[Relocation], pool: PoolView, _: object) -> str:
    members = {job for group in pool.groups.values() for job in group.members}
    moved = [one.job for one in answer]
    if len(set(moved)) < len(moved) or any(job not in members or not pool.movable(job) for job in moved):
        return f"jobs that are movable, each once, of {_listed(list(members))}"
    return next(filter(None, (_choice(one.to, pool.request(one.job), pool) for one in answer)), "")


def _kept(answer: tuple[str, ...] | None, rollout: SliceView) -> str:
    return "" if set(answer or ()) <= set(rollout.nodes) else f"None, or some of the nodes {_listed(rollout.nodes)}"


def _strays(answer: str | None, group: JobGroup, _: object) -> str:
    known = answer is None or answer in group.members
    return "" if known else f"None, or a member of the group: {_listed(group.members)}"


def _bills(answer: Mapping[str, int], shares: Sequence[BillShare], cost: int) -> str:
    jobs = [share.job for share in shares]
    fits = answer.keys() <= set(jobs) and min(answer.values(), default=0) >= 0 and sum(answer.values()) <= cost
    return "" if fits else f"nothing negative for the members {_listed(jobs)}, and at most {cost} in all"


def _budget(answer: Budget, total_pages: int, *_: object) -> str:
    return _held(answer, total_pages)


def _next_budget(answer: Budget, _: Budget, total_pages: int, *__: object) -> str:
    return _held(answer, total_pages)


def _held(answer: Budget, total_pages: int) -> str:
    fits = 0 <= answer.pages <= total_pages and 0 <= answer.serving_pages <= total_pages
    return "" if fits else f"from 0 to all {total_pages} pages, for rollouts and for serving"


_ALLOWED: Mapping[str, Callable[..., str]] = {
    "route": _route,
    "moves": _moves,
    "first": _plan,
    "following": _plan,
    "leases_wanted": _wanted,
    "pause_ns": _not_negative,
    "stays_ns": _stays,
    "lead_ns": _not_negative,
    "drop_reason": _reason,
    "launches": _launches,
    "cycle": _not_negative,
    "place": _choice,
    "relocations": _relocations,
    "keeps": _kept,
    "strays": _strays,
    "bills": _bills,
    "lease_ns": _not_negative,
    "begin_step": _budget,
    "observe": _next_budget,
}
"""By what is asked: what is allowed in place of an answer that is not, given the answer and what was asked; empty for
one that is. Of other answers only the type is checked."""
