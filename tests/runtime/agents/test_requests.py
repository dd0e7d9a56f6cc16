"""Requests of those who train elsewhere: which of them are one, and how long they are known."""

from typing import Any

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S, SamplingParameters
from elastic.protocol.front_messages import AgentCall, AgentCaller, BranchFound, LookUp, OpenTurns, WantedSampling
from elastic.protocol.sampled import pack_ids, pack_logprobs
from elastic.runtime.agents import AgentLimits, RequestRollouts
from elastic.runtime.agents.requests import AGAIN_S, LEFT_S, marks_of
from elastic.runtime.agents.rollouts import ALONE_S
from elastic.runtime.agents.trajectory import AgentTurn
from policies.seeding import FixedWindow
from tests.core.conftest import CoreHarness

LIMITS = AgentLimits(
    sampling=SamplingParameters(max_new_tokens=8, noise_seed=0, stop_token_ids=(1,)),
    pinned=frozenset(),
    max_turns=1,
    max_context_tokens=64,
    vocab_size=100,
    open_turns_max=100,
    deadline_s=1000.0,
    idle_s=100.0,
)
PLAN = {"steps": 10**9, "groups": 0, "staleness_bound": 10**9, "driven_outside": True}
NOBODY = AgentCaller()


def call(key: str = "", digest: bytes = b"one") -> AgentCall:
    return AgentCall("tokens", digest.ljust(16), key)


class Served:
    """A run that others train: a core with one worker, and the requests at it."""

    def __init__(self) -> None:
        self.core = CoreHarness(seeding=FixedWindow(0), **PLAN)
        self.requests = RequestRollouts(7, LIMITS, self.core.scheduler, self.feed, self.now_ns)
        self.core.trainer(capacity=0)
        self.core.tell(e.WorkerSlept(worker="trainer", epoch=1))
        self.worker = self.core.worker()

    def now_ns(self) -> int:
        return round(self.core.now_s * NS_PER_S)

    def feed(self, event: e.Event, payload: Any = None) -> None:
        for command in self.core.tell(event):
            if isinstance(command, c.FinishTurn):
                self.requests.finish_turn(command.turn)

    def asked(self, call: AgentCall, caller: AgentCaller = NOBODY) -> tuple[AgentTurn, bool]:
        """The request's turn, and whether it has joined one that there was."""
        found = self.requests.look_up(LookUp(1, caller, call))
        if not isinstance(found, BranchFound):
            return found[0], True
        turns, _ = self.requests.open(OpenTurns(2, NOBODY, call, None, 0, pack_ids([5, 6]), 0, 1, WantedSampling()))
        return turns[0], False

    def updated(self) -> None:
        """One more version is answered, and its worker has it."""
        version = (self.core.scheduler.version or 0) + 1
        self.feed(e.VersionOffered(source=f"at {version}", look=f"{version}"))
        self.feed(e.WeightsPublished(worker="trainer", epoch=1, version=version))
        self.feed(e.WeightsApplied(worker=self.worker, epoch=1, version=version))


@pytest.fixture
def served() -> Served:
    return Served()


def test_a_request_without_a_key_takes_up_an_equal_one_whose_client_has_vanished(served: Served) -> None:
    first, _ = served.asked(call())
    assert served.asked(call()) != (first, True), "the first one's client is there"
    served.requests.alone(first)
    assert served.asked(call(digest=b"two"))[1] is False
    assert served.asked(call()) == (first, True)


def test_a_new_request_takes_up_nothing_of_an_older_version_than_was_answered(served: Served) -> None:
    old, _ = served.asked(call())
    served.requests.alone(old)
    served.updated()
    new, joined = served.asked(call())
    assert (joined, new.id) == (False, "1/1/0/0")


def test_a_request_whose_front_has_ended_is_taken_up_for_a_while_whatever_was_answered_meanwhile(
    served: Served,
) -> None:
    old, _ = served.asked(call())
    served.requests.alone(old, cut_off=True)
    served.updated()
    assert served.asked(call()) == (old, True)
    served.requests.alone(old, cut_off=True)
    served.core.now_s += AGAIN_S + 1
    assert served.asked(call())[1] is False


