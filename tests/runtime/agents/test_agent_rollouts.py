"""Trajectories that agents play: whatever they call, repeat, edit and leave, each sampled token is trained once."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core import saved_state
from elastic.core.types import NS_PER_S, Chunk, Chunks, InfrastructureCause, SamplingParameters
from elastic.protocol import wire
from elastic.protocol.front_messages import (
    HISTORY_BYTES_MAX,
    AgentCall,
    AgentCaller,
    BeginTrajectory,
    BranchFound,
    LookUp,
    OpenTurns,
    RecallHistory,
    WantedSampling,
)
from elastic.protocol.sampled import ids_of, pack_ids, pack_logprobs
from elastic.runtime.agents import AgentLimits, AgentRollouts
from elastic.runtime.agents.refusals import CallRefused
from elastic.runtime.agents.rollouts import ALONE_S
from elastic.runtime.agents.trajectory import AgentTurn
from elastic.runtime.episodes import RolloutTrajectory
from elastic.testing.faults.core.incarnation import fresh_core
from elastic.testing.faults.core.world import simulate
from tests.seeds import examples

LIMITS = AgentLimits(
    sampling=SamplingParameters(max_new_tokens=8, noise_seed=0, stop_token_ids=(1,)),
    pinned=frozenset({"temperature", "top_p", "top_k"}),
    max_turns=1000,
    max_context_tokens=4096,
    vocab_size=1 << 30,
    open_turns_max=100,
    deadline_s=1000.0,
    idle_s=100.0,
    policies=("solver", "critic"),
)
DRIVER = AgentCaller(driver="main")
ANYTHING = WantedSampling()
MEMBERS = ("0/0/0", "0/0/1")
AGENT = AgentCaller(trajectory=MEMBERS[0])


class Bench:
    """Rollouts with a core that starts every turn, and remembers all that it was told."""

    def __init__(self, limits: AgentLimits = LIMITS) -> None:
        self.now_ns = 0
        self.told: list[tuple[e.Event, list[c.Command], Any]] = []
        self.ended: dict[str, tuple[e.Event, RolloutTrajectory]] = {}
        self.running: dict[str, AgentTurn] = {}
        self.requests = 0
        self.fresh = 100
        """The next token that nobody has seen."""
        self.rollouts = AgentRollouts(7, limits, self.feed, lambda: self.now_ns)
        start = c.StartGroup(step=0, group="0/0", index=0, trajectories=MEMBERS)
        self.told.append((e.Tick(), [start], None))
        self.rollouts.start(start)

    def feed(self, event: e.Event, payload: Any = None) -> None:
        commands: list[c.Command] = []
        if isinstance(event, e.TurnCut) and event.turn in self.running:
            del self.running[event.turn]
            commands.append(c.FinishTurn(turn=event.turn))
        self.told.append((event, commands, None))
        if isinstance(event, e.TrajectoryFinished | e.TrajectoryFailed):
            self.ended[event.trajectory] = event, payload
        for command in commands:
            assert isinstance(command, c.FinishTurn)
            self.rollouts.finish_turn(command.turn)

    def begin(self, group: str = "g", key: str = "", **more: Any) -> str:
        self.requests += 1
        return self.rollouts.begin(BeginTrajectory(self.requests, DRIVER, b"{}", group, key, **more))[0]

    def ask(
        self,
        call: AgentCall,
        branch: int | None,
        tokens: int,
        ids: list[int],
        choices: int = 1,
        sampling: WantedSampling = ANYTHING,
        caller: AgentCaller = AGENT,
    ) -> tuple[list[AgentTurn], bool]:
        self.requests += 1
        turns, joined = self.rollouts.open(
            OpenTurns(self.requests, caller, call, branch, tokens, pack_ids(ids), 0, choices, sampling)
        )
        if not joined:
            self.running |= {turn.id: turn for turn in turns}
        return turns, joined

    def unsettled(self) -> set[str]:
        """The turns that wait for their answer to be settled."""
        memory, *_ = self.rollouts.saved()  # type: ignore[misc]
        return {t.id for one in memory.trajectories.values() for t in one.turns.values() if t.kept is None}

    def unseen(self, count: int) -> list[int]:
        self.fresh += count
        return list(range(self.fresh - count, self.fresh))

    def generate(self, turn: AgentTurn, count: int, *, worker: str = "spot-1") -> None:
        count = min(count, turn.generated.sampling.max_new_tokens - turn.tokens) if turn.generated.sampling else count
        ids = self.unseen(count)
        chunks = Chunks.of([Chunk(0, turn.tokens, count, 3)])
        event = e.TokensReceived(worker=worker, epoch=1, chunks=chunks)
        accepted = c.AcceptTokens(chunks=(0,), turns=(turn.id,))
        frame = wire.Tokens(chunks, pack_ids(ids), pack_logprobs([-i / 1024 for i in ids]))
        commands: list[c.Command] = [accepted]
        self.rollouts.accept(event, accepted, frame)
        if turn.generated.sampling is not None and turn.tokens == turn.generated.sampling.max_new_tokens:
            commands.append(c.FinishTurn(turn=turn.id))
            self.running.pop(turn.id, None)
            self.rollouts.finish_turn(turn.id)
        self.told.append((event, commands, frame))

    def finish(self, turn: AgentTurn) -> None:
        if self.running.pop(turn.id, None) is not None:
            self.told.append((e.Tick(), [c.FinishTurn(turn=turn.id)], None))
            self.rollouts.finish_turn(turn.id)

    def fail(self, turn: AgentTurn) -> None:
        if self.running.pop(turn.id, None) is not None:
            self.told.append((e.Tick(), [c.FailTurn(turn=turn.id, cause="no capacity: none")], None))
            self.rollouts.fail_turn(turn.id, "no capacity: none")

    def recalled(self) -> "Bench":
        """Another process that has read the journal."""
        other = Bench.__new__(Bench)
        other.now_ns, other.requests, other.fresh = self.now_ns, self.requests, self.fresh
        other.told, other.ended, other.running = list(self.told), {}, {}
        other.rollouts = AgentRollouts(7, LIMITS, other.feed, lambda: other.now_ns)
        for event, commands, payload in self.told:
            other.rollouts.recalled(event, None)
            for command in commands:
                if isinstance(command, c.AcceptTokens):
                    assert isinstance(event, e.TokensReceived)
                    other.rollouts.accept(event, command, payload)
                else:
                    other.rollouts.recalled(event, command)
        return other


def refill(bench: Bench, trajectory: str, replaces: str) -> None:
    """The run has a further member for the group of one that has failed."""
    order = c.RefillMember(trajectory=trajectory, replaces=replaces, cause=InfrastructureCause.CAPACITY)
    bench.told.append((e.Tick(), [order], None))
    bench.rollouts.refill(order)


def test_a_driver_that_asks_again_gets_the_member_that_replaces_one() -> None:
    bench = Bench()
    assert [bench.begin(), bench.begin()] == [*MEMBERS]
    with pytest.raises(CallRefused, match="all of its members"):
        bench.begin()
    bench.rollouts.end(AGENT, "no capacity")
    refill(bench, "0/0/2", MEMBERS[0])
    assert bench.recalled().begin() == "0/0/2"
    assert bench.begin() == "0/0/2"
    bench.now_ns += 40 * NS_PER_S
    bench.rollouts.look_after()
    assert "0/0/2" not in bench.ended


def test_a_member_that_replaces_one_and_that_nobody_asks_for_has_soon_failed() -> None:
    bench = Bench()
    assert [bench.begin(), bench.begin()] == [*MEMBERS]
    refill(bench, "0/0/2", MEMBERS[0])
    other = bench.recalled()
    for one in (bench, other):
        one.rollouts.resume()
        one.now_ns += 29 * NS_PER_S
        one.rollouts.look_after()
        assert not one.ended
        one.now_ns += 2 * NS_PER_S
        one.rollouts.look_after()
        event, _ = one.ended["0/0/2"]
        assert isinstance(event, e.TrajectoryFailed)
        assert event.cause == "nobody asked for it in 30 s"
        with pytest.raises(CallRefused, match="all of its members"):
            one.begin()


def trained(episode: RolloutTrajectory) -> Counter[tuple[int, str]]:
    """How often each token is trained, as which policy's, having checked that its log-probability is its own."""
    found: Counter[tuple[int, str]] = Counter()
    for row in episode.data():
        ids = ids_of(row.token_ids)
        at = row.sampled.trained(len(ids))
        mine = [token for token, own in zip(ids, at, strict=True) if own]
        assert row.sampled.token_logprobs().tolist() == [-token / 1024 for token in mine]
        ends = 0
        for start, count in row.sampled.spans:
            assert ends <= start, "spans overlap"
            ends = start + count
        assert ends <= len(ids)
        found.update((token, row.sampled.policy) for token in mine)
    return found


@settings(max_examples=examples(30, 200), deadline=None)
@given(st.data())
def test_each_token_of_an_answer_is_trained_once_whatever_agents_do(data: st.DataObject) -> None:
    bench = Bench(replace(LIMITS, idle_s=1e6, deadline_s=1e7))
    bench.begin()
    calls = 0
    waiting: list[tuple[AgentCall, AgentTurn]] = []
    answers: set[tuple[int, str]] = set()
    marks: list[bytes] = []
    policies = st.sampled_from(data.draw(st.sampled_from((("",), ("solver", "critic"), ("", "solver", "critic")))))

    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(("ask", "again", "generate", "finish", "settle", "deliver", "leave", "fail"))):
            case "ask":
                calls += 1
                call = AgentCall("chat", bytes([calls]), policy=data.draw(policies))
                chain = data.draw(st.lists(st.sampled_from(marks), max_size=3)) if marks else []
                found = bench.rollouts.look_up(LookUp(0, AGENT, call, chain, True))
                assert isinstance(found, BranchFound)
                prompt = bench.unseen(data.draw(st.integers(1, 4)))
                if found.branch is None and data.draw(st.booleans()):
                    known = bench.rollouts.show(AGENT)
                    assert known.state == "open"
                choices = data.draw(st.integers(1, 3))
                turns, joined = bench.ask(call, found.branch, found.tokens, prompt, choices)
                assert not joined
                assert len(turns) == choices
                waiting += [(call, turn) for turn in turns]
            case "again" if waiting:
                call, turn = data.draw(st.sampled_from(waiting))
                if turn.id in bench.unsettled():
                    again = bench.rollouts.look_up(LookUp(0, AGENT, AgentCall("chat", call.digest, retry=True)))
                    if not isinstance(again, BranchFound):
                        assert turn in again
            case "generate" if waiting:
                _, turn = data.draw(st.sampled_from(waiting))
                if turn.id in bench.running:
                    bench.generate(turn, data.draw(st.integers(1, 5)))
            case "finish" if waiting:
                bench.finish(data.draw(st.sampled_from(waiting))[1])
            case "fail" if waiting:
                bench.fail(data.draw(st.sampled_from(waiting))[1])
            case "settle" if waiting:
                _, turn = data.draw(st.sampled_from(waiting))
                if turn.over and turn.finish and turn.kept is None and turn.id in bench.unsettled():
                    kept = data.draw(st.integers(0, turn.tokens))
                    ids = ids_of(turn.generated.token_ids)[:kept]
                    mark = f"mark {turn.id}".encode()
                    bench.rollouts.settle(turn, kept, mark)
                    answers |= {(token, turn.call.policy) for token in ids}
                    marks.append(mark)
            case "deliver" if waiting:
                bench.rollouts.deliver(data.draw(st.sampled_from(waiting))[1])
            case "leave" if waiting:
                _, turn = data.draw(st.sampled_from(waiting))
                bench.rollouts.alone(turn)
                if data.draw(st.booleans()):
                    bench.now_ns += int((ALONE_S + 1) * 1e9)
                    bench.rollouts.look_after()
            case _:
                pass
    rewards: dict[str, float] = data.draw(st.dictionaries(st.sampled_from(["solver", "critic"]), st.floats(-1, 1)))
    for policy, reward in rewards.items():
        bench.rollouts.reward(AGENT, reward, policy)
    other = bench.recalled()
    for one in (bench, other):
        one.rollouts.reward(AGENT, 1.0)
        one.rollouts.end(AGENT, "")
    event, episode = bench.ended[MEMBERS[0]]
    again, same = other.ended[MEMBERS[0]]
    assert trained(episode) == Counter(answers)
    worth = {row.sampled.policy: row.sampled.worth for row in episode.data() if row.sampled.spans}
    assert worth == {policy: rewards.get(policy, 1.0) for _, policy in answers}
    assert not isinstance(event, e.TrajectoryFinished) or event.by_policy == worth
    assert event == again
    assert same.data() == episode.data(), "another process has it otherwise"