@pytest.mark.parametrize(
    ("key", "cut_off", "goes_on_s"),
    [("", False, LEFT_S), ("", True, ALONE_S), ("mine", False, ALONE_S)],
    ids=["it has left", "its front has ended", "it has a key"],
)
def test_a_request_goes_on_for_a_while_without_its_client(
    served: Served, key: str, cut_off: bool, goes_on_s: float
) -> None:
    turn, _ = served.asked(call(key))
    served.requests.alone(turn, cut_off=cut_off)
    assert served.asked(call(key)) == (turn, True)
    served.requests.alone(turn, cut_off=cut_off)
    served.core.now_s += goes_on_s
    served.requests.look_after()
    assert turn.id in served.core.scheduler.turns.live
    served.core.now_s += 0.1
    served.requests.look_after()
    assert turn.id not in served.core.scheduler.turns.live


def test_a_request_that_waits_keeps_its_place_while_its_client_asks_again(served: Served) -> None:
    served.feed(e.TurnsHeld(held=True))
    turn, _ = served.asked(call())
    served.requests.alone(turn)
    served.core.now_s += 2 * LEFT_S
    served.requests.look_after()
    assert served.asked(call()) == (turn, True)
    served.feed(e.TurnsHeld(held=False))
    served.requests.look_after()
    assert turn.id in served.core.scheduler.turns.live


@pytest.mark.parametrize(
    ("key", "caller"), [("", AgentCaller(trajectory="0/1/0")), ("mine", NOBODY)], ids=["by its name", "by its key"]
)
def test_a_request_that_is_asked_again_goes_on_with_what_it_had(served: Served, key: str, caller: AgentCaller) -> None:
    other, _ = served.asked(call())
    old, _ = served.asked(call(key))
    for turn in (other, old):
        served.requests.alone(turn)
    served.updated()
    assert served.asked(call(key), caller) == (old, True)


@pytest.mark.parametrize(("last", "finish"), [(1, "stop"), (2, "length")])
def test_a_turn_whose_last_token_ends_it_has_stopped_though_it_may_have_no_further_one(last: int, finish: str) -> None:
    turn, _ = Served().asked(call())
    limit = turn.generated.sampling
    assert limit is not None
    ids = [2] * (limit.max_new_tokens - 1) + [last]
    turn.generated.accept(pack_ids(ids), pack_logprobs([0.0] * len(ids)), 0, "worker")
    turn.generated.ended = ""
    assert turn.finish == finish


def test_a_request_joins_turns_whose_client_is_known_to_have_vanished_only_after_it_was_looked_for() -> None:
    served = Served()
    turn, _ = served.asked(call())
    assert isinstance(served.requests.look_up(LookUp(1, NOBODY, call())), BranchFound)
    served.requests.alone(turn)
    ask = OpenTurns(2, NOBODY, call(), None, 0, pack_ids([5, 6]))
    several = msgspec.structs.replace(ask, choices=2)
    assert not served.requests.open(several)[1], "of another number of choices"
    assert served.requests.open(ask) == ([turn], True)
    assert served.requests.open(ask)[1] is False, "somebody waits for it"


def test_what_requests_have_in_common_is_their_session_and_a_long_beginning() -> None:
    prompt = list(range(100))
    session, whole, half = marks_of("one", pack_ids(prompt))
    assert marks_of("two", pack_ids(prompt)) == (marks_of("two", b"")[0], whole, half)
    assert marks_of("one", b"") == (session,)
    assert marks_of("", pack_ids([*prompt[:64], 7, 7])) == (whole, half), "they begin with the same 64 tokens"
    assert marks_of("", pack_ids([*prompt[:40], 7] * 3))[1] == half, "with the same 32"
    assert marks_of("", pack_ids(prompt[:31])) == ()