def test_an_agent_that_only_appends_has_one_branch() -> None:
    bench = Bench()
    bench.begin()
    for number in range(3):
        call = AgentCall("chat", bytes([number]))
        found = bench.rollouts.look_up(LookUp(0, AGENT, call, [b"mark %d" % n for n in range(number)]))
        assert isinstance(found, BranchFound)
        (turn,), _ = bench.ask(call, found.branch, found.tokens, bench.unseen(2))
        bench.generate(turn, 8)
        bench.rollouts.settle(turn, turn.tokens, b"mark %d" % number)
        bench.rollouts.deliver(turn)
    bench.rollouts.reward(AGENT, 0.5)
    status = bench.rollouts.end(AGENT, "")
    _, episode = bench.ended[MEMBERS[0]]
    assert (status.branches, status.state, len(episode.data())) == (1, "finished", 1)
    assert episode.sampled.spans == [(2, 8), (12, 8), (22, 8)]
    assert episode.sampled.reward == 0.5


def test_a_call_joins_until_it_is_delivered_and_when_it_says_so() -> None:
    bench = Bench()
    bench.begin()
    call = AgentCall("chat", b"body")
    (turn,), _ = bench.ask(call, None, 0, [200, 201])
    assert bench.ask(call, None, 0, [200, 201]) == ([turn], True)
    bench.generate(turn, 8)
    bench.rollouts.settle(turn, 8, b"")
    assert bench.ask(call, None, 0, [200, 201]) == ([turn], True)
    bench.rollouts.deliver(turn)
    marked = AgentCall("chat", b"body", retry=True)
    assert bench.ask(marked, None, 0, [200, 201]) == ([turn], True), "its answer may not have arrived"
    (another,), joined = bench.ask(call, None, 0, [200, 201])
    assert not joined
    assert another.id != turn.id
    keyed = AgentCall("chat", b"third", key="once")
    (first,), _ = bench.ask(keyed, None, 0, [200])
    bench.generate(first, 8)
    bench.rollouts.settle(first, 8, b"")
    bench.rollouts.deliver(first)
    assert bench.ask(keyed, None, 0, [200]) == ([first], True)
    with pytest.raises(CallRefused) as refused:
        bench.ask(AgentCall("chat", b"fourth", key="once"), None, 0, [200])
    assert refused.value.status == 422


def test_another_process_goes_on_from_what_was_saved() -> None:
    bench = Bench()
    bench.begin()
    (first,), _ = bench.ask(AgentCall("chat", b"1"), None, 0, [200, 201])
    bench.generate(first, 8)
    bench.rollouts.settle(first, 8, b"mark")
    bench.rollouts.deliver(first)
    asked = AgentCall("chat", b"2")
    (second,), _ = bench.ask(asked, first.at.branch, 10, [300])
    bench.generate(second, 3)
    core = fresh_core(simulate(1).settings)
    saved = saved_state.save(core, bench.rollouts.saved())

    other = Bench()
    other.rollouts.restore(*saved_state.restore(fresh_core(simulate(1).settings), saved))
    found = other.rollouts.look_up(LookUp(0, AGENT, AgentCall("chat", b"3"), [b"mark"]))
    assert isinstance(found, BranchFound)
    assert (found.matched, found.tokens, found.answer_tokens) == (1, 10, 8)
    (again,), joined = other.ask(asked, first.at.branch, 10, [300])
    assert joined
    other.generate(again, 8)
    assert ids_of(again.generated.token_ids)[:3] == ids_of(second.generated.token_ids)
    other.rollouts.settle(again, 8, b"")
    other.rollouts.reward(AGENT, 1.0)
    other.rollouts.end(AGENT, "")
    assert other.ended[MEMBERS[0]][1].sampled.spans == [(2, 8), (11, 8)]


def test_what_was_said_up_to_an_answer_is_known_to_another_process() -> None:
    bench = Bench()
    bench.begin()
    turns: list[AgentTurn] = []
    for number in range(4):
        (turn,), _ = bench.ask(AgentCall("/v1/responses", bytes([number])), None, 0, [200 + number])
        bench.generate(turn, 8)
        turns.append(turn)
    one, two, lost, aside = turns
    bench.rollouts.settle(one, 8, b"one", b"first")
    bench.rollouts.settle(two, 8, b"two", b"second", b"one")
    bench.rollouts.settle(lost, 8, b"lost", b"third", b"never heard of")
    bench.rollouts.settle(aside, 8, b"aside", bytes(HISTORY_BYTES_MAX), b"one")
    for turn in turns:
        bench.rollouts.deliver(turn)
    core = fresh_core(simulate(1).settings)
    restored = Bench()
    saved = saved_state.save(core, bench.rollouts.saved())
    restored.rollouts.restore(*saved_state.restore(fresh_core(simulate(1).settings), saved))

    for other in (bench, bench.recalled(), restored):
        pieces = [other.rollouts.recall(RecallHistory(0, AGENT, turn.id)) for turn in (one, two)]
        assert pieces == [[b"first"], [b"first", b"second"]]
        for turn in (lost.id, aside.id, f"{MEMBERS[0]}/9", f"{MEMBERS[1]}/0"):
            with pytest.raises(CallRefused) as refused:
                other.rollouts.recall(RecallHistory(0, AGENT, turn))
            assert (refused.value.status, refused.value.code) == (400, "previous_response_not_found")
        for chain, known in (([b"one"], 1), ([b"one", b"x", b"two", b"y"], 3), ([b"aside"], 0)):
            found = other.rollouts.look_up(LookUp(0, AGENT, AgentCall("/v1/responses", b"new"), chain))
            assert isinstance(found, BranchFound)
            assert found.known == known


def test_token_ids_go_on_from_the_branch_that_has_most_of_them() -> None:
    bench = Bench()
    bench.begin()
    (turn,), _ = bench.ask(AgentCall("completions", b"1"), None, 0, [200, 201])
    bench.generate(turn, 8)
    bench.rollouts.settle(turn, 8, b"")
    context = [200, 201, *ids_of(turn.generated.token_ids)]
    (as_is,), _ = bench.ask(AgentCall("completions", b"0"), None, 0, context)
    (beside,), _ = bench.ask(AgentCall("completions", b"2"), None, 0, context)
    assert (as_is.at.branch, beside.at.branch) == (0, 1), "each goes on in a branch of its own"
    bench.fail(as_is)
    bench.fail(beside)
    (on,), _ = bench.ask(AgentCall("completions", b"4"), None, 0, [*context, 300])
    (edited,), _ = bench.ask(AgentCall("completions", b"3"), None, 0, [*context[:5], 301])
    assert (on.at.branch, on.at.prompt_tokens) == (0, 11)
    assert (edited.at.branch, edited.at.prompt_tokens) == (2, 6)


def test_groups_are_given_out_by_name_and_have_an_end() -> None:
    bench = Bench()
    assert (bench.begin("one"), bench.begin("one", key="k")) == MEMBERS
    assert bench.begin("one", key="k") == MEMBERS[1], "a lost answer takes no second place"
    with pytest.raises(CallRefused) as full:
        bench.begin("one")
    assert full.value.status == 409
    with pytest.raises(CallRefused) as none:
        bench.begin("two")
    assert none.value.status == 429
    with pytest.raises(CallRefused) as another:
        bench.rollouts.show(AgentCaller(driver="other", named="0-0-0"))
    assert another.value.status == 404


def test_a_reward_comes_once_and_a_trajectory_without_one_has_failed() -> None:
    bench = Bench()
    bench.begin(sessions=["s-1"])
    bench.begin()
    by_session = AgentCaller(driver="main", named="s-1")
    (turn,), _ = bench.ask(AgentCall("chat", b"1"), None, 0, [200])
    bench.generate(turn, 8)
    bench.rollouts.settle(turn, 8, b"")
    for value in (float("nan"), float("inf")):
        with pytest.raises(CallRefused) as odd:
            bench.rollouts.reward(by_session, value)
        assert odd.value.status == 400
    assert bench.rollouts.reward(by_session, 1.0) == bench.rollouts.reward(AGENT, 1.0)
    with pytest.raises(CallRefused) as other:
        bench.rollouts.reward(AGENT, 0.5)
    assert other.value.status == 409
    ended = bench.rollouts.end(by_session, "")
    assert bench.rollouts.end(by_session, "") == ended
    assert (ended.state, ended.reward) == ("finished", 1.0)
    with pytest.raises(CallRefused) as over:
        bench.ask(AgentCall("chat", b"2"), None, 0, [200])
    assert (over.value.status, over.value.retry) == (410, False)
    assert bench.rollouts.end(AgentCaller(driver="main", named="0-0-1"), "").state == "failed"
    assert isinstance(bench.ended[MEMBERS[1]][0], e.TrajectoryFailed)


def test_what_a_driver_says_of_a_trajectory_goes_along_with_it_and_into_another_process() -> None:
    bench = Bench()
    bench.begin()
    (turn,), _ = bench.ask(AgentCall("chat", b"1"), None, 0, [200])
    bench.generate(turn, 8)
    bench.rollouts.settle(turn, 8, b"")
    bench.rollouts.reward(AGENT, 1.0)
    for process in (bench, bench.recalled()):
        process.rollouts.end(AGENT, "", metrics={"calls": 2.0, "none": float("nan")})
        _, episode = process.ended[MEMBERS[0]]
        assert (episode.metrics, episode.task) == ({"calls": 2.0}, b"{}")


def test_what_is_idle_ends_with_the_reward_that_it_has() -> None:
    bench = Bench()
    bench.begin()
    bench.begin()
    (turn,), _ = bench.ask(AgentCall("chat", b"1"), None, 0, [200])
    bench.generate(turn, 8)
    bench.rollouts.settle(turn, 8, b"")
    bench.rollouts.deliver(turn)
    bench.rollouts.reward(AGENT, 1.0)
    bench.now_ns = int((LIMITS.idle_s + 1) * 1e9)
    bench.rollouts.look_after()
    finished, failed = (bench.ended[member][0] for member in MEMBERS)
    assert isinstance(finished, e.TrajectoryFinished)
    assert isinstance(failed, e.TrajectoryFailed)
    assert "idle for 100 s" in failed.cause


def test_calls_with_several_prompts_join_choice_by_choice() -> None:
    """Each of two clients opens the choices of one prompt after the other, and they overlap."""
    bench = Bench()
    bench.begin()
    call = AgentCall("completions", b"batch")

    def opened(first: int) -> list[str]:
        bench.requests += 1
        ask = OpenTurns(bench.requests, AGENT, call, None, 0, pack_ids([200 + first]), first, 2)
        return [turn.id for turn in bench.rollouts.open(ask)[0]]

    assert [opened(0), opened(0), opened(2), opened(4), opened(2), opened(4)] == [
        *([f"0/0/0/{number}" for number in pair] for pair in ((0, 1), (0, 1), (2, 3), (4, 5), (2, 3), (4, 5)))
    ]


def test_an_answer_can_be_asked_for_again_long_after_it_was_delivered() -> None:
    bench = Bench()
    bench.begin()
    said: list[tuple[AgentCall, AgentTurn, tuple[bytes, bytes]]] = []
    for number in range(40):
        call = AgentCall("chat", bytes([number]), key=f"call {number}")
        (turn,), _ = bench.ask(call, 0 if number else None, 0 if not number else 2, [300 + number])
        bench.generate(turn, 8)
        kept = 5 if number % 2 else 8
        if kept < 8:
            bench.rollouts.settle(turn, kept, b"mark %d" % number)
        else:
            bench.rollouts.settle(turn, kept, b"")
        said.append((call, turn, bench.rollouts.said(turn)))
        bench.rollouts.deliver(turn)
    for call, turn, words in said:
        assert bench.ask(call, None, 0, [1]) == ([turn], True)
        assert bench.rollouts.said(turn) == words
        assert sum(run.tokens for run in turn.generated.runs) == turn.tokens == len(words[0]) // 4


def test_other_idempotency_keys_are_other_calls() -> None:
    bench = Bench()
    bench.begin()
    (one,), _ = bench.ask(AgentCall("chat", b"body", key="1"), None, 0, [200])
    (two,), _ = bench.ask(AgentCall("chat", b"body", key="2"), None, 0, [200])
    assert one.id != two.id
    assert bench.ask(AgentCall("chat", b"body", key="1"), None, 0, [200]) == ([one], True)
    assert bench.ask(AgentCall("chat", b"body", key="2"), None, 0, [200]) == ([two], True)


def test_calls_with_other_keys_and_several_prompts_keep_their_turns_apart() -> None:
    """Their choices are opened in turn, and each call has all of its own again."""
    bench = Bench()
    bench.begin()
    one, two = (AgentCall("completions", b"batch", key=key) for key in "12")

    def opened(call: AgentCall, choice: int) -> str:
        bench.requests += 1
        ask = OpenTurns(bench.requests, AGENT, call, None, 0, pack_ids([200 + choice]), choice)
        return bench.rollouts.open(ask)[0][0].id

    first = [opened(call, choice) for choice in range(3) for call in (one, two)]
    assert len({*first}) == 6
    assert [opened(call, choice) for choice in range(3) for call in (one, two)] == first
    for call, turns in ((one, first[::2]), (two, first[1::2])):
        joined = bench.rollouts.look_up(LookUp(0, AGENT, call))
        assert not isinstance(joined, BranchFound)
        assert [turn.id for turn in joined] == turns


def test_no_session_is_called_as_a_trajectory_is() -> None:
    bench = Bench()
    bench.begin()
    for ask in (lambda: bench.rollouts.bind(AGENT, "0-0-1"), lambda: bench.begin(sessions=["0-0-1"])):
        with pytest.raises(CallRefused) as refused:
            ask()
        assert refused.value.status == 400
    with pytest.raises(CallRefused) as unknown:
        bench.rollouts.show(AgentCaller(driver="main", named="0/0/0"))
    assert unknown.value.status == 404


def test_a_call_with_more_choices_than_turns_are_left_truncates_nothing() -> None:
    bench = Bench(replace(LIMITS, max_turns=3))
    bench.begin()
    bench.ask(AgentCall("chat", b"1"), None, 0, [200])
    with pytest.raises(CallRefused) as refused:
        bench.ask(AgentCall("chat", b"2"), None, 0, [200], choices=3)
    assert refused.value.status == 400
    assert bench.rollouts.show(AGENT).state == "open"
    bench.ask(AgentCall("chat", b"3"), None, 0, [200], choices=2)
    with pytest.raises(CallRefused) as over:
        bench.ask(AgentCall("chat", b"4"), None, 0, [200])
    assert over.value.status == 410
    assert bench.rollouts.show(AGENT).state == "truncated"


@pytest.mark.parametrize("reward", [1.7e308, -1.7e308, 1e10])
def test_a_reward_that_no_mean_can_have_is_refused(reward: float) -> None:
    bench = Bench()
    bench.begin()
    with pytest.raises(CallRefused) as refused:
        bench.rollouts.reward(AGENT, reward)
    assert refused.value.status == 400


def answered(bench: Bench, policy: str, body: bytes, chain: list[bytes], mark: bytes) -> AgentTurn:
    call = AgentCall("chat", body, policy=policy)
    found = bench.rollouts.look_up(LookUp(0, AGENT, call, chain))
    assert isinstance(found, BranchFound)
    (turn,), _ = bench.ask(call, found.branch, found.tokens, bench.unseen(2))
    bench.generate(turn, 8)
    bench.rollouts.settle(turn, 8, mark)
    bench.rollouts.deliver(turn)
    return turn


def test_a_branch_is_one_policys() -> None:
    """What another policy has said is its context; each goes on in a branch of its own."""
    bench = Bench()
    bench.begin()
    turns = [
        answered(bench, "solver", b"1", [], b"solved"),
        answered(bench, "critic", b"2", [b"solved"], b"judged"),
        answered(bench, "solver", b"3", [b"solved"], b"solved again"),
        answered(bench, "critic", b"4", [b"solved", b"judged"], b"judged again"),
        answered(bench, "", b"5", [b"judged again"], b"said"),
    ]
    assert [(turn.at.branch, turn.at.prompt_tokens) for turn in turns] == [(0, 2), (1, 12), (0, 12), (1, 22), (2, 32)]
    bench.rollouts.reward(AGENT, 1.0, "solver")
    status = bench.rollouts.reward(AGENT, -1.0, "critic")
    assert status.reward is None, "the model's own name has none"
    assert {name: (one.turns, one.tokens, one.reward) for name, one in status.policies.items()} == {
        "solver": (2, 16, 1.0),
        "critic": (2, 16, -1.0),
    }
    bench.rollouts.reward(AGENT, 0.25)
    bench.rollouts.end(AGENT, "")
    event, episode = bench.ended[MEMBERS[0]]
    assert isinstance(event, e.TrajectoryFinished)
    assert (event.reward, event.by_policy) == (0.25, {"solver": 1.0, "critic": -1.0, "": 0.25})
    assert [(row.sampled.policy, row.sampled.worth) for row in episode.data()] == [
        ("solver", 1.0),
        ("critic", -1.0),
        ("", 0.25),
    ]
    assert sum(trained(episode).values()) == 40


def test_policies_have_rewards_of_their_own() -> None:
    bench = Bench()
    bench.begin()
    bench.begin()
    answered(bench, "solver", b"1", [], b"solved")
    answered(bench, "critic", b"2", [b"solved"], b"judged")
    bench.rollouts.reward(AGENT, 1.0, "solver")
    with pytest.raises(CallRefused) as unknown:
        bench.rollouts.reward(AGENT, 1.0, "jury")
    assert (unknown.value.status, unknown.value.param) == (400, "policy")
    assert "'solver', 'critic'" in str(unknown.value)
    with pytest.raises(CallRefused) as other:
        bench.rollouts.reward(AGENT, 0.5, "solver")
    assert (other.value.status, other.value.code) == (409, "reward_given")
    assert bench.rollouts.reward(AGENT, 1.0, "solver") == bench.rollouts.reward(AGENT, 1.0, "solver")
    assert bench.rollouts.reward(AGENT, 0.0, "critic").reward == 0.5, "their mean, as nobody gave the trajectory's"
    bench.rollouts.end(AGENT, "")
    assert bench.rollouts.reward(AGENT, 0.0, "critic").state == "finished"
    for policy in ("", "critic"):
        with pytest.raises(CallRefused) as over:
            bench.rollouts.reward(AGENT, 2.0, policy)
        assert over.value.status == 410
    event, _ = bench.ended[MEMBERS[0]]
    assert isinstance(event, e.TrajectoryFinished)
    assert (event.reward, event.by_policy) == (0.5, {"solver": 1.0, "critic": 0.0})


def test_a_policy_without_any_reward_is_no_zero() -> None:
    bench = Bench()
    bench.begin()
    answered(bench, "solver", b"1", [], b"solved")
    answered(bench, "critic", b"2", [b"solved"], b"judged")
    bench.rollouts.reward(AGENT, 1.0, "solver")
    status = bench.rollouts.end(AGENT, "")
    assert (status.state, status.cause) == ("failed", "it was ended without a reward for 'critic'")
    for ask in (LookUp(0, AGENT, AgentCall("chat", b"3", policy="jury")),):
        with pytest.raises(CallRefused):
            bench.rollouts.look_up(ask)
